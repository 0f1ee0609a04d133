"""Long-running processes: no leaks, thread safety, and deterministic results."""

import gc
import os
import random
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch

from swin_dense import SwinBackbone
from swin_dense.ops import sdpa
from tests.conftest import TINY


def held():
    """Return the numbers of open files, threads and live tensors of this process, without the cache of plans."""
    sdpa._plans.clear()  # tests/ops/test_plan.py shows its limit
    gc.collect()
    tensors = sum(issubclass(type(thing), torch.Tensor) for thing in gc.get_objects())
    return len(os.listdir('/proc/self/fd')), len(os.listdir('/proc/self/task')), tensors


@pytest.mark.slow
@pytest.mark.long
@pytest.mark.skipif(sys.platform != 'linux', reason='reads the handles and threads of the process from /proc')
def test_many_image_sizes_leak_nothing():
    """Every tenth pass is a training step."""
    draw, model, counts = random.Random(0), SwinBackbone(**TINY).eval(), {}
    for index in range(1, 201):
        is_training = index % 10 == 0
        images = torch.rand(
            1,
            3,
            draw.randint(1, 200),
            draw.randint(1, 200),
        )
        with torch.set_grad_enabled(is_training):
            loss = sum(out.mean() for out in model(images))
        if is_training:
            loss.backward()
            model.zero_grad()
            counts[index] = held()
    assert counts[200] == counts[80]


@pytest.mark.parametrize('attn_backend', ['auto', 'reference'])
def test_eight_threads_on_one_model_equal_serial_results(attn_backend):
    model = SwinBackbone(**TINY, attn_backend=attn_backend).eval()
    images = [torch.randn(1, 3, 20 + 9 * index, 90 - 7 * index) for index in range(8)]

    @torch.no_grad()
    def run(first):
        return [model(images[(first + step) % 8]) for step in range(16)]

    expected = run(0)
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(run, range(8)))
    for first, outputs in enumerate(found):
        for step, maps in enumerate(outputs):
            assert all(map(torch.equal, maps, expected[(first + step) % 8]))


def trained(options):
    torch.manual_seed(0)
    model = SwinBackbone(**TINY, drop_path_rate=0.3, **options)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    for _ in range(2):
        optimizer.zero_grad()
        loss = sum(out.square().mean() for out in model(torch.randn(2, 3, 45, 60)))
        loss.backward()
        optimizer.step()
    return [*model.eval()(torch.randn(1, 3, 45, 60)), *model.parameters()]


@pytest.mark.parametrize(
    'options',
    [
        {},
        {'with_cp': True},
        {'attn_backend': 'sdpa'},
    ],
    ids=str,
)
def test_deterministic_algorithms(options):
    """Under torch.use_deterministic_algorithms no operation raises, and results repeat bit for bit."""
    torch.use_deterministic_algorithms(True)
    try:
        assert all(map(torch.equal, trained(options), trained(options)))
    finally:
        torch.use_deterministic_algorithms(False)
