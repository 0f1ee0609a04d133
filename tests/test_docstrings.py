"""Every public name has a docstring with an example, and the example gives what it says."""

import doctest

import pytest
import torch

import swin_dense
from swin_dense import ops
from swin_dense.features.batches import Extractor

PUBLIC = [*(getattr(swin_dense, name) for name in swin_dense.__all__), Extractor, ops.window_attention]
# What a caller raises or catches has nothing to show.
SHOWN = [thing for thing in PUBLIC if not (isinstance(thing, type) and issubclass(thing, Exception))]


@pytest.mark.parametrize('thing', SHOWN, ids=lambda thing: thing.__name__)
def test_an_example_gives_what_it_says(thing, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    weights = swin_dense.SwinBackbone('t').state_dict()
    torch.save(weights, 'swin_tiny_patch4_window7_224.pth')
    examples = doctest.DocTestFinder(recurse=False).find(thing, thing.__name__, globs={'torch': torch, **vars(thing)})
    assert sum(len(example.examples) for example in examples) > 0
    for example in examples:
        example.globs.update(torch=torch, **{thing.__name__: thing, 'WindowSpec': ops.windows.WindowSpec})
        runner = doctest.DocTestRunner()
        runner.run(example)
        assert runner.failures == 0
