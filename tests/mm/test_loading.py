"""Load checkpoints of models of mmdet and mmseg."""

import re

import mmdet.models.backbones  # noqa: F401  registers them
import pytest
import torch
from mmengine.logging import MessageHub
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import load_checkpoint as load_by_mmengine
from PIL import Image

from swin_dense.workbench.recipes.files import load_recipe
from tests.conftest import ROOT, equal_weights, photograph, randomize
from tests.mm.demo import demo_config, with_tiny_swin
from tests.processes import python


def tiny(name, kind, seed, **options):
    """Build the model of a recipe with a tiny Swin of type ``kind`` and random weights."""
    config = load_recipe(name)
    init_default_scope(config.default_scope)
    with_tiny_swin(config.model, type=kind, **options)
    return randomize(MODELS.build(config.model), seed)


@pytest.mark.parametrize(
    'name',
    [
        'mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco',
        'mask2former_swin-t_8xb2-160k_ade20k-512x512',
        'dino-5scale_swin-l_8xb2-12e_coco',
    ],
)
def test_load_from_loads_all_weights_of_a_published_query_based_model(name, tmp_path):
    """The file is a training checkpoint with the framework's Swin, including heads, message hub and optimiser."""
    theirs, ours = tiny(name, 'SwinTransformer', 1), tiny(name, 'SwinDense', 2)
    hub = MessageHub.get_instance('published')
    hub.update_scalar('train/loss', 1.0)
    checkpoint = {
        'meta': {'epoch': 12, 'dataset_meta': {'classes': ('person',)}, 'time': '20220508'},
        'state_dict': theirs.state_dict(),
        'message_hub': hub.state_dict(),
        'optimizer': torch.optim.AdamW(theirs.parameters()).state_dict(),
    }
    torch.save(checkpoint, tmp_path / 'published.pth')
    load_by_mmengine(ours, str(tmp_path / 'published.pth'))
    assert equal_weights(ours, theirs)


@pytest.mark.slow
def test_mmdets_own_inferencer_reads_a_checkpoint_as_the_page_says(tmp_path):
    """Without the import of swin_dense, torch 2.6 and later refuse the message hub in the file."""
    config = demo_config('mmdet', tmp_path)
    init_default_scope('mmdet')
    hub = MessageHub.get_instance('of an inferencer')
    hub.update_scalar('train/loss', 1.0)
    hub.update_info('cfg', config.pretty_text)  # as a training stores it
    weights = MODELS.build(config.model).state_dict()
    torch.save({'meta': {}, 'state_dict': weights, 'message_hub': hub.state_dict()}, tmp_path / 'epoch_12.pth')
    Image.fromarray(photograph(64, 96)).save(tmp_path / 'photo.jpg')
    page = (ROOT / 'docs/frameworks.md').read_text()
    block = re.search(r'^```py\n(# needs the checkpoint of a training\n.*?)^```', page, re.S | re.M)[1]
    assert 'True' in python('-W', 'ignore', '-c', f'{block}print(isinstance(boxes, list))', cwd=tmp_path).stdout
    if torch.__version__ >= '2.6':
        without = block.replace('import swin_dense ', '# ')
        assert 'weights_only' in python('-W', 'ignore', '-c', without, cwd=tmp_path, status=1).stderr
