"""DINO, Deformable DETR, MaskFormer, Mask2Former and RTMDet as modules for export, against the frameworks."""

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from mmdet.models import MaskFormerFusionHead
from mmdet.registry import TRANSFORMS
from mmdet.structures import DetDataSample
from mmengine.config import ConfigDict
from mmengine.registry import init_default_scope
from PIL import Image

from swin_dense.export import formats
from swin_dense.workbench.export import deformable, gate, whole
from swin_dense.workbench.runtime import pictures, queries
from tests.workbench.export.query_models import FILES, config_of, random_model


@pytest.mark.parametrize('name', FILES)
def test_the_module_equals_predict_before_export(demo_data, pixels, name):
    is_segmentor = name.startswith('mmseg')
    plan = whole.planned_segmentor if is_segmentor else whole.planned_detector
    graph, _, compare = plan(random_model(config_of(name, demo_data), pixels), {})

    @torch.no_grad()
    def run(feed):
        size = [torch.as_tensor(feed.get('size', (0, 0)))] if is_segmentor else []
        outputs = formats.outputs_of(graph(torch.from_numpy(feed['img']), *size))
        return [out.numpy() for out in outputs]

    for size in ((96, 128), (128, 160)) if name == 'rtmdet' else ((96, 130), (130, 161)):
        share, count = compare(run, pictures.resized(pixels, *size))
        assert share < 1e-4, size
        assert count > 0


@pytest.mark.parametrize(
    'size',
    [
        (1, 1),
        (1, 7),
        (5, 3),
    ],
)
def test_samples_equal_torchs_grid_sample(size):
    """Samples lie inside, on the border and far outside of a map between two others."""
    before, after = 4, 9  # tokens of the other maps
    tokens = before + size[0] * size[1] + after
    values = torch.randn(2, tokens, 6, dtype=torch.float64)
    place = 3 * torch.rand(2, 50, 4, 2, dtype=torch.float64) - 1
    corners = torch.tensor(
        [
            [0, 0],
            [1, 1],
            [0.5, 0],
            [-40, 7],
        ],
        dtype=torch.float64,
    )
    place[:, 0] = corners
    place[:, 1] = corners / torch.tensor([size[1], size[0]])
    weights = torch.randn(2, 50, 4, dtype=torch.float64)
    level = values[:, before:-after].transpose(1, 2).reshape(2, 6, *size)
    samples = F.grid_sample(level, 2 * place - 1, 'bilinear', 'zeros', align_corners=False)
    expected = torch.einsum('bcqp,bqp->bqc', samples, weights)
    found = deformable.by_grid_sample(values, before, size, place, weights)
    torch.testing.assert_close(found, expected)


# Heights and widths with padding, without it, and of the original image.
SIZES_OF_MASKS = [
    ((64, 80), (60, 77), (60, 77)),
    ((64, 80), (64, 80), (37, 91)),
    ((8, 8), (3, 8), (50, 3)),
]


@pytest.mark.parametrize('filter_low_score', [False, True])
@pytest.mark.parametrize(('padded', 'size', 'image'), SIZES_OF_MASKS)
def test_masks_and_segments_equal_mmdets_fusion(padded, size, image, filter_low_score):
    settings = {'object_mask_thr': 0.5, 'iou_thr': 0.2, 'filter_low_score': filter_low_score}
    classes = 3 * torch.randn(30, 7)
    coarse = 30 * torch.randn(1, 30, 4, 5)
    masks = F.interpolate(coarse, (padded[0] // 4, padded[1] // 4), mode='bicubic')

    large = F.interpolate(masks, padded, mode='bilinear', align_corners=False)
    test_cfg = ConfigDict(**settings, instance_on=True, max_per_image=40)
    head = MaskFormerFusionHead(num_things_classes=4, num_stuff_classes=2, test_cfg=test_cfg)
    sample = DetDataSample(metainfo={'img_shape': size, 'ori_shape': image})
    (expected,) = head.predict(
        classes[None],
        large,
        [sample],
        rescale=True,
    )
    ids = expected['pan_results'].sem_seg[0].numpy()
    instances = expected['ins_results']

    facts = {'divisor': 8, 'things': 4, 'instances': 40, 'panoptic': settings}
    outputs = [classes.softmax(1).numpy(), masks[0].numpy()]
    found, panoptic = queries.predicted(outputs, size, image, facts, 0.0)
    assert (panoptic != ids).mean() < 2e-3
    assert len(np.unique(ids)) > 1
    scores = instances.scores.sort(descending=True)[0].numpy()
    assert found.scores == pytest.approx(scores, abs=1e-5)
    assert sorted(found.labels) == sorted(instances.labels.tolist())
    area = sum(mask.sum() for mask in found.masks)
    assert area == pytest.approx(int(instances.masks.sum()), rel=1e-3)
    assert found.boxes.sum(0) == pytest.approx(instances.bboxes.sum(0).numpy(), rel=1e-2)
    described = queries.described(panoptic, ['a', 'b', 'c', 'd', 'e', 'f'])
    assert described[-1]['id'] == max(ids.max(), panoptic.max())


PAD = {'type': 'Pad', 'pad_val': {'img': (114, 110, 3)}}


@pytest.mark.parametrize(
    'transforms',
    [
        [{'type': 'Resize', 'scale': (160, 100), 'keep_ratio': True}],
        [{'type': 'Resize', 'scale': (333, 71)}],
        [{'type': 'Resize', 'scale_factor': 0.5}],
        [{'type': 'Resize', 'scale_factor': 1.3}, {'type': 'Pad', 'size_divisor': 32, 'pad_val': 7}],
        [{**PAD, 'size_divisor': 32}],
        [{**PAD, 'size': (20, 200)}],
        [],
    ],
)
@pytest.mark.parametrize('to_float32', [False, True])
def test_the_input_equals_that_of_mmdets_pipeline(tmp_path, transforms, to_float32):
    init_default_scope('mmdet')
    rgb = np.random.default_rng(0).integers(0, 256, (90, 134, 3), np.uint8)
    Image.fromarray(rgb).save(tmp_path / 'image.png')
    pipeline = [{'type': 'LoadImageFromFile', 'to_float32': to_float32}, *transforms]
    results = {'img_path': str(tmp_path / 'image.png')}
    for transform in pipeline:
        results = TRANSFORMS.build(transform)(results)
    assert not [*gate.reasons_against_pipeline(pipeline)]
    (found,), _ = pictures.model_input(rgb, gate.preparation_of(pipeline))
    distance = 1e-4 if to_float32 else 0
    np.testing.assert_allclose(
        found.transpose(1, 2, 0),
        results['img'],
        rtol=0,
        atol=distance,
    )
