"""`swin-dense complexity`: what windows save."""

import pytest
from matplotlib import image

from swin_dense.__main__ import main


def run(capsys, *args):
    assert main(['complexity', *args]) == 0
    return capsys.readouterr().out


def test_worked_example(capsys):
    printed = run(capsys, '--map', '112', '112', '--channels', '128', '--window', '7')
    assert '40,124,743,680' in printed
    assert printed == run(capsys)  # the default


def test_table_of_a_backbone_adds_up(capsys):
    lines = run(capsys, '--arch', 't', '--image', '800', '1280').splitlines()
    rows = {line[:16].strip(): [float(cell) for cell in line[16:].split()] for line in lines[3:11]}
    totals = rows.pop('all')
    for column, value in enumerate(totals):
        assert sum(row[column] for row in rows.values()) == pytest.approx(value, abs=0.05)
    # Attention within windows: 2 M^2 C FLOPs per padded token, two blocks in stage 1 of 203 x 322 tokens.
    assert rows['attention'][0] == pytest.approx(2 * 2 * 49 * 203 * 322 * 96 / 1e9, abs=0.005)
    assert '27,520,698 parameters' in lines


def test_a_map_that_windows_do_not_tile_is_padded(capsys):
    printed = run(capsys, '--map', '10', '20', '--channels', '8', '--window', '7')
    # By hand, for 14 x 21 tokens: 4 h w C^2 + 2 M^2 h w C.
    assert f' {4 * 294 * 64 + 2 * 49 * 294 * 8:,} FLOPs' in printed
    assert 'padded to 14 x 21 tokens' in printed
    assert 'padded' not in run(capsys, '--map', '14', '21')


@pytest.mark.parametrize('arch', ['t', 'swin_t', 'Swin-Tiny'])
def test_every_name_of_an_architecture_has_one_title(capsys, arch):
    assert run(capsys, '--arch', arch, '--image', '32', '32').startswith('Swin-T with window 7')


@pytest.mark.parametrize(
    ('args', 'message'),
    [
        ('--arch b', '--arch is that of a backbone; give --image'),
        ('--arch b --map 7 7', '--arch is that of a backbone; give --image'),
        ('--image 32 32 --channels 64', '--channels is that of a map'),
        ('--plot unused.png --channels 64', '--channels is that of a map'),
        ('--arch swin_x --image 32 32', "got 'swin_x'"),
        ('--map 0 0', 'every entry of --map must be at least 1, got 0'),
        ('--image 32 0', 'every entry of --image must be at least 1, got 0'),
        ('--channels 0', '--channels must be at least 1, got 0'),
        ('--window 0', '--window must be at least 1, got 0'),
    ],
)
def test_options_that_make_no_sense(capsys, args, message):
    assert main(['complexity', *args.split()]) == 2
    assert message in capsys.readouterr().err


def test_plot_is_a_picture(capsys, tmp_path):
    path = tmp_path / 'complexity.png'
    assert str(path) in run(capsys, '--arch', 'b', '--plot', str(path))
    pixels = image.imread(path)
    assert pixels.shape[0] > 500
    assert pixels.shape[1] > 800
    red = (pixels[..., 0] > 0.7) & (pixels[..., 1] < 0.3)
    blue = (pixels[..., 2] > 0.6) & (pixels[..., 0] < 0.3)
    # Both curves are there, and at the right edge that of global attention is far above the other.
    rows_of_red, rows_of_blue = (mask[:, -200:].nonzero()[0] for mask in (red, blue))
    assert rows_of_red.mean() + 100 < rows_of_blue.mean()
