"""Build the backbone that a command's options describe; options are validated before weights are loaded."""

from __future__ import annotations

import argparse
import os
import sys
from typing import Any

import torch

from swin_dense import SwinBackbone, create_backbone
from swin_dense.commands._options import require_packages
from swin_dense.features.inference import on_device
from swin_dense.models.archs import resolve_arch
from swin_dense.models.create import network_of


def build_backbone(args: argparse.Namespace, **options: Any) -> SwinBackbone:
    """Build the backbone; options that the user does not give are inferred from the checkpoint."""
    name, device, given = args.arch, device_of(args), backbone_options(args)
    if args.checkpoint is None:
        if args.prefix is not None:
            raise ValueError('--prefix chooses a backbone in a checkpoint; give --checkpoint too')
        name = name or 'swin_t'
        torch.manual_seed(0)
        if os.environ.get('RANK', '0') == '0':
            print('WARNING: no --checkpoint given, so the weights and all results are RANDOM', file=sys.stderr)
    return on_device(create_backbone(name, args.checkpoint, prefix=args.prefix, **given, **options), device)


def backbone_options(args: argparse.Namespace) -> dict[str, Any]:
    """Check ``--arch`` and ``--checkpoint``, and return the other backbone options that the user gave."""
    check_arch(args.arch)
    check_checkpoint(args.checkpoint)
    given = {'window_size': args.window_size, 'clamp_window': args.clamp_window}
    return {option: value for option, value in given.items() if value is not None}


def device_of(args: argparse.Namespace) -> torch.device:
    """Return the device to compute on: ``--device``, else this process's GPU (LOCAL_RANK), else the CPU.

    Raises:
        ValueError: the device is not available.
    """
    cuda = f'cuda:{os.environ.get("LOCAL_RANK", 0)}'
    return on_device(torch.empty(0), args.device or (cuda if torch.cuda.is_available() else 'cpu')).device


def check_arch(name: str | None) -> None:
    if name is not None:
        resolve_arch(name, network_of(name) or 'swin')


def check_checkpoint(*paths: str | None) -> None:
    """Raise ImportError if a package that reading or writing these files needs is not installed."""
    given = [path for path in paths if path is not None]
    needed = {'huggingface_hub': any(path.startswith('hf://') for path in given)}
    needed['safetensors'] = any(path.endswith('.safetensors') for path in given)
    require_packages([package for package, is_needed in needed.items() if is_needed], 'checkpoints')
