"""A Swin V2 is not loaded into a model that scales its positions otherwise, without a word."""

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
from swin_dense.checkpoint.export import write_file
from tests.checkpoint.helpers import ARCH
from tests.conftest import equal_weights, needs, randomize

UNKNOWN = 'neither the checkpoint nor the model records the windows'
OTHER = r'trained with windows of 3x3, 3x3, 3x3, 3x3 tokens.*pretrained_window_size=\(3, 3, 3, 3\)'


def v2(window=3, **options):
    return SwinV2Backbone(**{**ARCH, 'window_size': window}, **options)


def without_metadata(model):
    return dict(model.state_dict())


def saved(state):
    """Return a state dict as torch reads it from a file."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_names_and_shapes_are_those_of_the_parameters():
    model = v2()
    assert list(model.state_dict()) == [name for name, _ in model.named_parameters()]
    plain = nn.Module()
    for name, module in model.named_children():
        plain.add_module(name, module)
    plain.load_state_dict(model.state_dict(), strict=True)


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


@pytest.mark.parametrize(
    'wrong',
    [
        None,
        3,
        [3],
        [(3,)] * 8,
        [(3, 'x')] * 8,
        [(3, 1)] * 8,
        [(3, 1 << 16)] * 8,
        [(3, 3)] * 5,
        [],
    ],
)
def test_wrong_records_are_ignored(wrong):
    state = v2().state_dict()
    state._metadata['']['windows'] = wrong
    v2(5).load_state_dict(state)


def test_a_window_per_stage(tmp_path):
    model = randomize(v2([2, 3, (3, 5), 2], pretrained_window_size=(4, 0, 0, 2), out_indices=(0, 1, 2)), 1)
    path = write_file(tmp_path / 'a.pth', model.state_dict())
    made = create_backbone(checkpoint=path)
    assert (made.windows, made.trained_windows[:3]) == (model.windows[:3], model.trained_windows[:3])
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
    state = without_metadata(v2())
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
    model.load_state_dict(without_metadata(model))
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
    state._metadata['']['windows'] = [
        (3, 3),
        (3, 3),
        (3, 3),
        (5, 5),
    ]
    made = create_backbone(checkpoint=write_file(tmp_path / 'a.pth', state))
    assert (made.window_size, made.pretrained_window_size) == ((3, 3), (3, 3, 0, 0))
