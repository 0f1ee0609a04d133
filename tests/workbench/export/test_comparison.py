"""What `export_whole` would write, and what the file is compared with before it is kept."""

import copy
import json

import numpy as np
import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope

from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.configs.own_classes import ignore_values, map_values, set_classes
from swin_dense.workbench.export import gate, whole
from swin_dense.workbench.export.agreement import ROUNDING, share_of_unmatched
from swin_dense.workbench.runtime.outputs import Instances
from swin_dense.workbench.runtime.sessions import KEY
from tests.workbench.export import query_models
from tests.workbench.export.whole_models import config_of

SHAPE = (1, 3, 48, 66)


@pytest.fixture
def planned(tmp_path, monkeypatch):
    """Return a function that exports a model until its file is to be written: its graph, interface and comparison."""
    plans = []
    monkeypatch.setattr(whole, 'write_verified', lambda path, *plan: plans.append(plan))

    def plan(config):
        init_default_scope(config.default_scope)
        model = MODELS.build(copy.deepcopy(config.model))  # DINO changes its config
        torch.save({'state_dict': model.state_dict(), 'meta': {}}, tmp_path / 'w.pth')
        whole.export_whole(config, tmp_path / 'w.pth', tmp_path / 'x.onnx')
        ((write, comparison),) = plans
        graph, interface, _ = write.args
        return graph, interface, comparison

    return plan


@pytest.mark.parametrize(
    ('name', 'divisor', 'queries', 'strides'),
    [
        ('dino', 1, query_models.QUERIES, [8, 16, 32, 64]),
        ('deformable_detr', 1, 0, [8, 16, 32, 64]),
        ('rtmdet', 32, 0, [8, 16, 32]),
    ],
)
def test_sizes_that_a_detector_supports(planned, demo_data, name, divisor, queries, strides):
    _, interface, comparison = planned(query_models.config_of(name, demo_data))
    limits = {'divisor': divisor, 'queries': queries, 'strides': strides}
    assert json.loads(interface.facts[KEY])['limits'] == limits
    assert interface.ranges.keys() == ({'height', 'width'} if divisor > 1 else set())
    sides = [side for shape in comparison.shapes for side in shape[2:]]
    assert not any(side % divisor for side in sides)


def test_a_segmentors_file_is_compared_also_at_another_size(planned, demo_data):
    graph, _, comparison = planned(config_of('upernet', demo_data))
    assert not any(part.training for part in graph.modules())
    assert not any(parameter.requires_grad for parameter in graph.parameters())

    @torch.no_grad()
    def run(feed):
        size = torch.as_tensor(feed.get('size', (0, 0)))
        return [graph(torch.from_numpy(feed['img']), size).numpy()]

    def resizing_classes(feed):
        labels = torch.from_numpy(run({'img': feed['img']})[0])
        size = tuple(feed.get('size', labels.shape[1:]))
        resized = torch.nn.functional.interpolate(labels[None].float(), size)
        return [resized[0].int().numpy()]

    assert run({'img': np.zeros(SHAPE, np.float32)})[0].dtype == np.int32
    assert comparison.error(run, SHAPE) == (0.0, 2 * 48 * 66)
    assert comparison.error(resizing_classes, SHAPE)[0] > 0.0


def test_a_config_for_masks_of_other_values_is_exported(planned, demo_data, tmp_path):
    """`swin-dense config --ignore --mask-values` writes transforms that act on labels alone."""
    config = config_of('upernet', demo_data)
    prepared = gate.preparation_of(config.test_dataloader.dataset.pipeline)
    set_classes(Experiment(config), list('abcdef'))
    map_values(Experiment(config), [0, 50, 100, 150, 200, 250])
    ignore_values(Experiment(config), [7])
    config.dump(tmp_path / 'mine.py')
    written = Config.fromfile(tmp_path / 'mine.py')
    kinds = {step.type for step in written.test_dataloader.dataset.pipeline}
    assert {'MapMaskValues', 'IgnoreMaskValues'} <= kinds
    _, interface, _ = planned(written)
    facts = json.loads(interface.facts[KEY])
    assert {key: facts[key] for key in prepared} == json.loads(json.dumps(prepared))


BOXES = np.array([[0, 0, 20, 30], [40, 40, 50, 90.0]])
FULL, DIAGONAL = np.ones((1, 4, 4), bool), np.eye(4, dtype=bool)[None]


def instances(*scores, shift=0.0, masks=()):
    count = len(scores)
    return Instances(
        BOXES[:count] + shift,
        np.array(scores),
        np.zeros(count, int),
        masks,
    )


@pytest.mark.parametrize(
    ('theirs', 'ours', 'share'),
    [
        (instances(0.9, 0.8), instances(0.9), 1 / 3),
        (instances(0.9), instances(0.9009), 0),
        (instances(0.9), instances(0.9011), 1),
        (instances(0.9), instances(0.9, shift=0.1), 0),
        (instances(0.9), instances(0.9, shift=1.0), 1),
        (instances(0.9), instances(0.9, masks=FULL), 1),
        (instances(0.9, masks=FULL), instances(0.9, masks=FULL), 0),
        (instances(0.9, masks=FULL), instances(0.9, masks=DIAGONAL), 1),
        # One result may keep an instance whose score is the threshold in the other, which drops it.
        (instances(0.9, ROUNDING), instances(0.9), 0),
        (instances(0.9, 2 * ROUNDING), instances(0.9), 1 / 3),
    ],
)
def test_instances_that_differ(theirs, ours, share):
    for pair in ((theirs, ours), (ours, theirs)):
        found, count = share_of_unmatched(*pair, 0.0, 100)
        assert found == pytest.approx(share)
        assert count > 0
    assert share_of_unmatched(instances(), instances(), 0.0, 100) == (0, 0)  # nothing to compare


@pytest.mark.parametrize(
    ('image', 'mirrored', 'result'),
    [
        ((0.02, 30), None, (0.02, 30)),
        ((0.05, 31), (0.0, 28), (0.0, 28)),  # a near tie
        ((0.05, 31), (0.04, 28), (0.04, 28)),
        ((0.05, 31), (0.06, 28), (0.05, 31)),
        ((0.05, 31), (0.0, 0), (0.05, 31)),  # nothing was compared
    ],
)
def test_an_image_with_differences_is_compared_mirrored(image, mirrored, result):
    pixels = np.arange(12, dtype=np.uint8).reshape(2, 2, 3)
    compared = []

    def compare(run, other):
        assert run == 'a file'
        compared.append(other)
        return [image, mirrored][len(compared) - 1]

    assert whole.compared(compare, 'a file', pixels) == result
    expected = [pixels] if mirrored is None else [pixels, np.fliplr(pixels)]
    np.testing.assert_array_equal(compared, expected)
