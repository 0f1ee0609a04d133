"""Write feature pyramids of many images, or one vector per image and level, into a folder.

    swin-dense features photos/ --out vectors --checkpoint swin_t.in1k --pool gem
    swin-dense features list.txt slide.tif --out maps --checkpoint swin_t.in1k --tile 1792

With --pool, the Parquet files DIR/part-*.parquet contain the vectors, with the columns path, height and width. Without
it, each image has a safetensors file of maps below DIR/features, given in the column file. A part is written every
minute, with its rows in the order of the images; sort by path where a run wrote several parts.

To continue after an interruption, run the same command again. For several machines, object storage and tar files, see
swin_dense.features.Extractor, which Ray Data, datasets and Spark map over batches of images.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from swin_dense.commands._options import (
    add_backbone,
    add_checkpoint,
    add_normalization,
    check_backbone,
    normalization_options,
)
from swin_dense.images.listing import left_out, list_images
from swin_dense.utils import checks, packages
from swin_dense.utils.atomic import check_folder, exclusive_lock
from swin_dense.utils.choices import POOLINGS
from swin_dense.utils.signals import stop_signals

GROUP = 'backbones'
EXTRA = 'features'
DTYPES = ('float32', 'float16', 'bfloat16')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('places', nargs='+', metavar='SRC', help='image, folder, quoted pattern or .txt list')
    parser.add_argument(
        '--out', required=True, type=Path, metavar='DIR', help='folder for the features, which may have some already'
    )
    add_checkpoint(parser)
    add_backbone(parser)
    add_normalization(parser)
    parser.add_argument(
        '--levels', type=int, nargs='+', metavar='STRIDE', help='strides of the levels, such as 4 8 (default: all)'
    )
    parser.add_argument(
        '--pool', choices=('none', *POOLINGS), default='none', help='pool each level to a vector (default: %(default)s)'
    )
    parser.add_argument(
        '--dtype', choices=DTYPES, default='float32', help='type of the features (default: %(default)s)'
    )
    parser.add_argument('--autocast', choices=('float16', 'bfloat16'), help='compute in lower precision')
    parser.add_argument('--batch-size', type=int, default=8, help='images per batch (default: %(default)s)')
    parser.add_argument('--workers', type=int, default=2, help='threads that read images (default: %(default)s)')
    parser.add_argument('--tile', type=int, metavar='PIXELS', help='compute large images in tiles of this size')
    parser.add_argument('--overlap', type=int, metavar='PIXELS', help='overlap of tiles (default: enough to be exact)')
    parser.add_argument('--max-side', type=int, metavar='PIXELS', help='shrink images whose longer side is larger')
    parser.add_argument(
        '--page', type=int, help='page of files with several pages, from 0 (default: the only one, or the first frame)'
    )


def check_together(args: argparse.Namespace) -> None:
    """Check that the options do not contradict each other and that the packages they need are installed."""
    if args.dtype == 'bfloat16' and args.pool != 'none':
        raise ValueError('--dtype bfloat16 works only for maps; use another --dtype')
    if args.overlap is not None and args.tile is None:
        raise ValueError('--overlap needs --tile')
    if args.tile is not None and args.max_side is not None:
        raise ValueError('--max-side cannot be used with --tile; leave --tile out')
    if args.out.suffix and not args.out.is_dir():
        raise ValueError(f'--out must be a folder, to which many files are written, got {str(args.out)!r}')
    check_folder(args.out)
    normalization_options(args)
    checks.integers('--levels', args.levels or (1,))
    minimums = {'batch_size': 1, 'workers': 0, 'tile': 1, 'overlap': 0, 'max_side': 1, 'page': 0}
    for name, minimum in minimums.items():
        if getattr(args, name) is not None:
            checks.integer(f'--{name.replace("_", "-")}', getattr(args, name), minimum)
    check_backbone(args)
    packages.require('this command', 'tqdm', 'pyarrow', 'safetensors')


def _as_options(options: Mapping[str, Any]) -> str:
    """Return the advice to give options of a normalisation. Which bands to read, only the user knows."""
    return 'give ' + ' and '.join('--bands' if name == 'bands' else f'--{name} {options[name]}' for name in options)


def run(args: argparse.Namespace) -> int:
    check_together(args)
    skipped: dict[str, str | None] = {}
    images = list_images(args.places, skipped, [args.out])
    unread = [f'{path!r} {reason}' for path, reason in skipped.items() if reason is not None]
    if not images:
        raise ValueError('; '.join([f'no images found in {", ".join(args.places)}', *left_out(skipped)]))
    args.out.mkdir(parents=True, exist_ok=True)
    # These import tqdm and torch, which --help does not need.
    import torch
    from tqdm import tqdm

    from swin_dense.commands._backbone import build_backbone, extraction_of
    from swin_dense.features.folder import FeatureFolder, weights_digest
    from swin_dense.features.runner import Item, Runner

    backbone = build_backbone(args)
    extraction = extraction_of(args, backbone)
    pool = None if args.pool == 'none' else args.pool
    runner = Runner(extraction, pool, args.batch_size, args.workers)
    settings = {
        'arch': dataclasses.asdict(backbone.arch),
        'weights': weights_digest(backbone),
        'window_size': backbone.window_size,
        'clamp_window': backbone.clamp_window,
        'levels': extraction.levels,
        'pool': args.pool,
        'dtype': args.dtype,
        'autocast': args.autocast,
        'page': args.page or 0,
        'max_side': args.max_side,
        'tiling': extraction.tiling,
        **dataclasses.asdict(extraction.how),
    }
    dtype, failed = getattr(torch, args.dtype), len(unread)
    for reason in unread:
        tqdm.write(f'skipped: {reason}', file=sys.stderr)
    for note in left_out(skipped) + extraction.notes_on(images, cure=_as_options):
        tqdm.write(f'note: {note}', file=sys.stderr)
    busy = f'another extraction is writing to {args.out}; wait for it, or choose another folder'
    with (
        exclusive_lock(args.out / '.lock', busy),
        contextlib.closing(FeatureFolder(args.out, settings, images)) as folder,
    ):
        missing = [Item(path, path) for path in images if path not in folder.finished]
        with stop_signals() as received, contextlib.closing(runner.run(iter(missing))) as found:
            for item, size, levels in tqdm(found, total=len(missing), unit='image'):
                if isinstance(levels, str):
                    tqdm.write(f'skipped: {levels}', file=sys.stderr)
                    failed += 1
                elif pool is None:
                    folder.add_maps(item.name, size, levels)
                else:
                    folder.add_vectors(item.name, size, levels, dtype)
                if received:
                    print('stopped before the end; run the same command again to continue', file=sys.stderr)
                    return 128 + received[0]
    finished = len(images) + len(unread) - failed
    print(f'features of {finished} of {len(images)} images are in {args.out}; {failed} failed', file=sys.stderr)
    return int(failed > 0)
