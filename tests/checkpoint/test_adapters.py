"""Adapters in files of their own, the base that they need, and whole checkpoints with adapters."""

import copy
import pickle

import pytest
import torch

from swin_dense import (
    CheckpointError,
    SwinBackbone,
    SwinClassifier,
    SwinV2Backbone,
    create_backbone,
    export_state_dict,
    load_checkpoint,
    save_adapter,
)
from swin_dense.checkpoint.adapters import BASE_KEY, base_digest, part_of
from swin_dense.checkpoint.read import read_file
from swin_dense.export.convert import convert, write_adapter
from swin_dense.features import Extractor
from swin_dense.models.classifier import create_classifier
from tests.conftest import equal_weights, needs, photograph, randomize

SMALL = {'embed_dims': 16, 'depths': (2, 1), 'num_heads': (1, 2), 'window_size': 4}
MONA, LORA = {'type': 'mona', 'dim': 2}, {'type': 'lora', 'rank': 1}
ADAPTERS = [MONA, LORA]
VERSIONS = [SwinBackbone, SwinV2Backbone]
IMAGE = torch.rand(1, 3, 50, 61, generator=torch.Generator().manual_seed(0))


def make_base(kind=SwinBackbone, seed=0, **options):
    return randomize(kind(**{**SMALL, **options}), seed).eval()


def trained(base, adapter, seed=1):
    """Return a backbone with the weights of a base, and other values of its adapter and norms."""
    model = type(base)(**SMALL, adapter=adapter).eval()
    randomize(model, seed)
    own = dict(model.named_parameters())
    with torch.no_grad():
        for name, parameter in base.named_parameters():
            if part_of(name) == 'base':
                own[name].copy_(parameter)
    return model


def outputs(model):
    with torch.no_grad():
        return model(IMAGE)


def assert_equal(ours, theirs):
    assert all(torch.equal(a, b) for a, b in zip(outputs(ours), outputs(theirs), strict=True))


def assert_close(ours, theirs):
    for a, b in zip(outputs(ours), outputs(theirs), strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-4)


@pytest.fixture
def base(tmp_path):
    """Return a base, and the path of its file."""
    model = make_base()
    torch.save({'state_dict': model.state_dict()}, tmp_path / 'base.pth')
    return model, tmp_path / 'base.pth'


# --- the adapter alone ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('suffix', ['.pth', pytest.param('.safetensors', marks=needs('safetensors'))])
@pytest.mark.parametrize('adapter', ADAPTERS)
@pytest.mark.parametrize('kind', VERSIONS)
def test_base_and_adapter_give_the_trained_backbone(tmp_path, kind, adapter, suffix):
    base = make_base(kind)
    model = trained(base, adapter)
    path = save_adapter(model, tmp_path / f'adapter{suffix}')
    torch.save(base.state_dict(), tmp_path / 'base.pth')
    options = {'window_size': 4, 'pretrained_window_size': 4} if kind is SwinV2Backbone else {}
    found = create_backbone(None, tmp_path / 'base.pth', adapter_checkpoint=path, **options)
    assert found.adapter_options == model.adapter_options
    assert found.state_dict().keys() == model.state_dict().keys()
    assert equal_weights(model, found)
    assert_close(found, model)


@pytest.mark.parametrize('adapter', ADAPTERS)
def test_several_adapters_take_turns_on_one_base(tmp_path, base, adapter):
    models = [trained(base[0], adapter, seed) for seed in (1, 2)]
    paths = [save_adapter(model, tmp_path / f'{index}.pth') for index, model in enumerate(models)]
    backbone = create_backbone(None, base[1], adapter_checkpoint=paths[0])
    for index in (1, 0, 1):
        report = load_checkpoint(backbone, paths[index], log=None)
        assert not report.missing
        assert_close(backbone, models[index])


def test_a_stage_without_adapter_and_the_outputs_are_inferred(tmp_path, base):
    model = SwinBackbone(**SMALL, out_indices=(1,), adapter={**MONA, 'stages': [1]}).eval()
    load_checkpoint(model, base[1], log=None)
    path = save_adapter(model, tmp_path / 'adapter.pth')
    found = create_backbone(None, base[1], adapter_checkpoint=path)
    assert found.adapter_options.stages == (1,)
    assert found.out_indices == (1,)
    assert_equal(found, model)


