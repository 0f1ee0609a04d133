"""Every public name has a docstring with an example that runs as documented."""

import doctest

import pytest
import torch

import swin_dense
from swin_dense import ops
from swin_dense.features.extractor import Extractor

PUBLIC = [
    *(getattr(swin_dense, name) for name in swin_dense.__all__),
    Extractor,
    ops.window_attention,
]
# Exceptions need no example.
WITH_EXAMPLE = [target for target in PUBLIC if not (isinstance(target, type) and issubclass(target, Exception))]


@pytest.fixture(scope='module')
def weights(tmp_path_factory):
    """Return a file of 110 MB with the name that the examples use."""
    path = tmp_path_factory.mktemp('weights') / 'swin_t.in1k'
    torch.save(swin_dense.SwinBackbone('t').state_dict(), path)
    return path


@pytest.mark.parametrize('target', WITH_EXAMPLE, ids=lambda target: target.__name__)
def test_examples_run_as_documented(target, weights, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / weights.name).symlink_to(weights)
    names = {'torch': torch, target.__name__: target, 'WindowSpec': ops.windows.WindowSpec}
    found = doctest.DocTestFinder(recurse=False).find(target, target.__name__, globs=names)
    assert any(example.examples for example in found)
    runner = doctest.DocTestRunner()
    for example in found:
        runner.run(example)
    assert runner.failures == 0
