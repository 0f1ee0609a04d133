"""A Swin V2 is not loaded into a model that scales its positions otherwise, without a word."""

import copy
import io
import logging

import pytest
import torch
from torch import nn

from swin_dense import (
    CheckpointError,
    SwinClassifier,
    SwinV2Backbone,
    create_backbone,
    export_state_dict,
    load_checkpoint,
)
from swin_dense.checkpoint.save import write_file
from tests.checkpoint.helpers import ARCH
from tests.checkpoint.test_misfits import Sharded
from tests.conftest import equal_weights, needs, randomize

TABLE = 'relative_coords_table'
UNKNOWN = 'neither the checkpoint nor the model records the windows'
OTHER = r'trained with windows of 3x3, 3x3, 3x3, 3x3 tokens.*pretrained_window_size=\(3, 3, 3, 3\)'


def v2(window=3, **options):
    return SwinV2Backbone(**{**ARCH, 'window_size': window}, **options)


def without_record(model):
    """Return the weights as files of timm and transformers have them, which do not record windows."""
    return {name: tensor for name, tensor in model.state_dict().items() if TABLE not in name}


def saved(state):
    """Return a state dict as torch reads it from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_the_state_is_the_parameters_and_the_buffers_of_the_authors():
    """A table of coordinates per block, which is a buffer, as in the authors' code."""
    model = v2([3, 3, (3, 5), 2], pretrained_window_size=(4, 0, 0, 2))
    state = model.state_dict()
    parameters = [name for name, _ in model.named_parameters()]
    assert [name for name in state if TABLE not in name] == parameters
    assert [name for name in state if TABLE in name] == [name for name, _ in model.named_buffers()]
    torch.func.functional_call(model, state, torch.rand(1, 3, 20, 30), strict=True)
    ours = {name: tensor for name, tensor in state.items() if TABLE in name}
    authors = export_state_dict(model, 'official')
    authors = {name.replace('layers', 'stages').replace('attn', 'attn.w_msa'): x for name, x in authors.items()}
    assert len(ours) == 5  # one per block
    for name, table in ours.items():
        assert torch.equal(table, authors[name])
    plain = nn.Module()
    for name, module in model.named_children():
        plain.add_module(name, module)
    plain.load_state_dict(state, strict=True)
    model.stages[0].load_state_dict(v2().stages[0].state_dict(), strict=True)
    for damage in (lambda table: table.zero_(), lambda table: table.half()):  # as by to_empty, or a conversion
        for module in model.modules():
            if TABLE in module._buffers:
                setattr(module, TABLE, damage(getattr(module, TABLE)))
        model.load_state_dict(state)
        kept = model.state_dict()
        assert all(torch.allclose(kept[name].float(), table, atol=1e-3) for name, table in ours.items())


def test_tools_that_take_a_state_dict_take_this_one():
    """Functional calls, averages of weights, and assignment."""
    model, image = randomize(v2(), 1).eval(), torch.rand(1, 3, 20, 30)
    expected = model(image)
    for found, wanted in zip(torch.func.functional_call(model, model.state_dict(), image), expected, strict=True):
        torch.testing.assert_close(found, wanted)
    for name, tensor in model.state_dict().items():
        path, _, attribute = name.rpartition('.')
        assert getattr(model.get_submodule(path), attribute).shape == tensor.shape
    average = copy.deepcopy(model)
    for mean, tensor in zip(average.state_dict().values(), model.state_dict().values(), strict=True):
        mean.copy_(0.5 * mean + 0.5 * tensor)
    assert equal_weights(average, model)
    with torch.device('meta'):
        empty = v2()
    empty.load_state_dict(model.state_dict(), assign=True)
    assert equal_weights(empty, model)


def test_checkpoints_of_distributed_training_take_the_state_dict():
    state_dicts = pytest.importorskip('torch.distributed.checkpoint.state_dict', reason='needs torch 2.2')
    model, other = randomize(v2(), 1), v2()
    state_dicts.set_model_state_dict(other, state_dicts.get_model_state_dict(model))
    assert equal_weights(other, model)


