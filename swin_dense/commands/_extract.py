"""The implementation of `swin-dense features`: list images, extract missing features, print a summary."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import hashlib
import os
import warnings
from collections import Counter
from pathlib import Path
from typing import Any

import torch
from PIL import Image

from swin_dense.commands._backbone import build_backbone
from swin_dense.commands._options import normalization_of
from swin_dense.commands._progress import Progress, say, stop_signals
from swin_dense.features.extraction import extract
from swin_dense.features.folder import FeatureFolder, check_zarr
from swin_dense.features.inference import Inference, check_levels
from swin_dense.features.listing import iterate, list_images
from swin_dense.features.shards import Record, hash_of_name, lock_shard, parse_shard, shard_of_environment
from swin_dense.features.tiling import check_tiling


def extract_all(args: argparse.Namespace) -> int:
    """Extract the features that are missing in the folder, and return the exit status."""
    if args.format == 'zarr':
        check_zarr()
    shard, variables = (parse_shard(args.shard), '') if args.shard else shard_of_environment(os.environ)
    if variables:
        say(f'shard {shard.index}/{shard.count}, from {variables}')
    images, unread = _list(args.places, shard.index == 0)
    mine = {name: version for name, version in images.items() if shard.owns(hash_of_name(name))}
    backbone = build_backbone(args)
    inference = _inference(args, backbone)
    args.out.mkdir(parents=True, exist_ok=True)
    record = Record(args.out, shard, _settings(args, inference, backbone), images)
    total = None if any(name.endswith('.tar') for name in mine) else len(mine)
    done: Counter[str] = Counter()
    removed = ''
    with contextlib.ExitStack() as stack:
        stack.enter_context(warnings.catch_warnings())
        warnings.filterwarnings('ignore', module='PIL')  # what damaged files warn of
        stack.enter_context(lock_shard(args.out, shard))
        record.begin()
        levels = inference.levels or backbone.out_strides
        dtype = getattr(torch, args.dtype)
        folder = FeatureFolder(args.out, levels, args.pool, args.format, dtype, shard, args.part_rows)
        stack.callback(folder.close)
        received = stack.enter_context(stop_signals())
        progress = stack.enter_context(Progress(total, disable=os.environ.get('LOCAL_RANK', '0') != '0'))
        items = iterate(mine.items(), lambda name, version: not folder.is_finished(name, version))
        steps = extract(backbone, items, folder, inference, args.batch_size, args.workers)
        with contextlib.closing(steps):
            for step in steps:
                if step.tile is not None:
                    progress.within('tile {} of {}'.format(*step.tile))
                else:
                    progress.finish()
                    done['finished' if step.error is None else 'failed'] += 1
                if step.error is not None:
                    say(f'skipped: {step.error}')
                if received:
                    break
        if args.prune and not received:
            removed = f', features of {folder.prune(images)} other images removed'
    share = f' of shard {shard.index}/{shard.count}' if shard.count > 1 else ''
    of_all = f' of {total or done.total()}' if total or not received else ''
    say(f'{done["finished"]}{of_all} images{share} are in {args.out}, {done["failed"]} failed{removed}')
    if received:
        say('stopped before the end; run the same command again to continue')
        return 128 + received[0]
    other_lists = record.other_lists()
    for message in other_lists:
        say(f'{message}: run that shard again, or images may be missing')
    # torchrun terminates all ranks as soon as one exits with a non-zero status.
    failed = bool(done['failed'] or unread or other_lists)
    return int(failed and 'TORCHELASTIC_RUN_ID' not in os.environ)


def _list(places: list[str], is_first: bool) -> tuple[dict[str, str | None], bool]:
    """Return the images, and whether something could not be read; the first shard prints what was skipped."""
    unread: list[str] = []
    no_images: Counter[str] = Counter()

    def on_skipped(path: str, reason: str | None) -> None:
        if reason is None:
            no_images[Path(path).suffix or 'no suffix'] += 1
        else:
            unread.append(f'{path!r} {reason}')

    images = list_images(places, on_skipped)
    if is_first:
        for reason in unread:
            say(f'skipped: {reason}')
        if no_images:
            counts = ', '.join(f'{count} with {suffix}' for suffix, count in no_images.most_common())
            say(f'ignored files by suffix: {counts}; to include such files, give a pattern or a list')
    if not images:
        raise ValueError(f'no images found in {places}')
    return images, bool(unread)


def _inference(args: argparse.Namespace, backbone: Any) -> Inference:
    levels = check_levels(backbone, args.levels)
    tiling = None
    if args.tile is not None:
        tiling = check_tiling(backbone, args.tile, args.overlap, levels)
        # Images that need tiles exceed PIL's limit, which protects against decompression bombs.
        Image.MAX_IMAGE_PIXELS = None
    inference = Inference(
        **normalization_of(args),
        levels=levels,
        dtype=getattr(torch, args.dtype) if args.pool == 'none' else None,
        autocast=getattr(torch, args.autocast) if args.autocast else None,
        tiling=tiling,
        page=args.page,
        max_side=args.max_side,
    )
    inference.check_for(backbone)
    return inference


def _settings(args: argparse.Namespace, inference: Inference, backbone: Any) -> dict[str, Any]:
    """Return the options that determine the features; all features of a folder must share them."""
    tiling = inference.tiling
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
        'tile': tiling.tile if tiling else None,
        'overlap': tiling.overlap if tiling else None,
    }


def weights_digest(module: torch.nn.Module) -> str:
    """Return a short hash of all weights, to check that two runs use the same weights."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]
