"""The backbone, the device and the inference that options describe.

Commands import this module when they run, because it needs torch.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch
from PIL import Image

from swin_dense.commands._options import backbone_options, normalization_of
from swin_dense.create import create_backbone, warn_of_random_weights
from swin_dense.features.inference import check_levels, on_device
from swin_dense.features.tiling import check_tiling
from swin_dense.images.normalization import Inference
from swin_dense.models.swin import SwinBackbone


def build_backbone(args: argparse.Namespace, **options: Any) -> SwinBackbone:
    """Build the backbone of ``add_backbone``; options that the user does not give are those of the checkpoint."""
    device, name = device_of(args), args.arch
    if args.checkpoint is None:
        torch.manual_seed(0)
        warn_of_random_weights()
        name = name or 'swin_t'
    options = {**backbone_options(args), **options}
    backbone = create_backbone(name, args.checkpoint, prefix=args.prefix, **options)
    return on_device(backbone, device)


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device to compute on, if it is available: ``--device``, else the GPU of LOCAL_RANK, else the CPU."""
    device = args.device
    if not device:
        device = f'cuda:{os.environ.get("LOCAL_RANK", 0)}' if torch.cuda.is_available() else 'cpu'
    return on_device(torch.empty(0), device).device


def inference_of(args: argparse.Namespace, backbone: SwinBackbone) -> Inference:
    """Return how `swin-dense features` reads images and computes features."""
    levels = check_levels(backbone, args.levels)
    tiling = None
    if args.tile is not None:
        Image.MAX_IMAGE_PIXELS = None  # PIL's limit, which images that need tiles exceed
        tiling = check_tiling(backbone, args.tile, args.overlap, levels)
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