def by_torch(model, state):
    model.load_state_dict(state)


def by_this_package(model, state):
    load_checkpoint(model, state)


LOADERS = [by_torch, by_this_package]


@pytest.fixture(autouse=True)
def _only_warnings(caplog):
    caplog.set_level(logging.WARNING)


@pytest.mark.parametrize('load', LOADERS)
@pytest.mark.parametrize('window', [3, (3, 3)])
def test_a_file_carries_its_windows(tmp_path, window, load, caplog):
    model = v2(window)
    path = write_file(tmp_path / 'a.pth', {'state_dict': model.state_dict()})
    made = create_backbone(checkpoint=path)
    assert made.window_size == (3, 3)
    assert made.pretrained_window_size == (3, 3, 3, 3)
    state = saved(model.state_dict())
    load(v2(window), state)
    load(v2(5, pretrained_window_size=3), state)
    assert not caplog.records
    with pytest.raises(CheckpointError, match=OTHER):
        load(v2(5), state)


def test_windows_in_a_whole_model(tmp_path):
    """Under a prefix, and in the checkpoint of a training."""
    whole, other = nn.Module(), nn.Module()
    whole.backbone, other.backbone = v2(pretrained_window_size=(4, 4, 4, 2)), v2(5)
    with pytest.raises(CheckpointError, match=r'pretrained_window_size=\(4, 4, 4, 2\)'):
        other.load_state_dict(whole.state_dict())
    path = write_file(
        tmp_path / 'epoch_1.pth',
        {
            'meta': {},
            'state_dict': whole.state_dict(),
            'optimizer': {},
        },
    )
    assert create_backbone(checkpoint=path, window_size=3).pretrained_window_size == (4, 4, 4, 2)


def with_tables(state, change):
    return {name: change(tensor) if TABLE in name else tensor for name, tensor in state.items()}


@pytest.mark.parametrize(
    'change',
    [
        torch.zeros_like,
        lambda table: table * float('nan'),
        lambda table: table + float('inf'),
        lambda table: table * 1e30,
        lambda table: table * 1e-30,
        lambda table: table[..., :1],
        lambda table: table[0],
        lambda table: table[:0],
        lambda table: table.flatten(),
        lambda table: table.to_sparse(),
        lambda table: table.to('meta'),
        lambda table: table.view(torch.uint8).view(torch.bits8),
    ],
)
@pytest.mark.filterwarnings('ignore')
def test_wrong_records_are_ignored(change, caplog):
    state = with_tables(v2().state_dict(), change)
    v2(5).load_state_dict(state)
    assert UNKNOWN in caplog.text


@pytest.mark.parametrize('dtype', [torch.float16, torch.bfloat16, torch.float64, torch.float8_e4m3fn])
def test_records_of_any_precision(dtype):
    """As in files whose values were all converted; of 8 bits, tables of small windows are exact enough."""
    state = with_tables(v2().state_dict(), lambda table: table.to(dtype))
    v2(5, pretrained_window_size=3).load_state_dict(state)
    with pytest.raises(CheckpointError, match=OTHER):
        v2(5).load_state_dict(state)


def test_a_sharded_state_keeps_its_record(caplog):
    """That of FSDP2, whose parameters are DTensors, and whose tables are not."""
    state = {
        name: tensor if TABLE in name else tensor.as_subclass(Sharded) for name, tensor in v2().state_dict().items()
    }
    v2().load_state_dict(state)
    assert not caplog.records
    with pytest.raises(CheckpointError, match=OTHER):
        v2(5).load_state_dict(state)


@needs('safetensors')
def test_safetensors_and_plain_dicts_keep_them(tmp_path):
    from safetensors.torch import save_file

    model = randomize(v2([2, 3, 3, 2], pretrained_window_size=(4, 4, 4, 2)), 1)
    save_file(model.state_dict(), tmp_path / 'a.safetensors')
    plain = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    for checkpoint in (tmp_path / 'a.safetensors', plain):
        made = create_backbone(checkpoint=checkpoint)
        assert (made.windows, made.pretrained_window_size) == (model.windows, (4, 4, 4, 2))
        assert equal_weights(made, model)
        with pytest.raises(CheckpointError, match=r'pretrained_window_size=\(4, 4, 4, 2\)'):
            load_checkpoint(v2(5), checkpoint)


