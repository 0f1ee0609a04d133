"""DINO, Deformable DETR, MaskFormer, Mask2Former and RTMDet in one file against the frameworks, in both runtimes."""

import copy
import json
import shutil
from unittest import mock

import numpy as np
import onnx
import pytest
import torch
from mmdet.registry import TRANSFORMS
from mmdet.structures import DetDataSample
from mmengine.config import ConfigDict
from mmengine.registry import MODELS, init_default_scope
from PIL import Image

from swin_dense import export_detector, export_segmentor, runtime
from swin_dense.__main__ import main
from swin_dense.export import ExportError, formats
from swin_dense.workbench.export import agreement, deformable, gate, whole
from swin_dense.workbench.export.segmentor import MaskSegmentor
from swin_dense.workbench.predict import Predictor
from swin_dense.workbench.runtime import pictures, queries
from swin_dense.workbench.runtime.comparison import share_of_other_segments, share_of_unmatched
from swin_dense.workbench.runtime.sessions import SESSIONS
from tests.conftest import folders_named_in
from tests.workbench.export.accuracy import accuracy
from tests.workbench.export.query_models import (
    FILES,
    QUERIES,
    THINGS,
    config_of,
    random_model,
    trainable_config,
    write_backgrounds,
)
from tests.workbench.export.whole_models import train

RUNTIMES = sorted(SESSIONS)
# Smaller than the padding, odd, long and thin, multiples of everything, large.
SIZES = [(64, 64), (65, 97), (97, 65), (128, 192), (191, 129), (40, 300), (300, 41), (224, 225), (57, 73), (350, 420)]
# Of random weights; a MaskFormer of most seeds finds nothing in one of the sizes.
SEEDS = {'maskformer': 7}
SEGMENTORS = [name for name in FILES if name.startswith('mmseg')]
# Each is exported once, which takes up to a minute, and is left to `make test-all`. In `make test`, test_export.py and
# test_whole.py export a Swin.
CASES = ['mask2former_panoptic on resnet', *FILES]


@pytest.fixture(scope='module')
def pixels(demo_data):
    """Return an image, (H, W, 3) uint8, BGR."""
    return pictures.read(picture_of(demo_data))[:, :, ::-1]


def picture_of(data):
    return data / 'coco' / 'train2017' / '000000000001.jpg'


@pytest.fixture(scope='module')
def exported(demo_data, pixels, tmp_path_factory):
    """Return a function that exports a model with random weights once, and returns its config, weights and file."""
    folder = tmp_path_factory.mktemp('queries')
    made = {}

    def make(name):
        if name not in made:
            config = config_of(name, demo_data)
            weights, path = folder / f'{name}.pth', folder / f'{name}.onnx'
            model = random_model(config, pixels, seed=SEEDS.get(name, 2))
            torch.save({'state_dict': model.state_dict(), 'meta': {}}, weights)
            export = export_segmentor if name in SEGMENTORS else export_detector
            assert len(export(config, weights, path, image=picture_of(demo_data)).errors) == 3
            made[name] = config, weights, path
        return made[name]

    return make


def compared(name, model, run, pixels, facts):
    """Return the share of predictions of a file that differ from the framework's, and the number compared."""
    img = pixels.transpose(2, 0, 1)[None].astype(np.float32)
    if name in SEGMENTORS:
        (labels,) = run({'img': img})
        expected = agreement.classes_of_framework(model, pixels, pixels.shape[:2])
        return float((labels[0] != expected).mean()), len(np.unique(expected))
    if 'queries' in facts:
        return agreement.share_of_other_masks(agreement.predicted(model, pixels), run({'img': img}), facts['queries'])
    found = agreement.instances_of_file(run({'img': img}), pixels.shape[:2], None)
    expected = agreement.instances_of_framework(model, pixels)
    most = len(expected.scores) if name != 'rtmdet' else 300
    return share_of_unmatched(expected, found, facts['score_threshold'], most)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('name', CASES)
