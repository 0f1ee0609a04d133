"""Quantised files, on graphs written by hand whose losses are known."""

import numpy as np
import onnx
import pytest
from onnx import TensorProto, numpy_helper
from PIL import Image

from swin_dense import runtime
from swin_dense.__main__ import main
from swin_dense.workbench.runtime import comparison, quantization, quantizer
from swin_dense.workbench.runtime.masks import Instances
from swin_dense.workbench.runtime.model import Outputs
from swin_dense.workbench.runtime.sessions import FORMAT, KEY, SESSIONS
from tests.commands.files import write_model
from tests.processes import without

SIDE = 24
FACTS = {
    'format': FORMAT,
    'classes': ['red', 'green', 'blue'],
    'palette': [[255, 0, 0], [0, 255, 0], [0, 0, 255]],
    'resize': None,
    'mask_threshold': None,
}
# A layer with these weights sees one channel at 1e5 times its value. In 8 bits, nothing is left of the others.
WIDE, NARROW = np.diag([1, 1, 1e5]), np.diag([1, 1, 1e-5])


def save(path, graph, weights, modules, facts):
    """Write a graph; ``modules`` are the modules of its layers, by the names of their outputs."""
    versions = 'ir_version: 10, opset_import: ["": 20]'
    weights = {'size': np.zeros(2, np.int64), **weights}
    model = onnx.load(write_model(path, graph, {**FACTS, **facts}, weights, versions))
    for node in model.graph.node:
        (output,) = node.output
        node.name = f'{node.op_type} {output}'
        if output in modules:
            scopes = str(['', f'model.{modules[output]}', output])
            node.metadata_props.add(key='pkg.torch.onnx.name_scopes', value=scopes)
    model.metadata_props.add(key='author', value='us')
    onnx.save(onnx.shape_inference.infer_shapes(model), path)
    return path


def segmentor(path, *modules, **facts):
    """Write a file that gives each pixel its strongest colour, after layers of the given modules.

    A module whose name contains 'wide' cannot be quantised without a loss. The metadata contain ``facts``.
    """
    layers, weights, of_outputs = [], {'nothing': np.float32(0)}, {}
    last = 'img'
    for module in (*modules, 'decode_head.conv_seg'):
        scale = np.eye(3)
        if module.endswith('conv_seg'):
            scale = scale[::-1]  # from BGR
        for weight in (WIDE, NARROW) if 'wide' in module else (scale,):
            number = len(layers)
            weights[f'w{number}'] = np.ascontiguousarray(weight)[:, :, None, None].astype(np.float32)
            layers.append(f'x{number} = Conv ({last}, w{number})')
            last = f'x{number}'
            of_outputs[last] = module
    # The size is an input of the graph, but does not change this map.
    graph = f"""main (float[batch, 3, height, width] img, int64[2] size) => (int32[batch, height, width] labels) {{
        {' '.join(layers)}
        sides = Cast <to = 1> (size)
        side = ReduceMin <keepdims = 0> (sides)
        zero = Mul (side, nothing)
        logits = Add ({last}, zero)
        best = ArgMax <axis = 1, keepdims = 0> (logits)
        labels = Cast <to = 6> (best)
    }}"""
    return save(path, graph, weights, of_outputs, {'task': 'segmentation', **facts})


def detector(path):
    """Write a file that finds eight boxes in a bright image and none in a black one."""
    weights = {
        'w': np.eye(3, dtype=np.float32)[:, :, None, None] / 255,
        'linear': np.linspace(3, 5, 24, dtype=np.float32).reshape(3, 8),
        'bias': np.full(8, -3, np.float32),
        'boxes_of_all': np.array([[index, 0, index + 9, 9] for index in range(8)], np.float32),
        'labels_of_all': np.arange(8, dtype=np.int32) % 3,
        'flat': np.array([1, 3], np.int64),
        'all': np.array([8], np.int64),
    }
    graph = """main (float[batch, 3, height, width] img, int64[2] size)
        => (float[8, 4] boxes, float[8] scores, int32[8] labels) {
        x = Conv (img, w)
        pooled = GlobalAveragePool (x)
        features = Reshape (pooled, flat)
        logits = Gemm (features, linear, bias)
        each = Reshape (logits, all)
        scores = Sigmoid (each)
        boxes = Identity (boxes_of_all)
        labels = Identity (labels_of_all)
    }"""
    modules = {'x': 'backbone.stages.0.blocks.0', 'logits': 'roi_head.bbox_head.shared_fcs.0'}
    return save(path, graph, weights, modules, {'task': 'detection'})


