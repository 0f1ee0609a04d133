"""The backbone that the commands build: its options are inferred from the checkpoint."""

import argparse

import pytest
import torch

from swin_dense import SwinBackbone
from swin_dense.checkpoint import CheckpointError
from swin_dense.commands._backbone import build_backbone
from swin_dense.commands._options import add_backbone, add_checkpoint, check_backbone
from swin_dense.features.pyramid import warn_of_random_weights
from tests.conftest import tiny


def build(*arguments):
    parser = argparse.ArgumentParser()
    add_checkpoint(parser)
    add_backbone(parser)
    args = parser.parse_args([str(argument) for argument in arguments])
    check_backbone(args)
    return build_backbone(args)


def saved(path, **options):
    backbone = tiny(**options)
    torch.save(backbone.state_dict(), path)
    return backbone


def test_given_options_override_inferred_ones(tmp_path):
    saved(tmp_path / 'a.pth', window_size=5)
    assert build('--checkpoint', tmp_path / 'a.pth').window_size == (5, 5)
    assert build('--checkpoint', tmp_path / 'a.pth', '--window-size', 7).window_size == (7, 7)
    with pytest.raises(CheckpointError, match='the model is a Swin-T'):
        build('--checkpoint', tmp_path / 'a.pth', '--arch', 'swin_t')


def test_prefix_chooses_one_of_several_backbones(tmp_path):
    path = tmp_path / 'a.pth'
    both = torch.nn.ModuleDict({'student': tiny(), 'teacher': tiny(window_size=5)})
    torch.save({'state_dict': both.state_dict()}, path)
    with pytest.raises(CheckpointError, match=r'several backbones.*prefix='):
        build('--checkpoint', path)
    assert build('--checkpoint', path, '--prefix', 'teacher').window_size == (5, 5)
    assert build('--checkpoint', path, '--prefix', 'state_dict.student').window_size == (7, 7)
    with pytest.raises(ValueError, match=r'--prefix .*; give the checkpoint too'):
        build('--prefix', 'teacher')


def test_published_architectures_are_inferred_without_bias_tables(tmp_path):
    with torch.device('meta'):
        names = SwinBackbone('t', use_rel_pos_bias=False).state_dict()
    torch.save({name: torch.zeros(tensor.shape) for name, tensor in names.items()}, tmp_path / 'a.pth')
    with pytest.raises(CheckpointError, match=r'does not record the windows.*give window_size'):
        build('--checkpoint', tmp_path / 'a.pth')
    assert build('--checkpoint', tmp_path / 'a.pth', '--window-size', 7).arch.num_heads == (3, 6, 12, 24)
    saved(tmp_path / 'b.pth', use_rel_pos_bias=False)
    with pytest.raises(CheckpointError, match='number of heads'):
        build('--checkpoint', tmp_path / 'b.pth')


def test_only_rank_0_warns_of_random_weights(monkeypatch, caplog):
    for rank in ('0', '1'):
        monkeypatch.setenv('RANK', rank)
        warn_of_random_weights.cache_clear()
        build()
    assert caplog.text.count('all results are random') == 1
