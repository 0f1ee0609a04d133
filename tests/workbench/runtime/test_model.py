"""What a model computes around the outputs of its file, with outputs written by hand."""

import sys
import time
from concurrent.futures import ThreadPoolExecutor
from types import SimpleNamespace

import numpy as np
import pytest
from pycocotools import mask as coco_mask

from swin_dense.workbench.runtime.model import Model
from swin_dense.workbench.runtime.sessions import SESSIONS, has_bfloat16
from tests.commands.files import write_file
from tests.processes import python

FACTS = {
    'task': 'detection',
    'classes': ['ball', 'clock'],
    'palette': [[255, 0, 0], [0, 255, 0]],
    'resize': {'scale': None, 'scale_factor': (2, 0.5), 'keep_ratio': False},
    'mask_threshold': 0.5,
}
PICTURE = np.zeros((40, 60, 3), np.uint8)


class File:
    """Stands for a session; keeps what it was given."""

    size = (None, None)

    def __init__(self, *outputs):
        self.outputs = list(outputs)

    def run(self, feed):
        self.feed = feed
        return self.outputs


def detected(*more):
    boxes = np.array([[20, 5, 60, 15], [0, 0, 9, 9]], np.float32)
    scores, labels = np.array([0.9, 0.1], np.float32), np.array([1, 0], np.int32)
    return File(boxes, scores, labels, *more)


def inputs(*shape, dtype=np.float32):
    return np.zeros(shape, dtype)


def test_boxes_and_masks_have_the_size_of_the_picture():
    """The picture is read with twice its width and half its height."""
    file = detected(np.ones((2, 28, 28), np.float32))
    prediction = Model(file, FACTS, 0.3).predict(PICTURE)
    assert file.feed['img'].shape == (1, 3, 20, 120)
    (instance,) = prediction.record['instances']
    assert (instance['class'], instance['box']) == ('clock', [10, 10, 30, 30])
    assert coco_mask.area(instance['mask']) == 20 * 20
    assert prediction.painted[20, 20].any()
    assert not prediction.painted[35, 50].any()
    (instance,) = Model(detected(), FACTS, 0.3)(PICTURE)['instances']  # of a detector without masks
    assert instance['score'] == pytest.approx(0.9)
    assert 'mask' not in instance


@pytest.mark.parametrize('most', [None, 2])
def test_segments_of_queries(most):
    """The left half is a ball, which is counted, the right half a clock, which is not."""
    mask = np.repeat(np.array([[9, -9]], np.float32), 4, 1).repeat(8, 0)
    classes = np.array([[0.9, 0.1, 0], [0, 0.9, 0.1]], np.float32)
    panoptic = {'object_mask_thr': 0.5, 'iou_thr': 0.5, 'filter_low_score': True}
    settings = {'things': 1, 'instances': most, 'panoptic': panoptic, 'divisor': 4}
    file = File(classes, np.stack([mask, -mask]))
    prediction = Model(file, {**FACTS, 'queries': settings, 'resize': None}, 0.3).predict(PICTURE)
    assert (prediction.panoptic[:, :30] == 1000).all()
    assert (prediction.panoptic[:, 30:] == 1).all()
    described = [(one['class'], one['share']) for one in prediction.record['segments']]
    assert described == [('clock', 0.5), ('ball', 0.5)]
    if most is not None:
        assert [one['box'] for one in prediction.record['instances']] == [[0, 0, 30, 40]]
        return
    assert 'instances' not in prediction.record
    assert prediction.painted[:, :29].any((0, 1)).tolist() == [True, False, False]
    assert prediction.painted[:, 31:].any((0, 1)).tolist() == [False, True, False]


@pytest.mark.parametrize(
    ('shape', 'message'),
    [
        ((2, 3, 64, 64), r'shape \(1, 3, H, W\)'),
        ((1, 1, 64, 64), r'shape \(1, 3, H, W\)'),
        ((3, 64, 64), r'shape \(1, 3, H, W\)'),
        ((1, 3, 0, 64), r'shape \(1, 3, H, W\)'),
        ((1, 3, 64, 70), 'multiples of 32 .* got 64x70'),
        ((1, 3, 70, 64), 'multiples of 32 .* got 70x64'),
        ((1, 3, 32, 32), 'best 5 of the tokens .* these have 4'),
    ],
)
def test_inputs_of_the_wrong_size_or_type_are_refused(shape, message):
    limits = {'divisor': 32, 'queries': 5, 'strides': [16]}
    model = Model(detected(), {**FACTS, 'limits': limits}, 0.3)
    model.run(inputs(1, 3, 32, 64))
    with pytest.raises(ValueError, match=message):
        model.run(inputs(*shape))
    # OpenVINO would convert some of these types, and ONNX Runtime raise an error of its own.
    for dtype in (np.uint8, np.float16, np.float64):
        with pytest.raises(TypeError, match=f'img must be .*got {np.dtype(dtype)}'):
            model.run(inputs(1, 3, 32, 64, dtype=dtype))


@pytest.mark.parametrize(
    ('task', 'size', 'message'),
    [
        ('detection', (9, 9), r'size is an input of segmentors.*\(9, 9\)'),
        ('segmentation', (50.0, 60.0), 'size must be an integer, got 50.0'),
        ('segmentation', np.array([50, 60]), r'size must be an integer, got array\(\[50, 60\]\)'),
        ('segmentation', (50, 0), 'size must be at least 1, got 0'),
        ('segmentation', (1, 50, 60), 'size must be one integer or a'),
    ],
)
def test_wrong_sizes_of_the_result_are_refused(task, size, message):
    model = Model(detected(), {**FACTS, 'task': task}, 0.3)
    with pytest.raises((TypeError, ValueError), match=message):
        model.run(inputs(1, 3, 64, 64), size)


@pytest.mark.parametrize('name', SESSIONS)
def test_what_a_library_itself_lacks_is_named(tmp_path, monkeypatch, name):
    (tmp_path / f'{name}.py').write_text('import what_it_lacks')
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, name, raising=False)
    with pytest.raises(ModuleNotFoundError, match='what_it_lacks'):
        SESSIONS[name](tmp_path / 'a.onnx', 1)


def test_threads_that_start_together_share_the_core_of_openvino(monkeypatch):
    cores = []

    class Core:
        def __init__(self):
            cores.append(self)
            time.sleep(0.1)

        def get_property(self, *_):
            return 'BF16'

        def set_property(self, *_):
            pass

    monkeypatch.setattr('swin_dense.utils.packages.optional', lambda *_: SimpleNamespace(Core=Core))
    monkeypatch.setattr('swin_dense.workbench.runtime.sessions._cores', {})
    with ThreadPoolExecutor(4) as pool:
        assert all(pool.map(lambda _: has_bfloat16(), range(4)))
    assert len(cores) == 1


def test_a_signal_is_received_after_two_files_of_openvino(tmp_path):
    """Each core of OpenVINO replaces the stack on which signals arrive, and the last restores that of the first."""
    pytest.importorskip('openvino')
    code = """
import signal, sys
from swin_dense import runtime
first, second = (runtime.load(sys.argv[1], runtime='openvino') for _ in range(2))
del first
del second
received = []
signal.signal(signal.SIGTERM, lambda number, frame: received.append(number))
signal.raise_signal(signal.SIGTERM)
assert received == [signal.SIGTERM]
"""
    python('-c', code, *write_file(tmp_path / 'model.onnx'))
