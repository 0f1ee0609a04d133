"""The backbone, the device and the extraction that options describe.

Commands import this module when they run, because it needs torch.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from PIL import Image

from swin_dense.commands._options import normalization_options
from swin_dense.create import create_backbone
from swin_dense.features.extraction import Extraction, on_device
from swin_dense.features.pyramid import warn_of_random_weights
from swin_dense.images.normalization import Normalization
from swin_dense.models.swin import SwinBackbone


def build_backbone(args: argparse.Namespace, **options: Any) -> SwinBackbone:
    """Build the backbone of ``add_backbone``; options that the user does not give are those of the checkpoint."""
    device, name = device_of(args), args.arch
    if args.checkpoint is None:
        torch.manual_seed(0)
        warn_of_random_weights()
        name = name or 'swin_t'
    given = {'window_size': args.window_size, 'clamp_window': args.clamp_window, **options}
    options = {option: value for option, value in given.items() if value is not None}
    backbone = create_backbone(name, args.checkpoint, prefix=args.prefix, **options)
    on_device(backbone, device)
    return backbone


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device to compute on, if it is available: ``--device``, else the GPU of LOCAL_RANK, else the CPU."""
    device = args.device
    if not device:
        device = f'cuda:{os.environ.get("LOCAL_RANK", 0)}' if torch.cuda.is_available() else 'cpu'
    return on_device(torch.empty(0), device).device


def normalization_of(args: argparse.Namespace) -> Normalization | None:
    """Return the normalisation that the options of a command state, or None without any of them."""
    given = normalization_options(args)
    return Normalization(**given) if given else None


def extraction_of(args: argparse.Namespace, backbone: SwinBackbone) -> Extraction:
    """Return how `swin-dense features` reads images and computes features."""
    if args.tile is not None:
        Image.MAX_IMAGE_PIXELS = None  # PIL's limit, which images that need tiles exceed
    return Extraction(
        backbone,
        normalization_of(args),
        args.levels,
        page=args.page,
        max_side=args.max_side,
        tile=args.tile,
        overlap=args.overlap,
        dtype=args.dtype if args.pool == 'none' else None,
        autocast=args.autocast,
    )
