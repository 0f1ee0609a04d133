"""Each operator against its definition in loops, against torch, and against compiled mmcv where there is one."""

import functools
import itertools
import math
from types import SimpleNamespace

import pytest
import torch
import torch.nn.functional as F
from mmcv import ops
from mmcv.ops.carafe import carafe
from mmcv.ops.masked_conv import masked_conv2d
from mmcv.ops.multi_scale_deform_attn import MultiScaleDeformableAttnFunction
from mmcv.ops.psa_mask import psa_mask
from mmdet.models.losses.focal_loss import py_sigmoid_focal_loss
from torch.autograd import gradcheck

from tests.mmcv_lite_ops.conftest import PLAIN


def random_boxes(number, side=100.0, rounded=False):
    corner = torch.rand(number, 2) * side
    size = torch.rand(number, 2) * side / 3
    boxes = torch.cat([corner, corner + size], 1)
    return boxes.round() if rounded else boxes


def random_rois(number, images, side):
    """RoIs of which some begin before the map and some end after it, and one is a point."""
    boxes = random_boxes(number, side * 1.3) - side * 0.15
    boxes[0, 2:] = boxes[0, :2]
    indices = torch.randint(images, (number, 1)).float()
    return torch.cat([indices, boxes], 1)


def doubles(*shape):
    return torch.randn(shape, dtype=torch.float64)


def with_gradients(function, *inputs):
    """Return the output of a function, and the gradients of its inputs for a random gradient of the output."""
    inputs = [tensor.detach().requires_grad_() for tensor in inputs]
    output = function(*inputs)
    generator = torch.Generator().manual_seed(1)
    weights = torch.rand(output.shape, generator=generator).to(output)
    gradients = torch.autograd.grad((output * weights).sum(), inputs)
    return [output.detach(), *gradients]


def assert_near(found, expected, tolerance=1e-12):
    for one, other in zip(found, expected, strict=True):
        assert one.shape == other.shape
        largest = float(other.abs().max())
        torch.testing.assert_close(one, other, rtol=tolerance, atol=tolerance * largest)


def assert_like_compiled(both, function, *inputs, tolerance=1e-12):
    """Compare the output and the gradients of a function with those by compiled mmcv."""
    compiled, plain = both(lambda: with_gradients(function, *inputs))
    assert_near(plain, compiled, tolerance)


# Non-maximum suppression


def kept_by_loops(boxes, scores, threshold):
    kept = []
    for i in sorted(range(len(boxes)), key=lambda i: -scores[i]):
        if not any(iou(boxes[i], boxes[j]) > threshold for j in kept):
            kept.append(i)
    return kept


def iou(a, b):
    width = min(a[2], b[2]) - max(a[0], b[0])
    height = min(a[3], b[3]) - max(a[1], b[1])
    shared = max(0, width) * max(0, height)
    return shared / (area(a) + area(b) - shared)


def area(box):
    return (box[2] - box[0]) * (box[3] - box[1])


@pytest.mark.parametrize('number', [0, 1, 60, 300])
def test_nms_keeps_what_its_definition_keeps(plain, number):
    boxes, scores = random_boxes(number), torch.rand(number)
    kept = ops.nms(boxes, scores, 0.4)[1]
    assert kept.tolist() == kept_by_loops(boxes.tolist(), scores.tolist(), 0.4)


@pytest.mark.parametrize('offset', [0, 1])
@pytest.mark.parametrize('number', [1, 16, 17, 128, 129, 1000, 3000])
def test_nms_keeps_the_boxes_of_compiled_mmcv_in_its_order(both, number, offset):
    """Also with equal scores, and with overlaps at the threshold."""
    side = 40 if number < 200 else 150
    for levels, threshold in itertools.product([2, 30, 10**6], [0.1, 0.5, 0.7]):
        boxes = random_boxes(number, side, rounded=True)  # also boxes without an area
        scores = torch.randint(levels, (number,)) / levels
        nms = functools.partial(ops.nms, boxes, scores, threshold, offset)
        compiled, plain = both(nms)
        assert compiled[1].tolist() == plain[1].tolist()


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'class_agnostic': True},
        {'split_thr': 100},
        {'max_num': 20},
    ],
)
def test_batched_nms_keeps_the_boxes_of_compiled_mmcv(both, options):
    boxes = random_boxes(900)
    scores = torch.randint(50, (900,)) / 50
    classes = torch.randint(7, (900,))
    options = {'iou_threshold': 0.5, **options}
    compiled, plain = both(lambda: ops.batched_nms(boxes, scores, classes, options))
    assert compiled[1].tolist() == plain[1].tolist()
    assert compiled[0].equal(plain[0])


