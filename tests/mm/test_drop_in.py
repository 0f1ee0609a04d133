"""Every Swin config in the wheels of mmdet and mmseg builds with nothing but the backbone's type changed."""

from importlib.metadata import files as files_of_distribution
from importlib.resources import files
from pathlib import Path

import mmdet.models.backbones
import mmseg.models.backbones
import pytest
import torch
from mmengine.config import Config, ConfigDict

from swin_dense import SwinDense
from swin_dense.block import SwinBlock

PEERS = {
    'mmdet': mmdet.models.backbones.SwinTransformer,
    'mmseg': mmseg.models.backbones.SwinTransformer,
}


def swin_configs():
    """Find the configs by their text, together with those that inherit from them."""
    for package in PEERS:
        root = Path(str(files(package))) / '.mim' / 'configs'
        texts = {path: path.read_text() for path in sorted(root.rglob('*.py'))}
        found = {path for path, text in texts.items() if 'SwinTransformer' in text}
        while True:
            heirs = {path for path, text in texts.items() if any(base.name in text for base in found)} - found
            if not heirs:
                break
            found |= heirs
        for path in sorted(found):
            if '_base_' not in path.parts:
                yield pytest.param(package, path, id=f'{package}/{path.relative_to(root)}')


def backbones(node):
    """Yield every backbone config with a Swin in a resolved config."""
    if isinstance(node, dict):
        if str(node.get('type', '')).endswith('SwinTransformer'):
            yield node
        for value in node.values():
            yield from backbones(value)
    elif isinstance(node, (list, tuple)):
        for value in node:
            yield from backbones(value)


@pytest.mark.parametrize(('package', 'path'), list(swin_configs()))
def test_a_config_builds_with_its_own_arguments(package, path):
    found = list(backbones(Config.fromfile(path).model))
    assert found
    for backbone in {str(backbone): backbone for backbone in found}.values():
        options = {key: value for key, value in ConfigDict(backbone).to_dict().items() if key != 'type'}
        if not options.get('init_cfg'):
            options.pop('init_cfg', None)
        with torch.device('meta'):
            ours = SwinDense(**options)
        options.pop('drop_path_rate', None)  # the peers read rates from a tensor, which the meta device has none of
        theirs = PEERS[package](**options, drop_path_rate=0.0)
        assert sum(p.numel() for p in ours.parameters()) == sum(p.numel() for p in theirs.parameters())
        assert len(ours.out_indices) == len(theirs.out_indices)


def test_mmsegs_own_test_of_its_swin_with_the_class_exchanged():
    path = next(
        (path for path in files_of_distribution('mmsegmentation') if path.match('test_backbones/test_swin.py')), None
    )
    source = path.locate().read_text() if path and path.locate().is_file() else ''
    if 'from mmseg.models.backbones.swin import' not in source:
        pytest.skip('this mmsegmentation came without its tests')
    theirs = {}
    exec(compile(source, 'test_swin.py', 'exec'), theirs)
    theirs.update(SwinTransformer=SwinDense, SwinBlock=SwinBlock)
    theirs['test_swin_transformer']()
