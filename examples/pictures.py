"""Draw what a Swin does to a photograph: its pyramid, the attention of a token, windows and shift masks.

python examples/pictures.py pyramid photo.jpg --checkpoint swin_t.in1k --out pyramid.png
python examples/pictures.py attention photo.jpg --checkpoint swin_t.in1k --stage 2 --block 1 --pixel 9 9 --out a.png
python examples/pictures.py windows photo.jpg --stage 1 --out windows.png
python examples/pictures.py masks --out masks.png
"""

import argparse

import numpy as np
import torch
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from PIL import Image, ImageOps

from swin_dense import create_backbone, extract_pyramid
from swin_dense.explore.colours import pca_rgb
from swin_dense.ops.windows import Grid, slots_of_windows, window_grid


def places(size, window, shift):
    """Return the window of each cell of a map and its token in that window, two tensors (H, W)."""
    down, across = window_grid(*size, window)
    rows = (torch.arange(size[0]) - shift[0]) % (down * window[0])
    columns = (torch.arange(size[1]) - shift[1]) % (across * window[1])
    windows = rows[:, None] // window[0] * across + columns // window[1]
    return windows, rows[:, None] % window[0] * window[1] + columns % window[1]


def token_attention(backbone, image, stage, block, pixel):
    """Return the attention weights of the token at a pixel, (heads, H, W), zero outside its window."""
    attn = backbone.stages[stage].blocks[block].attn
    recorded = []
    # With a hook on the dropout, attention computes the weights, (N, A, T, T), and passes them through it.
    hook = attn.w_msa.attn_drop.register_forward_pre_hook(lambda module, args: recorded.append(args[0]))
    with hook:
        pyramid = extract_pyramid(backbone, image)
    stride = backbone.out_strides[stage]
    size = pyramid[stride].shape[1:]
    windows, tokens = places(size, *attn.windows_on(*size))
    cell = (pixel[0] // stride, pixel[1] // stride)
    weights_AT = recorded[0][windows[cell], :, tokens[cell]]
    return weights_AT[:, tokens] * (windows == windows[cell])


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
    """Draw the windows of a stage, without and with the shift, which joins pieces of one colour; hatch the padding."""
    pixels = colours_of(image)
    size = window_grid(*pixels.shape[:2], (stride, stride))
    padded = [count * window for count in window_grid(*size, (window, window))]
    height, width = (stride * cells for cells in padded)
    figure, axes = panels(2)
    for ax, shift in zip(axes, (0, window // 2), strict=True):
        windows, _ = places(padded, (window, window), (shift, shift))
        divided = torch.cat([windows[:shift].flatten(), windows[:, :shift].flatten()])
        tints = np.ma.masked_where(~torch.isin(windows, divided), windows % 20)
        ax.add_patch(Rectangle((0, 0), width, height, fill=False, hatch='///', edgecolor='grey', zorder=0))
        ax.imshow(pixels, extent=(0, pixels.shape[1], pixels.shape[0], 0), zorder=1)
        ax.imshow(tints, extent=(0, width, height, 0), cmap='tab20', vmin=0, vmax=19, alpha=0.5, zorder=2)
        ax.vlines(range(shift * stride, width + 1, window * stride), 0, height, colors='black', linewidth=0.7)
        ax.hlines(range(shift * stride, height + 1, window * stride), 0, width, colors='black', linewidth=0.7)
        ax.set_title(f'stride {stride}: windows of {window} x {window}, shift {shift}')
    return figure


def shift_masks(window):
    """Return which pairs of tokens attend to each other, (T, T), in the four kinds of shifted windows."""
    grid = Grid((2 * window, 2 * window), (window, window), (window // 2, window // 2))
    _, regions = slots_of_windows(grid, torch.device('cpu'))
    ids = regions.reshape(2, 2, -1)
    kinds = {'inside': ids[0, 0], 'right column': ids[0, 1], 'bottom row': ids[1, 0], 'bottom right': ids[1, 1]}
    return {name: regions[:, None] == regions for name, regions in kinds.items()}


def draw_shift_masks(window):
    """Draw which pairs of tokens attend to each other in white: a row for each query, a column for each key."""
    figure, axes = panels(4)
    for ax, (name, mask) in zip(axes, shift_masks(window).items(), strict=True):
        ax.imshow(mask, cmap='gray', vmin=0, vmax=1)
        ax.set_axis_on()
        ax.set(title=f'window {name}', xlabel='key token', ylabel='query token')
    return figure


def colours_of(image):
    return np.asarray(ImageOps.exif_transpose(Image.open(image)).convert('RGB')) / 255


def panels(count):
    """Return a figure and its axes, at most five in a row."""
    rows, columns = -(-count // 5), min(count, 5)
    figure = Figure(figsize=(3 * columns, 3 * rows), layout='compressed')
    axes = figure.subplots(rows, columns, squeeze=False).flatten()
    for ax in axes:
        ax.set_axis_off()
    return figure, axes[:count]


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('kind', choices=('pyramid', 'attention', 'windows', 'masks'))
    parser.add_argument('image', nargs='?')
    parser.add_argument('--checkpoint')
    parser.add_argument('--stage', type=int, default=1)
    parser.add_argument('--block', type=int, default=0)
    parser.add_argument('--pixel', type=int, nargs=2, default=(0, 0))
    parser.add_argument('--window-size', type=int, default=7)
    parser.add_argument('--out', required=True)
    args = parser.parse_args()
    stride = 4 * 2**args.stage
    if args.kind == 'masks':
        figure = draw_shift_masks(args.window_size)
    elif args.kind == 'windows':
        figure = draw_windows(args.image, stride, args.window_size)
    else:
        backbone = create_backbone(None if args.checkpoint else 'swin_t', args.checkpoint)
        if args.kind == 'pyramid':
            figure = draw_pyramid(extract_pyramid(backbone, args.image), args.image)
        else:
            weights = token_attention(backbone, args.image, args.stage, args.block, args.pixel)
            figure = draw_attention(weights, args.image, stride, args.pixel)
    figure.savefig(args.out, dpi=120, bbox_inches='tight')


if __name__ == '__main__':
    main()
