"""Files of one size in the compilers of other platforms, against the backbone: `make test-converters`."""

import importlib
import sys

import pytest
import torch

from swin_dense import SwinV2Backbone, export_model
from swin_dense.export.formats import outputs_of
from tests.conftest import ROOT, needs, randomize
from tests.export.test_export import TINY, Classifier, build

sys.path.insert(0, str(ROOT / 'benchmarks'))

import converters

SIZE = (75, 100)
MODELS = {
    'position': build(depths=(2, 1), use_abs_pos_embed=True, pretrain_img_size=40),
    'v2': randomize(SwinV2Backbone(**TINY, window_size=6, pretrained_window_size=8)).eval(),
    'classifier': Classifier(build()).eval(),
}


def exported(name, folder):
    """Export a model, and return the file, an image and the model's outputs."""
    model, img = MODELS[name], torch.randn(1, 3, *SIZE)
    export_model(model, folder / 'model.pt2', dynamic=False, size=SIZE)
    with torch.no_grad():
        return folder / 'model.pt2', img, outputs_of(model(img))


@pytest.mark.parametrize(
    ('target', 'name'),
    [
        *(pytest.param('executorch', name, marks=needs('executorch')) for name in MODELS),
        # It orders a dict of outputs, which the classifier returns, by name.
        pytest.param('litert', 'position', marks=needs('litert_torch')),
        pytest.param('litert', 'v2', marks=needs('litert_torch')),
    ],
)
def test_the_outputs_are_those_of_the_model(tmp_path, target, name):
    file, img, expected = exported(name, tmp_path)
    _, run = converters.CONVERTERS[target](file, tmp_path, img)
    found = run(img)
    assert max(map(converters.largest_error, found, expected)) < 1e-5
    assert max(map(converters.largest_error, run(-img), expected)) > 1e-2  # another image has other outputs


@needs('coremltools')
@pytest.mark.parametrize('name', MODELS)
def test_core_ml_converts_the_file(tmp_path, name):
    """It runs only on macOS, so only its inputs and outputs are compared."""
    file, img, expected = exported(name, tmp_path)
    package, _ = converters.to_coreml(file, tmp_path, img)
    description = importlib.import_module('coremltools').models.MLModel(str(package)).get_spec().description
    assert [list(one.type.multiArrayType.shape) for one in description.input] == [list(img.shape)]
    assert len(description.output) == len(expected)
