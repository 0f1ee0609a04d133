"""The backbone and the device that options describe.

Commands import this module when they run, because it needs torch.
"""

from __future__ import annotations

import argparse
import os
from typing import Any

import torch

from swin_dense.commands._options import backbone_options
from swin_dense.features.inference import on_device
from swin_dense.models.create import create_backbone, warn_of_random_weights
from swin_dense.models.swin import SwinBackbone


def build_backbone(args: argparse.Namespace, **options: Any) -> SwinBackbone:
    """Build the backbone of ``add_backbone``; options that the user does not give are those of the checkpoint."""
    device, name = device_of(args), args.arch
    if args.checkpoint is None:
        torch.manual_seed(0)
        warn_of_random_weights()
        name = name or 'swin_t'
    options = {**backbone_options(args), **options}
    backbone = create_backbone(
        name, args.checkpoint, adapter_checkpoint=args.adapter_checkpoint, prefix=args.prefix, **options
    )
    return on_device(backbone, device)


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device to compute on, if it is available: ``--device``, else the GPU of LOCAL_RANK, else the CPU."""
    cuda = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
    return on_device(torch.empty(0), args.device or (cuda if torch.cuda.is_available() else 'cpu')).device
