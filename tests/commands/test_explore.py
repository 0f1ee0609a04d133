"""`swin-dense explore` writes a complete page, or prints a one-line error and changes no file."""

import os
from pathlib import Path

import pytest
import torch
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.commands._main import main
from tests.conftest import TINY, photograph
from tests.explore.decoding import facts_of


@pytest.fixture
def place(tmp_path, monkeypatch):
    folder = tmp_path / 'my photos'
    folder.mkdir()
    monkeypatch.chdir(folder)
    Image.fromarray(photograph(60, 90)).save('a photo.png')
    torch.save({'model': SwinBackbone(**TINY).state_dict()}, 'small.pth')
    return folder


def explore(*options):
    return main(['explore', 'a photo.png', '--checkpoint', 'small.pth', *options])


def written():
    return facts_of(Path('page.html').read_text(encoding='utf-8'))


def test_a_page(place, capsys):
    assert explore('--out', 'page.html') == 0
    assert 'page.html: Swin (16 channels; 2, 2, 2, 2 blocks) on 60 x 90 pixels' in capsys.readouterr().out
    facts = written()
    assert (facts['name'], facts['isRandom'], facts['lang'], facts['size']) == ('a photo.png', False, 'en', [60, 90])
    assert explore('--out', 'page.html', '--force', '--lang', 'zh', '--max-side', '45') == 0
    assert (written()['lang'], written()['size']) == ('zh', [30, 45])
    assert sorted(path.name for path in place.iterdir()) == ['a photo.png', 'page.html', 'small.pth']


def test_a_file_name_that_is_not_utf_8(place):
    name = os.fsdecode(b'caf\xe9.png')
    (place / 'a photo.png').rename(name)
    assert main(['explore', name, '--checkpoint', 'small.pth', '--out', 'page.html']) == 0
    assert written()['name'] == 'caf\ufffd.png'


@pytest.mark.parametrize(
    ('options', 'message'),
    [
        ('--out small.pth', '--out must end in .html'),
        ('--out nowhere/page.html', 'there is no folder nowhere'),
        ('--out page.html --max-side 0', '--max-side must be at least 1'),
        ('--out page.html --max-size nan', '--max-size must be above 0'),
        ('--out page.html --max-size 0.05', 'the page needs at least'),
        ('--out page.html --checkpoint nowhere.pth', 'nowhere.pth'),
    ],
)
def test_wrong_usage(place, capsys, options, message):
    assert explore(*options.split()) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert message in line
    assert sorted(path.name for path in place.iterdir()) == ['a photo.png', 'small.pth']


@pytest.mark.parametrize('name', ['nothing.jpg', 'small.pth', '.'])
def test_no_image(place, capsys, name):
    assert main(['explore', name, '--checkpoint', 'small.pth', '--out', 'page.html']) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert name in line
