"""Files for the compilers of other platforms: what these do not take is refused by name."""

import pytest
import torch
from torch import nn

from swin_dense import SwinV2Backbone, export_model
from swin_dense.__main__ import main
from swin_dense.export import ExportError
from swin_dense.export.targets import TARGETS, check_file
from swin_dense.utils import choices
from tests.conftest import IfInstalled, randomize
from tests.export.test_export import TINY, Classifier, build

onnx = IfInstalled('onnx')
STATIC = {'dynamic': False, 'size': 40, 'check': False}


class Shuffled(nn.Module):
    """A backbone followed by an operation on six axes."""

    def __init__(self):
        super().__init__()
        self.backbone = build(out_indices=(0,))
        self.shuffle = Shuffle()

    def forward(self, img):
        return self.shuffle(self.backbone(img)[0])


class Shuffle(nn.Module):
    def forward(self, x):
        return x.unflatten(1, (2, 2, -1)).permute(0, 3, 4, 1, 5, 2).flatten(2)


def test_the_command_offers_them():
    assert set(choices.TARGETS) == set(TARGETS)


@pytest.mark.parametrize(
    'model',
    [
        build(use_abs_pos_embed=True, pretrain_img_size=40),
        randomize(SwinV2Backbone(**TINY, window_size=6, pretrained_window_size=8)).eval(),
        Classifier(build()).eval(),
    ],
    ids=['position', 'v2', 'classifier'],
)
def test_a_backbone_has_at_most_five_axes(tmp_path, model):
    export_model(model, tmp_path / 'x.pt2', target='coreml', **STATIC)
    assert (tmp_path / 'x.pt2').exists()


def test_more_axes_are_refused_for_core_ml_alone(tmp_path):
    (tmp_path / 'x.pt2').write_text('of yesterday')
    with pytest.raises(
        ExportError, match=r'not for Core ML, .*aten\.permute\.default of shuffle has a tensor of 6 axes'
    ):
        export_model(Shuffled(), tmp_path / 'x.pt2', target='coreml', **STATIC)
    assert [path.read_text() for path in tmp_path.iterdir()] == ['of yesterday']
    export_model(Shuffled(), tmp_path / 'x.pt2', target='executorch', **STATIC)
    assert len(torch.export.load(tmp_path / 'x.pt2').graph.nodes) > 9


@pytest.mark.parametrize('is_inside', [False, True])
def test_grid_sample_is_refused_for_tensorrt(tmp_path, is_inside):
    """At the top of a graph, or in a branch."""
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    node = helper.make_node('GridSample', ['x', 'grid'], ['out'])
    out = helper.make_tensor_value_info('out', float32, None)
    if is_inside:
        branches = {name: helper.make_graph([node], name, [], [out]) for name in ('then_branch', 'else_branch')}
        node = helper.make_node('If', ['condition'], ['out'], **branches)
    inputs = [helper.make_tensor_value_info(name, float32, None) for name in ('x', 'grid')]
    inputs.append(helper.make_tensor_value_info('condition', onnx.TensorProto.BOOL, []))
    onnx.save(helper.make_model(helper.make_graph([node], 'g', inputs, [out])), tmp_path / 'x.onnx')
    with pytest.raises(ExportError, match=r'not for TensorRT, .* contains GridSample, .* with grid_sample=False'):
        check_file(tmp_path / 'x.onnx', 'tensorrt')
    check_file(tmp_path / 'x.onnx', None)


@pytest.mark.parametrize(
    ('path', 'options', 'message'),
    [
        ('x.onnx', {'target': 'coreml'}, r"target='coreml' needs a .pt2 file, got .onnx"),
        ('x.pt2', {'target': 'tensorrt'}, r"target='tensorrt' needs a .onnx file, got .pt2"),
        ('x.pt2', {'target': 'litert'}, r"target='litert' needs fixed sizes: export with dynamic=False .*batch=1"),
        ('x.pt2', {'target': 'litert', 'dynamic': False, 'batch': None}, 'needs fixed sizes'),
        ('x.pt2', {'target': 'tflite'}, "target must be one of .*'litert'.*'tflite'"),
    ],
)
def test_what_the_arguments_exclude(tmp_path, path, options, message):
    with pytest.raises(ValueError, match=message):
        export_model(build(), tmp_path / path, **options)
    assert not list(tmp_path.iterdir())


def test_the_command(tmp_path, capsys):
    out = str(tmp_path / 'x.pt2')
    assert main(['export', '--out', out, '--target', 'executorch', '--size', '32']) == 2
    assert '--target executorch needs fixed sizes: export with --static and a batch' in capsys.readouterr().err
    assert main(['export', '--out', out, '--no-grid-sample']) == 2
    assert '--no-grid-sample are for a whole model' in capsys.readouterr().err
    assert not list(tmp_path.iterdir())
