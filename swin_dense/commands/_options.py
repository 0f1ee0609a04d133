"""Options shared by several commands: one definition, meaning and check for each.

This module does not import torch, so that `--help` and errors about arguments are fast.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from swin_dense.archs.arch import resolve_arch, split_name
from swin_dense.archs.published import place_of, suggestion
from swin_dense.images.presets import PRESETS
from swin_dense.utils import checks
from swin_dense.utils.addresses import is_address
from swin_dense.utils.atomic import check_destination
from swin_dense.utils.choices import EXPORTED


class HeightWidthAction(argparse.Action):
    """Store one or two numbers as (height, width)."""

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        setattr(namespace, self.dest, checks.pair(option or self.dest, values))


def add_checkpoint(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        '--checkpoint', help='weights: name (`swin-dense weights`), file or address (default: random weights)'
    )


def add_backbone(parser: argparse._ActionsContainer, device: str | None = None) -> None:
    """Add the options for the architecture, the weights and the device of a backbone, but for ``--checkpoint``."""
    inferred = 'default: that of the checkpoint'
    add_prefix(parser)
    parser.add_argument('--arch', help=f'swin_t to swin_l or swinv2_t to swinv2_l ({inferred}, else swin_t)')
    window = f'window size in tokens: side, or height and width; weights are resized to it ({inferred}, else 7)'
    _add_pair(parser, '--window-size', None, window)
    parser.add_argument(
        '--clamp-window', action=argparse.BooleanOptionalAction, help='shrink windows to small maps, as classifiers do'
    )
    add_device(parser, device)


def add_normalization(
    parser: argparse._ActionsContainer, note: str | None = None, scale: str = 'the largest value of their type'
) -> None:
    """Add the options that state how the stored values of images become the input of a backbone."""
    group = parser.add_argument_group('normalisation of images: (values of --bands / --scale - --mean) / --std', note)
    per_channel: dict[str, Any] = {'nargs': '+', 'type': float, 'metavar': 'X'}
    group.add_argument('--mean', help="a number, or a number per channel (default: ImageNet's)", **per_channel)
    group.add_argument('--std', help='likewise', **per_channel)
    group.add_argument('--scale', help=f'divides stored values, such as 10000 (default: {scale})', **per_channel)
    group.add_argument('--clamp', action='store_true', help='clamp the result to 0 to 1')
    group.add_argument(
        '--normalization', choices=list(PRESETS), help='--mean, --std, --scale and --clamp of published weights'
    )
    group.add_argument('--bands', type=int, nargs='+', metavar='N', help='bands to use, in this order, from 0')


def normalization_options(args: argparse.Namespace) -> dict[str, Any]:
    """Return the arguments of ``swin_dense.features.Normalization`` that the options of a command state."""
    given = {'mean': args.mean, 'std': args.std, 'scale': args.scale}
    options = {name: x[0] if len(x) == 1 else tuple(x) for name, x in given.items() if x is not None}
    if ('mean' in options) != ('std' in options):
        raise ValueError('--mean and --std need each other; give both')
    if args.clamp:
        options['clamp'] = True
    if args.normalization is not None:
        if options:
            raise ValueError(f'--normalization gives --{", --".join(options)}; leave one of them out')
        options = dict(PRESETS[args.normalization])
    if args.bands is not None:
        options['bands'] = checks.integers('--bands', args.bands, minimum=0)
    return options


def add_prefix(parser: argparse._ActionsContainer) -> None:
    parser.add_argument(
        '--prefix', help="which backbone, if the checkpoint contains several: its prefix, or a part such as 'teacher'"
    )


def add_size(parser: argparse._ActionsContainer, help: str, default: tuple[int, int] | None = None) -> None:
    _add_pair(parser, '--size', default, f'image size in pixels: height and width, or the side of a square; {help}')


def _add_pair(parser: argparse._ActionsContainer, option: str, default: tuple[int, int] | None, help: str) -> None:
    parser.add_argument(option, nargs='+', type=int, action=HeightWidthAction, default=default, metavar='N', help=help)


def add_device(parser: argparse._ActionsContainer, default: str | None = None) -> None:
    chosen = default or 'cuda if available, else cpu'
    parser.add_argument('--device', default=default, help=f'device to compute on (default: {chosen})')


def add_out(parser: argparse.ArgumentParser, help: str, required: bool = True) -> None:
    parser.add_argument('--out', required=required, type=Path, metavar='FILE', help=help)
    add_force(parser)


def add_force(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--force', action='store_true', help='replace the output if it exists')


def add_settings(parser: argparse.ArgumentParser) -> None:
    help = (
        'change entries of the config: model.backbone.with_cp=True; write lists as key="[a,b]" or key=a,b, '
        'and a dict, which replaces the entry, as in Python; address a list entry by its index: '
        '"pipeline.2.scale=(640,400)", in quotes, because a shell reads parentheses'
    )
    options: dict[str, Any] = {'dest': 'set', 'nargs': '+', 'action': 'extend', 'metavar': 'KEY=VALUE'}
    parser.add_argument('--set', default=[], help=help, **options)
    # The name of this option in mmdet's and mmseg's own tools.
    parser.add_argument('--cfg-options', default=argparse.SUPPRESS, help=argparse.SUPPRESS, **options)


def add_check_images(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--check-images', action='store_true', help='decode every image and mask once, to find damaged ones'
    )


def check_out(args: argparse.Namespace, *suffixes: str) -> None:
    """Check before any computation that ``--out`` can be written, and ends in one of the suffixes, if any is given."""
    if suffixes and args.out.suffix.lower() not in suffixes:
        raise ValueError(f'--out must end in {" or ".join(suffixes)}, got {str(args.out)!r}')
    check_destination(args.out, args.force)


def check_file(path: str | Path) -> None:
    """Check that an input file of a command exists and is not a folder."""
    if Path(path).is_dir():
        raise IsADirectoryError(f'{path} is a folder; give a file in it')
    if not Path(path).exists():
        raise FileNotFoundError(f'there is no file {path}')


def check_backbone(args: argparse.Namespace) -> None:
    """Check the options of :func:`add_backbone` that need no torch."""
    if args.arch is not None:
        resolve_arch(args.arch, split_name(args.arch)[0] or 'swin')
    if args.checkpoint is None and args.prefix is not None:
        raise ValueError('--prefix chooses a backbone in a checkpoint; give the checkpoint too')
    if args.checkpoint is not None:
        check_checkpoint(args.checkpoint)


def check_checkpoint(place: str, of_backbone: bool = True) -> None:
    """Check that a checkpoint exists, unless it is an address, or names published weights; it may be a folder."""
    place = place_of(place) if of_backbone else place
    if not is_address(place) and not Path(place).exists():
        advice = suggestion(place) if of_backbone else ''
        raise FileNotFoundError(f'there is no checkpoint file {place!r}{advice}')


def is_exported_file(place: str) -> bool:
    """Return whether a place is a file of a whole model that `swin-dense export` wrote, by its suffix."""
    return not is_address(place) and Path(place).suffix.lower() in EXPORTED
