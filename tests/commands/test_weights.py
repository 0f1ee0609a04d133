"""`swin-dense weights`."""

import pytest

from swin_dense.archs.published import published
from swin_dense.commands._main import main


def test_what_is_listed(listed):
    lines = listed().splitlines()
    assert [line.split()[0] for line in lines[1 : len(published()) + 1]] == list(published())
    assert max(map(len, lines)) <= 100
    assert listed('Satlas', 'ms').count('satlas-sentinel2-ms') == 4
    printed = listed('swin_b.in1k')
    assert published()['swin_b.in1k'].address in printed
    assert 'swin_b.in1k_384' not in printed
    # Where swin_t is part of the address of the authors' other weights.
    lines = listed('swin_t').partition('\n\n')[0].splitlines()
    names = [line.split()[0] for line in lines[1:]]
    assert names == [name for name, one in published().items() if one.arch == 'swin_t']


@pytest.fixture
def listed(capsys):
    def run(*words):
        assert main(['weights', *words]) == 0
        return capsys.readouterr().out

    return run


@pytest.mark.parametrize('arguments', ['weights swin_t.in1kk', 'features photos --out out --checkpoint swin_t.in1kk'])
def test_the_nearest_name_is_suggested(capsys, arguments):
    assert main(arguments.split()) == 2
    assert "did you mean 'swin_t.in1k'?" in capsys.readouterr().err