def test_a_window_per_stage(tmp_path):
    model = randomize(v2([2, 3, (3, 5), 2], pretrained_window_size=(4, 0, 0, 2), out_indices=(0, 1, 2)), 1)
    path = write_file(tmp_path / 'a.pth', model.state_dict())
    made = create_backbone(checkpoint=path)
    assert (made.windows, made.spec().trained_windows[:3]) == (model.windows[:3], model.spec().trained_windows[:3])
    image = torch.rand(1, 3, 40, 50)
    for found, expected in zip(made(image), model.eval()(image), strict=True):
        torch.testing.assert_close(found, expected, rtol=0, atol=0)
    exported = export_state_dict(model, 'official')
    tables = [exported[f'layers.{stage}.blocks.0.attn.relative_coords_table'] for stage in range(3)]
    assert [tuple(table.shape[1:3]) for table in tables] == [(3, 3), (5, 5), (5, 9)]


def test_oblong_windows(tmp_path):
    model = randomize(v2((3, 5)), 1)
    path = write_file(tmp_path / 'a.pth', model.state_dict())
    made = create_backbone(checkpoint=path)
    assert made.window_size == (3, 5)
    assert made.pretrained_window_size == (0, 0, 0, 0)
    assert equal_weights(made, model)
    with pytest.raises(CheckpointError, match=r'window_size=\(3, 5\) and pretrained_window_size=\(0, 0, 0, 0\)'):
        create_backbone(checkpoint=path, window_size=4)


@pytest.mark.parametrize('load', LOADERS)
@pytest.mark.parametrize('window', [5, 3])
def test_unknown_windows_are_a_warning(window, load, caplog):
    state = without_record(v2())
    load(v2(window, pretrained_window_size=3), state)
    assert not caplog.records
    load(v2(window), state)
    (warning,) = caplog.records
    assert UNKNOWN in warning.getMessage()


def classifier(**options):
    return SwinClassifier('swinv2_t', 3, **{**ARCH, **options})


def test_a_classifier_is_not_warned_of_its_backbone(caplog):
    model = classifier()
    model.load_state_dict(saved(model.state_dict()))
    model.load_state_dict(without_record(model))
    assert not caplog.records
    with pytest.raises(CheckpointError, match='trained with windows of'):
        classifier(window_size=2).load_state_dict(model.state_dict())


@needs('mmengine')
def test_a_checkpoint_of_mmengine_carries_them(tmp_path):
    from mmengine.runner.checkpoint import get_state_dict, save_checkpoint
    from mmengine.runner.checkpoint import load_checkpoint as load

    from swin_dense import SwinDenseV2

    whole, other = nn.Module(), nn.Module()
    whole.backbone = SwinDenseV2(**ARCH)
    other.backbone = SwinDenseV2(**{**ARCH, 'window_size': 5})
    save_checkpoint({'state_dict': get_state_dict(whole), 'meta': {}}, str(tmp_path / 'a.pth'))
    with pytest.raises(CheckpointError, match=OTHER):
        load(other, str(tmp_path / 'a.pth'))
    fits = SwinDenseV2(**{**ARCH, 'window_size': 5}, pretrained_window_size=3)
    other.backbone = fits
    load(other, str(tmp_path / 'a.pth'))
    assert equal_weights(fits, whole.backbone)


def test_a_record_of_fewer_stages_tells_the_window_of_the_first(tmp_path):
    state = v2().state_dict()
    for name in list(state):
        if TABLE in name and name.startswith(('stages.2', 'stages.3')):
            del state[name]
    made = create_backbone(checkpoint=write_file(tmp_path / 'a.pth', state))
    assert (made.window_size, made.pretrained_window_size) == ((3, 3), (3, 3, 0, 0))
