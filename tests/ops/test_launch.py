"""Test how compiled kernels are launched: without a GPU, and with a stand-in for Triton or for its driver."""

import contextlib
from types import SimpleNamespace

import pytest
import torch

from swin_dense.ops.triton import attention, choice, gpu
from swin_dense.ops.triton.launch import Launch
from swin_dense.ops.windows import WindowSpec
from swin_dense.utils import private
from tests.ops.devices import run_python


class Kernel:
    """A kernel that records the types of its compilation and the arguments of its launches."""

    arg_names = ('x', 'out', 'rows', 'eps', 'BLOCK')

    def __init__(self):
        self.compiled, self.launched = [], []

    def warmup(self, *tensors, grid, **arguments):
        self.compiled.append((tensors[0].dtype, arguments))
        return {grid: lambda *values: self.launched.append(values)}


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch):
    monkeypatch.setattr(gpu, 'IS_INTERPRETED', False)
    monkeypatch.setattr(private, 'current_cuda_device', lambda: -1)  # that of a tensor on the CPU
    monkeypatch.setattr(torch.cuda, 'is_current_stream_capturing', lambda: False)


def test_numbers_and_constants_are_in_the_order_of_the_kernel():
    kernel = Kernel()
    launch = Launch(kernel, 3, {'BLOCK': 64, 'eps': 0.5, 'rows': 7}, {'num_warps': 4})
    x, out = torch.zeros(2, 1)
    for _ in range(3):
        launch(x, out)
    assert kernel.launched == [(x, out, 7, 0.5, 64)] * 3
    assert kernel.compiled == [(torch.float32, {'BLOCK': 64, 'eps': 0.5, 'rows': 7, 'num_warps': 4})]


def test_a_kernel_is_launched_on_the_device_of_its_tensors(monkeypatch):
    current = [0]

    @contextlib.contextmanager
    def device_of(tensor):
        before = current[0]
        current[0] = tensor.get_device()
        yield
        current[0] = before

    monkeypatch.setattr(private, 'current_cuda_device', lambda: current[0])
    monkeypatch.setattr(torch.cuda, 'device_of', device_of)
    kernel, devices = Kernel(), []
    launch = Launch(kernel, 3, {'BLOCK': 64, 'eps': 0.5, 'rows': 7}, {})
    kernel.warmup = lambda *tensors, grid, **arguments: {grid: lambda *values: devices.append(current[0])}
    launch(*torch.zeros(2, 1))
    current[0] = -1
    launch(*torch.zeros(2, 1))
    assert devices == [-1, -1]


def test_other_dtypes_are_other_kernels():
    kernel = Kernel()
    launch = Launch(kernel, 3, {'rows': 7, 'eps': 0.5, 'BLOCK': 64}, {})
    for dtype in (torch.float32, torch.bfloat16, torch.float32, torch.bfloat16):
        launch(torch.zeros(1, dtype=dtype), torch.zeros(1))
    assert [dtype for dtype, _ in kernel.compiled] == [torch.float32, torch.bfloat16]
    assert len(kernel.launched) == 4


def test_nothing_is_launched_for_no_programs():
    kernel = Kernel()
    Launch(kernel, 0, {'rows': 0, 'eps': 0.5, 'BLOCK': 64}, {})(torch.zeros(1), torch.zeros(1))
    assert not kernel.compiled


def test_an_argument_that_the_kernel_does_not_have_is_refused():
    with pytest.raises(KeyError, match='rows'):
        Launch(Kernel(), 3, {'lines': 7, 'eps': 0.5, 'BLOCK': 64}, {})


@pytest.mark.parametrize(
    ('kernel', 'message'),
    [
        (SimpleNamespace(arg_names=['scale']), r'KeyError'),
        (SimpleNamespace(), r"AttributeError.*'arg_names'"),
    ],
)
def test_another_triton_ends_in_the_trial(monkeypatch, kernel, message):
    """One warning gives the cause and the remedy, and 'auto' is torch's attention."""
    names = ('forward', 'backward_queries', 'backward_keys', 'table_gradient')
    monkeypatch.setattr(attention, 'kernels', SimpleNamespace(**dict.fromkeys(names, kernel)), raising=False)
    monkeypatch.setattr(choice, 'reasons', choice.Reasons())
    monkeypatch.setattr(gpu, 'unsupported_device_reason', lambda device: None)
    attention._launches.cache_clear()
    spec = WindowSpec(2, (7, 7), (3, 3), 0.25)
    with pytest.warns(UserWarning, match=message) as caught:
        assert not choice.is_kernel(torch.zeros(1, 9, 8, 32), None, spec, 0.0)
    (warning,) = caught
    assert 'swin-dense doctor' in str(warning.message)


@pytest.mark.slow
@pytest.mark.skipif(gpu._unusable is not None, reason=str(gpu._unusable))
def test_triton_gets_the_same_arguments_as_by_its_own_call(tmp_path):
    """The launcher of the driver is replaced: what reaches it by our launch equals what ``kernel[grid]`` passes on."""
    out = run_python(
        """
        import torch, triton
        from types import SimpleNamespace
        from triton.backends.compiler import GPUTarget

        launched = []

        class Driver:
            get_current_target = lambda self: GPUTarget('cuda', 90, 32)
            get_current_device = lambda self: 0
            get_current_stream = lambda self, device: 0
            launcher_cls = lambda self, src, metadata: lambda *values: launched.append(values)
            utils = SimpleNamespace(
                get_device_properties=lambda device: {'max_shared_mem': 232448},
                load_binary=lambda *inputs: (0, 1, 32, 0, 1024),
            )

        triton.runtime.driver.set_active(Driver())
        from swin_dense.ops.triton import attention, norm
        from swin_dense.utils import private
        private.current_cuda_device = lambda: -1  # that of a tensor on the CPU

        def plain(values):
            return [tuple(value.shape) if isinstance(value, torch.Tensor) else value for value in values[8:]]

        def compare(run, launch, *tensors):
            launched.clear()
            for _ in range(2):
                run()
            launch._kernel[launch._grid](*tensors, **launch._arguments, **launch._options)
            first, second, theirs = map(plain, launched)
            assert first == second == theirs, (first, theirs)

        x, weight = torch.zeros(40, 96), torch.ones(96)
        launch = norm._launches(x.numel(), 96, x.device, 1e-5).forward
        out = torch.empty(40, 96, dtype=torch.bfloat16)
        compare(lambda: norm.forward(x, weight, weight, 1e-5, torch.bfloat16), launch, x, weight, weight, out)

        qkv, table = torch.zeros(1, 7, 14, 96), torch.zeros(169, 2)
        settings = (2, (7, 7), (3, 3), 0.25, (7, 13))
        launch = attention._launches_of(qkv, table, *settings).forward
        outputs = attention._empty_outputs(qkv, table, *settings)
        compare(lambda: attention.forward(qkv, table, *settings), launch, qkv, table, *outputs)
        print('same')
        """,
        TRITON_CACHE_DIR=str(tmp_path),  # Triton's own call writes there, whether or not the home can be written
        TRITON_INTERPRET='0',
    )
    assert out.strip() == 'same'
