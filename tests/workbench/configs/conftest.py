"""Own data in the layouts of the recipes."""

import pytest

from tests.workbench.configs.data import CLASSES, DETECTOR, SEGMENTOR, OwnData, make_coco, make_masks


@pytest.fixture
def fruit(tmp_path, capsys):
    """Four images of each split with a box and a mask."""
    return OwnData(
        make_coco(tmp_path / 'fruit'),
        DETECTOR,
        capsys,
        '--classes',
        ','.join(CLASSES),
    )


@pytest.fixture
def ten_fruits(tmp_path, capsys):
    return OwnData(
        make_coco(tmp_path / 'fruit', 10),
        DETECTOR,
        capsys,
        '--classes',
        ','.join(CLASSES),
    )


@pytest.fixture
def roads(tmp_path, capsys):
    """Four images of each split with a mask of two classes."""
    return OwnData(make_masks(tmp_path / 'roads'), SEGMENTOR, capsys, '--classes', 'a,b')
