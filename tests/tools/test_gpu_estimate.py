"""The counts of ``benchmarks/gpu_estimate.py`` against counts by hand and against torch's own autocast."""

import sys

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch._subclasses.fake_tensor import FakeTensor, FakeTensorMode
from torch.overrides import TorchFunctionMode

from swin_dense import SwinBackbone
from tests.conftest import ROOT, TINY

sys.path.insert(0, str(ROOT / 'benchmarks'))

import gpu_estimate

SHAPE = (2, 3, 60, 52)


class Layer(nn.Module):
    """A linear layer over the last dimension of the image, and a GELU."""

    def __init__(self):
        super().__init__()
        self.linear = nn.Linear(8, 16)

    def forward(self, img):
        return (F.gelu(self.linear(img)),)


def test_inference_by_hand():
    rows = gpu_estimate.count(Layer().to('meta'), (1, 3, 4, 8), False, torch.bfloat16).rows
    # 12 rows of 8 numbers, the weight and its bias are cast from 4 bytes to 2; the result is 12 rows of 16.
    assert set(rows) == {'aten::_to_copy', 'aten::addmm', 'aten::gelu'}
    assert (rows['aten::_to_copy'].launches, rows['aten::_to_copy'].bytes) == (3, 6 * (96 + 128 + 16))
    assert (rows['aten::addmm'].launches, rows['aten::addmm'].bytes) == (1, 2 * (96 + 128 + 16 + 192))
    assert rows['aten::addmm'].flops == 2 * 12 * 8 * 16
    assert (rows['aten::gelu'].launches, rows['aten::gelu'].bytes) == (1, 2 * (192 + 192))
    assert all(row.seconds == row.launches * gpu_estimate.LAUNCH for row in rows.values())  # as they are small


def test_training_by_hand():
    done = gpu_estimate.count(Layer().to('meta'), (1, 3, 4, 8), True, torch.bfloat16)
    # Backward: one kernel for GELU; for the layer, a product (weight) and a sum (bias), both cast to float32.
    assert {name: row.launches for name, row in done.rows.items()} == {
        'aten::_to_copy': 3 + 2,
        'aten::addmm': 1,
        'aten::gelu': 1,
        'aten::gelu_backward': 1,
        'aten::mm': 1,
        'aten::sum': 1,
    }
    # The layer keeps its input in low precision, and GELU keeps its input. The image requires no gradient, so the
    # backward pass needs no weight, but autocast keeps its casts.
    assert done.rows['aten::_to_copy'].kept_bytes == 2 * (96 + 128 + 16)
    assert done.rows['aten::addmm'].kept_bytes == 2 * 192
    assert done.rows['aten::gelu'].kept_bytes == 0  # the output


def test_time_is_bound_by_bytes_or_products():
    rows = gpu_estimate.count(Layer().to('meta'), (64, 3, 4096, 8), False, torch.bfloat16).rows
    assert rows['aten::gelu'].seconds == rows['aten::gelu'].bytes / gpu_estimate.BANDWIDTH
    square = nn.Linear(8192, 8192, bias=False)
    model = nn.Sequential(nn.Flatten(0, 2), square, nn.Unflatten(0, (1, -1))).to('meta')
    rows = gpu_estimate.count(model, (8, 3, 512, 8192), False, torch.bfloat16).rows
    assert rows['aten::mm'].seconds == 2 * 8 * 3 * 512 * 8192**2 / gpu_estimate.PEAK_LOW


def mmdet():
    swin = pytest.importorskip('mmdet.models.backbones.swin')
    return swin.SwinTransformer(embed_dims=16, depths=(2, 2, 2, 2), num_heads=(1, 2, 4, 8))


class Called(TorchFunctionMode):
    """Record the called functions of torch."""

    def __init__(self):
        super().__init__()
        self.functions = set()

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.functions.add(func)
        return func(*args, **(kwargs or {}))


@pytest.mark.parametrize('build', [mmdet, lambda: SwinBackbone(**TINY, attn_backend='reference')])
def test_casts_all_called_functions_with_a_rule_in_torchs_autocast(build):
    rules = torch._C._dispatch_get_registrations_for_dispatch_key('AutocastCUDA')
    names = {rule.split('::')[1].split('.')[0] for rule in rules}
    with Called() as called:
        build().to('meta')(torch.empty(SHAPE, device='meta'))
    has_rule = {func for func in called.functions if func.__name__.strip('_') in names}
    simulated = gpu_estimate.TO_LOW | gpu_estimate.TO_FLOAT32
    assert F.layer_norm in has_rule
    assert has_rule == called.functions & simulated


@pytest.mark.parametrize('given', [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    'function',
    [
        lambda x: F.linear(x, x),
        lambda x: x @ x,
        lambda x: F.conv2d(x, x),
        lambda x: F.layer_norm(x, (8,)),
        lambda x: F.softmax(x, -1),
        lambda x: x.softmax(-1),
        lambda x: F.gelu(x),
    ],
    ids=['linear', 'matmul', 'conv2d', 'layer_norm', 'F.softmax', 'softmax', 'gelu'],
)
def test_casts_to_the_dtype_of_torchs_autocast(function, given):
    """Torch's own autocast for CUDA is applied to a FakeTensor, which has a CUDA device but no memory."""
    shape = (8, 8, 8, 8) if 'conv2d' in function.__code__.co_names else (8, 8)
    on_meta = torch.empty(shape, device='meta', dtype=given)
    mode = FakeTensorMode()
    fake = FakeTensor(mode, on_meta, torch.device('cuda:0'))
    before = torch.is_autocast_enabled('cuda'), torch.get_autocast_dtype('cuda')
    torch.set_autocast_dtype('cuda', torch.bfloat16)
    torch.set_autocast_enabled('cuda', True)
    try:
        with mode, torch.no_grad():
            expected = function(fake).dtype
    finally:
        torch.set_autocast_enabled('cuda', before[0])
        torch.set_autocast_dtype('cuda', before[1])
    with gpu_estimate.Autocast(torch.bfloat16):
        assert function(on_meta).dtype == expected


def test_an_operator_that_hides_its_kernels_is_an_error():
    @torch.library.custom_op('swin_dense::hides_its_kernels', mutates_args=())
    def hides(x: torch.Tensor) -> torch.Tensor:
        return x.clone()

    hides.register_fake(torch.empty_like)

    class Model(nn.Module):
        def forward(self, img):
            return (hides(img),)

    with pytest.raises(RuntimeError, match='hides_its_kernels has no cost'):
        gpu_estimate.count(Model(), SHAPE, False, torch.bfloat16)


def test_the_command_compares_with_the_first_model(monkeypatch, capsys, tmp_path):
    report = tmp_path / 'counts.json'
    options = ['ours:sdpa', 'ours:triton', '--size', '64', '64', '--train', '--json', str(report)]
    monkeypatch.setattr(sys, 'argv', ['gpu_estimate.py', *options])
    gpu_estimate.main()
    first, second = capsys.readouterr().out.splitlines()
    assert first.endswith('1.00 times ours:sdpa')
    assert float(second.split()[-3]) > 1
    assert 'swin_dense::triton_window_attention' in report.read_text()
