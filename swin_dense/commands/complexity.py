"""Show what attention costs, globally and in windows, and how that grows with the image.

    swin-dense complexity --map 112 112 --channels 128 --window 7     # one attention on one map
    swin-dense complexity --arch swin_t --image 800 1280              # a backbone, stage by stage
    swin-dense complexity --arch swin_t --plot complexity.png         # cost against image size

A FLOP is one multiply-add.
"""

from __future__ import annotations

import argparse
from pathlib import Path

from swin_dense import checks
from swin_dense.analysis.complexity import PARTS, Cost, backbone_costs, msa_flops, total, window_msa_flops
from swin_dense.archs import arch_letter
from swin_dense.windows import window_grid

PLOT_SIDES = range(112, 1793, 28)
PLOT_TICKS = (112, 224, 448, 896, 1792)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--arch', help='of the backbone: swin_t, swin_s, swin_b or swin_l (default: swin_t)')
    parser.add_argument('--window', type=int, default=7, help='side of a window in tokens (default: %(default)s)')
    parser.add_argument('--channels', type=int, help='of the map (default: 128)')
    what = parser.add_mutually_exclusive_group()
    size = ('HEIGHT', 'WIDTH')
    what.add_argument('--map', nargs=2, type=int, metavar=size, help='a map, size in tokens (default: 112 112)')
    what.add_argument('--image', nargs=2, type=int, metavar=size, help='a whole backbone, size in pixels')
    what.add_argument('--plot', type=Path, help='draw cost against image size into this file')


def run(args: argparse.Namespace) -> int:
    complete(args)
    if args.plot:
        plot(args.arch, args.window, args.plot)
        print(f'wrote {args.plot}')
    elif args.image:
        print(backbone_table(args.arch, args.image[0], args.image[1], args.window))
    else:
        print(attention_table(args.map[0], args.map[1], args.channels, args.window))
    return 0


def complete(args: argparse.Namespace) -> None:
    """Check the options together and fill in what was left out."""
    checks.integer('--window', args.window)
    if args.image or args.plot:
        if args.channels is not None:
            raise ValueError('--channels is that of a map; leave it out with --image and --plot, or give --map')
        args.arch = arch_letter('swin_t' if args.arch is None else args.arch)
        if args.image:
            checks.integers('--image', args.image)
        return
    if args.arch is not None:
        raise ValueError('--arch is that of a backbone; give --image HEIGHT WIDTH or --plot FILE, or leave it out')
    args.map = checks.integers('--map', args.map or (112, 112))
    args.channels = checks.integer('--channels', 128 if args.channels is None else args.channels)


def attention_table(height: int, width: int, channels: int, window: int) -> str:
    everywhere = msa_flops(height, width, channels)
    rows, columns = window_grid(height, width, (window, window))
    padded = (rows * window, columns * window)
    windowed = window_msa_flops(padded[0], padded[1], channels, window)
    lines = [
        f'attention on a map of {height} x {width} tokens with {channels} channels',
        f'  global:                 {everywhere:20,} FLOPs',
        f'  in windows of {window:2} x {window:2}:   {windowed:20,} FLOPs, {everywhere / windowed:.1f} times less',
        f'  saved by the windows:   {everywhere - windowed:20,} FLOPs',
    ]
    if padded != (height, width):
        lines.append(f'  The windows do not tile the map: it is padded to {padded[0]} x {padded[1]} tokens for them.')
    return '\n'.join(lines)


def backbone_table(arch: str, height: int, width: int, window: int) -> str:
    stages = backbone_costs(arch, height, width, window)
    names = [f'stage {number}' for number in range(1, len(stages) + 1)]
    lines = [f'Swin-{arch.upper()} with window {window} on an image of {height} x {width} pixels, GFLOPs', '']
    lines.append(f'{"":16}' + ''.join(f'{name:>10}' for name in [*names, 'all']))
    for part in PARTS:
        lines.append(_row(part, [stage[part] for stage in stages]))
    lines.append(_row('all', [total([stage]) for stage in stages]))
    everywhere = total(backbone_costs(arch, height, width, window_size=None)).flops
    lines += [
        '',
        f'{total(stages).parameters:,} parameters',
        f'{everywhere / 1e9:,.2f} GFLOPs if every token attended to all others',
    ]
    return '\n'.join(lines)


def _row(name: str, costs: list[Cost]) -> str:
    flops = [cost.flops for cost in costs]
    return f'{name:16}' + ''.join(f'{value / 1e9:10.2f}' for value in [*flops, sum(flops)])


def plot(arch: str, window: int, path: Path) -> None:
    """Draw the backbone's cost against the side of a square image, for global and for window attention."""
    import matplotlib

    matplotlib.use('Agg')
    from matplotlib import pyplot

    figure, axes = pyplot.subplots(figsize=(7, 4.5), layout='constrained')
    curves = {'global attention': None, f'windows of {window} x {window}': window}
    for (label, size), color in zip(curves.items(), ('tab:red', 'tab:blue'), strict=True):
        costs = [total(backbone_costs(arch, side, side, size)).flops / 1e9 for side in PLOT_SIDES]
        axes.plot(PLOT_SIDES, costs, color=color, linewidth=2, label=label)
    axes.set(
        title=f'Cost of Swin-{arch.upper()}, and of the same blocks with global attention',
        xlabel='side of a square image, pixels',
        ylabel='GFLOPs (multiply-adds)',
        xscale='log',
        yscale='log',
        xlim=(PLOT_SIDES[0], PLOT_SIDES[-1]),
    )
    axes.set_xticks(PLOT_TICKS, [str(side) for side in PLOT_TICKS])
    axes.minorticks_off()
    axes.grid(alpha=0.3)
    axes.legend(loc='upper left')
    figure.savefig(path, dpi=150)
    pyplot.close(figure)
