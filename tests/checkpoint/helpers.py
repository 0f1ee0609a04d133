"""Backbones, classifiers and comparisons for the tests of loading."""

import copy
import json
import pickle

import pytest
import torch

from swin_dense import SwinBackbone
from swin_dense.checkpoint import CheckpointError, export_state_dict, load_checkpoint
from swin_dense.checkpoint.save import write_file
from tests.conftest import assert_within, equal_weights, needs, randomize

FRAMEWORKS = ('mmdet', 'mmseg')

ARCH = {
    'embed_dims': 8,
    'depths': (2, 1, 1, 1),
    'num_heads': (1, 2, 2, 2),
    'window_size': 3,
}

SMALL = {
    'embed_dims': 8,
    'depths': (1, 1),
    'num_heads': (2, 4),
}
IMAGE = torch.randn(
    1,
    3,
    35,
    50,
    dtype=torch.float64,
    generator=torch.Generator().manual_seed(0),
)


class Runs:
    """An object whose unpickling calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def save_zipped(value, path):
    torch.save(value, path)


def save_legacy(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)


def save_plain(value, path):
    path.write_bytes(pickle.dumps(value))


SAVERS = [save_zipped, save_legacy, save_plain]


def build(seed=0, **options):
    return randomize(SwinBackbone(**{**ARCH, **options}).double().eval(), seed)


def build_peer(framework, seed=1, **options):
    backbones = pytest.importorskip(f'{framework}.models.backbones')
    peer = randomize(backbones.SwinTransformer(**{**ARCH, **options}).double(), seed)
    peer.eval()
    return peer


def load(backbone, source, **options):
    return load_checkpoint(backbone, source, log=None, **options)


def prefixed(prefix, state):
    """Return a state dict, or that of a module, with a prefix before each name."""
    if isinstance(state, torch.nn.Module):
        state = state.state_dict()
    return {f'{prefix}{name}': value for name, value in state.items()}


def official_classifier(backbone, classes=10):
    """Return the checkpoint that the official classification code saves for a backbone's weights."""
    channels = backbone.arch.channels[-1]
    state = {
        'layers.0.blocks.1.attn_mask': torch.zeros(64, 49, 49),
        'norm.weight': torch.rand(channels),
        'norm.bias': torch.rand(channels),
        'head.weight': torch.rand(classes, channels),
        'head.bias': torch.rand(classes),
    }
    for name, value in export_state_dict(backbone, 'official').items():
        if name.endswith('relative_position_bias_table'):
            state[name.replace('bias_table', 'index')] = torch.zeros(9, 9, dtype=torch.long)
        if not name.startswith('norm'):
            state[name] = value
    return {'model': state}


@torch.no_grad()
def same_outputs(ours, theirs):
    assert_within(ours(IMAGE), theirs(IMAGE), 1e-9)


def raises_and_keeps(backbone, source, match, **options):
    """Return the error with which a checkpoint is refused, and see that the weights are as before."""
    before = copy.deepcopy(backbone.state_dict())
    with pytest.raises(CheckpointError, match=match) as raised:
        load(backbone, source, **options)
    assert equal_weights(backbone, before)
    return str(raised.value)


SAFETENSORS = pytest.param('model.safetensors', marks=needs('safetensors'))


def write_shards(folder, state, name='model.safetensors'):
    """Write a state dict into three shards and an index, as save_pretrained does; return the path of the index."""
    stem, _, suffix = name.rpartition('.')
    weight_map = {}
    for number in range(3):
        shard = f'{stem}-{number + 1:05}-of-00003.{suffix}'
        keys = list(state)[number::3]
        weight_map |= dict.fromkeys(keys, shard)
        write_file(folder / shard, {key: state[key] for key in keys})
    index = folder / f'{name}.index.json'
    index.write_text(json.dumps({'metadata': {'total_size': 1}, 'weight_map': weight_map}))
    return index


def edit_index(index, change):
    """Change the shard that an index names for its first entry."""
    content = json.loads(index.read_text())
    first = next(iter(content['weight_map']))
    content['weight_map'][first] = change(content['weight_map'][first])
    index.write_text(json.dumps(content))
