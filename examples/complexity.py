"""Plot and print the cost of a Swin against the side of the image, with windows and with global attention.

    python examples/complexity.py --arch t --out complexity.png

The formulas are those of the paper (Liu et al., ICCV 2021, equations 1 and 2), in multiply-adds.
"""

import argparse

import torch
from matplotlib.figure import Figure
from torch.utils.flop_counter import FlopCounterMode

from swin_dense import SwinBackbone

SIDES = (112, 224, 448, 896, 1792)  # in pixels


def msa_flops(height: int, width: int, channels: int) -> int:
    """Return the FLOPs of global self-attention on a map: 4 h w C^2 + 2 (h w)^2 C."""
    tokens = height * width
    return 4 * tokens * channels**2 + 2 * tokens**2 * channels


def window_msa_flops(height: int, width: int, channels: int, window: int) -> int:
    """Return the FLOPs of window attention on a map of whole windows: 4 h w C^2 + 2 M^2 h w C."""
    tokens = height * width
    return 4 * tokens * channels**2 + 2 * window**2 * tokens * channels


def counted(backbone: SwinBackbone, side: int) -> tuple[int, int]:
    """Return the FLOPs of a backbone on meta for a square image, and what they were with global attention."""
    with FlopCounterMode(display=False) as counter, torch.no_grad():
        backbone(torch.zeros(1, 3, side, side, device='meta'))
    own = whole = counter.get_total_flops() // 2  # torch counts a multiply-add as two
    window = backbone.window_size[0]
    for depth, channels, stride in zip(backbone.arch.depths, backbone.arch.channels, backbone.out_strides, strict=True):
        tokens = -(-side // stride)
        padded = -(-tokens // window) * window
        whole += depth * (msa_flops(tokens, tokens, channels) - window_msa_flops(padded, padded, channels, window))
    return own, whole


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', default='t')
    parser.add_argument('--window-size', type=int, default=7)
    parser.add_argument('--out', required=True)
    args = parser.parse_args()
    with torch.device('meta'):
        backbone = SwinBackbone(args.arch, window_size=args.window_size)
    windows, everywhere = zip(*(counted(backbone, side) for side in SIDES), strict=True)
    figure = Figure(figsize=(7, 4.5), layout='constrained')
    axes = figure.add_subplot()
    for label, flops in (('global attention', everywhere), (f'windows of {args.window_size}', windows)):
        gflops = [value / 1e9 for value in flops]
        axes.loglog(SIDES, gflops, label=label, marker='o')
        print(label, *(f'{side}: {value:.1f}' for side, value in zip(SIDES, gflops, strict=True)), sep=', ')
    axes.set(xlabel='side of a square image, pixels', ylabel='GFLOPs (multiply-adds)')
    axes.set_xticks(SIDES, labels=SIDES)
    axes.set_xticks([], minor=True)
    axes.legend()
    figure.savefig(args.out, dpi=150)


if __name__ == '__main__':
    main()