@pytest.fixture(scope='module')
def photographs(tmp_path_factory):
    """Return 24 files of noise in bright colours."""
    folder = tmp_path_factory.mktemp('photographs')
    rng = np.random.default_rng(0)
    for index in range(24):
        Image.fromarray(rng.integers(100, 256, (SIDE, SIDE, 3), np.uint8)).save(folder / f'{index:02}.png')
    return sorted(folder.iterdir())


@pytest.fixture
def black(tmp_path):
    (tmp_path / 'black').mkdir()
    for index in range(24):
        Image.fromarray(np.zeros((SIDE, SIDE, 3), np.uint8)).save(tmp_path / 'black' / f'{index:02}.png')
    return sorted((tmp_path / 'black').iterdir())


def quantized_modules(path):
    """Return the weights of a file that are stored in 8 bits, as the names of their float weights."""
    graph = onnx.load(path).graph
    return {one.name.removesuffix('_quantized') for one in graph.initializer if one.data_type == TensorProto.INT8}


def test_a_file_without_loss(tmp_path, photographs):
    path = segmentor(tmp_path / 'x.onnx', 'backbone.patch_embed.projection', 'backbone.stages.0', 'decode_head.convs.0')
    done = runtime.quantize(path, photographs, tmp_path / 'int8.onnx')
    assert done == runtime.Quantized(
        path=tmp_path / 'int8.onnx',
        loss=0.0,
        compared=12 * SIDE**2,
        in_float=('backbone.patch_embed', 'decode_head.conv_seg'),
        in_int8=('backbone.stages.0', 'decode_head.convs.0'),
    )
    assert quantized_modules(done.path) == {'w1', 'w2'} | {f'{name}_zero_point' for name in ('w1', 'w2')}
    before = runtime.load(path)
    for library in SESSIONS:
        after = runtime.load(done.path, runtime=library)
        for photograph in photographs:
            np.testing.assert_array_equal(after.predict(photograph).labels, before.predict(photograph).labels)
    said = after.facts.pop('quantized')
    assert after.facts == before.facts
    assert said == {
        'method': 'static int8: QDQ, MinMax, weights per channel',
        'int8': list(done.in_int8),
        'float': list(done.in_float),
        'photographs': {'calibration': 12, 'held out': 12},
        'loss': 0.0,
        'limit': 0.02,
    }
    assert {entry.key for entry in onnx.load(done.path).metadata_props} >= {KEY, 'author'}
    onnx.checker.check_model(done.path, full_check=True)
    assert {one.domain for one in onnx.load(done.path).graph.node} == {''}


def test_ranges_are_the_least_and_the_largest_values_of_all_inputs(tmp_path):
    path = segmentor(tmp_path / 'x.onnx', 'decode_head.wide')
    rng = np.random.default_rng(0)
    inputs = [rng.normal(size=(1, 3, SIDE, SIDE + index)).astype(np.float32) for index in range(5)]
    ranges = quantizer.measured_ranges(path, inputs)
    for name, scale in (('img', [1, 1, 1]), ('x0', [1, 1, 1e5]), ('x1', [1, 1, 1])):
        values = np.concatenate([(img * np.reshape(scale, (3, 1, 1))).ravel() for img in inputs])
        np.testing.assert_allclose(np.ravel(ranges[name].range_value), (values.min(), values.max()), rtol=1e-6)


