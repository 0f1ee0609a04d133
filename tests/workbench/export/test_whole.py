"""Whole models in one file against the frameworks, in both runtimes, at other sizes than the recorded one."""

import copy
import itertools
import json
import re
import shutil

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from mmdet.models.roi_heads.mask_heads import fcn_mask_head
from mmengine.config import ConfigDict
from mmengine.registry import MODELS, init_default_scope
from PIL import Image
from pycocotools import mask as coco_mask

from swin_dense import export_whole, runtime
from swin_dense.export import ExportError
from swin_dense.workbench.export import agreement, detectors, whole
from swin_dense.workbench.predict import Predictor
from swin_dense.workbench.runtime import pictures
from swin_dense.workbench.runtime.sessions import FORMAT, KEY, SESSIONS
from tests.conftest import ROOT, folders_named_in
from tests.examples import load_example
from tests.mmcv_lite_ops.conftest import PLAIN, use
from tests.workbench.export import query_models
from tests.workbench.export.choices import assert_equal_given_choices, with_choices
from tests.workbench.export.whole_models import HEADS, config_of, picture_of

RUNTIMES = sorted(SESSIONS)
paste = fcn_mask_head._do_paste_mask
# Smaller than the padding, odd, long and thin, multiples of everything, large.
SIZES = [
    (64, 64),
    (65, 97),
    (97, 65),
    (128, 192),
    (191, 129),
    (40, 300),
    (300, 41),
    (224, 225),
    (31, 33),
    (350, 420),
]
# Between a probability in a pasted mask and the threshold: mmdet computes them in float32, from coordinates in pixels.
TIE = 1e-5
# Each is exported once, after a training or with random weights, which takes about a minute; all but the first are left
# to `make test-all`.
FIRST, UPERNET = 'mask_rcnn on swin', 'upernet on swin'
DETECTORS = [FIRST, 'retinanet on swin', 'cascade_mask_rcnn on v2', 'cascade_rcnn on swin', 'faster_rcnn on resnet']
SEGMENTORS = [UPERNET, 'upernet on v2', 'upernet on resnet']
TRAINED = [*DETECTORS, *SEGMENTORS]
PANOPTIC = 'mask2former_panoptic on resnet'
QUERIES = [PANOPTIC, *query_models.FILES]


def costly(*names):
    """Return test parameters for models, marked by the time that their export takes."""
    long = [pytest.mark.slow, pytest.mark.long]
    return [pytest.param(name, marks=[pytest.mark.slow] if name == FIRST else long) for name in names]


@pytest.mark.parametrize('name', costly(*TRAINED, *QUERIES))
def test_a_file_has_standard_operators_alone(exported, name):
    *_, path = exported(name)
    onnx.checker.check_model(path, full_check=True)
    assert folders_named_in(path) == []
    model = onnx.load(path)
    assert not model.functions
    assert {node.domain for node in model.graph.node} == {''}


def planned(exported_model):
    """Return a model, its module for export, the comparison of both and the facts of the file."""
    config, weights, _ = exported_model
    predictor, facts = Predictor(config, str(weights), 'cpu'), {}
    plan = whole.planned_detector if predictor.is_detector else whole.planned_segmentor
    module, _, compare = plan(predictor.model, facts)
    return predictor.model, module.eval(), compare, facts