@pytest.mark.parametrize('method', ['naive', 'linear', 'gaussian'])
def test_soft_nms_chooses_the_boxes_of_compiled_mmcv_in_its_order(both, method):
    for levels, min_score in itertools.product([3, 10**6], [1e-3, 0.2]):
        boxes = random_boxes(400, rounded=True) + torch.tensor([0, 0, 1, 1])
        scores = torch.randint(levels, (400,)) / levels
        nms = functools.partial(
            ops.soft_nms,
            boxes,
            scores,
            0.3,
            min_score=min_score,
            method=method,
            offset=1,
        )
        compiled, plain = both(nms)
        assert compiled[1].tolist() == plain[1].tolist()
        torch.testing.assert_close(
            plain[0],
            compiled[0],
            rtol=1e-6,
            atol=1e-7,
        )


@pytest.mark.parametrize(
    ('method', 'factor'),
    [
        ('naive', 0.0),
        ('linear', 0.5),
        ('gaussian', math.exp(-(0.5**2) / 0.4)),
    ],
)
def test_soft_nms_lowers_the_score_of_the_box_that_overlaps(plain, method, factor):
    boxes = torch.tensor(
        [
            [0.0, 0, 10, 10],
            [0, 0, 10, 5],
            [20, 20, 30, 30],
        ]
    )
    scores = torch.tensor([0.9, 0.8, 0.7])
    dets, indices = ops.soft_nms(
        boxes,
        scores,
        0.4,
        sigma=0.4,
        min_score=-1,
        method=method,
    )
    found = dict(
        zip(
            indices.tolist(),
            dets[:, 4].tolist(),
            strict=True,
        )
    )
    assert found == pytest.approx({0: 0.9, 1: 0.8 * factor, 2: 0.7})
    assert scores.tolist() == pytest.approx([0.9, 0.8, 0.7])


def test_nms_match_puts_each_box_into_one_group(plain):
    boxes, scores = random_boxes(80), torch.rand(80)
    found = ops.nms_match(torch.cat([boxes, scores[:, None]], 1), 0.3)
    groups = [group.tolist() for group in found]
    assert sorted(itertools.chain(*groups)) == list(range(80))
    kept = kept_by_loops(boxes.tolist(), scores.tolist(), 0.3)
    assert [group[0] for group in groups] == kept


# RoIAlign


def roi_align_by_loops(input, rois, bins, scale, ratio, aligned):
    output = input.new_zeros(len(rois), input.shape[1], *bins)
    for i, (image, *corners) in enumerate(rois.tolist()):
        x1, y1, x2, y2 = (corner * scale - (0.5 if aligned else 0) for corner in corners)
        height, width = (length if aligned else max(length, 1) for length in (y2 - y1, x2 - x1))
        for row, column in itertools.product(range(bins[0]), range(bins[1])):
            step_y, step_x = height / bins[0], width / bins[1]
            rows, columns = (ratio or math.ceil(step) for step in (step_y, step_x))
            for sample_y, sample_x in itertools.product(range(rows), range(columns)):
                y = y1 + (row + (sample_y + 0.5) / rows) * step_y
                x = x1 + (column + (sample_x + 0.5) / columns) * step_x
                output[i, :, row, column] += read(input[int(image)], y, x) / (rows * columns)
    return output


def read(image, y, x):
    """Interpolate an image (C, H, W); it is zero beyond a pixel outside of its border."""
    height, width = image.shape[1:]
    if not (-1 <= y <= height and -1 <= x <= width):
        return torch.zeros_like(image[:, 0, 0])
    y, x = min(max(y, 0), height - 1), min(max(x, 0), width - 1)
    top, left = int(y), int(x)
    bottom, right = min(top + 1, height - 1), min(left + 1, width - 1)
    of_bottom, of_right = y - top, x - left
    upper = image[:, top, left] * (1 - of_right) + image[:, top, right] * of_right
    lower = image[:, bottom, left] * (1 - of_right) + image[:, bottom, right] * of_right
    return upper * (1 - of_bottom) + lower * of_bottom


