"""``mmcv._ext`` in PyTorch: the operators that mmcv compiles, for mmcv-lite, which is mmcv without them.

The functions of ``mmcv.ops`` check their arguments, allocate the outputs, and call the functions below to fill them, or
to return a result. Names and parameters are therefore mmcv's. Each function computes what its operator defines, and
what mmcv adds to the definition: the order of boxes with equal scores, and what a position outside of the image reads.
On CUDA tensors, torchvision computes NMS, RoIAlign and deformable convolutions if it is installed. Operators that the
models of mmdet and mmsegmentation do not need raise NotImplementedError.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from types import ModuleType
from typing import Any, NoReturn

import torch
import torch.nn.functional as F
from torch import Tensor

_NMS_BLOCK = 64  # boxes that NMS compares at a time with all others
_ROI_BLOCK = 128  # RoIs whose weights RoIAlign computes at a time


def get_compiler_version() -> str:
    return 'none: mmcv-lite-ops, operators in PyTorch'


def get_compiling_cuda_version() -> str:
    """Return the CUDA of torch, whose kernels compute the operators on GPUs."""
    return torch.version.cuda or 'not available'


def __getattr__(name: str) -> Callable[..., NoReturn]:
    """Return a function that raises, since the import of ``mmcv.ops`` asks for the names of all operators."""
    if name.startswith('_'):
        raise AttributeError(f'module {__name__!r} has no attribute {name!r}')
    return functools.partial(_not_here, name)


def _not_here(name: str, *args: object, **kwargs: object) -> NoReturn:
    raise NotImplementedError(
        f'{name} is not in mmcv-lite-ops, which has the operators of the models of mmdet and mmsegmentation. A '
        'compiled mmcv has it: pip uninstall mmcv-lite mmcv-lite-ops; pip install --no-build-isolation mmcv==2.1.0'
    )


def _operator(function: Callable[..., Any]) -> Callable[..., Any]:
    """Hide the steps of an operator from torch.compile and autocast, as they are hidden in a compiled one."""

    @torch.compiler.disable
    @functools.wraps(function)
    def run(tensor: Tensor, *args: Any, **kwargs: Any) -> Any:
        with torch.autocast(tensor.device.type, enabled=False):
            return function(tensor, *args, **kwargs)

    return run


def _torchvision(tensor: Tensor) -> ModuleType | None:
    """Return ``torchvision.ops`` if it should compute an operator on this tensor."""
    return _torchvision_ops() if tensor.is_cuda else None


@functools.cache
def _torchvision_ops() -> ModuleType | None:
    try:
        import torchvision.ops
    except Exception:  # one that was built for another torch raises a RuntimeError
        return None
    return torchvision.ops


def _precise(tensor: Tensor) -> Tensor:
    """Return half precision as float32, in which all operators compute it."""
    return tensor if tensor.dtype == torch.float64 else tensor.float()


def _gradients(function: Callable[..., Tensor], inputs: Sequence[Tensor], grad_output: Tensor) -> tuple[Tensor, ...]:
    """Return the gradients of inputs of a function, which is computed again."""
    with torch.enable_grad():
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        output = function(*leaves)
        return torch.autograd.grad(output, leaves, grad_output.to(output.dtype))


# Non-maximum suppression (NMS)


def _iou(a: Tensor, b: Tensor, offset: int) -> Tensor:
    """Return the intersection over union of boxes (x1, y1, x2, y2) of shapes (4, ...), sides made ``offset`` longer."""
    # In place, because the memory of temporaries takes most of the time.
    width = torch.minimum(a[2], b[2]).sub_(torch.maximum(a[0], b[0])).add_(offset).clamp_(min=0)
    height = torch.minimum(a[3], b[3]).sub_(torch.maximum(a[1], b[1])).add_(offset).clamp_(min=0)
    intersection = width.mul_(height)
    area_a, area_b = ((box[2] - box[0] + offset) * (box[3] - box[1] + offset) for box in (a, b))
    return intersection.div_((area_a + area_b).sub_(intersection))


@_operator
def nms(boxes: Tensor, scores: Tensor, iou_threshold: float, offset: int) -> Tensor:
    """Return the indices of the boxes that no box of a higher score suppresses, by descending score."""
    fast = _torchvision(boxes)
    if fast and offset == 0:
        return fast.nms(boxes, scores, iou_threshold)
    # Among equal scores, the first suppresses the others. mmcv sorts like this; a stable sort gives another order.
    order = scores.sort(descending=True).indices
    boxes = boxes[order].T.contiguous()
    kept, left = order[:0], torch.arange(len(order), device=order.device)
    while len(left):
        block, left = left[:_NMS_BLOCK], left[_NMS_BLOCK:]
        among_block = _iou(boxes[:, block, None], boxes[:, None, block], offset) > iou_threshold
        block = block[_survivors(among_block.triu(1))]
        suppressed = (_iou(boxes[:, block, None], boxes[:, None, left], offset) > iou_threshold).any(0)
        kept, left = torch.cat([kept, block]), left[~suppressed]
    return order[kept]


def _survivors(suppresses: Tensor) -> Tensor:
    """Return which boxes survive, shape (K,), if each that survives suppresses those of its row in ``suppresses``."""
    survive = suppresses.new_ones(len(suppresses))
    while True:
        # After k rounds, the first k boxes are final; usually, a few rounds suffice for all.
        again = ~(suppresses & survive[:, None]).any(0)
        if again.equal(survive):
            return survive
        survive = again


@_operator
def nms_match(dets: Tensor, iou_threshold: float) -> list[list[int]]:
    """Return groups of boxes: each box that NMS keeps, with those that it suppresses."""
    boxes, scores = dets[:, :4].T, dets[:, 4].contiguous()
    left, groups = scores.sort(descending=True).indices, []
    while len(left):
        matches = _iou(boxes[:, left[:1]], boxes[:, left], offset=0) >= iou_threshold
        matches[0] = True  # a box without an area, too
        groups.append(left[matches].tolist())
        left = left[~matches]
    return groups


@_operator
def softnms(
    boxes: Tensor,
    scores: Tensor,
    dets: Tensor,
    iou_threshold: float,
    sigma: float,
    min_score: float,
    method: int,
    offset: int,
) -> Tensor:
    """Lower the scores of boxes that overlap one of a higher score: to 0 (method 0), by the IoU (1), by a Gaussian (2).

    Returns:
        The indices of the boxes in the order in which they are chosen; ``dets`` begins with their boxes and scores.
    """
    boxes, scores = boxes.T.contiguous(), scores.clone()
    # The chosen boxes, and from ``start`` to ``end`` the candidates, in mmcv's order, which decides among equal scores.
    order, start, end = torch.arange(len(scores)), 0, len(scores)
    while start < end:
        best = start + int(scores[order[start:end]].argmax())
        order[[start, best]] = order[[best, start]]
        chosen, others = order[start], order[start + 1 : end]
        start += 1
        iou = _iou(boxes[:, chosen, None], boxes[:, others], offset)
        if method == 2:
            # torch rounds the exponential function of float32 differently than the C library.
            scores[others] *= (-(iou * iou) / sigma).double().exp().to(iou.dtype)
        else:
            scores[others] *= torch.where(iou >= iou_threshold, method * (1 - iou), 1)
        stays = scores[others] >= min_score
        end = start + int(stays.sum())
        # The last candidates take the places of those that go.
        first, last = stays[: end - start], stays[end - start :]
        others[: end - start][~first] = others[end - start :][last].flip(0)
    dets[:end] = torch.cat([boxes.T, scores[:, None]], 1)[order[:end]]
    return order[:end]


# RoIAlign: a bin is the mean of samples, which interpolate the map linearly along y and along x. Both are weighted
# sums, of rows and of columns, so a RoI is the product of two small matrices and the part of the map that it covers.


@_operator
def roi_align_forward(
    input: Tensor,
    rois: Tensor,
    output: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    bins = aligned_height, aligned_width
    _check_pool_mode(pool_mode)
    if fast := _torchvision(input):
        output.copy_(fast.roi_align(input, rois.to(input), bins, spatial_scale, sampling_ratio, aligned))
        return
    covered = _covered(rois, input.shape[2:], bins, spatial_scale, sampling_ratio, aligned)
    for i, (image, rows, columns, row_weights, column_weights) in enumerate(covered):
        part = _precise(input[image, :, rows, columns])
        output[i] = torch.einsum('yh,chw,xw->cyx', row_weights, part, column_weights)


@_operator
def roi_align_backward(
    grad_output: Tensor,
    rois: Tensor,
    argmax_y: Tensor,
    argmax_x: Tensor,
    grad_input: Tensor,
    aligned_height: int,
    aligned_width: int,
    spatial_scale: float,
    sampling_ratio: int,
    pool_mode: int,
    aligned: bool,
) -> None:
    bins = aligned_height, aligned_width
    _check_pool_mode(pool_mode)
    if fast := _torchvision(grad_output):
        forward = functools.partial(
            fast.roi_align,
            boxes=rois.to(grad_output),
            output_size=bins,
            spatial_scale=spatial_scale,
            sampling_ratio=sampling_ratio,
            aligned=aligned,
        )
        grad_input += _gradients(forward, [grad_input], grad_output)[0]  # it is linear, the same at every input
        return
    grad_maps = _precise(grad_input)
    covered = _covered(rois, grad_maps.shape[2:], bins, spatial_scale, sampling_ratio, aligned)
    for i, (image, rows, columns, row_weights, column_weights) in enumerate(covered):
        grad_bins = _precise(grad_output[i])
        grad_maps[image, :, rows, columns] += torch.einsum('yh,cyx,xw->chw', row_weights, grad_bins, column_weights)
    grad_input.copy_(grad_maps)


def _check_pool_mode(pool_mode: int) -> None:
    if pool_mode == 0:
        _not_here("RoIAlign(pool_mode='max')")


def _covered(
    rois: Tensor, size: Sequence[int], bins: Sequence[int], spatial_scale: float, sampling_ratio: int, aligned: bool
) -> Iterator[tuple[int, slice, slice, Tensor, Tensor]]:
    """Yield for each RoI (image, x1, y1, x2, y2) which part of the maps it covers, and its weights.

    Args:
        rois: shape (R, 5).
        size: height and width of the maps.
        bins: number of bins along y and along x.
        spatial_scale: pixels of the maps per unit of the RoIs.
        sampling_ratio: samples of a bin along each axis; 0 for about one per pixel.
        aligned: whether pixel 0 is centred at 0.5, and RoIs may be smaller than a pixel.

    Yields:
        The image, the rows, the columns, the weights of the rows (bins along y, rows) and of the columns.

    Raises:
        ValueError: a RoI is not finite, or ends before it starts.
    """
    rois = _precise(rois)
    for first in range(0, len(rois), _ROI_BLOCK):
        some = rois[first : first + _ROI_BLOCK]
        corners = some[:, 1:] * spatial_scale - (0.5 if aligned else 0)
        weights = []
        for axis in (1, 0):
            start, length = corners[:, axis], corners[:, axis + 2] - corners[:, axis]
            if not aligned:
                length = length.clamp(min=1)
            if not ((length >= 0) & length.isfinite()).all():
                raise ValueError('RoIs must be finite, with x1 <= x2 and y1 <= y2')
            weights.append(_bin_weights(start, length, bins[1 - axis], size[1 - axis], sampling_ratio))
        ranges = [_nonzero_range(of_axis) for of_axis in weights]
        for image, rows, columns, y, x in zip(some[:, 0].int().tolist(), *ranges, *weights, strict=True):
            yield image, rows, columns, y[:, rows], x[:, columns]


def _bin_weights(start: Tensor, length: Tensor, bins: int, size: int, sampling_ratio: int) -> Tensor:
    """Return the weights of the pixels of an axis in the bins of RoIs (R,) that start there, shape (R, bins, size)."""
    start, length = start[:, None, None], length[:, None, None]
    bin_length = length / bins
    samples = torch.full_like(bin_length, sampling_ratio) if sampling_ratio > 0 else bin_length.ceil()
    sample = torch.arange(int(samples.max()), device=start.device)
    bin_start = start + torch.arange(bins, device=start.device)[:, None] * bin_length
    at = bin_start + (sample + 0.5) * bin_length / samples.clamp(min=1)
    # Within a pixel of the map, samples read its border; beyond, zero.
    share = ((sample < samples) & (at >= -1) & (at <= size)) / samples.clamp(min=1)
    at = at.clamp(0, size - 1)
    low = at.long()
    of_high = (at - low) * share
    weights = start.new_zeros(len(start), bins, size)
    weights.scatter_add_(2, low, share - of_high)
    return weights.scatter_add_(2, (low + 1).clamp(max=size - 1), of_high)


def _nonzero_range(weights: Tensor) -> list[slice]:
    """Return the range of pixels that the bins of each RoI read, from weights of shape (R, bins, size)."""
    has_weight = weights.any(1)
    start = has_weight.int().argmax(1)
    end = (has_weight * torch.arange(1, weights.shape[2] + 1, device=weights.device)).amax(1)
    return list(map(slice, start.tolist(), end.tolist()))


# Focal loss


@_operator
def sigmoid_focal_loss_forward(
    input: Tensor, target: Tensor, weight: Tensor, output: Tensor, gamma: float, alpha: float
) -> None:
    log_right, log_wrong, balance = _focal_terms(input, target, weight, alpha)
    output.copy_(-balance * (gamma * log_wrong).exp() * log_right)


@_operator
def sigmoid_focal_loss_backward(
    input: Tensor, target: Tensor, weight: Tensor, grad_input: Tensor, gamma: float, alpha: float
) -> None:
    log_right, log_wrong, balance = _focal_terms(input, target, weight, alpha)
    slope = (gamma * log_wrong).exp() * (gamma * log_right.exp() * log_right - log_wrong.exp())
    grad_input.copy_(torch.where(_is_target(input, target), slope, -slope) * balance)


def _focal_terms(input: Tensor, target: Tensor, weight: Tensor, alpha: float) -> tuple[Tensor, Tensor, Tensor]:
    """Return the logarithms of the probabilities of being right and wrong, and the factor of each class; (N, classes).

    mmcv takes the logarithm of a rounded probability instead, which is wrong for logits above 17.
    """
    is_target = _is_target(input, target)
    logits = torch.where(is_target, _precise(input), -_precise(input))
    balance = torch.where(is_target, alpha, 1 - alpha).to(logits)
    if len(weight):
        of_class = F.pad(
            _precise(weight), (0, 1), value=1.0
        )  # the background comes after the last class, and has no weight
        balance = balance * of_class[target][:, None]
    return F.logsigmoid(logits), F.logsigmoid(-logits), balance


def _is_target(input: Tensor, target: Tensor) -> Tensor:
    return target[:, None] == torch.arange(input.shape[1], device=input.device)


# Multi-scale deformable attention


def _attend(shapes: Tensor) -> Callable[..., Tensor]:
    """Return mmcv's own function in PyTorch, of values, locations and weights, which it uses on CPUs."""
    from mmcv.ops.multi_scale_deform_attn import multi_scale_deformable_attn_pytorch  # imports this module

    sizes = shapes.tolist()
    return lambda value, locations, weights: multi_scale_deformable_attn_pytorch(value, sizes, locations, weights)


