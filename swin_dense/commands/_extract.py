"""What `swin-dense features` does with its arguments: list images, extract missing features, print a summary."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import os
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from swin_dense.commands._backbone import build_backbone
from swin_dense.commands._options import normalization_of
from swin_dense.commands._progress import Progress, say
from swin_dense.features.extraction import extract, weights_digest
from swin_dense.features.folder import FeatureFolder, check_zarr
from swin_dense.features.inference import check_levels
from swin_dense.features.listing import iterate, list_images
from swin_dense.features.normalization import Inference, Tiling
from swin_dense.features.shards import Record, Shard, hash_of_name, parse_shard, shard_of_environment
from swin_dense.features.tiling import check_tiling
from swin_dense.utils.signals import stop_signals


def extract_all(args: argparse.Namespace) -> int:
    """Extract the features that are missing in the folder, and return the exit status."""
    if args.format == 'zarr':
        check_zarr()
    shard, variables = (parse_shard(args.shard), '') if args.shard else shard_of_environment(os.environ)
    if variables:
        say(f'shard {shard.index}/{shard.count}, from {variables}')
    images, unread = _list(args, shard.index == 0)
    backbone = build_backbone(args)
    inference = _inference(args, backbone)
    record = Record(args.out, shard, _settings(args, inference, backbone), images)
    try:
        args.out.mkdir(parents=True, exist_ok=True)
        with record.writing():
            failed, received = _extract_missing(args, shard, images, backbone, inference, not unread)
    except OSError as error:
        say(_cannot_write(args.out, error))
        return 1
    if received:
        say('stopped before the end; run the same command again to continue')
        return 128 + received[0]
    other_lists = record.other_lists()
    for message in other_lists:
        say(f'{message}: run that shard again, or images may be missing')
    # torchrun terminates all ranks as soon as one exits with a non-zero status.
    return int(bool(failed or unread or other_lists) and 'TORCHELASTIC_RUN_ID' not in os.environ)


def _cannot_write(out: Path, error: OSError) -> str:
    return (
        f'swin-dense features: error: cannot write to {out}: {error.strerror or error}. Finished images are kept: make '
        'room or allow writing, then run the same command again.'
    )


def _list(args: argparse.Namespace, is_first: bool) -> tuple[dict[str, str | None], list[str]]:
    """Return the images, and what could not be read and why; the first shard prints what was skipped."""
    skipped: dict[str, str | None] = {}
    # Maps in zarr are images too.
    without = [out for out in (args.out, args.out / 'features') if not _is_place(out, args.places)]
    images = list_images(args.places, skipped, without)
    unread = [f'{path!r} {reason}' for path, reason in skipped.items() if reason is not None]
    if is_first and skipped:
        _say_skipped(unread, Counter(Path(path).suffix or 'no suffix' for path in skipped if skipped[path] is None))
    if not images:
        raise ValueError(f'no images found in {args.places}')
    return images, unread


def _is_place(out: Path, places: list[str]) -> bool:
    return any(os.path.realpath(place) == os.path.realpath(out) for place in places)


def _say_skipped(unread: list[str], no_images: Counter[str]) -> None:
    for reason in unread:
        say(f'skipped: {reason}')
    if no_images:
        counts = ', '.join(f'{count} with {suffix}' for suffix, count in no_images.most_common())
        say(f'ignored files by suffix: {counts}; to include such files, give a pattern or a list')


def _inference(args: argparse.Namespace, backbone: Any) -> Inference:
    levels = check_levels(backbone, args.levels)
    inference = Inference(
        **normalization_of(args),
        levels=levels,
        dtype=getattr(torch, args.dtype) if args.pool == 'none' else None,
        autocast=getattr(torch, args.autocast) if args.autocast else None,
        tiling=None if args.tile is None else _tiling(args, backbone, levels),
        page=args.page,
        max_side=args.max_side,
    )
    inference.check_for(backbone)
    return inference


def _tiling(args: argparse.Namespace, backbone: Any, levels: tuple[int, ...]) -> Tiling:
    # Images that need tiles exceed PIL's limit, which protects against decompression bombs.
    Image.MAX_IMAGE_PIXELS = None
    return check_tiling(backbone, args.tile, args.overlap, levels)


def _settings(args: argparse.Namespace, inference: Inference, backbone: Any) -> dict[str, Any]:
    """Return the options that determine the features; all features of a folder must share them."""
    tile, overlap = inference.tiling or (None, None)
    return {
        'arch': dataclasses.asdict(backbone.arch),
        'weights': weights_digest(backbone),
        'window_size': backbone.window_size,
        **({'clamp_window': True} if backbone.clamp_window else {}),  # absent if False, as in older folders
        'levels': inference.levels,
        'pool': args.pool,
        'format': 'parquet' if args.pool != 'none' else args.format,
        'dtype': args.dtype,
        'autocast': args.autocast,
        'page': args.page or 0,
        'max_side': args.max_side,
        **normalization_of(args),  # absent if not given, as in older folders
        'tile': tile,
        'overlap': overlap,
    }


def _extract_missing(
    args: argparse.Namespace,
    shard: Shard,
    images: dict[str, str | None],
    backbone: Any,
    inference: Inference,
    is_complete: bool,
) -> tuple[int, list[int]]:
    """Extract this shard's missing features; return the number of failed images, and the signal that ended it."""
    mine = {name: version for name, version in images.items() if shard.owns(hash_of_name(name))}
    total = None if any(name.endswith('.tar') for name in mine) else len(mine)
    dtype = getattr(torch, args.dtype)
    done: Counter[str] = Counter()
    removed = ''
    with contextlib.ExitStack() as stack:
        folder = FeatureFolder(args.out, inference.levels or (), args.pool, args.format, dtype, shard, args.part_rows)
        stack.callback(folder.close)
        received = stack.enter_context(stop_signals())
        progress = stack.enter_context(Progress(total, disable=os.environ.get('LOCAL_RANK', '0') != '0'))
        items = iterate(mine.items(), lambda name, version: not folder.is_finished(name, version))
        steps = extract(backbone, items, folder, inference, args.batch_size, args.workers)
        with contextlib.closing(steps):
            for step in steps:
                if step.tile is None:
                    done['finished' if step.error is None else 'failed'] += 1
                if step.error is not None:
                    say(f'skipped: {step.error}')
                progress.show(step.tile)
                if received:
                    break
        if args.prune and not is_complete:
            removed = ', no features of other images removed, because some folders could not be read'
        elif args.prune and not received:
            removed = f', features of {folder.prune(images)} other images removed'
    share = f' of shard {shard.index}/{shard.count}' if shard.count > 1 else ''
    of_all = f' of {total or done.total()}' if total or not received else ''
    say(f'{done["finished"]}{of_all} images{share} are in {args.out}, {done["failed"]} failed{removed}')
    return done['failed'], received