def roi_align(rois, bins, scale, ratio=0, aligned=True):
    return lambda input: ops.roi_align(input, rois, bins, scale, ratio, 'avg', aligned)


of_roi_align = pytest.mark.parametrize(
    ('ratio', 'aligned', 'bins'),
    [
        (0, True, (7, 7)),
        (0, False, (2, 3)),
        (2, True, (2, 3)),
        (2, False, (7, 7)),
    ],
)


@of_roi_align
def test_roi_align_equals_its_definition(plain, ratio, aligned, bins):
    input = doubles(2, 3, 19, 30)
    rois = random_rois(20, images=2, side=80).double()
    options = rois, bins, 0.25, ratio, aligned
    found = with_gradients(roi_align(*options), input)
    expected = with_gradients(lambda input: roi_align_by_loops(input, *options), input)
    assert_near(found, expected)


def test_roi_align_of_no_rois_and_outside_of_the_map_is_empty_and_zero(plain):
    input = torch.ones(1, 2, 8, 8, requires_grad=True)
    assert ops.roi_align(input, torch.zeros(0, 5), 7, 1.0).shape == (0, 2, 7, 7)
    rois = [[0.0, 20, 20, 30, 30], [0.0, -30, -30, -20, -20]]
    outside = ops.roi_align(input, torch.tensor(rois), 7, 1.0)
    outside.sum().backward()
    assert not outside.any()
    assert not input.grad.any()


@pytest.mark.parametrize(
    'corners',
    [
        [5.0, 0, 4, 9],
        [0, 0, math.nan, 9],
        [0, 0, math.inf, 9],
    ],
)
def test_roi_align_refuses_rois_that_are_no_boxes(plain, corners):
    with pytest.raises(ValueError, match='RoIs must be finite, with x1 <= x2'):
        roi_align(torch.tensor([[0, *corners]]), 7, 1.0)(torch.ones(1, 2, 8, 8))


def test_roi_align_in_half_precision_is_computed_in_float32(plain):
    input = torch.randn(1, 4, 20, 20).half()
    rois = random_rois(9, images=1, side=20).half()
    half = with_gradients(roi_align(rois, 7, 1.0), input)
    exact = with_gradients(roi_align(rois.float(), 7, 1.0), input.float())
    assert half[0].equal(exact[0].half())
    torch.testing.assert_close(
        half[1].float(),
        exact[1],
        rtol=2e-3,
        atol=2e-3,
    )


# Focal loss


def focal_loss(target, gamma=2.0, alpha=0.25, weight=None):
    return lambda logits: ops.sigmoid_focal_loss(logits, target, gamma, alpha, weight, 'none')


@pytest.mark.parametrize('has_weight', [False, True])
def test_focal_loss_equals_mmdets_in_python(plain, has_weight):
    logits, target = 4 * doubles(50, 6), torch.randint(7, (50,))  # 6 is the background
    weight = torch.rand(6, dtype=torch.float64) if has_weight else None

    def in_python(x):
        loss = py_sigmoid_focal_loss(x, F.one_hot(target, 7)[:, :6], None, 2.0, 0.25, 'none')
        if has_weight:
            of_targets = torch.cat([weight, torch.ones(1)])[target]
            loss = loss * of_targets[:, None]
        return loss

    found = with_gradients(focal_loss(target, 2.0, 0.25, weight), logits)
    # mmcv multiplies the gradient of each class by the gradient of its loss.
    assert_near(found, with_gradients(in_python, logits), tolerance=1e-9)


def test_focal_loss_of_large_logits_is_exact(plain):
    logits = torch.tensor([[90.0], [-90.0], [30.0]])
    target = torch.tensor([1, 0, 1])  # class 1 is the background
    loss = focal_loss(target)(logits)
    assert loss[:, 0].tolist() == pytest.approx([0.75 * 90, 0.25 * 90, 0.75 * 30])


# Deformable convolutions