def test_products_do_not_overflow_on_processors_without_vnni(tmp_path):
    # Only on such a processor could the predictions tell: there, ONNX Runtime replaces the fast and wrong products.
    session = SESSIONS['onnxruntime'](segmentor(tmp_path / 'x.onnx', 'backbone.stages.0'), 1)
    options = session._session.get_session_options()
    assert options.get_session_config_entry('session.x64quantprecision') == '1'


def test_the_groups_that_lose_most_return_to_float(tmp_path, photographs):
    path = segmentor(tmp_path / 'x.onnx', 'backbone.stages.0', 'backbone.stages.wide', 'decode_head.convs.0')
    done = runtime.quantize(path, photographs, tmp_path / 'int8.onnx')
    assert done.in_float == ('decode_head.conv_seg', 'backbone.stages.wide')
    assert done.in_int8 == ('backbone.stages.0', 'decode_head.convs.0')
    assert done.loss == 0.0


def test_a_loss_above_the_limit_names_the_groups(tmp_path, photographs):
    path = segmentor(tmp_path / 'x.onnx', 'backbone.stages.wide', 'neck.convs.0', 'decode_head.wide')
    (tmp_path / 'int8.onnx').write_text('of yesterday')
    with pytest.raises(runtime.QuantizationError, match=r'was not written.* at most 2\.0%') as raised:
        runtime.quantize(path, photographs, tmp_path / 'int8.onnx')
    assert 'backbone.stages.wide 6' in str(raised.value)
    assert 'decode_head.wide 6' in str(raised.value)
    assert 'neck' not in str(raised.value)
    assert (tmp_path / 'int8.onnx').read_text() == 'of yesterday'
    assert len(list(tmp_path.iterdir())) == 2
    done = runtime.quantize(path, photographs, tmp_path / 'int8.onnx', limit=0.9)
    assert 0.5 < done.loss < 0.9


def test_a_detector(tmp_path, photographs):
    done = runtime.quantize(detector(tmp_path / 'x.onnx'), photographs, tmp_path / 'int8.onnx')
    assert done.loss == 0.0
    assert done.compared == 2 * 12 * 8
    assert done.in_int8 == ('backbone.stages.0', 'roi_head.bbox_head.shared_fcs')
    assert quantized_modules(done.path) >= {'w', 'linear'}


def test_photographs_that_show_too_little(tmp_path, photographs, black):
    path = detector(tmp_path / 'x.onnx')
    with pytest.raises(ValueError, match=r'finds nothing in the 12 photographs held out.* 50 or more'):
        runtime.quantize(path, black, tmp_path / 'int8.onnx')
    few = [*photographs[:10], *black[:14]]
    with pytest.raises(ValueError, match='finds 40 instances in the 12 photographs'):
        runtime.quantize(path, few, tmp_path / 'int8.onnx')
    runtime.quantize(path, few, tmp_path / 'int8.onnx', limit=0.03)
    path = segmentor(tmp_path / 'y.onnx', 'backbone.stages.0')
    with pytest.raises(ValueError, match='all pixels of the 12 photographs held out the same class'):
        runtime.quantize(path, black, tmp_path / 'int8.onnx')
    with pytest.raises(ValueError, match=r'at least 20 photographs.* got 19'):
        runtime.quantize(path, photographs[:19], tmp_path / 'int8.onnx')


def test_at_most_200_photographs_are_used_from_the_whole_list(monkeypatch):
    monkeypatch.setattr(quantization, '_is_usable', lambda photograph, model: True)
    calibration, held_out = quantization._photographs([f'{index}.jpg' for index in range(1000)], None)
    assert len(calibration) == len(held_out) == 100
    assert (calibration[0].name, held_out[-1].name) == ('0.jpg', '995.jpg')
    assert not set(calibration) & set(held_out)


def test_a_photograph_that_is_given_twice_counts_once(tmp_path, photographs):
    path = segmentor(tmp_path / 'x.onnx', 'backbone.stages.0')
    folder = photographs[0].parent
    again = [folder / '..' / folder.name / photograph.name for photograph in photographs]
    done = runtime.quantize(path, [*photographs, *again], tmp_path / 'int8.onnx')
    assert done.compared == 12 * SIDE**2
    with pytest.raises(ValueError, match=r'at least 20 photographs.* got 19$'):
        runtime.quantize(path, photographs[:19] * 2, tmp_path / 'int8.onnx')


