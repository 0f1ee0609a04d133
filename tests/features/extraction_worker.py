"""The command line with a toy backbone, to be run as a program of its own by test_extraction.py."""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2] / 'tools'))

import extract_features

from swin_dense import SwinBackbone
from tests.conftest import TINY, randomize


def create_toy(name, checkpoint=None, window_size=7):
    return randomize(SwinBackbone(**TINY, window_size=window_size)).eval()


if __name__ == '__main__':
    torch.set_num_threads(1)
    extract_features.create_backbone = create_toy
    sys.exit(extract_features.main())