def test_the_base_may_be_a_classifier_without_output_norms(tmp_path):
    arch = {name: value for name, value in SMALL.items() if name != 'window_size'}
    classifier = randomize(SwinClassifier(arch, window_size=4))
    head = {'head.weight': classifier.head.weight, 'head.bias': classifier.head.bias}
    state = {k: v for k, v in export_state_dict(classifier.backbone, 'official').items() if not k.startswith('norm')}
    torch.save({'model': {**state, **head}}, tmp_path / 'classifier.pth')
    model = SwinBackbone(**SMALL, adapter=MONA).eval()
    load_checkpoint(model, tmp_path / 'classifier.pth', log=None)
    path = save_adapter(randomize_norms(model), tmp_path / 'adapter.pth')
    found = create_backbone(None, tmp_path / 'classifier.pth', adapter_checkpoint=path)
    assert_equal(found, model)


@pytest.mark.parametrize('has_head', [True, False])
@pytest.mark.parametrize('adapter', ADAPTERS)
def test_a_classifier_takes_an_adapter_and_its_head(tmp_path, adapter, has_head):
    """An adapter of a whole classifier has a head, perhaps for other classes; one of a backbone alone has none."""
    arch = {name: value for name, value in SMALL.items() if name != 'window_size'}
    base = randomize(SwinClassifier(arch, 5, window_size=4))
    torch.save(base.state_dict(), tmp_path / 'base.pth')
    model = randomize(SwinClassifier(arch, 7 if has_head else 5, window_size=4, adapter=adapter), 1).eval()
    kept = {name: value for name, value in base.backbone.state_dict().items() if part_of(name) == 'base'}
    model.backbone.load_state_dict({**model.backbone.state_dict(), **kept})
    if not has_head:
        model.head.load_state_dict(base.head.state_dict())
    path = save_adapter(model if has_head else model.backbone, tmp_path / 'adapter.pth')
    found = create_classifier(tmp_path / 'base.pth', adapter_checkpoint=path)
    assert found.state_dict().keys() == model.state_dict().keys()
    assert equal_weights(model, found)


def randomize_norms(model):
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if part_of(name) == 'norm':
                parameter.add_(torch.rand_like(parameter))
    return model


@pytest.mark.parametrize('adapter', ADAPTERS)
def test_an_extractor_takes_an_adapter_and_is_pickled_with_it(tmp_path, base, adapter):
    model = trained(base[0], adapter)
    path = save_adapter(model, tmp_path / 'adapter.pth')
    rows = {'image': [photograph(64, 80)]}
    torch.save(model.state_dict(), tmp_path / 'whole.pth')
    expected = Extractor(str(tmp_path / 'whole.pth'))(rows)['level_8']
    extract = Extractor(str(base[1]), adapter_checkpoint=str(path))
    for one in (extract, pickle.loads(pickle.dumps(extract))):
        torch.testing.assert_close(torch.tensor(one(rows)['level_8']), torch.tensor(expected))
    plain = Extractor(str(base[1]))(rows)['level_8']
    assert abs(plain - expected).max() > 1e-2


def test_another_base_is_refused_and_nothing_changes(tmp_path, base):
    path = save_adapter(trained(make_base(seed=5), MONA), tmp_path / 'adapter.pth')
    with pytest.raises(CheckpointError, match=r'adapter for a base with the hash [0-9a-f]{12}, but the weights'):
        create_backbone(None, base[1], adapter_checkpoint=path)
    model = trained(base[0], MONA)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(CheckpointError, match='First load the checkpoint from which the adapter was trained'):
        load_checkpoint(model, path, allow_partial=True, log=None)
    with pytest.raises(CheckpointError, match='First load'):
        model.load_state_dict(read_file(path), strict=False)
    assert equal_weights(model, before)


@pytest.mark.parametrize('other', [{'type': 'mona', 'dim': 3}, LORA, {**MONA, 'stages': [0]}, None])
def test_another_adapter_is_refused(tmp_path, base, other):
    path = save_adapter(trained(base[0], MONA), tmp_path / 'adapter.pth')
    model = SwinBackbone(**SMALL, adapter=other)
    load_checkpoint(model, base[1], log=None)
    with pytest.raises(CheckpointError, match=r"has the adapter .*'mona', 'dim': 2.*build the model with adapter="):
        load_checkpoint(model, path, log=None)


def test_one_changed_weight_of_the_base_changes_the_hash():
    parameters = dict(make_base().named_parameters())
    first = base_digest(parameters)
    assert torch.equal(first, base_digest(dict(reversed(parameters.items()))))
    name = 'stages.0.blocks.1.attn.w_msa.relative_position_bias_table'
    with torch.no_grad():
        parameters['norm1.weight'] += 1
        assert torch.equal(first, base_digest(parameters))
        parameters[name].view(-1)[-1] += 1e-6
    assert not torch.equal(first, base_digest(parameters))


