"""examples/quantize.py: its file is small, predicts what the float file does, and leaves sensitive layers in float."""

import json
from types import SimpleNamespace

import numpy as np
import onnx
import pytest

from swin_dense import runtime
from tests.conftest import needs
from tests.examples import load_example
from tests.workbench.export.whole_models import config_of, train

pytestmark = [needs('mmdet'), pytest.mark.slow]
INT8 = onnx.TensorProto.INT8


@pytest.fixture
def example():
    return load_example('quantize')


def export(name, data, folder, steps):
    from swin_dense.workbench.export import whole

    config = config_of(name, data)
    weights = train(config, folder / f'{name}.pth', steps)
    whole.export_whole(config, weights, folder / f'{name}.onnx')
    return folder / f'{name}.onnx'


@pytest.mark.parametrize(('name', 'steps'), [('upernet', 30), pytest.param('mask_rcnn', 80, marks=pytest.mark.long)])
def test_an_exported_model_in_8_bits(example, demo_data, tmp_path, capsys, name, steps):
    source, out = export(name, demo_data, tmp_path, steps), tmp_path / 'int8.onnx'
    example.main(str(source), str(demo_data / 'coco' / 'train2017'), str(out))
    assert '4 photographs held out' in capsys.readouterr().out
    assert out.stat().st_size < 0.75 * source.stat().st_size
    onnx.checker.check_model(str(out))
    model = onnx.load(out)
    assert [one.name for one in model.graph.input] == [one.name for one in onnx.load(source).graph.input]
    in_8_bits = {weight.name for weight in model.graph.initializer if weight.data_type == INT8}
    assert any('backbone.stages.0.blocks.0.ffn' in weight for weight in in_8_bits)
    assert not [weight for weight in in_8_bits if any(module in weight for module in example.IN_FLOAT)]
    picture = next((demo_data / 'coco' / 'val2017').iterdir())
    float_model, int8_model = runtime.load(source), runtime.load(out)
    assert json.dumps(int8_model.facts) == json.dumps(float_model.facts)
    first, second = (each.predict(picture) for each in (float_model, int8_model))
    assert example.agreement(first, second) > 0.8


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