def in_sizes(pixels, divisor=1, queries=0, strides=()):
    """Yield an image in all sizes, rounded up to multiples of a divisor, whose maps have enough tokens for queries."""
    for size in SIZES:
        height, width = (-(-side // divisor) * divisor for side in size)
        tokens = sum(-(-height // stride) * -(-width // stride) for stride in strides)
        if tokens >= queries:
            yield pictures.resized(pixels, height, width)


@pytest.mark.parametrize('name', costly(*DETECTORS))
def test_unseen_sizes_of_detectors_of_boxes(exported, pixels, tmp_path, name):
    """Compare the file with the module that it was recorded from, and in float64 the module with the framework."""
    model, module, _, facts = planned(exported(name))
    changed = with_choices(exported(name)[2], tmp_path / 'choices.onnx')
    for each in RUNTIMES:
        session = SESSIONS[each](changed, 1)
        for image in in_sizes(pixels):
            assert_equal_given_choices(module, session, whole._image(image), len(module.OUTPUTS))
    exact = model.double()
    found = [assert_module_is_exact(exact, image, facts['mask_threshold']) for image in in_sizes(pixels)]
    assert sum(found) > len(SIZES)


@pytest.mark.parametrize('name', costly(*SEGMENTORS, *QUERIES))
@pytest.mark.parametrize('each', RUNTIMES)
def test_unseen_sizes_of_other_models(exported, pixels, name, each):
    _, _, compare, facts = planned(exported(name))
    session, counts = SESSIONS[each](exported(name)[2], 1), []
    for image in in_sizes(pixels, **facts.get('limits', {})):
        share, count = compare(session.run, image)
        counts.append(count)
        assert share < 1e-3, image.shape
    assert max(counts) > (2 if name == 'maskformer' else 5)


def assert_module_is_exact(model, pixels, mask_threshold):
    """Compare the module of a detector in float64 with mmdet's own ``predict``; return the number of instances.

    Both by mmcv's operators in PyTorch, because the compiled NMS supports only float32 on a CPU.
    """
    module = whole.graph_of(copy.deepcopy(model)).eval()
    img = torch.from_numpy(pixels.transpose(2, 0, 1)[None].copy()).double()
    ties = []  # for each instance, a region of the image, and which of its pixels are too near the threshold to tell

    def paste_as_float32(masks, boxes, *arguments, **options):
        probabilities, region = paste(masks.float(), boxes.float(), *arguments, **options)
        ties.append((region, (probabilities[0] - mask_threshold).abs().numpy() < TIE))
        return probabilities, region

    with torch.no_grad(), pytest.MonkeyPatch.context() as patch:
        use(PLAIN, patch)
        outputs = [out.numpy() for out in module(img)]
        patch.setattr(fcn_mask_head, '_do_paste_mask', paste_as_float32)
        expected = agreement.instances_of_framework(model, pixels)
    assert expected.scores.dtype == outputs[1].dtype == np.float64
    outputs = [array.astype(np.float32) for array in outputs]
    found = agreement.instances_of_file(outputs, pixels.shape[:2], mask_threshold)
    for field in ('labels', 'scores', 'boxes'):
        np.testing.assert_allclose(
            getattr(found, field),
            getattr(expected, field),
            rtol=1e-6,
            atol=1e-5,
        )
    assert len(found.masks) == len(expected.masks) == len(ties)
    for own, mask, (region, is_tie) in zip(found.masks, expected.masks, ties, strict=True):
        is_wrong = own != mask
        is_wrong[region] &= ~is_tie
        assert not is_wrong.any()
    return len(expected.scores)


@pytest.mark.parametrize('name', costly(*DETECTORS))
@pytest.mark.parametrize('each', RUNTIMES)
def test_an_image_without_objects(exported, name, each):
    *_, path = exported(name)
    session = SESSIONS[each](path, 1)
    for value in (0, 255):
        img = np.full(
            (1, 3, 100, 120),
            value,
            np.float32,
        )
        boxes, scores, *others = session.run({'img': img})
        assert boxes.shape == (len(scores), 4)
        assert {len(other) for other in others} == {len(scores)}


def assert_equal_instances(found, expected):
    """Pair each instance with the nearest one of its class, because equal scores may be in any order."""
    assert len(found) == len(expected) > 3
    rest = list(found)
    for theirs in expected:
        same = [one for one in rest if one['label'] == theirs['label']]
        ours = min(same, key=lambda one: np.abs(np.subtract(one['box'], theirs['box'])).max())
        rest.remove(ours)
        assert ours.keys() == theirs.keys()
        assert ours['class'] == theirs['class']
        assert ours['score'] == pytest.approx(theirs['score'], abs=1e-4)
        assert ours['box'] == pytest.approx(theirs['box'], abs=1e-2)
        if 'mask' in ours:
            ours, theirs = (coco_mask.decode(one['mask']) for one in (ours, theirs))
            assert (ours != theirs).sum() <= 2


@pytest.mark.parametrize('name', costly(FIRST, 'retinanet on swin', 'faster_rcnn on resnet', UPERNET))
@pytest.mark.parametrize('resize', [{'scale': (333, 200), 'keep_ratio': True}, {'scale': (150, 210)}])
def test_the_runtime_equals_the_predictor(exported, demo_data, tmp_path, name, resize):
    """Both read the image from a file, resize it, and return predictions in its original size."""
    config, weights, path = exported(name)
    config, picture = copy.deepcopy(config), str(picture_of(demo_data))
    pipeline = config.test_dataloader.dataset.pipeline
    pipeline[:] = [step for step in pipeline if step.type != 'Resize']
    pipeline.insert(1, ConfigDict(type='Resize', **resize))
    file = onnx.load(path)
    (facts,) = file.metadata_props
    facts.value = json.dumps({**json.loads(facts.value), **whole.gate.preparation_of(pipeline)})
    onnx.save(file, tmp_path / 'model.onnx')
    expected = Predictor(config, str(weights), 'cpu', score=0.05).predict(picture)
    for each in RUNTIMES:
        found = runtime.load(tmp_path / 'model.onnx', runtime=each, score=0.05).predict(picture)
        assert found.record.keys() == expected.record.keys()
        assert found.record['image'] == picture
        assert found.painted.shape == expected.painted.shape
        if name != UPERNET:
            assert_equal_instances(found.record['instances'], expected.record['instances'])
            continue
        assert (found.labels != expected.labels).mean() < 1e-3
        segments = expected.record['segments']
        shares = [pytest.approx(one['share'], abs=2e-3) for one in segments]
        same = [{**one, 'share': share} for one, share in zip(segments, shares, strict=True)]
        assert found.record['segments'] == same


@pytest.mark.parametrize('name', sorted(HEADS))
def test_the_module_equals_mmdets_predict_before_export(demo_data, name):
    """With random weights, some boxes are empty; some images are smaller than every anchor."""
    config = config_of(name, demo_data)
    init_default_scope('mmdet')
    torch.manual_seed(1)
    model = MODELS.build(config.model).eval().double()
    for head in model.modules():
        if hasattr(head, 'test_cfg') and isinstance(head.test_cfg, dict) and 'score_thr' in head.test_cfg:
            head.test_cfg.score_thr = 0.005
    for size in ((96, 130), (33, 20), (8, 200)):
        pixels = np.random.default_rng(0).integers(0, 256, (*size, 3), np.uint8)
        assert assert_module_is_exact(model, pixels, 0.5 if 'mask' in name else None) > 0


@pytest.mark.slow
@pytest.mark.long
def test_a_wrong_file_is_removed_and_the_old_file_is_kept(exported, demo_data, tmp_path, monkeypatch):
    config, weights, _ = exported('faster_rcnn on resnet')
    path = tmp_path / 'x.onnx'
    path.write_text('of yesterday')
    original = detectors.batched_nms
    monkeypatch.setattr(
        detectors,
        'batched_nms',
        lambda boxes, scores, groups, *rest: original(boxes, scores, torch.zeros_like(groups), *rest),
    )
    with pytest.raises(ExportError, match='the file is wrong on an image'):
        export_whole(config, weights, path, image=picture_of(demo_data))
    assert [each.read_text() for each in tmp_path.iterdir()] == ['of yesterday']


@pytest.fixture
def other_file(tmp_path):
    file = onnx.parser.parse_model(
        '<ir_version: 8, opset_import: ["": 17]> f (float[N] a) => (float[N] b) { b = Abs(a) }'
    )
    onnx.save(file, tmp_path / 'other.onnx')
    return tmp_path / 'other.onnx'


def test_a_missing_file_and_an_unknown_runtime(other_file):
    with pytest.raises(FileNotFoundError, match=r'there is no file nowhere.onnx'):
        runtime.load('nowhere.onnx')
    with pytest.raises(ValueError, match=r"runtime must be one of .*'tensorrt'"):
        runtime.load(other_file, runtime='tensorrt')


@pytest.mark.parametrize('each', RUNTIMES)
def test_damaged_files_and_files_of_later_versions(other_file, each):
    with pytest.raises(ValueError, match='write one with `swin-dense export CONFIG'):
        runtime.load(other_file, runtime=each)
    model = onnx.load(other_file)
    model.metadata_props.add(key=KEY, value=json.dumps({'format': FORMAT + 1}))
    onnx.save(model, other_file)
    with pytest.raises(ValueError, match=f'format {FORMAT + 1} of a later version'):
        runtime.load(other_file, runtime=each)
    content = other_file.read_bytes()
    damaged = {
        'empty': b'',
        'half': content[: len(content) // 2],
        'cut': content[:-10],
        'no onnx': b'no model' * 99,
        'photo': b'\xff\xd8\xff\xe0' + content[4:],
        'metadata': content.replace(b'{"format"', b'{!format"'),
    }
    for name, part in damaged.items():
        other_file.write_bytes(part)
        with pytest.raises(ValueError, match=r'other\.onnx') as raised:
            runtime.load(other_file, runtime=each)
        assert '\n' not in str(raised.value)
        assert name in ('empty', 'no onnx') or 'damaged' in str(raised.value)


@pytest.mark.slow
def test_the_page_on_deployment(exported, demo_data, tmp_path, monkeypatch):
    *_, path = exported(FIRST)
    monkeypatch.chdir(tmp_path)
    shutil.copy(path, 'model.onnx')
    shutil.copy(picture_of(demo_data), 'photo.jpg')
    names = {}
    whole_models = (ROOT / 'docs' / 'files.md').read_text().partition('\n## A backbone')[0]
    for block in re.findall(r'^```python\n(.*?)^```', whole_models, re.S | re.M):
        exec(block, names)
    assert names['record'].keys() == {'format', 'image', 'height', 'width', 'instances'}
    assert names['painted'].dtype == np.uint8
    facts = runtime.load('model.onnx').facts
    assert (facts['format'], facts['mask_threshold']) == (FORMAT, 0.5)
    with Image.open('photo.jpg') as image:
        assert runtime.load('model.onnx', score=0.3)(image) == {**names['record'], 'image': None}
    picture = pictures.read('photo.jpg')
    assert names['by_openvino'].keys() == names['record'].keys()
    for file, each in itertools.product(('int8.onnx', 'float16.onnx'), RUNTIMES):
        assert runtime.load(file, runtime=each)(picture).keys() == names['record'].keys()
    compare_before_selection('model.onnx', 'float16.onnx', picture, 1e-2)


def compare_before_selection(path, other, picture, allowed):
    """Compare what two files compute before they choose proposals: rounding can decide which they choose."""
    maps, others = (values_before_selection(file, picture) for file in (path, other))
    assert len(maps) >= 4
    for expected, found in zip(maps, others, strict=True):
        np.testing.assert_allclose(found, expected, rtol=0, atol=allowed * np.abs(expected).max())


def values_before_selection(path, picture):
    """Return what a file computes before the first choice of proposals: the inputs of each first TopK, by size."""
    model = onnx.load(path)
    first, selected = [], set()
    for node in model.graph.node:  # in the order of execution
        if selected.intersection(node.input):
            selected.update(node.output)
        elif node.op_type == 'TopK':
            first.append(node.input[0])
            selected.update(node.output)
    for name in first:
        model.graph.output.append(onnx.ValueInfoProto(name=name))
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=['CPUExecutionProvider'])
    image = picture[None, :, :, ::-1].transpose(0, 3, 1, 2).astype(np.float32)
    return sorted(session.run(first, {session.get_inputs()[0].name: image}), key=np.size)


@pytest.mark.parametrize('name', costly(FIRST, UPERNET))
def test_the_example_writes_a_file_in_8_bits(exported, demo_data, tmp_path, capsys, name):
    example = load_example('quantize')
    *_, source = exported(name)
    out, photographs = tmp_path / 'int8.onnx', demo_data / 'coco' / 'train2017'
    example.main(str(source), str(photographs), str(out))
    assert '4 photographs held out' in capsys.readouterr().out
    assert out.stat().st_size < 0.75 * source.stat().st_size
    inputs = [[one.name for one in onnx.load(file).graph.input] for file in (source, out)]
    assert inputs[0] == inputs[1]
    nodes = onnx.load(out).graph.node
    in_8_bits = {node.output[0] for node in nodes if node.op_type == 'DequantizeLinear'}
    modules = ' '.join(str(node.metadata_props) for node in nodes if in_8_bits.intersection(node.input[1:2]))
    assert 'backbone.stages.0.blocks.0.ffn.layers.1' in modules
    assert not [part for part in example.IN_FLOAT if part in modules]
    before, after = runtime.load(source), runtime.load(out)
    assert after.facts == before.facts
    picture = next((demo_data / 'coco' / 'val2017').iterdir())
    if name == FIRST:
        compare_before_selection(source, out, pictures.read(picture), 5e-2)
    else:
        assert example.agreement(before.predict(picture), after.predict(picture)) > 0.7
