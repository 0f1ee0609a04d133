"""Write the feature pyramids of many images into a folder.

    swin-dense features photos/ --out features --checkpoint swin_tiny.pth
    torchrun --nproc-per-node 8 -m swin_dense features photos/ --out features --checkpoint swin_tiny.pth

Run the same command again to go on where it stopped. Images whose file has changed since, by size or time, are done
again. ``index.csv`` in the folder lists image, feature file and size, ``failures.csv`` what could not be done.
What was finished before a signal (exit status 130 or 143) or before the disk was full (1) is kept.
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import os
import sys
from collections import Counter
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from PIL import Image

from swin_dense.commands._backbone import add_backbone_arguments, build_backbone
from swin_dense.features.extraction import POOLINGS, Extraction
from swin_dense.features.inference import Inference, check_levels, on_device
from swin_dense.features.job import run_extraction, stop_signals, weights_digest
from swin_dense.features.sources import list_images
from swin_dense.features.storage import FORMATS, FeatureFolder, require_package
from swin_dense.features.tiling import check_tiling

DTYPES = {'float32': torch.float32, 'float16': torch.float16, 'bfloat16': torch.bfloat16}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'sources', nargs='+', metavar='SRC', help='image, folder, quoted pattern, or .txt list of paths'
    )
    parser.add_argument('--out', required=True, metavar='DIR', help='folder for the features; made where missing')
    add_backbone_arguments(parser)
    parser.add_argument('--levels', type=int, nargs='+', metavar='STRIDE', help='e.g. 4 8 16 32 (default: all)')
    parser.add_argument('--pool', choices=('none', *POOLINGS), default='none', help='one vector per level')
    parser.add_argument('--format', choices=FORMATS, default='safetensors', help='(default: %(default)s)')
    parser.add_argument('--dtype', choices=DTYPES, default='float32', help='of the files (default: %(default)s)')
    parser.add_argument('--autocast', choices=('float16', 'bfloat16'), help='compute in lower precision')
    parser.add_argument(
        '--batch-size', type=int, default=8, help='images of equal size at once, at most (default: %(default)s)'
    )
    parser.add_argument('--workers', type=int, default=2, help='reading threads per rank (default: %(default)s)')
    parser.add_argument('--tile', type=int, metavar='PIXELS', help='read large images in tiles of this size')
    parser.add_argument('--overlap', type=int, metavar='PIXELS', help='between tiles (default: as exact results need)')
    parser.add_argument('--max-side', type=int, metavar='PIXELS', help='shrink images with a longer side to this')
    parser.add_argument('--page', type=int, default=0, help='of files with several, from 0 (default: %(default)s)')
    parser.add_argument('--prune', action='store_true', help='remove the features of images that SRC does not name')
    parser.add_argument('--device', help='(default: cuda where there is one, else cpu)')


def check_together(args: argparse.Namespace) -> None:
    """Refuse options that contradict each other."""
    if args.dtype == 'bfloat16' and args.format != 'safetensors':
        raise ValueError(f'--format {args.format} cannot hold bfloat16; use --format safetensors or another --dtype')
    if args.tile is not None and args.pool == 'none' and args.format == 'npz':
        raise ValueError('--format npz cannot be written piece by piece; use safetensors or zarr with --tile')
    if args.overlap is not None and args.tile is None:
        raise ValueError('--overlap belongs to --tile')
    require_package(args.format)


def run(args: argparse.Namespace) -> int:
    check_together(args)
    rank, world_size = int(os.environ.get('RANK', 0)), int(os.environ.get('WORLD_SIZE', 1))
    if world_size > 1:
        # Ranks meet at the beginning and at the end, and the last may need much longer than the first.
        dist.init_process_group('gloo', timeout=datetime.timedelta(days=30))
    try:
        return extract(args, rank, world_size)
    except FileNotFoundError:
        raise
    except OSError as error:
        print(
            f'swin-dense features: error: cannot write to {args.out}: {error.strerror or error}. Finished images are '
            'kept; make room or permit writing, and run the same command again.',
            file=sys.stderr,
        )
        return 1
    finally:
        if world_size > 1:
            dist.destroy_process_group()


def extract(args: argparse.Namespace, rank: int, world_size: int) -> int:
    from swin_dense.commands._progress import console, progress_bar, say

    skipped: dict[str, str] = {}
    no_images: Counter[str] = Counter()

    def on_skipped(path: str, reason: str) -> None:
        if os.path.isdir(path):
            skipped[path] = f'folder {path!r} {reason}'
        else:
            no_images[Path(path).suffix or 'no suffix'] += 1

    paths = list_images(args.sources, on_skipped)
    if rank == 0:
        for reason in skipped.values():
            say(f'skipped: {reason}')
        if no_images:
            counts = ', '.join(f'{count} with {suffix}' for suffix, count in no_images.most_common())
            say(f'not taken for images, by their names: {counts}; a pattern or a list takes them too')
    if not paths:
        raise ValueError(f'no images found in {args.sources}')
    backbone = on_device(build_backbone(args), device_of(args))
    extraction = build_extraction(args, backbone)
    folder = FeatureFolder(args.out, args.format)

    name = f'rank {rank} of {world_size}' if world_size > 1 else 'images'
    with stop_signals() as received, progress_bar(name, disable=rank != 0) as progress:
        task = progress.add_task('', total=None)

        def on_start(images: int, finished: int) -> None:
            progress.update(task, total=images, completed=finished)

        def on_image(path: str, error: str | None) -> None:
            progress.advance(task)
            if error is not None:
                say(f'skipped: {error}')

        outcome = run_extraction(
            backbone,
            paths,
            folder,
            extraction,
            describe_settings(args, extraction, backbone),
            rank=rank,
            world_size=world_size,
            skipped=skipped,
            prune_others=args.prune,
            on_start=on_start,
            on_image=on_image,
            should_stop=lambda: bool(received),
        )
    if rank == 0:
        pruned = f', {outcome.pruned} of other images removed' if args.prune else ''
        console.print(
            f'{outcome.finished} of {len(paths)} images are in {args.out}, {len(outcome.failures)} failed{pruned}'
        )
    if received:
        return 128 + received[0]
    if outcome.is_deserted:
        say(f'rank {rank}: another rank ended before its share was done; the same command goes on from here')
        return 1
    return 1 if outcome.failures else 0


def device_of(args: argparse.Namespace) -> str:
    if args.device is not None:
        return args.device
    return f'cuda:{os.environ.get("LOCAL_RANK", 0)}' if torch.cuda.is_available() else 'cpu'


def build_extraction(args: argparse.Namespace, backbone: Any) -> Extraction:
    levels = check_levels(backbone, args.levels)
    tiling = None
    if args.tile is not None:
        tiling = check_tiling(backbone, args.tile, args.overlap, levels)
        # Whoever asks for tiles expects images beyond PIL's guard against small files that unpack to huge ones.
        Image.MAX_IMAGE_PIXELS = None
    return Extraction(
        Inference(
            levels,
            autocast=DTYPES[args.autocast] if args.autocast else None,
            tiling=tiling,
            page=args.page,
            max_side=args.max_side,
        ),
        pool=args.pool,
        dtype=DTYPES[args.dtype],
        batch_size=args.batch_size,
        workers=args.workers,
    )


def describe_settings(args: argparse.Namespace, extraction: Extraction, backbone: Any) -> dict[str, Any]:
    """Return what the features depend on: a folder holds features made in one way."""
    tiling = extraction.inference.tiling
    return {
        'arch': dataclasses.asdict(backbone.arch),
        'weights': weights_digest(backbone),
        'window_size': backbone.window_size,
        'levels': extraction.inference.levels,
        'pool': args.pool,
        'format': args.format,
        'dtype': args.dtype,
        'autocast': args.autocast,
        'page': args.page,
        'max_side': args.max_side,
        'tile': tiling.tile if tiling else None,
        'overlap': tiling.overlap if tiling else None,
    }