def test_what_is_missing_is_named(tmp_path, base):
    path = save_adapter(trained(base[0], LORA), tmp_path / 'adapter.pth')
    with pytest.raises(TypeError, match='adapter alone; give the checkpoint that it was trained from too'):
        create_backbone('swin_t', adapter_checkpoint=path)
    with pytest.raises(CheckpointError, match=r'adapter without its base; give the checkpoint .* adapter_checkpoint'):
        create_backbone(None, path)
    with pytest.raises(CheckpointError, match='is not an adapter alone; give it as checkpoint'):
        create_backbone(None, base[1], adapter_checkpoint=base[1])
    with pytest.raises(CheckpointError, match='the SwinBackbone has no adapter'):
        save_adapter(base[0], tmp_path / 'other.pth')
    with pytest.raises(FileExistsError):
        save_adapter(trained(base[0], LORA), path)


# --- whole checkpoints ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('adapter', ADAPTERS)
@pytest.mark.parametrize('kind', VERSIONS)
def test_a_whole_checkpoint_tells_its_adapter(tmp_path, kind, adapter):
    model = trained(make_base(kind), adapter)
    torch.save({'state_dict': {f'backbone.{k}': v for k, v in model.state_dict().items()}}, tmp_path / 'epoch_1.pth')
    options = {'window_size': 4, 'pretrained_window_size': 4} if kind is SwinV2Backbone else {}
    found = create_backbone(None, tmp_path / 'epoch_1.pth', **options)
    assert_equal(found, model)
    model.load_state_dict(found.state_dict())
    with pytest.raises(CheckpointError, match=r'has the adapter .*, the model has no adapter; build the model with'):
        load_checkpoint(kind(**{**SMALL, **options}), tmp_path / 'epoch_1.pth', log=None)


# --- conversion -------------------------------------------------------------------------------------------------------


def run_convert(source, out, **options):
    return convert(str(source), out, 'timm', options={}, **options)


def test_conversion_merges_lora(tmp_path, base):
    model = trained(base[0], LORA)
    torch.save(model.state_dict(), tmp_path / 'whole.pth')
    path = save_adapter(model, tmp_path / 'adapter.pth')
    out, report = run_convert(tmp_path / 'whole.pth', tmp_path / 'a.pth')
    assert 'was merged into the weights' in str(report)
    assert_close(create_backbone(None, out, num_heads=(1, 2)), model)
    out, _ = run_convert(base[1], tmp_path / 'b.pth', adapter_checkpoint=str(path))
    assert_close(create_backbone(None, out, num_heads=(1, 2)), model)
    merged = SwinBackbone(**SMALL).eval()
    merged.load_state_dict(export_state_dict(model, 'mmdet'))
    assert_close(merged, model)


def test_conversion_refuses_mona_and_another_base(tmp_path, base):
    torch.save(trained(base[0], MONA).state_dict(), tmp_path / 'whole.pth')
    with pytest.raises(CheckpointError, match='whose convolutions no other library has'):
        run_convert(tmp_path / 'whole.pth', tmp_path / 'a.pth')
    path = save_adapter(trained(make_base(seed=5), LORA), tmp_path / 'adapter.pth')
    with pytest.raises(CheckpointError, match='for a base with other weights than those of'):
        run_convert(base[1], tmp_path / 'a.pth', adapter_checkpoint=str(path))
    with pytest.raises(CheckpointError, match='is not an adapter alone'):
        run_convert(base[1], tmp_path / 'a.pth', adapter_checkpoint=str(base[1]))


def test_the_adapter_of_a_whole_model_keeps_its_head_and_classes(tmp_path, base):
    model = trained(base[0], LORA)
    state = {f'backbone.{name}': tensor for name, tensor in model.state_dict().items()}
    checkpoint = {'state_dict': {**state, 'head.weight': torch.ones(2)}, 'meta': {'dataset_meta': {'classes': ['a']}}}
    torch.save({**checkpoint, 'optimizer': {'state': {0: torch.ones(9)}}}, tmp_path / 'epoch_1.pth')
    found = read_file(write_adapter(str(tmp_path / 'epoch_1.pth'), tmp_path / 'adapter.pth'))
    assert found['meta'] == {'dataset_meta': {'classes': ['a']}}
    own = {f'backbone.{name}' for name in model.state_dict() if part_of(name) != 'base'}
    assert found['state_dict'].keys() == {*own, 'head.weight', f'backbone.{BASE_KEY}'}
    assert_close(create_backbone(None, base[1], adapter_checkpoint=tmp_path / 'adapter.pth'), model)
    with pytest.raises(CheckpointError, match='already an adapter without its base'):
        write_adapter(str(tmp_path / 'adapter.pth'), tmp_path / 'again.pth')
