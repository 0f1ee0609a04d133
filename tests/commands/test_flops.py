"""`swin-dense flops` without a config: the cost of a backbone, and the saving by windows."""

import pytest
from matplotlib import image

from swin_dense.__main__ import main


def run(capsys, *args):
    assert main(['flops', *args]) == 0
    return capsys.readouterr().out


def test_worked_example(capsys):
    printed = run(capsys, '--grid', '112', '112', '--channels', '128', '--window-size', '7')
    assert '40,124,743,680' in printed
    assert printed == run(capsys, '--grid', '112', '112')  # the defaults


def test_table_of_a_backbone_adds_up(capsys):
    lines = run(capsys, '--arch', 't', '--size', '800', '1280').splitlines()
    assert lines[2].split() == [word for stage in range(4) for word in ('stage', str(stage))] + ['all']
    rows = {line[:16].strip(): [float(cell) for cell in line[16:].split()] for line in lines[3:11]}
    totals = rows.pop('all')
    for column, value in enumerate(totals):
        assert sum(row[column] for row in rows.values()) == pytest.approx(value, abs=0.05)
    # Attention within windows: 2 M^2 C FLOPs per padded token, two blocks in the first stage of 203 x 322 tokens.
    assert rows['attention'][0] == pytest.approx(2 * 2 * 49 * 203 * 322 * 96 / 1e9, abs=0.005)
    assert '27,520,698 parameters' in lines


def test_a_map_that_windows_do_not_tile_is_padded(capsys):
    printed = run(capsys, '--grid', '10', '20', '--channels', '8', '--window-size', '7')
    # By hand, for 14 x 21 tokens: 4 h w C^2 + 2 M^2 h w C.
    assert f' {4 * 294 * 64 + 2 * 49 * 294 * 8:,} FLOPs' in printed
    assert 'padded to 14 x 21 tokens' in printed
    assert 'padded' not in run(capsys, '--grid', '14', '21', '--channels', '8')


@pytest.mark.parametrize('arch', ['t', 'swin_t', 'Swin-Tiny'])
def test_every_name_of_an_architecture_gives_the_same_title(capsys, arch):
    assert run(capsys, '--arch', arch, '--size', '32').startswith('Swin-T with windows of 7 x 7 on an image of 32 x 32')


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        ('', 'give exactly one of: a config'),
        ('--arch b --grid 7 7', 'give exactly one of: a config'),
        ('mine.py --arch b', 'give exactly one of: a config'),
        ('--arch b --channels 64', '--channels needs --grid'),
        ('--grid 7 7 --size 32', '--size needs a config or --arch'),
        ('mine.py --window-size 7', '--window-size needs --arch or --grid'),
        ('mine.py --out a.png', '--out needs --arch'),
        ('--arch b --size 32 --out a.png', 'leave --size out'),
        ('--arch swin_x --size 32', "--arch must be one of ['t'"),
        ('--grid 0 0', 'every entry of --grid must be at least 1, got 0'),
        ('--arch t --size 32 0', '--size must be at least 1, got 0'),
        ('--arch t --size 1 2 3', '--size must be one integer or a (height, width) pair, got [1, 2, 3]'),
        ('--grid 7 7 --channels 0', '--channels must be at least 1, got 0'),
        ('--arch t --window-size 0', '--window-size must be at least 1, got 0'),
        ('--arch t --out a.gif', '--out must end in .png or .pdf'),
    ],
)
def test_invalid_options(capsys, args, message):
    assert main(['flops', *args.split()]) == 2
    assert message in capsys.readouterr().err


def test_the_plot_of_cost_against_image_size(capsys, tmp_path):
    path = tmp_path / 'flops.png'
    assert str(path) in run(capsys, '--arch', 'b', '--out', str(path))
    pixels = image.imread(path)
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 800
    red = (pixels[..., 0] > 0.7) & (pixels[..., 1] < 0.3)
    blue = (pixels[..., 2] > 0.6) & (pixels[..., 0] < 0.3)
    # Both curves are drawn, and at the right edge the red one, of global attention, is far above the other.
    rows_of_red, rows_of_blue = (mask[:, -200:].nonzero()[0] for mask in (red, blue))
    assert rows_of_red.mean() + 100 < rows_of_blue.mean()