def test_photographs_that_cannot_be_used_are_named_and_left_out(tmp_path, photographs, caplog):
    path = segmentor(tmp_path / 'x.onnx', 'backbone.stages.0', limits={'divisor': SIDE})
    (tmp_path / 'damaged.jpg').write_text('no image')
    Image.new('RGB', (SIDE + 1, SIDE)).save(tmp_path / 'odd.png')
    unusable = [tmp_path / name for name in ('damaged.jpg', 'missing.jpg', 'odd.png')]
    images = [*photographs[:10], *unusable, *photographs[10:]]
    done = runtime.quantize(path, images, tmp_path / 'int8.onnx')
    assert done.compared == 12 * SIDE**2
    warnings = [record.message for record in caplog.records if record.levelname == 'WARNING']
    assert len(warnings) == 3
    for warning, photograph in zip(warnings, unusable, strict=True):
        assert photograph.name in warning
        assert warning.endswith('; left out')
    with pytest.raises(ValueError, match=r'at least 20 photographs.* got 19, and 3 that cannot be used'):
        runtime.quantize(path, [*unusable, *photographs[:19]], tmp_path / 'y.onnx')


def test_the_float_file_predicts_each_photograph_once(tmp_path, photographs, monkeypatch):
    predicted = []
    original = runtime.Model.outputs

    def outputs(self, pixels):
        predicted.append((self, pixels.tobytes()))
        return original(self, pixels)

    monkeypatch.setattr(runtime.Model, 'outputs', outputs)
    path = segmentor(tmp_path / 'x.onnx', 'backbone.stages.0', 'backbone.stages.wide', 'decode_head.convs.0')
    runtime.quantize(path, photographs, tmp_path / 'int8.onnx')
    by_float_file = [pixels for model, pixels in predicted if model is predicted[0][0]]
    assert len(by_float_file) == len(set(by_float_file)) == 24


def without_scopes(model):
    for one in model.graph.node:
        del one.metadata_props[:]


def without_layers(model):
    for one in model.graph.node:
        for entry in one.metadata_props:
            entry.value = str(['', 'model.neck', 'conv'])


def in_float16(model):
    for weight in model.graph.initializer:
        if weight.name.startswith('w'):
            weight.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(weight).astype(np.float16), weight.name))


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (without_scopes, 'lacks the names of its modules; export the model again'),
        (without_layers, 'has no layers that could be quantised'),
        (in_float16, 'is not in float32'),
    ],
)
def test_files_that_cannot_be_quantised(tmp_path, change, message):
    model = onnx.load(segmentor(tmp_path / 'x.onnx', 'backbone.stages.0'))
    change(model)
    onnx.save(model, tmp_path / 'x.onnx')
    with pytest.raises(ValueError, match=rf'x\.onnx {message}'):
        quantizer.groups_of(tmp_path / 'x.onnx')


def test_a_file_is_quantised_once(tmp_path, photographs):
    done = runtime.quantize(segmentor(tmp_path / 'x.onnx', 'backbone.stages.0'), photographs, tmp_path / 'int8.onnx')
    with pytest.raises(ValueError, match=r'int8\.onnx is quantised already'):
        runtime.quantize(done.path, photographs, tmp_path / 'twice.onnx')


def test_wrong_arguments(tmp_path, photographs):
    path = segmentor(tmp_path / 'x.onnx', 'backbone.stages.0')
    for out, limit, message in (
        ('y.pt2', 0.02, r'must end in \.onnx, got .*y\.pt2'),
        ('x.onnx', 0.02, 'is the float file itself'),
        ('y.onnx', 0.0, 'limit must lie between 0 and 1'),
        ('y.onnx', 1.0, 'limit must lie between 0 and 1'),
    ):
        with pytest.raises(ValueError, match=message):
            runtime.quantize(path, photographs, tmp_path / out, limit=limit)
    with pytest.raises(TypeError, match='images must be a list of files, got '):
        runtime.quantize(path, photographs[0].parent, tmp_path / 'y.onnx')
    with pytest.raises(FileNotFoundError, match='there is no folder'):
        runtime.quantize(path, photographs, tmp_path / 'none' / 'y.onnx')
    assert [one.name for one in tmp_path.iterdir()] == ['x.onnx']


