"""`swin-dense weights`."""

import pytest

from swin_dense.archs.weights import published
from swin_dense.commands._main import main


def test_all_are_listed_by_name_in_100_columns(capsys):
    assert main(['weights']) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines[1 : len(published()) + 1]] == list(published())
    assert max(map(len, lines)) <= 100


def test_some_and_one(capsys):
    assert main(['weights', 'Satlas', 'ms']) == 0
    assert capsys.readouterr().out.count('satlas-sentinel2-ms') == 4
    assert main(['weights', 'swin_t']) == 0  # also part of the address of the authors' other weights
    listed = [line.split()[0] for line in capsys.readouterr().out.partition('\n\n')[0].splitlines()[1:]]
    assert listed == [name for name, one in published().items() if one.arch == 'swin_t']
    assert main(['weights', 'swin_b.in1k']) == 0
    printed = capsys.readouterr().out
    assert published()['swin_b.in1k'].address in printed
    assert 'swin_b.in1k_384' not in printed


@pytest.mark.parametrize('arguments', ['weights swin_t.in1kk', 'features photos --out out --checkpoint swin_t.in1kk'])
def test_the_nearest_name_is_suggested(capsys, arguments):
    assert main(arguments.split()) == 2
    assert "did you mean 'swin_t.in1k'?" in capsys.readouterr().err
