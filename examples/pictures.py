"""Draw what a Swin does to a photograph: its pyramid, the attention of a token, windows and shift masks.

    python examples/pictures.py pyramid photo.jpg --checkpoint swin_t.in1k --out pyramid.png
    python examples/pictures.py attention photo.jpg --checkpoint swin_t.in1k --stage 2 --block 1 --pixel 9 9 --out a.png
    python examples/pictures.py windows photo.jpg --stage 1 --out windows.png
    python examples/pictures.py masks --grid 20 26 --out masks.png

For Grad-CAM of a classifier, the package grad-cam takes any block:

    GradCAM(model, [model.backbone.stages[2].blocks[-1]], reshape_transform=lambda x: x.permute(0, 3, 1, 2))
"""

import argparse
import math

import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle

from swin_dense import create_backbone, extract_pyramid
from swin_dense.explore.colours import pca_rgb
from swin_dense.images.presets import IMAGENET_MEAN, IMAGENET_STD
from swin_dense.images.reading import normalize, read_image
from swin_dense.ops import reference
from swin_dense.ops.windows import region_ids, window_grid


def token_attention(backbone, image, stage, block, pixel):
    """Return the attention weights of the token at a pixel, (heads, H, W), zero outside its window."""
    img = normalize(read_image(image, backbone.in_channels), IMAGENET_MEAN, IMAGENET_STD)[None]
    attn = backbone.stages[stage].blocks[block].attn
    recorded = []
    # With a hook on the dropout, attention computes the weights, (N, A, T, T), and passes them through it.
    hook = attn.w_msa.attn_drop.register_forward_pre_hook(lambda module, args: recorded.append(args[0]))
    with torch.no_grad(), hook:
        backbone(img)
    stride = math.prod(backbone.strides[: stage + 1])
    size = window_grid(img.shape[2], img.shape[3], (stride, stride))
    numbers = torch.arange(1, 1 + size[0] * size[1]).view(1, *size, 1)
    tokens_NT = reference.partition(numbers, *attn.windows_on(*size))[0, :, :, 0]  # 0 is padding
    window, token = (tokens_NT == numbers[0, pixel[0] // stride, pixel[1] // stride]).nonzero()[0].tolist()
    weights_AT = recorded[0][window, :, token]
    of_tokens = weights_AT.new_zeros(len(weights_AT), 1 + size[0] * size[1])
    return of_tokens.index_add(1, tokens_NT[window], weights_AT)[:, 1:].unflatten(1, size)


def draw_pyramid(pyramid, image):
    """Draw an image and every level, with its first three principal components as red, green and blue."""
    figure, axes = panels(1 + len(pyramid))
    axes[0].imshow(colours_of(image))
    for ax, (stride, level) in zip(axes[1:], pyramid.items(), strict=True):
        ax.imshow(pca_rgb(level))
        ax.set_title(f'stride {stride}: {" x ".join(map(str, level.shape))}')
    return figure


def draw_attention(weights, image, stride, pixel):
    """Draw the attention of a token as heat maps over the image: the mean of all heads, then each head."""
    pixels = colours_of(image)
    heats = [weights.mean(0), *weights]
    figure, axes = panels(len(heats))
    for index, (ax, heat) in enumerate(zip(axes, heats, strict=True)):
        extent = (0, heat.shape[1] * stride, heat.shape[0] * stride, 0)
        ax.imshow(0.55 * pixels, extent=(0, pixels.shape[1], pixels.shape[0], 0))
        ax.imshow(heat, extent=extent, cmap='inferno', alpha=(0.75 * heat / heat.max()).sqrt().numpy())
        corner = (pixel[1] // stride * stride, pixel[0] // stride * stride)
        ax.add_patch(Rectangle(corner, stride, stride, fill=False, edgecolor='cyan'))
        ax.set_title(f'head {index - 1}' if index else 'mean of the heads')
    return figure


def draw_windows(image, stride, window):
    """Draw the windows of one stage over the image, without and with shift: one tint for each window."""
    pixels = colours_of(image)
    size = window_grid(*pixels.shape[:2], (stride, stride))
    rows, columns = window_grid(*size, (window, window))
    figure, axes = panels(2)
    for ax, shift in zip(axes, (0, window // 2), strict=True):
        ids = torch.arange(rows * columns)[None, :, None, None].expand(1, -1, window**2, 1)
        regions = region_ids(*size, (window, window), (shift, shift))[None, :, :, None]
        cells = reference.merge(ids * 4 + regions, size, (window, window), (shift, shift))[0, :, :, 0]
        extent = (0, size[1] * stride, size[0] * stride, 0)
        ax.imshow(pixels, extent=(0, pixels.shape[1], pixels.shape[0], 0))
        ax.imshow(cells % 20, extent=extent, cmap='tab20', alpha=0.4, interpolation='nearest')
        ax.set_title(f'windows of {window} x {window}, shift {shift}')
    return figure


def shift_masks(height, width, window):
    """Return which pairs of tokens attend to each other, (T, T), in the four kinds of shifted windows."""
    rows, columns = window_grid(height, width, (window, window))
    ids = region_ids(height, width, (window, window), (window // 2, window // 2)).reshape(rows, columns, -1)
    kinds = {'inside': ids[0, 0], 'right column': ids[0, -1], 'bottom row': ids[-1, 0], 'bottom right': ids[-1, -1]}
    return {name: regions[:, None] == regions for name, regions in kinds.items()}


def draw_shift_masks(height, width, window):
    figure, axes = panels(4)
    for ax, (name, mask) in zip(axes, shift_masks(height, width, window).items(), strict=True):
        ax.imshow(mask, cmap='gray')
        ax.set_title(name)
    return figure


def colours_of(image):
    return read_image(image, page=0).permute(1, 2, 0).clamp(0, 1).numpy()


def panels(count):
    figure = Figure(figsize=(3 * count, 3), layout='constrained')
    axes = figure.subplots(1, count, squeeze=False)[0].tolist()
    for ax in axes:
        ax.set_axis_off()
    return figure, axes


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('kind', choices=('pyramid', 'attention', 'windows', 'masks'))
    parser.add_argument('image', nargs='?')
    parser.add_argument('--checkpoint')
    parser.add_argument('--stage', type=int, default=1)
    parser.add_argument('--block', type=int, default=0)
    parser.add_argument('--pixel', type=int, nargs=2, default=(0, 0))
    parser.add_argument('--window-size', type=int, default=7)
    parser.add_argument('--grid', type=int, nargs=2, default=(20, 26))
    parser.add_argument('--out', required=True)
    args = parser.parse_args()
    stride = 4 * 2**args.stage
    if args.kind == 'masks':
        figure = draw_shift_masks(*args.grid, args.window_size)
    elif args.kind == 'windows':
        figure = draw_windows(args.image, stride, args.window_size)
    else:
        backbone = create_backbone(None if args.checkpoint else 'swin_t', args.checkpoint)
        if args.kind == 'pyramid':
            figure = draw_pyramid(extract_pyramid(backbone, args.image), args.image)
        else:
            weights = token_attention(backbone, args.image, args.stage, args.block, args.pixel)
            figure = draw_attention(weights, args.image, stride, args.pixel)
    figure.savefig(args.out)


if __name__ == '__main__':
    main()
