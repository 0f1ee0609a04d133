"""The command line with a toy backbone, to be run as a program of its own by test_extraction.py."""

import sys

import torch

from swin_dense import SwinBackbone
from swin_dense.__main__ import main
from swin_dense.commands import _backbone
from tests.conftest import TINY, randomize


def create_toy(arch):
    return randomize(SwinBackbone(**TINY)).eval()


if __name__ == '__main__':
    torch.set_num_threads(1)
    _backbone.BACKBONES['swin'] = create_toy
    sys.exit(main(['features', *sys.argv[1:]]))