def test_unseen_sizes_in_both_runtimes(exported, pixels, name):
    config, weights, path = exported(name)
    onnx.checker.check_model(path, full_check=True)
    assert folders_named_in(path) == []
    model = onnx.load(path)
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {''}
    model = Predictor(config, str(weights), 'cpu').model
    files = [runtime.load(path, runtime=each, threads=1) for each in RUNTIMES]
    most = 0
    for size in SIZES:
        if name == 'rtmdet':
            size = tuple(-(-side // 32) * 32 for side in size)
        for file in files:
            share, count = compared(
                name, model, lambda feed, file=file: file.run(**feed), pictures.resized(pixels, *size), file.facts
            )
            assert share < 1e-3, (size, file)
            most = max(most, count)
    assert most > (2 if name in SEGMENTORS or name == 'maskformer' else 5)


@pytest.mark.parametrize('name', FILES)
def test_the_module_equals_predict_before_export(demo_data, pixels, name):
    config = config_of(name, demo_data)
    model = random_model(config, pixels)
    copied = copy.deepcopy(model)
    graph = MaskSegmentor(copied) if name in SEGMENTORS else whole.graph_of(copied)

    def run(feed):
        with torch.no_grad():
            more = [torch.zeros(2, dtype=torch.int64)] if name in SEGMENTORS else []
            outputs = graph(torch.from_numpy(feed['img']), *more)
        return [out.numpy() for out in (outputs if isinstance(outputs, tuple) else [outputs])]

    facts = {'score_threshold': 0.0 if name != 'rtmdet' else config.model.test_cfg.score_thr}
    if 'former' in name and name not in SEGMENTORS:
        facts['queries'] = whole.settings_of_queries(model)
    for size in ((96, 128), (128, 160)) if name == 'rtmdet' else ((96, 130), (130, 161)):
        share, count = compared(name, model, run, pictures.resized(pixels, *size), facts)
        assert share < 1e-4, size
        assert count > 0


@pytest.mark.parametrize('size', [(1, 1), (1, 7), (5, 3)])
def test_samples_by_gathers_equal_torchs_grid_sample(size):
    """Samples lie inside, on the border and far outside of a map between two others."""
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2, 4 + size[0] * size[1] + 9, 6, dtype=torch.float64, generator=generator)
    place = 3 * torch.rand(2, 50, 4, 2, dtype=torch.float64, generator=generator) - 1
    corners = torch.tensor([[0, 0], [1, 1], [0.5, 0], [-40, 7]], dtype=torch.float64)
    place[:, 0], place[:, 1] = corners, corners / torch.tensor([size[1], size[0]])
    weights = torch.randn(2, 50, 4, dtype=torch.float64, generator=generator)
    level = values[:, 4:-9].transpose(1, 2).reshape(2, 6, *size)
    samples = torch.nn.functional.grid_sample(level, 2 * place - 1, 'bilinear', 'zeros', align_corners=False)
    expected = torch.einsum('bcqp,bqp->bqc', samples, weights)
    for function in (deformable.by_gathers, deformable.by_grid_sample):
        torch.testing.assert_close(function(values, 4, size, place, weights), expected)


@pytest.mark.parametrize('name', ['dino', 'deformable_detr_refine', 'mask2former_panoptic', 'mmseg_mask2former'])
def test_modules_with_gathers_equal_those_with_grid_sample(demo_data, pixels, name):
    model = random_model(config_of(name, demo_data), pixels)
    graph = (MaskSegmentor if name in SEGMENTORS else whole.graph_of)(model)
    img = torch.from_numpy(pictures.resized(pixels, 96, 130).transpose(2, 0, 1).copy())[None].float()
    more = [torch.zeros(2, dtype=torch.int64)] if name in SEGMENTORS else []
    with torch.no_grad():
        expected = formats.outputs_of(graph(img, *more))
        deformable.use_gathers(graph)
        with mock.patch('torch.nn.functional.grid_sample', side_effect=AssertionError('GridSample')):
            found = formats.outputs_of(graph(img, *more))
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5 * float(theirs.abs().max()))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('name', ['dino on resnet', 'mask2former_panoptic on resnet'])
def test_files_without_grid_sample_equal_those_with_it(exported, pixels, demo_data, tmp_path, name):
    config, weights, path = exported(name)
    options = {'image': picture_of(demo_data), 'target': 'tensorrt'}
    with pytest.raises(ExportError, match=r'not for TensorRT, .* contains GridSample, .* with grid_sample=False'):
        export_detector(config, weights, tmp_path / 'x.onnx', **options)
    assert not list(tmp_path.iterdir())
    export_detector(config, weights, tmp_path / 'x.onnx', grid_sample=False, **options)
    operators = [{node.op_type for node in onnx.load(file).graph.node} for file in (path, tmp_path / 'x.onnx')]
    assert ['GridSample' in found for found in operators] == [True, False]
    for each in RUNTIMES:
        files = [runtime.load(file, runtime=each, threads=1) for file in (path, tmp_path / 'x.onnx')]
        for size in SIZES[::3]:
            img = pictures.resized(pixels, *size).transpose(2, 0, 1)[None].astype(np.float32)
            for ours, theirs in zip(*(file.run(img) for file in files), strict=True):
                np.testing.assert_allclose(ours, theirs, rtol=0, atol=1e-5 * np.abs(theirs).max())


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('name', SEGMENTORS)
def test_a_batch_and_another_size_of_the_class_map(exported, pixels, name):
    config, weights, path = exported(name)
    model = Predictor(config, str(weights), 'cpu').model
    three = [pixels, pixels[::-1], pixels[:, ::-1]]
    img = np.stack(three).transpose(0, 3, 1, 2).astype(np.float32)
    for each in RUNTIMES:
        file = runtime.load(path, runtime=each, threads=1)
        for size in ((50, 60), (300, 211)):
            (labels,) = file.run(img, size)
            expected = [agreement.classes_of_framework(model, one, size) for one in three]
            assert (labels != np.stack(expected)).mean() < 1e-3
            (one,) = file.run(img[:1], size)
            assert (one[0] != expected[0]).mean() < 1e-3
        for size, error, message in (
            ((50.0, 60.0), TypeError, 'size must be an integer, got 50.0'),
            ((50, 0), ValueError, 'size must be at least 1, got 0'),
            ((1, 50, 60), ValueError, 'size must be one integer or a'),
        ):
            with pytest.raises(error, match=message):
                file.run(img, size)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('each', RUNTIMES)
