"""Write feature pyramids of many images, or one vector per image and level, into a folder.

    swin-dense features photos/ --out vectors --checkpoint swin_tiny.pth --pool gem
    swin-dense features shards/ s3://bucket/photos --out vectors --checkpoint swin_tiny.pth --pool gem --shard 0/8
    torchrun --nproc-per-node 8 -m swin_dense features photos/ --out maps --checkpoint swin_tiny.pth

With --pool, the Parquet files DIR/part-*.parquet contain the vectors, with the columns path, height, width and, for
images that failed, error. Without it, each image has a file of maps below DIR/features, given in the column file.

To continue after an interruption, run the same command again. Images whose size or modification time has changed are
recomputed. A signal (exit status 130 or 143) or a full disk (1) loses no finished image, or with --pool no complete
part. Shards do not communicate: each can run anywhere and at any time. Under torchrun and in Slurm arrays, the shard is
read from environment variables.
"""

from __future__ import annotations

import argparse
import contextlib
import os
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

from swin_dense.commands._options import (
    add_adapter,
    add_backbone,
    add_loading,
    add_normalization,
    check_backbone,
    check_integers,
    normalization_of,
)
from swin_dense.features.listing import list_images
from swin_dense.features.shards import parse_shard, shard_of_environment
from swin_dense.utils import checks, packages
from swin_dense.utils.choices import MAP_FORMATS, POOLINGS, ROWS_PER_PART
from swin_dense.utils.signals import stop_signals

GROUP = 'backbones'
EXTRA = 'features'
# Suffixes that --out, a folder, must not have: its user expects a file. Tools do read a folder .parquet.
_FILES = ('.csv', '.h5', '.hdf5', '.json', '.npy', '.npz', '.pkl', '.pt', '.pth', '.safetensors', '.tar', '.zarr')
DTYPES = ('float32', 'float16', 'bfloat16')


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        'places', nargs='+', metavar='SRC', help='image, tar file, folder, quoted pattern or .txt list; path or address'
    )
    parser.add_argument(
        '--out', required=True, type=Path, metavar='DIR', help='folder for the features; an existing one is extended'
    )
    add_backbone(parser)
    add_adapter(parser)
    add_normalization(parser)
    parser.add_argument(
        '--levels', type=int, nargs='+', metavar='STRIDE', help='strides of the levels, such as 4 8 (default: all)'
    )
    parser.add_argument(
        '--pool',
        choices=('none', *POOLINGS),
        default='none',
        help='pool each level to a vector (default: %(default)s)',
    )
    parser.add_argument('--format', choices=MAP_FORMATS, help='file format of maps (default: safetensors)')
    parser.add_argument(
        '--dtype', choices=DTYPES, default='float32', help='type of the features (default: %(default)s)'
    )
    parser.add_argument('--autocast', choices=('float16', 'bfloat16'), help='compute in lower precision')
    add_loading(parser, batch_size=8)
    parser.add_argument('--tile', type=int, metavar='PIXELS', help='compute large images in tiles of this size')
    parser.add_argument('--overlap', type=int, metavar='PIXELS', help='overlap of tiles (default: enough to be exact)')
    parser.add_argument('--max-side', type=int, metavar='PIXELS', help='shrink images whose longer side is larger')
    parser.add_argument(
        '--page', type=int, help='page of files with several pages, from 0 (default: the only one, or the first frame)'
    )
    parser.add_argument(
        '--shard', metavar='I/N', help='shard I, from 0, of N (default: from the environment of torchrun or Slurm)'
    )
    parser.add_argument(
        '--part-rows', type=int, default=ROWS_PER_PART, help='images per Parquet file (default: %(default)s)'
    )
    parser.add_argument('--prune', action='store_true', help='remove the features of images that are not in SRC')


