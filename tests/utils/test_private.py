"""Private names of other packages stand in one file, and each may go."""

import ast
import re
from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from swin_dense.utils import private, private_mm
from tests.conftest import ROOT, needs
from tests.processes import python

PACKAGE = ROOT / 'swin_dense'
HOME, HOME_OF_MM, OLD = (PACKAGE / 'utils' / f'{name}.py' for name in ('private', 'private_mm', 'compat'))
PRIVATE = re.compile(r'_[a-zA-Z]\w*')
# What collections.namedtuple documents, the methods that nn.Module documents to be called on every module, and a
# type in annotations, which are not evaluated.
DOCUMENTED = {'_replace', '_asdict', '_fields', '_save_to_state_dict', '_load_from_state_dict', '_ActionsContainer'}


def names_in(source):
    """Return the private names that a file takes from objects or modules, and those that it defines."""
    used, defined = set(), set()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute):
            is_own = isinstance(node.value, ast.Name) and node.value.id in ('self', 'cls')
            (defined if is_own and isinstance(node.ctx, ast.Store) else used).add(node.attr)
        elif isinstance(node, ast.ImportFrom):
            used.update([*node.module.split('.'), *(alias.name for alias in node.names)])
        elif isinstance(node, ast.Call) and getattr(node.func, 'id', '') in (
            'getattr',
            'hasattr',
            'setattr',
            'delattr',
        ):
            used.update(
                part.value for part in node.args if isinstance(part, ast.Constant) and isinstance(part.value, str)
            )
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            defined.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            defined.add(node.id)
    return {name for name in used if PRIVATE.fullmatch(name)}, defined


def test_no_other_file_uses_private_names_of_other_packages():
    found = {path: names_in(path.read_text()) for path in PACKAGE.rglob('*.py')}
    own = set.union(*(defined for _, defined in found.values())) | {path.stem for path in found} | DOCUMENTED
    assert names_in('import torch\ntorch._C.x; from a import _b; getattr(c, "_d")')[0] == {'_C', '_b', '_d'}
    files = {path.name: used - own for path, (used, _) in found.items() if path not in (HOME, HOME_OF_MM, OLD)}
    assert not {name: used for name, used in files.items() if used}


def names_that_may_go():
    texts = [node.value for node in ast.walk(ast.parse(HOME.read_text())) if isinstance(node, ast.Constant)]
    return sorted(text for text in texts if isinstance(text, str) and re.fullmatch(r'(\w+\.)*_\w+(\.\w+)*', text))


ELSEWHERE = {'_parameters', '_buffers'}  # of CUDA graphs
# Builds, runs, trains and loads both versions, in a fork for each name, which is replaced by one that does not exist.
PROGRAM = """
import os, re, sys, traceback
from pathlib import Path
import torch

def use(source, path):
    import swin_dense.utils
    from types import ModuleType
    module = ModuleType('swin_dense.utils.private')
    exec(compile(source, path, 'exec'), vars(module))
    sys.modules[module.__name__] = swin_dense.utils.private = module
    import swin_dense
    results = []
    arch = dict(embed_dims=16, depths=(2, 1), num_heads=(1, 2))
    for kind in (swin_dense.SwinBackbone, swin_dense.SwinV2Backbone):
        torch.manual_seed(0)
        model = kind(arch, window_size=4, attn_drop_rate=0.0)
        img = torch.rand(1, 3, 40, 56)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sum(out.square().mean() for out in model(img)).backward()
        optimizer.step()
        with torch.no_grad():
            results += [out.clone() for out in model.eval()(img)]
        torch.save({'model': model.state_dict()}, 'weights.pth')
        other = kind(arch, window_size=4).eval()
        report = swin_dense.load_checkpoint(other, 'weights.pth')
        assert not report.missing, report
        with torch.no_grad():
            assert all(map(torch.equal, other(img), model(img)))
    return results

path, names = sys.argv[1], sys.argv[2:]
source = Path(path).read_text()
if not os.fork():
    torch.save(use(source, path), 'expected.pth')
    os._exit(0)
assert os.wait()[1] == 0
for name in names:
    changed = re.sub(rf"(?<='){re.escape(name)}(?=['{{])", f'{name}_gone', source)
    assert changed != source, name
    if not os.fork():
        try:
            found = use(changed, path)
            assert all(map(torch.equal, found, torch.load('expected.pth')))
        except BaseException:
            print(name, traceback.format_exc())
            os._exit(1)
        os._exit(0)
    os.wait()
print('done')
"""


@pytest.mark.slow
def test_each_name_may_go(tmp_path):
    """Without one, the package is imported, and both versions are built, run, trained, saved and loaded as with it."""
    names = [name for name in names_that_may_go() if name not in ELSEWHERE]
    assert len(names) >= 12
    assert python('-W', 'ignore', '-c', PROGRAM, HOME, *names, cwd=tmp_path).stdout == 'done\n'


def test_hooks_and_buffers_without_the_names():
    module = nn.BatchNorm1d(3)
    module.register_buffer('derived', torch.zeros(1), persistent=False)
    assert not private.is_persistent(module, 'derived')
    del module._non_persistent_buffers_set
    assert private.is_persistent(module, 'derived')


def test_exporting_and_downloading_without_the_names(monkeypatch):
    _config = pytest.importorskip('torch.fx.experimental._config', reason='torch 2.1 lacks it')

    with private.backed_size_oblivious():
        assert _config.backed_size_oblivious
    with monkeypatch.context() as patch:
        patch.setattr('torch.fx.experimental._config', nullcontext())
        with private.backed_size_oblivious():
            pass
    monkeypatch.delattr('torch.hub.tqdm')
    with private.progress_bar(total=3) as show:
        show(3)


@needs('mmengine')
def test_what_is_asked_of_mmengine_without_the_names(monkeypatch):
    from mmengine.config import Config
    from mmengine.logging import HistoryBuffer
    from mmengine.model import ImgDataPreprocessor
    from mmengine.runner.checkpoint import CheckpointLoader, load_from_local

    assert private_mm.is_resuming(SimpleNamespace(_resume=False, cfg={'resume': True})) is False
    assert private_mm.is_resuming(SimpleNamespace(cfg={'resume': True}))
    assert private_mm.metainfo_of(object, {'classes': ('a',)}) == {'classes': ('a',)}
    for statistics in ({'mean': [1, 2, 3], 'std': [4, 5, 6]}, {}):
        for swaps in (True, False):
            preprocessor = ImgDataPreprocessor(**statistics, bgr_to_rgb=swaps)
            assert private_mm.swaps_channels(preprocessor) is swaps
            with monkeypatch.context() as patch:
                patch.setattr(private_mm, 'hasattr', lambda *_: False, raising=False)
                assert private_mm.swaps_channels(preprocessor) is swaps
    with monkeypatch.context() as patch:
        patch.delattr(CheckpointLoader, '_schemes')
        assert private_mm.local_loader() is load_from_local
    monkeypatch.delattr(HistoryBuffer, '_statistics_methods')
    assert private_mm.history_statistics(HistoryBuffer)['max'] is HistoryBuffer.max
    monkeypatch.setitem(__import__('sys').modules, 'mmengine._strategy', None)
    assert private_mm.fsdp_strategy() is None
    monkeypatch.delattr(Config, '_to_lazy_dict')
    assert private_mm.lazy_dict(Config({'a': 1})) == {'a': 1}
