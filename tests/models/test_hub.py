"""Save models with their options and load them again; a folder replaces the Hugging Face Hub."""

import copy
import json
import pickle
import shutil
import sys
from types import SimpleNamespace

import pytest
import torch

from swin_dense import CheckpointError, SwinBackbone, SwinClassifier, SwinV2Backbone
from swin_dense.archs import Arch
from tests.conftest import TINY, IfInstalled, randomize

safetensors = IfInstalled('safetensors.torch')
IMAGE = torch.rand(1, 3, 64, 96)
MODELS = {
    'v1': lambda: SwinBackbone('t', **TINY, out_indices=(1, 3), window_size=(7, 4)),
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


class Mine(SwinBackbone):
    pass


def test_the_model_card_imports_a_subclass_from_its_module(tmp_path):
    assert safetensors.save_file
    Mine('t', **TINY).save_pretrained(tmp_path)
    assert f'from {__name__} import Mine' in (tmp_path / 'README.md').read_text()
    assert type(Mine.from_pretrained(tmp_path)) is Mine


def test_options_can_be_changed(saved):
    backbone, folder = saved
    other = SwinBackbone.from_pretrained(folder, window_size=5, frozen_stages=1)
    assert other.window_size == (5, 5)
    assert torch.equal(other.norm3.weight, backbone.norm3.weight)
    assert not other.patch_embed.projection.weight.requires_grad


def test_errors_name_the_cause(saved, tmp_path):
    _, folder = saved
    with pytest.raises(TypeError, match="unknown option 'windw_size'; did you mean 'window_size'"):
        SwinBackbone.from_pretrained(folder, windw_size=5)
    with pytest.raises(ValueError, match=r'contains a SwinBackbone: call SwinBackbone\.from_pretrained'):
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


def test_push_to_hub_and_from_pretrained(saved, tmp_path, monkeypatch):
    backbone, _ = saved
    requests = []

    class HfApi:
        def __init__(self, token):
            requests.append(token)

        def create_repo(self, repo_id, private, exist_ok):
            requests.append((repo_id, private, exist_ok))

        def upload_folder(self, repo_id, folder_path, revision, commit_message):
            shutil.copytree(folder_path, tmp_path / 'hub')
            return f'https://huggingface.co/{repo_id}'

    def snapshot_download(repo_id, revision, token, allow_patterns):
        requests.append((repo_id, revision, token))
        return str(tmp_path / 'hub')

    hub = SimpleNamespace(HfApi=HfApi, snapshot_download=snapshot_download)
    monkeypatch.setitem(sys.modules, 'huggingface_hub', hub)
    assert backbone.push_to_hub('me/mine', token='secret') == 'https://huggingface.co/me/mine'
    assert "from_pretrained('me/mine')" in (tmp_path / 'hub' / 'README.md').read_text()
    loaded = SwinBackbone.from_pretrained('me/mine', revision='v1')
    assert torch.equal(loaded.norm3.weight, backbone.norm3.weight)
    assert requests == ['secret', ('me/mine', None, True), ('me/mine', 'v1', None)]


@pytest.mark.parametrize('package', ['safetensors', 'huggingface_hub'])
def test_a_missing_package_is_named(package, tmp_path, monkeypatch):
    for name in (package, f'{package}.torch'):
        monkeypatch.setitem(sys.modules, name, None)
    model = SwinBackbone('t', **TINY)
    with pytest.raises(ImportError, match=f'pip install {package}'):
        model.save_pretrained(tmp_path) if package == 'safetensors' else model.push_to_hub('me/mine')


def test_copies_keep_their_options(saved, tmp_path):
    for copied in (copy.deepcopy(saved[0]), pickle.loads(pickle.dumps(saved[0]))):
        copied.save_pretrained(tmp_path / 'copy')
        assert (tmp_path / 'copy' / 'config.json').read_text() == (saved[1] / 'config.json').read_text()
