"""A former public name works, and warns with the new one at the line that uses it."""

import importlib
import re
import sys
import types
import warnings

import pytest

import swin_dense
from swin_dense.utils.deprecation import former_name
from tests.conftest import needs

NAMES = {'build': 'swin_dense.create_backbone', 'Net': 'swin_dense.SwinBackbone'}


@pytest.fixture
def module(monkeypatch):
    made = types.ModuleType('renamed_parts')
    made.__getattr__ = lambda name: former_name('renamed_parts', name, NAMES)
    monkeypatch.setitem(sys.modules, 'renamed_parts', made)
    return made


def test_a_former_name_warns_and_works(module):
    with pytest.warns(FutureWarning, match=r'build will .*use swin_dense.create_back') as seen:
        assert module.build is swin_dense.create_backbone
    assert seen[0].filename == __file__
    with pytest.warns(FutureWarning, match=r'use swin_dense\.SwinBackbone'):
        from renamed_parts import Net
    assert Net is swin_dense.SwinBackbone


def test_other_names_are_unknown(module):
    with warnings.catch_warnings():
        warnings.simplefilter('error')
        assert not hasattr(module, 'other')
        with pytest.raises(AttributeError, match="'renamed_parts' has no attribute 'other'"):
            _ = module.other


@needs('mmengine')
@pytest.mark.parametrize(
    ('module', 'name', 'new'),
    [
        ('swin_dense.mm', 'WholeCheckpointHook', 'swin_dense.workbench.checkpoints.WholeCheckpointHook'),
        ('swin_dense.export', 'export_detector', 'swin_dense.export_detector'),
        ('swin_dense.export', 'export_segmentor', 'swin_dense.export_segmentor'),
    ],
)
def test_names_that_moved(module, name, new):
    owner, _, attribute = new.rpartition('.')
    with pytest.warns(FutureWarning, match=f'use {re.escape(new)}$'):
        found = getattr(importlib.import_module(module), name)
    assert found is getattr(importlib.import_module(owner), attribute)


@needs('mmengine')
def test_a_config_of_an_earlier_version_finds_its_hook():
    from mmengine.registry import HOOKS

    from swin_dense.workbench.checkpoints import WholeCheckpointHook

    with pytest.warns(FutureWarning, match='use swin_dense'):
        assert HOOKS.get('swin_dense.mm.WholeCheckpointHook') is WholeCheckpointHook
