"""FLOPs of whole models against published figures and the frameworks' own Swin, and `swin-dense flops`."""

import functools
import json
from pathlib import Path

import mmdet
import mmseg
import pytest
import torch
from mmengine.config import Config

from swin_dense import SwinBackbone
from swin_dense.analysis.flop_counter import count
from swin_dense.commands._main import main
from swin_dense.workbench.building import build_on_meta, published_shape, run_on_shapes
from tests.conftest import TINY

REPOSITORY = Path(__file__).parents[2]
CONFIGS = REPOSITORY / 'configs'
DETECTION = (800, 1280)

MASK_RCNN = 'mask_rcnn/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'
CASCADE = 'cascade_mask_rcnn/cascade-mask-rcnn_swin-b-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py'
UPERNET = 'upernet/swin-{}_ade20k-{}.py'

# Published by the authors: the config, the image size of the FLOPs, millions of parameters, and GFLOPs.
PUBLISHED = [
    (MASK_RCNN, DETECTION, 48, 267),
    (CASCADE, DETECTION, 145, 982),
    (UPERNET.format('tiny-patch4-window7-in1k-pre_upernet_8xb2-160k', '512x512'), (512, 2048), 60, 945),
    # https://github.com/SwinTransformer/Swin-Transformer-Semantic-Segmentation/issues/16
    (UPERNET.format('tiny-patch4-window7-in1k-pre_upernet_8xb2-160k', '512x512'), (512, 512), 60, 236.08),
]
LARGE_640 = UPERNET.format('large-patch4-window7-in22k-pre_upernet_official-8xb2-160k', '640x640')


@functools.cache
def counted(config, shape):
    return count(build_on_meta(Config.fromfile(CONFIGS / config)), *shape, run_on_shapes)


# Models of one family differ only in their configs, whose sizes tests/tools/test_zoo.py compares.
@pytest.mark.parametrize(('config', 'shape', 'millions', 'gigaflops'), PUBLISHED)
def test_published_figures(config, shape, millions, gigaflops):
    result = counted(config, shape)
    assert round(result.parameters[''] / 1e6) == millions
    assert result.flops[''] / 1e9 == pytest.approx(gigaflops, rel=0.01)


def test_image_sizes_of_the_published_figures():
    shapes = {
        name: published_shape(Config.fromfile(CONFIGS / name)) for name in (MASK_RCNN, PUBLISHED[2][0], LARGE_640)
    }
    assert list(shapes.values()) == [(800, 1280), (512, 2048), (640, 2560)]


@pytest.mark.parametrize(
    ('ours', 'theirs', 'shape'),
    [
        (
            MASK_RCNN,
            Path(mmdet.__path__[0], '.mim/configs/swin/mask-rcnn_swin-t-p4-w7_fpn_1x_coco.py'),
            DETECTION,
        ),
        (PUBLISHED[2][0], Path(mmseg.__path__[0], '.mim/configs/swin', Path(PUBLISHED[2][0]).name), (512, 2048)),
    ],
)
def test_every_part_costs_the_same_as_with_the_frameworks_own_swin(ours, theirs, shape):
    own = counted(ours, shape)
    other = counted(theirs, shape)
    parts = [name for name in other.parameters if name.count('.') < 2 and not name.startswith('backbone.')]
    assert len(parts) > 10
    for name in parts:
        assert own.parameters[name] == other.parameters[name], name
        assert own.flops[name] == other.flops[name], name
    # mmdet and mmseg project the outputs of padding tokens, as the official code does.
    assert other.flops[''] == other.computed_flops
    for stage in range(4):
        assert own.flops[f'backbone.stages.{stage}'] == other.flops[f'backbone.stages.{stage}']


def test_modules_add_up():
    with torch.device('meta'):
        backbone = SwinBackbone(TINY, attn_backend='triton')
    result = count(backbone, 64, 96)
    for figures in (result.parameters, result.flops):
        blocks = [f'stages.0.blocks.{block}' for block in (0, 1)]
        assert figures['stages.0'] == sum(figures[name] for name in [*blocks, 'stages.0.downsample'])
        children = ('patch_embed', 'stages', 'norm0', 'norm1', 'norm2', 'norm3')
        assert figures[''] == sum(figures[name] for name in children)


def test_a_model_without_a_convolution_is_refused():
    with pytest.raises(ValueError, match='the model has no Conv2d'):
        count(torch.nn.Linear(3, 4, device='meta'), 64, 96)


def run_tool(capsys, *args):
    assert main(['flops', *args]) == 0
    return capsys.readouterr().out


def test_tool_prints_json_to_the_given_depth(capsys):
    config = str(CONFIGS / MASK_RCNN)
    printed = json.loads(run_tool(capsys, config, '--json', '--depth', '2', '--size', '64', '96'))
    result = count(build_on_meta(Config.fromfile(config)), 64, 96, run_on_shapes)
    assert printed['shape'] == [64, 96]
    assert printed['flops'] == result.flops['']
    assert printed['computed_flops'] == result.computed_flops
    assert printed['modules']['roi_head.mask_head'] == {
        'parameters': result.parameters['roi_head.mask_head'],
        'flops': result.flops['roi_head.mask_head'],
    }
    assert max(name.count('.') for name in printed['modules']) == 1


def test_tool_prints_a_table_in_the_order_of_the_model(capsys):
    config = str(CONFIGS / MASK_RCNN)
    printed = run_tool(capsys, config, '--cfg-options', 'model.backbone.depths=(2,2,2,2)')
    names = [line.split()[0] for line in printed.splitlines()[:6]]
    assert names == ['module', 'model', 'backbone', 'neck', 'rpn_head', 'roi_head']
    assert 'For one image of 800 x 1280 pixels' in printed


def test_tool_explains_a_wrong_config(capsys, tmp_path):
    without_scope = tmp_path / 'model.py'
    without_scope.write_text(f'_base_ = {str(CONFIGS / MASK_RCNN)!r}\ndefault_scope = None\n')
    for arguments, message in [
        ([str(tmp_path / 'none.py')], 'there is no recipe and no config file'),
        ([str(without_scope)], 'has no default_scope'),
    ]:
        assert main(['flops', *arguments]) == 2
        assert message in capsys.readouterr().err
