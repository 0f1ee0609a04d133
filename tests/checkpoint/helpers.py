"""Backbones, classifiers and comparisons for the tests of loading."""

import copy
import json

import pytest
import torch

from swin_dense import SwinBackbone
from swin_dense.checkpoint import CheckpointError, export_state_dict, load_checkpoint
from swin_dense.checkpoint.export import write_file
from tests.conftest import equal_weights, needs, randomize

FRAMEWORKS = ('mmdet', 'mmseg')

ARCH = {'embed_dims': 8, 'depths': (2, 1, 1, 1), 'num_heads': (1, 2, 2, 2), 'window_size': 3}

SMALL = {'embed_dims': 8, 'depths': (1, 1), 'num_heads': (2, 4)}
IMAGE = torch.randn(1, 3, 35, 50, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def build(seed=0, **options):
    return randomize(SwinBackbone(**{**ARCH, **options}).double().eval(), seed)


def build_peer(framework, seed=1, **options):
    backbones = pytest.importorskip(f'{framework}.models.backbones')
    peer = randomize(backbones.SwinTransformer(**{**ARCH, **options}).double(), seed)
    peer.eval()
    return peer


def load(backbone, source, **options):
    return load_checkpoint(backbone, source, log=None, **options)


def official_classifier(backbone, classes=10):
    """Return the checkpoint that the official classification code saves for a backbone's weights."""
    channels = backbone.arch.channels[-1]
    state = {k: v for k, v in export_state_dict(backbone, 'official').items() if not k.startswith('norm')}
    for name in list(state):
        if name.endswith('relative_position_bias_table'):
            state[name.replace('bias_table', 'index')] = torch.zeros(9, 9, dtype=torch.long)
    state['layers.0.blocks.1.attn_mask'] = torch.zeros(64, 49, 49)
    state['norm.weight'], state['norm.bias'] = torch.rand(channels), torch.rand(channels)
    state['head.weight'], state['head.bias'] = torch.rand(classes, channels), torch.rand(classes)
    return {'model': state}


def same_outputs(ours, theirs):
    with torch.no_grad():
        torch.testing.assert_close(ours(IMAGE), theirs(IMAGE), rtol=0, atol=1e-9)


def raises_and_keeps(backbone, source, match, **options):
    before = copy.deepcopy(backbone.state_dict())
    with pytest.raises(CheckpointError, match=match):
        load(backbone, source, **options)
    assert equal_weights(backbone, before)


SAFETENSORS = pytest.param('model.safetensors', marks=needs('safetensors'))


def write_shards(folder, state, name='model.safetensors', shards=3):
    """Write a state dict into shards and an index, as save_pretrained does; return the path of the index."""
    stem, _, suffix = name.rpartition('.')
    names = [f'{stem}-{number + 1:05}-of-{shards:05}.{suffix}' for number in range(shards)]
    for number, shard in enumerate(names):
        write_file(folder / shard, {key: state[key] for key in list(state)[number::shards]})
    weight_map = {key: names[number % shards] for number, key in enumerate(state)}
    (folder / f'{name}.index.json').write_text(json.dumps({'metadata': {'total_size': 1}, 'weight_map': weight_map}))
    return folder / f'{name}.index.json'


def edit_index(index, change):
    content = json.loads(index.read_text())
    first, *_ = content['weight_map']
    content['weight_map'][first] = change(content['weight_map'][first])
    index.write_text(json.dumps(content))