@_operator
def ms_deform_attn_forward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    im2col_step: int,
) -> Tensor:
    return _attend(value_spatial_shapes)(value, sampling_locations, attention_weights)


@_operator
def ms_deform_attn_backward(
    value: Tensor,
    value_spatial_shapes: Tensor,
    value_level_start_index: Tensor,
    sampling_locations: Tensor,
    attention_weights: Tensor,
    grad_output: Tensor,
    grad_value: Tensor,
    grad_sampling_loc: Tensor,
    grad_attn_weight: Tensor,
    im2col_step: int,
) -> None:
    inputs = value, sampling_locations, attention_weights
    gradients = _gradients(_attend(value_spatial_shapes), inputs, grad_output)
    for buffer, gradient in zip((grad_value, grad_sampling_loc, grad_attn_weight), gradients, strict=True):
        buffer.copy_(gradient)


# Deformable convolutions, without (version 1) and with a mask (version 2)


def _deform_conv(
    input: Tensor,
    weight: Tensor,
    offset: Tensor,
    mask: Tensor | None = None,
    bias: Tensor | None = None,
    *,
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
    groups: int,
    deform_groups: int,
) -> Tensor:
    """Convolve with taps that are moved by ``offset`` and multiplied by ``mask``.

    mmdet's DyHead passes an offset and a mask of a larger map. mmcv reads the first numbers of each image as if they
    had the shape of the output. Published weights were trained that way, so this is done here too.

    Args:
        input: shape (N, C, H, W).
        weight: shape (D, C / groups, KH, KW).
        offset: along y and x, in pixels; shape (N, deform groups * KH * KW * 2, OH, OW).
        mask: shape (N, deform groups * KH * KW, OH, OW).
        bias: shape (D,).

    Returns:
        Shape (N, D, OH, OW).
    """
    input, weight, offset = _precise(input), _precise(weight), _precise(offset)
    batch, channels, *size = input.shape
    kernel, taps = weight.shape[2:], weight.shape[2:].numel()
    positions = []  # of the taps without an offset, along y and along x, shapes (KH, OH) and (KW, OW)
    for axis in range(2):
        reach = dilation[axis] * (kernel[axis] - 1)
        first = torch.arange(-padding[axis], size[axis] + padding[axis] - reach, stride[axis], device=input.device)
        positions.append(first + dilation[axis] * torch.arange(kernel[axis], device=input.device)[:, None])
    out = positions[0].shape[1], positions[1].shape[1]
    numbers = deform_groups * taps * out[0] * out[1]
    offset = offset.flatten(1)[:, : 2 * numbers].reshape(batch, -1, *out)
    if mask is not None:
        mask = _precise(mask).flatten(1)[:, :numbers].reshape(batch, -1, *out)
    if fast := _torchvision(input):  # it derives the groups from the shapes
        return fast.deform_conv2d(input, offset, weight, bias, stride, padding, dilation, mask)

    moved = offset.reshape(batch * deform_groups, *kernel, 2, *out)
    y = positions[0][:, None, :, None] + moved[:, :, :, 0]
    x = positions[1][None, :, None, :] + moved[:, :, :, 1]
    y = y.masked_fill((y <= -1) | (x <= -1), -2)  # a tap one pixel before the map has no gradient, as in mmcv
    # At integer positions, where offsets begin, the gradient depends on the pixels to which rounding errors lead. With
    # a map of 2 ** k + 1 pixels from -1 to 1, these positions are exact in grid_sample.
    padded = [2 ** max(1, (length - 2).bit_length()) + 1 for length in size]
    maps = input.reshape(batch * deform_groups, channels // deform_groups, *size)
    maps = F.pad(maps, (0, padded[1] - size[1], 0, padded[0] - size[0]))
    grid = torch.stack([x * (2 / (padded[1] - 1)) - 1, y * (2 / (padded[0] - 1)) - 1], -1)
    # The samples have shape (N * deform groups, C / deform groups, taps, OH * OW).
    samples = F.grid_sample(maps, grid.view(batch * deform_groups, taps, -1, 2), align_corners=True)
    if mask is not None:
        samples = samples * mask.reshape(batch * deform_groups, 1, taps, -1)
    columns = samples.view(batch, groups, channels // groups * taps, -1)
    output = (weight.view(groups, -1, columns.shape[2]) @ columns).view(batch, -1, *out)
    return output if bias is None else output + _precise(bias)[:, None, None]


def _settings(sizes: dict[str, int]) -> dict[str, Any]:
    """Return the keyword arguments of :func:`_deform_conv` from mmcv's, which have other names in version 2."""
    if 'dH' in sizes:
        stride, padding, dilation = ((sizes[f'{name}H'], sizes[f'{name}W']) for name in ('d', 'pad', 'dilation'))
    else:
        stride, padding, dilation = ((sizes[f'{name}_h'], sizes[f'{name}_w']) for name in ('stride', 'pad', 'dilation'))
    groups = {'groups': sizes['group'], 'deform_groups': sizes['deformable_group']}
    return {'stride': stride, 'padding': padding, 'dilation': dilation, **groups}


@_operator
def deform_conv_forward(
    input: Tensor, weight: Tensor, offset: Tensor, output: Tensor, columns: Tensor, ones: Tensor, **sizes: int
) -> None:
    output.copy_(_deform_conv(input, weight, offset, **_settings(sizes)))


@_operator
def deform_conv_backward_input(
    input: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_input: Tensor,
    grad_offset: Tensor,
    weight: Tensor,
    columns: Tensor,
    **sizes: int,
) -> None:
    settings = _settings(sizes)
    gradients = _gradients(lambda x, moved: _deform_conv(x, weight, moved, **settings), (input, offset), grad_output)
    grad_input.copy_(gradients[0])
    grad_offset.copy_(gradients[1])


@_operator
def deform_conv_backward_parameters(
    input: Tensor,
    offset: Tensor,
    grad_output: Tensor,
    grad_weight: Tensor,
    columns: Tensor,
    ones: Tensor,
    scale: float,
    **sizes: int,
) -> None:
    settings = _settings(sizes)
    # The convolution is linear in its weight, so its gradient is the same at every weight.
    (gradient,) = _gradients(
        lambda weight: _deform_conv(input, weight, offset, **settings), (grad_weight,), grad_output
    )
    grad_weight += scale * gradient


@_operator
def modulated_deform_conv_forward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    output: Tensor,
    columns: Tensor,
    with_bias: bool,
    **sizes: int,
) -> None:
    output.copy_(_deform_conv(input, weight, offset, mask, bias if with_bias else None, **_settings(sizes)))


@_operator
def modulated_deform_conv_backward(
    input: Tensor,
    weight: Tensor,
    bias: Tensor,
    ones: Tensor,
    offset: Tensor,
    mask: Tensor,
    columns: Tensor,
    grad_input: Tensor,
    grad_weight: Tensor,
    grad_bias: Tensor,
    grad_offset: Tensor,
    grad_mask: Tensor,
    grad_output: Tensor,
    with_bias: bool,
    **sizes: int,
) -> None:
    function = functools.partial(_deform_conv, **_settings(sizes))
    gradients = _gradients(function, (input, weight, offset, mask), grad_output)
    for buffer, gradient in zip((grad_input, grad_weight, grad_offset, grad_mask), gradients, strict=True):
        buffer.copy_(gradient)
    if with_bias:
        grad_bias.copy_(grad_output.sum((0, 2, 3)))


# PSANet: each position has a mask of weights around it, which here become weights of all positions.


def _psamask(input: Tensor, psa_type: int, mask_size: Sequence[int], half: Sequence[int]) -> Tensor:
    """Return the weights of all pairs of positions, (N, H * W, H, W), from masks (N, mask height * mask width, H, W).

    The mask of position (y, x) has the weight of position (i, j) at (i - y, j - x) from its centre. The output has it
    at (i, j), (y, x) where positions collect (``psa_type`` 0), and at (y, x), (i, j) where they distribute.
    """
    batch, _, height, width = input.shape
    row, column = (torch.arange(size, device=input.device) for size in (height, width))
    mask_row, mask_column = row[:, None] - row + half[0], column[:, None] - column + half[1]  # (i, y) and (j, x)
    in_row, in_column = ((at >= 0) & (at < size) for at, size in zip((mask_row, mask_column), mask_size, strict=True))
    tap = mask_row[:, None, :, None] * mask_size[1] + mask_column[:, None]  # (i, j, y, x)
    is_inside = in_row[:, None, :, None] & in_column[:, None]
    tap, is_inside = tap.flatten(0, 1).clamp(0, input.shape[1] - 1), is_inside.flatten(0, 1)
    collected = input.gather(1, tap.expand(batch, -1, -1, -1)) * is_inside
    return collected if psa_type == 0 else collected.flatten(2).transpose(1, 2).reshape(collected.shape)


@_operator
def psamask_forward(
    input: Tensor,
    output: Tensor,
    psa_type: int,
    num_: int,
    h_feature: int,
    w_feature: int,
    h_mask: int,
    w_mask: int,
    half_h_mask: int,
    half_w_mask: int,
) -> None:
    output.copy_(_psamask(input, psa_type, (h_mask, w_mask), (half_h_mask, half_w_mask)))


@_operator
def psamask_backward(
    grad_output: Tensor,
    grad_input: Tensor,
    psa_type: int,
    num_: int,
    h_feature: int,
    w_feature: int,
    h_mask: int,
    w_mask: int,
    half_h_mask: int,
    half_w_mask: int,
) -> None:
    function = functools.partial(
        _psamask, psa_type=psa_type, mask_size=(h_mask, w_mask), half=(half_h_mask, half_w_mask)
    )
    grad_input.copy_(_gradients(function, [grad_input], grad_output)[0])  # it is linear, the same at every input


# CARAFE: upsampling in which each pixel is a weighted sum of the pixels around it, with weights of its own.


def _carafe(features: Tensor, masks: Tensor, kernel_size: int, group_size: int, scale_factor: int) -> Tensor:
    """Upsample features (N, C, H, W) with masks (N, groups * kernel_size ** 2, H * scale_factor, W * scale_factor)."""
    batch, channels, height, width = features.shape
    around = F.unfold(features, kernel_size, padding=kernel_size // 2)
    around = around.view(batch, group_size, channels // group_size, kernel_size**2, height, width)
    masks = masks.view(batch, group_size, kernel_size**2, height, scale_factor, width, scale_factor)
    return torch.einsum('ngckhw,ngkhiwj->ngchiwj', around, masks).reshape(
        batch, channels, height * scale_factor, width * scale_factor
    )


@_operator
def carafe_forward(
    features: Tensor,
    masks: Tensor,
    rfeatures: Tensor,
    routput: Tensor,
    rmasks: Tensor,
    output: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    rfeatures.copy_(features)  # mmcv keeps these for the backward pass
    output.copy_(_carafe(features, masks, kernel_size, group_size, scale_factor))


@_operator
def carafe_backward(
    grad_output: Tensor,
    rfeatures: Tensor,
    masks: Tensor,
    rgrad_output: Tensor,
    rgrad_input_hs: Tensor,
    rgrad_input: Tensor,
    rgrad_masks: Tensor,
    grad_input: Tensor,
    grad_masks: Tensor,
    kernel_size: int,
    group_size: int,
    scale_factor: int,
) -> None:
    function = functools.partial(_carafe, kernel_size=kernel_size, group_size=group_size, scale_factor=scale_factor)
    gradients = _gradients(function, (rfeatures, masks), grad_output)
    grad_input.copy_(gradients[0])
    grad_masks.copy_(gradients[1])


# Convolutions at chosen positions, of guided anchoring


@_operator
def masked_im2col_forward(
    im: Tensor,
    mask_h_idx: Tensor,
    mask_w_idx: Tensor,
    col: Tensor,
    kernel_h: int,
    kernel_w: int,
    pad_h: int,
    pad_w: int,
) -> None:
    """Fill ``col`` (C * kernel_h * kernel_w, positions) with what a convolution of ``im`` (1, C, H, W) reads there."""
    width = im.shape[3] + 2 * pad_w - kernel_w + 1
    columns = F.unfold(im, (kernel_h, kernel_w), padding=(pad_h, pad_w))
    col.copy_(columns[0, :, mask_h_idx * width + mask_w_idx])


@_operator
def masked_col2im_forward(
    col: Tensor, mask_h_idx: Tensor, mask_w_idx: Tensor, im: Tensor, height: int, width: int, channels: int
) -> None:
    im[0, :, mask_h_idx, mask_w_idx] = col