BOX = [0.0, 0.0, 100.0, 100.0]


def one(score=0.9, label=0, box=BOX, mask=()):
    return Instances(np.array([box]), np.array([score]), np.array([label]), mask)


def corner(rows):
    mask = np.zeros((1, 100, 100), bool)
    mask[0, :rows] = True
    return mask


@pytest.mark.parametrize(
    ('first', 'second', 'counts'),
    [
        (one(), one(), (0, 2)),
        (one(), one(label=1), (2, 2)),
        (one(), one(score=0.81), (0, 2)),
        (one(), one(score=0.79), (2, 2)),
        (one(0.31), one(0.29), (0, 1)),
        (one(0.29), one(0.25), (0, 0)),
        (one(), one(box=[0.0, 0.0, 100.0, 91.0]), (0, 2)),
        (one(), one(box=[0.0, 0.0, 100.0, 89.0]), (2, 2)),
        (one(mask=corner(100)), one(mask=corner(91)), (0, 2)),
        (one(mask=corner(100)), one(mask=corner(89)), (2, 2)),
    ],
)
def test_instances_that_count_as_the_same(first, second, counts):
    for both in ((first, second), (second, first)):
        assert comparison.count_unmatched(*both, quantization.SCORE, quantization.TOLERANCE) == counts


def test_segments_are_compared_pixel_by_pixel_and_instances_too():
    panoptic = np.zeros((10, 10), np.int32)
    panoptic[:5] = 1000
    other = np.zeros((10, 10), np.int32)
    other[:4] = 2000  # another number of the same class
    outputs = [Outputs(None, one(label=label), part) for label, part in ((0, panoptic), (1, other))]
    counts = quantization._differences(*outputs, 3)
    np.testing.assert_array_equal(counts, [[2, 2], [10, 100]])


FRAMEWORKS = ('torch', 'mmengine', 'mmcv', 'mmdet', 'mmseg', 'cv2', 'pycocotools', 'onnxscript')


def test_the_command_needs_neither_torch_nor_the_frameworks(tmp_path, photographs):
    path = segmentor(tmp_path / 'x.onnx', 'backbone.stages.0')
    arguments = ['quantize', path, photographs[0].parent, '--out', tmp_path / 'int8.onnx']
    done = without(FRAMEWORKS, *arguments)
    assert '100.00% of 6,912 results agree with the float file' in done.stdout
    assert 'in float: decode_head.conv_seg' in done.stdout
    assert 'running the float file on 12 photographs ...' in done.stderr
    assert '--force replaces it' in without(FRAMEWORKS, *arguments, status=2).stderr


def test_the_command_refuses(tmp_path, photographs, capsys):
    path = segmentor(tmp_path / 'x.onnx', 'backbone.stages.wide')
    folder, out = str(photographs[0].parent), ['--out', str(tmp_path / 'int8.onnx')]
    (tmp_path / 'empty').mkdir()
    for arguments, status, message in (
        (
            [str(path), folder],
            1,
            'of its predictions differ from those of the float file, at most 2.0% is allowed (--limit)',
        ),
        ([str(path), folder, '--limit', '0'], 2, '--limit must lie between 0 and 1'),
        ([str(path), str(photographs[0])], 2, 'at least 20 photographs'),
        ([str(path), str(tmp_path / 'empty')], 2, 'contains no images'),
        ([str(path), 'nowhere.jpg'], 2, 'there is no file nowhere.jpg'),
        (['nowhere.onnx', folder], 2, 'there is no file nowhere.onnx'),
    ):
        assert main(['quantize', *arguments, *out]) == status
        assert message in capsys.readouterr().err
    assert not (tmp_path / 'int8.onnx').exists()
