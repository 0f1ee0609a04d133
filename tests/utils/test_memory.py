"""The memory that a pass frees is found again by the next one; counted by page faults in processes of their own."""

import os
import platform
import sys

import pytest

from swin_dense.utils.memory import KEEP_VARIABLE
from tests.conftest import ROOT
from tests.processes import completed, environment

PAGES = """
import resource, statistics, sys, torch
from swin_dense import SwinBackbone
from swin_dense.utils import memory
model, img = SwinBackbone(dict(embed_dims=96, depths=(2, 2), num_heads=(3, 6))).eval(), torch.rand(1, 3, 224, 224)
run = torch.compile(model, backend='eager', fullgraph=True) if 'compiled' in sys.argv else model
faults = []
with torch.set_grad_enabled('training' in sys.argv):
    for _ in range(16):
        before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
        outs = run(img)
        if 'training' in sys.argv:
            sum(out.sum() for out in outs).backward()
        faults.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
        del outs
calls = memory.keep_freed.cache_info()
print(calls.misses, memory.keep_freed(), statistics.median_low(faults[5:]))
"""
on_glibc = pytest.mark.skipif(platform.libc_ver()[0] != 'glibc', reason='other allocators keep memory by other rules')


def run(*arguments, **variables):
    """Return how often the allocator was set, whether it keeps memory, and the page faults of the median pass."""
    variables = {**environment(), **variables}
    for name in os.environ:
        if name.startswith('MALLOC_') or name in ('GLIBC_TUNABLES', 'LD_PRELOAD'):
            del variables[name]
    command = [sys.executable, '-c', PAGES, *arguments]
    calls, keeps, faults = completed(command, cwd=ROOT, env=variables).stdout.split()
    return int(calls), keeps == 'True', int(faults)


@on_glibc
@pytest.mark.parametrize(
    'how', [(), ('training',), pytest.param(('compiled',), marks=pytest.mark.slow)], ids=lambda how: ' '.join(how)
)
def test_a_pass_finds_the_memory_of_the_pass_before(how):
    calls, keeps, faults = run(*how, **{KEEP_VARIABLE: '1'})
    assert keeps
    assert calls == 1
    # Page faults of the median pass, because the heap may still grow in one or two of them. If glibc returns the
    # memory, most passes have 2,000 to 6,000.
    assert faults < 100


@pytest.mark.parametrize(
    ('libc', 'variable'),
    [('glibc', '0'), ('musl', '1'), ('glibc', None)],
    ids=['by the variable', 'others', 'where there is a GPU'],
)
def test_an_allocator_is_left_as_it_is(monkeypatch, libc, variable):
    from swin_dense.utils import memory

    monkeypatch.delenv(KEEP_VARIABLE, raising=False)
    if variable is not None:
        monkeypatch.setenv(KEEP_VARIABLE, variable)
    monkeypatch.setattr(memory.torch.cuda, 'is_available', lambda: True)
    monkeypatch.setattr(platform, 'libc_ver', lambda: (libc, '2.36'))
    monkeypatch.setattr(memory.ctypes, 'CDLL', lambda name: pytest.fail('it was called'))
    assert not memory.keep_freed.__wrapped__()


@pytest.mark.parametrize('limit', [1 << 30, 32 << 20])
def test_the_largest_limit_that_glibc_takes(monkeypatch, limit):
    """glibc before 2.35 refuses more than 32 MiB, for which mallopt returns 0."""
    from swin_dense.utils import memory

    accepted = []

    class Library:
        @staticmethod
        def mallopt(option, value):
            is_accepted = option != -3 or value <= limit
            accepted.extend([(option, value)] if is_accepted else [])
            return int(is_accepted)

    monkeypatch.setenv(KEEP_VARIABLE, '1')
    monkeypatch.setattr(platform, 'libc_ver', lambda: ('glibc', '2.31'))
    monkeypatch.setattr(memory.ctypes, 'CDLL', lambda name: Library)
    assert memory.keep_freed.__wrapped__()
    assert accepted == [(-3, limit), (-1, (1 << 31) - 1)]
