import pytest
import torch
from conftest import randomize

from swin_dense import load_checkpoint
from swin_dense.checkpoint import export_state_dict

from .conftest import TINY, largest_difference, with_our_norms
