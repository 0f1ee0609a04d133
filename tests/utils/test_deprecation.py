"""A former public name works, and warns with the new one at the line that uses it."""

import importlib
import re

import pytest

import swin_dense.export
from tests.conftest import needs


def test_other_names_are_unknown():
    with pytest.raises(AttributeError, match=r"'swin_dense\.export' has no attribute 'other'"):
        _ = swin_dense.export.other


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
    with pytest.warns(FutureWarning, match=f'use {re.escape(new)}$') as seen:
        found = getattr(importlib.import_module(module), name)
    assert seen[0].filename == __file__
    assert found is getattr(importlib.import_module(owner), attribute)


@needs('mmengine')
def test_a_config_of_an_earlier_version_finds_its_hook():
    from mmengine.registry import HOOKS

    from swin_dense.workbench.checkpoints import WholeCheckpointHook

    with pytest.warns(FutureWarning, match='use swin_dense'):
        assert HOOKS.get('swin_dense.mm.WholeCheckpointHook') is WholeCheckpointHook
