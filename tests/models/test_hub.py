"""Save models with their options and load them again; a folder replaces the Hugging Face Hub."""

import copy
import json
import pickle
import sys

import pytest
import torch

from swin_dense import CheckpointError, SwinBackbone, SwinClassifier, SwinV2Backbone
from swin_dense.archs import Arch
from tests.conftest import TINY, IfInstalled, randomize

safetensors = IfInstalled('safetensors.torch')
IMAGE = torch.rand(1, 3, 64, 96)
MODELS = {
    'v1': lambda: SwinBackbone('t', **TINY, out_indices=(1, 3), window_size=(7, 4)),
    'adapter': lambda: SwinBackbone('t', **TINY, adapter={'type': 'mona', 'stages': (1,)}),
    'v2': lambda: SwinV2Backbone(Arch(16, (2, 2), (1, 2)), window_size=8, pretrained_window_size=6),
    'classifier': lambda: SwinClassifier('swin_t', 5, **TINY),
}


@pytest.fixture
def saved(tmp_path):
    assert safetensors.save_file
    backbone = randomize(SwinBackbone('t', **TINY)).eval()
    return backbone, backbone.save_pretrained(tmp_path / 'saved')


def drop(folder, key):
    path = folder / 'model.safetensors'
    state = safetensors.load_file(path)
    del state[key]
    safetensors.save_file(state, path)


@torch.no_grad()
@pytest.mark.parametrize('build', MODELS.values(), ids=MODELS)
def test_a_loaded_model_equals_the_saved_one(build, tmp_path):
    assert safetensors.save_file
    model = randomize(build()).eval()
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert not loaded.training
    outputs = loaded(IMAGE), model(IMAGE)
    assert all(torch.equal(a, b) for a, b in zip(*outputs, strict=True))
    loaded.save_pretrained(tmp_path / 'again')
    assert (tmp_path / 'again' / 'config.json').read_text() == (tmp_path / 'config.json').read_text()


def test_saved_files(saved):
    _, folder = saved
    assert sorted(path.name for path in folder.iterdir()) == ['README.md', 'config.json', 'model.safetensors']
    config = json.loads((folder / 'config.json').read_text())
    options = {key: list(value) if isinstance(value, tuple) else value for key, value in TINY.items()}
    assert config == {'library': 'swin_dense', 'class': 'SwinBackbone', 'options': {'arch': 't', **options}}
    card = (folder / 'README.md').read_text()
    assert card.startswith('---\nlibrary_name: swin_dense\n')
    program = card.split('```python\n')[1].split('```')[0]
    names = {}
    exec(program, names)
    assert isinstance(names['model'], SwinBackbone)
    (folder / 'README.md').write_text('my own card')
    saved[0].save_pretrained(folder)
    assert (folder / 'README.md').read_text() == 'my own card'


@torch.no_grad()
@pytest.mark.parametrize('pretrained', [{}, {'pretrained_window_size': (4, 0, 4, 4)}])
def test_another_window_of_a_swin_v2_keeps_the_scale_of_its_position_networks(pretrained, tmp_path):
    assert safetensors.save_file
    small = randomize(SwinV2Backbone('t', **TINY, window_size=4, **pretrained)).eval()
    expected = SwinV2Backbone('t', **TINY, window_size=8, pretrained_window_size=4).eval()
    expected.load_state_dict(small.state_dict())
    loaded = SwinV2Backbone.from_pretrained(small.save_pretrained(tmp_path), window_size=8)
    assert all(torch.equal(a, b) for a, b in zip(loaded(IMAGE), expected(IMAGE), strict=True))
    given = SwinV2Backbone.from_pretrained(tmp_path, window_size=8, pretrained_window_size=8)
    assert given.pretrained_window_size == (8, 8, 8, 8)
    with pytest.raises(AttributeError, match='window_size=8 and pretrained_window_size'):
        small.window_size = 8


@pytest.mark.parametrize(
    ('model', 'why'),
    [
        (lambda: SwinV2Backbone('t', **TINY, window_size=(4, 8)), 'are not square'),
        (lambda: SwinClassifier('swinv2_t', 5, **TINY), 'shrink to small maps'),
    ],
)
def test_a_window_of_a_swin_v2_that_may_not_change_is_refused(model, why, tmp_path):
    assert safetensors.save_file
    model = model()
    model.save_pretrained(tmp_path)
    with pytest.raises(ValueError, match=f'without pretrained_window_size.*{why}'):
        type(model).from_pretrained(tmp_path, window_size=6)
    changed = type(model).from_pretrained(tmp_path, window_size=6, pretrained_window_size=8)
    assert getattr(changed, 'backbone', changed).window_size == (6, 6)


def test_the_preset_of_the_input_is_saved_and_belongs_to_the_weights(saved, tmp_path):
    backbone, _ = saved
    backbone.input_preset = 'satlas-rgb'
    folder = backbone.save_pretrained(tmp_path / 'preset')
    loaded = SwinBackbone.from_pretrained(folder)
    assert loaded.input_preset == 'satlas-rgb'
    loaded.load_state_dict(SwinBackbone('t', **TINY).state_dict())
    assert loaded.input_preset is None
    classifier = SwinClassifier('swin_t', 5, **TINY)
    classifier.backbone.input_preset = 'satlas-rgb'
    classifier.save_pretrained(tmp_path / 'classifier')
    loaded = SwinClassifier.from_pretrained(tmp_path / 'classifier')
    assert loaded.backbone.input_preset == 'satlas-rgb'
    loaded.load_state_dict(classifier.state_dict())
    assert loaded.backbone.input_preset is None