def test_inputs_that_a_file_does_not_support(exported, each):
    """DINO selects queries among tokens: OpenVINO would return boxes for fewer, ONNX Runtime an error of its own."""
    *_, path = exported('dino')
    model = runtime.load(path, runtime=each)
    assert model.facts['limits'] == {'divisor': 1, 'queries': QUERIES, 'strides': [8, 16, 32, 64]}
    model.run(np.zeros((1, 3, 64, 48), np.float32))  # 48 + 12 + 4 + 1 tokens
    message = rf'input 56x48 is too small for this model: it selects the best {QUERIES} of .* and these have 59'
    with pytest.raises(ValueError, match=message):
        model.run(np.zeros((1, 3, 56, 48), np.float32))
    with pytest.raises(TypeError, match=r'img must be .* float32, got uint8'):
        model.run(np.zeros((1, 3, 64, 64), np.uint8))
    with pytest.raises(ValueError, match=r'img must have .*, got \(2, 3, 64, 64\)'):
        model.run(np.zeros((2, 3, 64, 64), np.float32))
    *_, path = exported('rtmdet')
    with pytest.raises(ValueError, match=r'must be multiples of 32 .*, got 64x70'):
        runtime.load(path, runtime=each).run(np.zeros((1, 3, 64, 70), np.float32))


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize('name', CASES)
def test_the_runtime_equals_the_predictor(exported, demo_data, tmp_path, name):
    """Both read the image from a file, resize and pad it, and return predictions in its original size."""
    config, weights, path = exported(name)
    config = copy.deepcopy(config)
    pipeline = config.test_dataloader.dataset.pipeline
    if name != 'rtmdet':  # which has Resize and Pad
        pipeline[:] = [transform for transform in pipeline if transform.type != 'Resize']
        pipeline[0].to_float32 = 'mask2former' in name
        pipeline.insert(1, ConfigDict(type='Resize', scale=(250, 171), keep_ratio=True))
        if name.startswith('mask2former_panoptic'):
            pipeline.insert(2, ConfigDict(type='LoadPanopticAnnotations'))
    changed = tmp_path / 'model.onnx'
    model = onnx.load(path)
    (facts,) = model.metadata_props
    facts.value = json.dumps({**json.loads(facts.value), **gate.preparation_of(pipeline)})
    onnx.save(model, changed)
    picture = str(picture_of(demo_data))
    expected = Predictor(config, str(weights), 'cpu', score=0.05).predict(picture)
    for each in RUNTIMES:
        found = runtime.load(changed, runtime=each, score=0.05).predict(picture)
        assert found.record.keys() == expected.record.keys()
        assert found.painted.shape == expected.painted.shape
        if name in SEGMENTORS:
            assert (found.labels != expected.labels).mean() < 1e-3
        if 'segments' in found.record and name not in SEGMENTORS:
            assert share_of_other_segments(expected.panoptic, found.panoptic, THINGS + 3)[0] < 1e-3
            assert [one['class'] for one in found.record['segments']] == [
                one['class'] for one in expected.record['segments']
            ]
        theirs, ours = (each.record.get('instances', []) for each in (expected, found))
        assert len(ours) == pytest.approx(len(theirs), abs=1)  # one may be near the score
        scores = [sorted(one['score'] for one in some)[-min(len(ours), len(theirs)) :] for some in (ours, theirs)]
        assert scores[0] == pytest.approx(scores[1], abs=1e-3)
        assert 'mask' in ours[0] if 'mask' in name and ours else True


