"""Fixtures and helpers that the tests share."""

import pytest
import torch
from hypothesis import settings

# How long an example takes depends on what else the machine does.
settings.register_profile('default', deadline=None)
settings.load_profile('default')

# The suite runs one process per core; more threads than cores would wait for each other.
torch.set_num_threads(1)

TINY = {'embed_dims': 16, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}


def randomize(module: torch.nn.Module, seed: int = 0) -> torch.nn.Module:
    """Give every parameter a random value, so that none hides behind an initial 0 or 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            parameter.copy_(0.2 * noise + (parameter.ndim == 1))
    return module


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)
