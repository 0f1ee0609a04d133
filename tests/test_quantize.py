"""How examples/quantize.py compares two files; what it writes is tested in tests/workbench/export/test_whole.py."""

from types import SimpleNamespace

import numpy as np
import pytest

from tests.conftest import needs
from tests.examples import load_example

pytestmark = [needs('onnxruntime'), needs('pycocotools')]


@pytest.fixture
def example():
    return load_example('quantize')


def detected(*instances):
    record = {'instances': [{'label': label, 'box': box} for label, box in instances]}
    return SimpleNamespace(labels=None, record=record)


def mapped(last):
    return SimpleNamespace(labels=np.array([[0, 1, 2, last]]))


BOX, NEAR, FAR = [0, 0, 20, 20], [0, 0, 20, 19], [0, 0, 20, 10]


@pytest.mark.parametrize(
    ('first', 'second', 'share'),
    [
        (detected((0, BOX)), detected((0, NEAR)), 1),
        (detected((0, BOX)), detected((1, BOX)), 0),
        (detected((0, BOX)), detected((0, FAR)), 0),
        (detected((0, BOX)), detected((0, BOX), (1, FAR)), 2 / 3),
        (detected((0, BOX)), detected(), 0),
        (detected(), detected(), 1),
        (mapped(3), mapped(4), 0.75),
    ],
)
def test_agreement_counts_what_either_file_has_alone(example, first, second, share):
    assert example.agreement(first, second) == pytest.approx(share)