@pytest.mark.slow
@pytest.mark.long
def test_the_command_writes_segments(exported, demo_data, tmp_path):
    config, weights, path = exported(CASES[0])
    picture = picture_of(demo_data)
    config.dump(tmp_path / 'config.py')
    arguments = {'file': [str(path)], 'framework': [str(tmp_path / 'config.py'), str(weights)]}
    ids = {}
    for name, model in arguments.items():
        assert main(['predict', *model, str(picture), '--out', str(tmp_path / name)]) == 0
        found = np.asarray(Image.open(tmp_path / name / f'{picture.stem}.panoptic.png')).astype(int)
        ids[name] = found[:, :, 0] + 256 * found[:, :, 1] + 256**2 * found[:, :, 2]
        record = json.loads((tmp_path / name / f'{picture.stem}.json').read_text())
        assert record.keys() == {'format', 'image', 'height', 'width', 'segments', 'instances'}
        for segment in record['segments']:
            assert (ids[name] == segment['id']).mean() == pytest.approx(segment['share'])
        assert len(record['segments']) > 1
    assert share_of_other_segments(ids['framework'], ids['file'], THINGS + 3)[0] < 1e-3


@pytest.mark.parametrize('filter_low_score', [False, True])
@pytest.mark.parametrize(
    'sizes', [((64, 80), (60, 77), (60, 77)), ((64, 80), (64, 80), (37, 91)), ((8, 8), (3, 8), (50, 3))]
)
def test_masks_and_segments_equal_mmdets_fusion(sizes, filter_low_score):
    from mmdet.models import MaskFormerFusionHead

    padded, size, image = sizes
    generator = torch.Generator().manual_seed(0)
    classes = 3 * torch.randn(30, 7, generator=generator)
    coarse = 30 * torch.randn(30, 4, 5, generator=generator)
    masks = torch.nn.functional.interpolate(coarse[None], (padded[0] // 4, padded[1] // 4), mode='bicubic')[0]
    settings = {'object_mask_thr': 0.5, 'iou_thr': 0.2, 'filter_low_score': filter_low_score}
    test_cfg = ConfigDict(**settings, instance_on=True, max_per_image=40)
    head = MaskFormerFusionHead(num_things_classes=4, num_stuff_classes=2, test_cfg=test_cfg)
    large = torch.nn.functional.interpolate(masks[None], padded, mode='bilinear', align_corners=False)
    sample = DetDataSample(metainfo={'img_shape': size, 'ori_shape': image})
    (expected,) = head.predict(classes[None], large, [sample], rescale=True)
    facts = {'divisor': 8, 'things': 4, 'instances': 40, 'panoptic': settings}
    found, panoptic = queries.predicted([classes.softmax(1).numpy(), masks.numpy()], size, image, facts, 0.0)
    ids = expected['pan_results'].sem_seg[0].numpy()
    assert (panoptic != ids).mean() < 2e-3
    assert len(np.unique(ids)) > 1
    boxes, scores, labels, full = found
    instances = expected['ins_results']
    order = instances.scores.argsort(descending=True, stable=True)
    assert scores == pytest.approx(instances.scores[order].numpy(), abs=1e-5)
    assert sorted(labels) == sorted(instances.labels.tolist())
    assert sum(mask.sum() for mask in full) == pytest.approx(int(instances.masks.sum()), rel=1e-3)
    assert boxes.sum(0) == pytest.approx(instances.bboxes.sum(0).numpy(), rel=1e-2)
    assert queries.described(panoptic, ['a', 'b', 'c', 'd', 'e', 'f'])[-1]['id'] == max(ids.max(), panoptic.max())


PAD = {'type': 'Pad', 'pad_val': {'img': (114, 110, 3)}}


@pytest.mark.parametrize(
    'transforms',
    [
        [{'type': 'Resize', 'scale': (160, 100), 'keep_ratio': True}],
        [{'type': 'Resize', 'scale': (333, 71)}],
        [{'type': 'Resize', 'scale_factor': 0.5}],
        [{'type': 'Resize', 'scale': (160, 160), 'keep_ratio': True}, {**PAD, 'size': (160, 192)}],
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
    found, _ = pictures.model_input(rgb, gate.preparation_of(pipeline))
    np.testing.assert_allclose(found[0].transpose(1, 2, 0), results['img'], rtol=0, atol=1e-4 if to_float32 else 0)


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.parametrize(('name', 'steps'), [('dino', 250), ('mask2former_panoptic', 250)])
def test_ap_and_pq_are_those_of_the_framework(demo_data, tmp_path, name, steps):
    """On the training images: so short a training finds few objects in any others."""
    data = tmp_path / 'data'
    shutil.copytree(demo_data, data)
    write_backgrounds(data)
    config = trainable_config(name, data)
    weights, path = train(config, tmp_path / 'weights.pth', steps, rate=5e-4), tmp_path / 'model.onnx'
    export_detector(config, weights, path, image=picture_of(data))
    model = Predictor(config, str(weights), 'cpu').model
    files = [runtime.load(path, runtime=each, score=0.0) for each in RUNTIMES]
    training, validation = config.train_dataloader.dataset, config.val_dataloader.dataset
    validation.update(ann_file=training.ann_file, data_prefix=training.data_prefix)
    config.val_evaluator.ann_file = f'{training.data_root}{training.ann_file}'
    expected, *found = accuracy(config, model, files)
    assert expected['coco/bbox_mAP'] > 0.05
    if 'mask' in name:
        assert expected['PQ'] > 0.1
    for metrics in found:
        assert metrics == pytest.approx(expected, abs=1e-3)


def built(config):
    init_default_scope(config.default_scope)
    return MODELS.build(config.model).eval()


def reasons_against(config):
    pipeline = config.test_dataloader.dataset.pipeline
    return '; '.join([*gate.reasons_against(built(config)), *gate.reasons_against_pipeline(pipeline)])


@pytest.mark.parametrize('name', FILES)
def test_supported_models_are_not_refused(demo_data, name):
    assert not reasons_against(config_of(name, demo_data))


@pytest.mark.parametrize(
    ('name', 'key', 'value', 'message'),
    [
        ('dino', 'data_preprocessor.pad_size_divisor', 32, 'with pad_size_divisor=32; supported: 1'),
        ('maskformer', 'data_preprocessor.pad_size_divisor', 32, 'with pad_size_divisor=32; supported: 1'),
        ('deformable_detr', 'bbox_head.loss_cls', {'_delete_': True, 'type': 'CrossEntropyLoss'}, 'use_sigmoid=False'),
        ('dino', 'test_cfg.nms', {'type': 'nms'}, 'model.bbox_head.test_cfg has nms='),
        ('mask2former', 'test_cfg.semantic_on', True, 'has semantic_on=True; supported: False'),
        ('mask2former', 'test_cfg.score_thr', 0.1, 'model.panoptic_fusion_head.test_cfg has score_thr=0.1'),
        ('rtmdet', 'bbox_head.bbox_coder.type', 'TBLRBBoxCoder', 'model.bbox_head.bbox_coder is a TBLRBBoxCoder'),
        ('rtmdet', 'test_cfg.nms.type', 'soft_nms', "model.test_cfg.nms is 'soft_nms'"),
        (
            'mmseg_maskformer',
            'data_preprocessor.test_cfg',
            {'size_divisor': 32},
            'with size_divisor=32; supported: None',
        ),
        ('mmseg_mask2former', 'test_cfg.mode', 'slide', "with mode='slide'; supported: 'whole'"),
    ],
)
def test_unsupported_parts_are_refused_by_name(demo_data, name, key, value, message):
    config = config_of(name, demo_data)
    config.merge_from_dict({f'model.{key}': ConfigDict(value) if isinstance(value, dict) else value})
    assert message in reasons_against(config)


def test_padding_by_a_segmentors_pipeline_is_refused():
    pipeline = [{'type': kind} for kind in ('LoadImageFromFile', 'Resize', 'Pad', 'PackSegInputs')]
    assert 'test pipeline of a segmentor has Pad' in '; '.join(gate.reasons_against_pipeline(pipeline))