def check_together(args: argparse.Namespace) -> None:
    """Check that the options do not contradict each other and that the packages they need are installed."""
    pools = args.pool != 'none'
    if pools and args.format is not None:
        raise ValueError(f'--pool writes Parquet; omit --format {args.format}')
    if args.dtype == 'bfloat16' and (pools or args.format == 'zarr'):
        raise ValueError('--dtype bfloat16 works only for maps with --format safetensors; use another --dtype')
    if args.overlap is not None and args.tile is None:
        raise ValueError('--overlap needs --tile')
    if args.tile is not None and args.max_side is not None:
        raise ValueError('--max-side cannot be used with --tile; leave --tile out')
    if args.out.suffix.lower() in _FILES and not args.out.is_dir():
        raise ValueError(
            f'--out must be a folder, to which many files are written, got {str(args.out)!r}; use a name such as '
            f'{str(args.out.with_suffix(""))!r}'
        )
    normalization_of(args)
    checks.integers('--levels', args.levels or (1,))
    check_integers(args, batch_size=1, workers=0, tile=1, overlap=0, max_side=1, page=0, part_rows=1)
    args.format = args.format or 'safetensors'
    check_backbone(args)
    needed = ['tqdm', 'pyarrow', *([] if pools else [args.format])]
    packages.require('this command', *needed)
    if args.format == 'zarr' and not pools and (packages.version_of('zarr') or '').startswith('2.'):
        raise ImportError(
            'the zarr format needs zarr 3, not 2: pip install "zarr>=3", with Python 3.11 or later; safetensors needs '
            'neither'
        )


def run(args: argparse.Namespace) -> int:
    check_together(args)
    shard, variables = (parse_shard(args.shard), '') if args.shard else shard_of_environment(os.environ)
    skipped: dict[str, str | None] = {}
    images = _list(args, skipped)
    # These import tqdm and torch, which --help does not need.
    from swin_dense.commands._backbone import build_backbone, inference_of
    from swin_dense.commands._progress import Progress, say
    from swin_dense.features.extraction import Extraction

    if variables:
        say(f'shard {shard.index}/{shard.count}, from {variables}')
    unread = [f'{path!r} {reason}' for path, reason in skipped.items() if reason is not None]
    for line in _said_of(unread, skipped) if shard.index == 0 else ():
        say(line)
    backbone = build_backbone(args)
    options = {'pool': args.pool, 'file_format': args.format, 'dtype': args.dtype}
    given, inference = normalization_of(args), inference_of(args, backbone)
    extraction = Extraction(args.out, shard, images, backbone, inference, given, **options)
    done: Counter[str] = Counter()
    removed = ''
    try:
        with (
            extraction.writing(args.part_rows) as folder,
            stop_signals() as received,
            Progress(extraction.total, disable=os.environ.get('LOCAL_RANK', '0') != '0') as progress,
        ):
            with contextlib.closing(extraction.steps(folder, args.batch_size, args.workers)) as steps:
                for step in steps:
                    if step.tile is None:
                        done['finished' if step.error is None else 'failed'] += 1
                    if step.error is not None:
                        say(f'skipped: {step.error}')
                    progress.show(step.tile)
                    if received:
                        break
            if args.prune and unread:
                removed = ', no features of other images removed, because some folders could not be read'
            elif args.prune and not received:
                removed = f', features of {folder.prune(images)} other images removed'
    except OSError as error:
        say(
            f'swin-dense features: error: cannot write to {args.out}: {error.strerror or error}. Finished images are '
            'kept: make room or allow writing, then run the same command again.'
        )
        return 1
    share = f' of shard {shard.index}/{shard.count}' if shard.count > 1 else ''
    of_all = f' of {extraction.total or done.total()}' if extraction.total or not received else ''
    say(f'{done["finished"]}{of_all} images{share} are in {args.out}, {done["failed"]} failed{removed}')
    if received:
        say('stopped before the end; run the same command again to continue')
        return 128 + received[0]
    other_lists = extraction.record.other_lists()
    for message in other_lists:
        say(f'{message}: run that shard again, or images may be missing')
    # torchrun terminates all ranks as soon as one exits with a non-zero status.
    return int(bool(done['failed'] or unread or other_lists) and 'TORCHELASTIC_RUN_ID' not in os.environ)


def _list(args: argparse.Namespace, skipped: dict[str, str | None]) -> dict[str, str | None]:
    places = set(map(os.path.realpath, args.places))
    # Maps in zarr are images too.
    without = [out for out in (args.out, args.out / 'features') if os.path.realpath(out) not in places]
    images = list_images(args.places, skipped, without)
    if not images:
        raise ValueError(f'no images found in {args.places}')
    return images


def _said_of(unread: list[str], skipped: dict[str, str | None]) -> Iterator[str]:
    """Yield what could not be read, and how many files are no images, by suffix."""
    yield from (f'skipped: {reason}' for reason in unread)
    no_images = Counter(Path(path).suffix or 'no suffix' for path, reason in skipped.items() if reason is None)
    if no_images:
        counts = ', '.join(f'{count} with {suffix}' for suffix, count in no_images.most_common())
        yield f'ignored files by suffix: {counts}; to include such files, give a pattern or a list'