CONVOLUTIONS = [
    {},
    {'stride': 2, 'padding': 1},
    {'padding': (2, 1), 'dilation': (2, 1)},
    {'groups': 2, 'deform_groups': 3, 'padding': 1},
]


def convolution_inputs(has_mask, stride=1, padding=0, dilation=1, groups=1, deform_groups=1):
    input = doubles(2, 6, 11, 13)
    weight = doubles(8, 6 // groups, 3, 3)
    size = F.conv2d(input, weight, None, stride, padding, dilation, groups).shape[2:]
    offset = 3 * doubles(2, deform_groups * 18, *size)
    if not has_mask:
        return [input, offset, weight]
    mask = torch.rand(2, deform_groups * 9, *size, dtype=torch.float64)
    return [input, offset, mask, weight, doubles(8)]


def deform_conv(has_mask, stride=1, padding=0, dilation=1, groups=1, deform_groups=1):
    options = stride, padding, dilation, groups, deform_groups
    function = ops.modulated_deform_conv2d if has_mask else ops.deform_conv2d
    return lambda *inputs: function(*inputs, *options)


@pytest.mark.parametrize('options', CONVOLUTIONS)
@pytest.mark.parametrize('has_mask', [False, True])
def test_deformable_convolutions_equal_compiled_mmcv(both, has_mask, options):
    inputs = convolution_inputs(has_mask, **options)
    assert_like_compiled(both, deform_conv(has_mask, **options), *inputs, tolerance=1e-11)


@pytest.mark.parametrize('options', CONVOLUTIONS)
@pytest.mark.parametrize('has_mask', [False, True])
def test_deformable_convolutions_without_offsets_are_convolutions(plain, has_mask, options):
    input, offset, *more = convolution_inputs(has_mask, **options)
    weight, bias = more[-2:] if has_mask else (more[0], None)
    if has_mask:
        more[0].fill_(1)
    found = deform_conv(has_mask, **options)(input, 0 * offset, *more)
    others = {name: value for name, value in options.items() if name != 'deform_groups'}
    torch.testing.assert_close(found, F.conv2d(input, weight, bias, **others))


@pytest.mark.parametrize(
    ('dtype', 'tolerance'),
    [
        (torch.float32, 2e-6),
        (torch.float64, 1e-11),
    ],
)
@pytest.mark.parametrize('has_mask', [False, True])
def test_gradients_at_integer_positions_equal_compiled_mmcv(both, has_mask, dtype, tolerance):
    """Where the derivative is not continuous, and where training begins."""
    input, offset, *more = (tensor.to(dtype) for tensor in convolution_inputs(has_mask, padding=1))
    inputs = input, offset.round(), *more
    assert_like_compiled(both, deform_conv(has_mask, padding=1), *inputs, tolerance=tolerance)


def test_offsets_of_one_pixel_and_of_a_larger_map(plain):
    input, offset, weight = convolution_inputs(False)
    offset[:, ::2] = 1  # y
    offset[:, 1::2] = -1  # x
    moved = F.pad(input, (1, 0, 0, 1))[..., 1:, :-1]
    found = ops.deform_conv2d(input, offset, weight)
    torch.testing.assert_close(found, F.conv2d(moved, weight))
    input, offset, mask, *parameters = convolution_inputs(True)
    expected = ops.modulated_deform_conv2d(input, offset, mask, *parameters)
    larger = []
    for x in (offset, mask):
        more = torch.ones(2, x.shape[1] * 9)
        larger.append(torch.cat([x.flatten(1), more], 1).view(2, -1, 9, 12))
    assert ops.modulated_deform_conv2d(input, *larger, *parameters).equal(expected)


# Deformable attention


def attention_by_loops(value, sizes, locations, weights):
    output = value.new_zeros(*weights.shape[:3], value.shape[3])
    values = value.split([height * width for height, width in sizes], 1)
    for place in itertools.product(*map(range, weights.shape)):
        b, q, head, level, _ = place
        height, width = sizes[level]
        x = float(locations[place][0]) * width - 0.5
        y = float(locations[place][1]) * height - 0.5
        image = values[level][b, :, head].T.unflatten(1, (height, width))
        image = F.pad(image, (1, 1, 1, 1))
        if -1 <= y <= height and -1 <= x <= width:
            output[b, q, head] += weights[place] * read(image, y + 1, x + 1)
    return output.flatten(2)


def attention_inputs():
    sizes = torch.tensor([[5, 7], [3, 4]])
    value = doubles(2, 47, 2, 3)
    locations = torch.rand(2, 4, 2, 2, 3, 2, dtype=torch.float64) * 1.4 - 0.2  # some outside of the map
    weights = torch.rand(2, 4, 2, 2, 3, dtype=torch.float64)
    return sizes, value, locations, weights


def attend(sizes):
    start = sizes.prod(1).cumsum(0) - sizes.prod(1)
    operator = MultiScaleDeformableAttnFunction
    return lambda value, locations, weights: operator.apply(value, sizes, start, locations, weights, 64)


def test_deformable_attention_equals_its_definition(plain):
    sizes, value, locations, weights = attention_inputs()
    expected = attention_by_loops(value, sizes.tolist(), locations, weights)
    torch.testing.assert_close(attend(sizes)(value, locations, weights), expected)


# PSANet, CARAFE and guided anchoring


@pytest.mark.parametrize('psa_type', [0, 1])
def test_psa_masks_equal_their_definition(plain, psa_type):
    input = torch.randn(2, 15, 4, 6)
    expected = torch.zeros(2, 4, 6, 4, 6)
    for y, x, i, j in itertools.product(range(4), range(6), range(4), range(6)):
        row, column = i - y + 2, j - x + 1
        if 0 <= row < 5 and 0 <= column < 3:
            values = input[:, row * 3 + column, y, x]
            if psa_type == 0:
                expected[:, i, j, y, x] = values
            else:
                expected[:, y, x, i, j] = values
    assert psa_mask(input, psa_type, (5, 3)).view(expected.shape).equal(expected)


@pytest.mark.parametrize(
    ('kernel', 'groups', 'scale'),
    [
        (3, 1, 2),
        (5, 2, 2),
        (1, 3, 3),
    ],
)
def test_carafe_equals_its_definition(plain, kernel, groups, scale):
    features = doubles(2, 6, 4, 5)
    masks = doubles(2, groups * kernel**2, 4 * scale, 5 * scale)

    def by_loops(features, masks):
        around = F.pad(features, [kernel // 2] * 4)
        kernels = masks.unflatten(1, (groups, kernel, kernel))
        output = []
        for c, y, x in itertools.product(range(6), range(4 * scale), range(5 * scale)):
            patch = around[:, c, y // scale :, x // scale :][:, :kernel, :kernel]
            of_group = kernels[:, c // (6 // groups), :, :, y, x]
            output.append((patch * of_group).sum((1, 2)))
        return torch.stack(output, 1).view(2, 6, 4 * scale, 5 * scale)

    found = with_gradients(lambda *inputs: carafe(*inputs, kernel, groups, scale), features, masks)
    assert_near(found, with_gradients(by_loops, features, masks))


def test_masked_convolutions_are_convolutions_at_the_positions_of_the_mask(plain):
    input = torch.randn(1, 3, 7, 9)
    parameters = torch.randn(4, 3, 3, 3), torch.randn(4)
    mask = torch.rand(1, 7, 9) > 0.5
    found = masked_conv2d(input, mask.float(), *parameters, 1)
    expected = F.conv2d(input, *parameters, padding=1)
    torch.testing.assert_close(found, expected * mask)


# All operators


@pytest.mark.parametrize('has_mask', [False, True])
def test_gradients_of_deformable_convolutions_are_those_of_finite_differences(plain, has_mask):
    options = {'stride': 2, 'padding': 1, 'deform_groups': 2}
    inputs = convolution_inputs(has_mask, **options)
    leaves = [tensor.requires_grad_() for tensor in inputs]
    assert gradcheck(deform_conv(has_mask, **options), leaves, fast_mode=True)


def test_gradients_of_the_other_operators_are_those_of_finite_differences(plain):
    sizes, *inputs = attention_inputs()
    rois = random_rois(5, images=2, side=10).double()
    target = torch.randint(5, (6,))
    cases = [
        (attend(sizes), inputs),
        (roi_align(rois, 3, 1.0), [doubles(2, 3, 9, 9)]),
        (focal_loss(target, 1.5, 0.3), [doubles(6, 4)]),
        (lambda x: psa_mask(x, 1, (3, 5)), [doubles(1, 15, 3, 4)]),
    ]
    for function, values in cases:
        assert gradcheck(function, [value.requires_grad_() for value in values], fast_mode=True)


def test_autocast_does_not_reach_into_operators(plain):
    inputs = [tensor.float() for tensor in convolution_inputs(True, padding=1)]
    align = roi_align(random_rois(9, images=2, side=10), 3, 1.0)

    def function(*inputs):
        return align(deform_conv(True, padding=1)(*inputs))

    expected = with_gradients(function, *inputs)
    with torch.autocast('cpu', torch.bfloat16):
        found = with_gradients(function, *inputs)
    assert all(map(torch.equal, found, expected))


def test_operators_work_in_compiled_modules(plain):
    input = torch.randn(2, 3, 9, 9)
    align = roi_align(random_rois(9, images=2, side=10), 3, 1.0)

    def function(x):
        return align(x * 2) + 1

    found = with_gradients(torch.compile(function, backend='eager'), input)
    assert all(map(torch.equal, found, with_gradients(function, input)))


def test_torchvision_gets_the_arguments_of_its_functions(plain, monkeypatch):
    """On CUDA tensors; its functions are replaced by ones with their signatures that call the plain operators."""
    boxes, scores = random_boxes(50), torch.rand(50)
    input = doubles(2, 6, 11, 13)
    rois = random_rois(9, images=2, side=10).double()
    options = {'stride': 2, 'padding': 1, 'groups': 2, 'deform_groups': 3}
    inputs = convolution_inputs(True, **options)
    calls = [
        lambda: [ops.nms(boxes, scores, 0.5)[1]],
        lambda: with_gradients(lambda x: ops.roi_align(x, rois, (2, 3), 0.5, 2, 'avg', True), input),
        lambda: with_gradients(deform_conv(True, **options), *inputs),
    ]
    expected = [call() for call in calls]
    called = []

    def nms(boxes, scores, iou_threshold):
        called.append('nms')
        return torch.tensor(
            kept_by_loops(
                boxes.tolist(),
                scores.tolist(),
                iou_threshold,
            )
        )

    def roi_align(input, boxes, output_size, spatial_scale=1.0, sampling_ratio=-1, aligned=False):
        called.append('roi_align')
        return roi_align_by_loops(input, boxes, output_size, spatial_scale, sampling_ratio, aligned)

    def deform_conv2d(input, offset, weight, bias=None, stride=(1, 1), padding=(0, 0), dilation=(1, 1), mask=None):
        called.append('deform_conv2d')
        monkeypatch.setattr(PLAIN, '_torchvision', lambda tensor: None)
        settings = {
            'stride': stride,
            'padding': padding,
            'dilation': dilation,
            'groups': 2,
            'deform_groups': 3,
        }
        output = PLAIN._deform_conv(input, weight, offset, mask, bias, **settings)
        monkeypatch.setattr(PLAIN, '_torchvision', lambda tensor: fake)
        return output

    fake = SimpleNamespace(nms=nms, roi_align=roi_align, deform_conv2d=deform_conv2d)
    monkeypatch.setattr(PLAIN, '_torchvision', lambda tensor: fake)
    for call, result in zip(calls, expected, strict=True):
        assert_near(call(), result)
    assert set(called) == {'nms', 'roi_align', 'deform_conv2d'}


def test_other_operators_say_what_to_install(plain):
    message = r'box_iou_rotated is not in mmcv-lite-ops.* pip install --no-build-isolation mmcv==2\.1\.0'
    with pytest.raises(NotImplementedError, match=message):
        ops.box_iou_rotated(torch.rand(2, 5), torch.rand(2, 5))
    with pytest.raises(NotImplementedError, match=r"\(pool_mode='max'\) is not in mmcv-lite"):
        ops.roi_align(torch.rand(1, 2, 8, 8), torch.tensor([[0, 0.0, 0, 4, 4]]), 2, 1.0, 0, 'max')
    assert not hasattr(PLAIN, '__path__')
