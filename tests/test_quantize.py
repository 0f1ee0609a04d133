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


def test_agreement_counts_what_either_file_has_alone(example):
    box, near, far = [0, 0, 20, 20], [0, 0, 20, 19], [0, 0, 20, 10]
    assert example.agreement(detected((0, box)), detected((0, near))) == 1
    assert example.agreement(detected((0, box)), detected((1, box))) == 0
    assert example.agreement(detected((0, box)), detected((0, far))) == 0
    assert example.agreement(detected((0, box)), detected((0, box), (1, far))) == pytest.approx(2 / 3)
    assert example.agreement(detected(), detected()) == 1
    assert example.agreement(detected((0, box)), detected()) == 0
    maps = [SimpleNamespace(labels=np.array([[0, 1, 2, one]])) for one in (3, 4)]
    assert example.agreement(*maps) == 0.75