class PassesOn(SwinBackbone):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **{'window_size': 5, **kwargs})


class PassesOnTheRest(SwinBackbone):
    def __init__(self, factor, *args, **kwargs):
        super().__init__(*args, **{'window_size': 5 * factor, **kwargs})


def test_a_subclass_that_passes_its_arguments_on_is_restored(tmp_path):
    assert safetensors.save_file
    model = randomize(PassesOn('t', **TINY))
    loaded = PassesOn.from_pretrained(model.save_pretrained(tmp_path), frozen_stages=1)
    assert (loaded.arch, loaded.window_size, loaded.frozen_stages) == (model.arch, (5, 5), 1)
    assert torch.equal(loaded.norm3.weight, model.norm3.weight)
    PassesOnTheRest(2, 't', **TINY).save_pretrained(tmp_path)
    assert PassesOnTheRest.from_pretrained(tmp_path).window_size == (10, 10)
    with pytest.raises(TypeError, match=r"the options are \['arch', "):
        PassesOn(windw=5)


def test_options_are_recorded_as_they_were(tmp_path):
    assert safetensors.save_file
    depths, norm = [2, 2, 2, 2], {'type': 'LN', 'eps': 1e-6}
    model = SwinBackbone('t', **{**TINY, 'depths': depths}, norm_cfg=norm)
    depths.append(2)
    norm['eps'] = 1.0
    loaded = SwinBackbone.from_pretrained(model.save_pretrained(tmp_path))
    assert (loaded.arch.depths, loaded.norm3.eps) == ((2, 2, 2, 2), 1e-6)


@pytest.mark.parametrize(
    ('build', 'words'),
    [
        (
            lambda: SwinBackbone(224, 4, 3),
            r'got \(224, 4, 3\); give options by',
        ),
        (lambda: PassesOn('t', 96, (2, 2, 6, 2)), 'PassesOn takes only arch by position'),
        (lambda: SwinClassifier('swin_t', 10, 4), 'only name and num_classes by position'),
    ],
)
def test_options_by_position_are_refused(build, words):
    with pytest.raises(TypeError, match=words):
        build()


@pytest.mark.parametrize(
    ('build', 'words'),
    [
        (
            lambda: SwinBackbone(224),
            'arch, .* got 224 .*; give other options',
        ),
        (lambda: SwinBackbone(img_size=512), 'images of any size work'),
        (
            lambda: SwinBackbone(embed_dim=96, foo=1),
            r"called 'embed_dims' here\n  'foo'\n",
        ),
    ],
)
def test_options_of_other_swins_are_explained(build, words):
    with pytest.raises(TypeError, match=words):
        build()


class Mine(SwinBackbone):
    pass


def test_the_model_card_imports_a_subclass_from_its_module(tmp_path):
    assert safetensors.save_file
    Mine('t', **TINY).save_pretrained(tmp_path)
    assert f'from {__name__} import Mine' in (tmp_path / 'README.md').read_text()
    assert type(Mine.from_pretrained(tmp_path)) is Mine


def test_errors_name_the_cause(saved, tmp_path):
    _, folder = saved
    with pytest.raises(TypeError, match="'windw_size'; did you mean 'window_size'"):
        SwinBackbone.from_pretrained(folder, windw_size=5)
    with pytest.raises(ValueError, match=r'call SwinBackbone\.from_pretrained'):
        SwinV2Backbone.from_pretrained(folder)
    drop(folder, 'norm1.bias')
    with pytest.raises(CheckpointError, match=r'norm1\.bias'):
        SwinBackbone.from_pretrained(folder)
    SwinClassifier('swin_t', 5, **TINY).save_pretrained(tmp_path / 'classifier')
    drop(tmp_path / 'classifier', 'head.bias')
    with pytest.raises(CheckpointError, match='head'):
        SwinClassifier.from_pretrained(tmp_path / 'classifier')
    (folder / 'config.json').write_text('{"model_type": "swin"}')
    with pytest.raises(ValueError, match='create_backbone'):
        SwinBackbone.from_pretrained(folder)
    with pytest.raises(TypeError, match='the option norm_cfg cannot be written'):
        SwinBackbone('t', **TINY, norm_cfg=torch.nn.LayerNorm).save_pretrained(folder)


@pytest.mark.parametrize('package', ['safetensors', 'huggingface_hub'])
def test_a_missing_package_is_named(package, tmp_path, monkeypatch):
    for name in (package, f'{package}.torch'):
        monkeypatch.setitem(sys.modules, name, None)
    model = SwinBackbone('t', **TINY)
    with pytest.raises(ImportError, match=rf"{package}, .* pip install '\.\[checkpoints\]'"):
        model.save_pretrained(tmp_path) if package == 'safetensors' else model.push_to_hub('me/mine')


def test_copies_keep_their_options(saved, tmp_path):
    for copied in (copy.deepcopy(saved[0]), pickle.loads(pickle.dumps(saved[0]))):
        copied.save_pretrained(tmp_path / 'copy')
        assert (tmp_path / 'copy' / 'config.json').read_text() == (saved[1] / 'config.json').read_text()
