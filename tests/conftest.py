"""Shared fixtures and helpers."""

import ast
import contextlib
import functools
import os
import shutil
import subprocess
import sys
import sysconfig
import tempfile
import warnings
import zipfile
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import settings

# Triton reads this when it is imported. Without a GPU its kernels run in its interpreter.
if not torch.cuda.is_available():
    os.environ.setdefault('TRITON_INTERPRET', '1')

ROOT = Path(__file__).parent.parent
# Packages that the core does not need, by the names of the modules.
OPTIONAL_PACKAGES = [
    *('mmengine', 'mmcv', 'mmdet', 'mmseg', 'cv2', 'timm', 'triton', 'rich', 'tqdm', 'pyarrow', 'fsspec'),
    *('huggingface_hub', 'matplotlib', 'safetensors', 'tifffile', 'imagecodecs', 'zarr', 'skimage', 'pandas'),
    *('onnx', 'onnxscript', 'onnxruntime', 'openvino'),
]

# The duration of an example depends on the load of the machine.
settings.register_profile('default', deadline=None)
settings.load_profile('default')

# The suite runs in several processes; further threads, also of the programs that tests start, would compete for cores.
torch.set_num_threads(1)
os.environ.setdefault('OMP_NUM_THREADS', '1')
# The programs that tests start, and the server that forks them, find this tree from any current folder.
os.environ['PYTHONPATH'] = os.pathsep.join(filter(None, [str(ROOT), os.environ.get('PYTHONPATH')]))

TINY = {
    'embed_dims': 16,
    'depths': (2, 2, 2, 2),
    'num_heads': (1, 2, 4, 8),
}


def assert_near(found, expected, tolerance):
    """Compare tensors, or arrays, with a tolerance that is both relative and absolute."""
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


def assert_within(found, expected, distance):
    """Compare tensors, or arrays, whose values may differ by a distance."""
    torch.testing.assert_close(found, expected, rtol=0, atol=distance)


def some(values, every):
    """Return test parameters of which `make test` runs only every n-th; `make test-all` runs all of them."""
    return [
        pytest.param(value, marks=[pytest.mark.long] if index % every else []) for index, value in enumerate(values)
    ]


def needs(package):
    """Skip a test whose code under test needs an optional package, if the package is not installed."""
    return pytest.mark.skipif(find_spec(package) is None, reason=f'needs {package}')


def _computes_half():
    """Return whether torch supports float16 convolutions and linear layers on a CPU."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter('ignore')
            computes = torch.autocast('cpu', torch.float16)
        with computes:
            torch.nn.functional.conv2d(torch.ones(1, 1, 1, 1), torch.ones(1, 1, 1, 1))
        torch.nn.functional.linear(torch.ones(1, 1).half(), torch.ones(1, 1).half())
    except RuntimeError:
        return False
    return True


# torch 2.1 supports neither.
needs_half = pytest.mark.skipif(
    not _computes_half(), reason=f'torch {torch.__version__} does not compute in float16 on a CPU'
)
needs_fully_shard = pytest.mark.skipif(
    torch.__version__ < '2.6', reason=f'torch {torch.__version__} has no fully_shard'
)
FLOAT16 = pytest.param(torch.float16, marks=needs_half)


class IfInstalled:
    """An optional package; a test that uses it is skipped if it is not installed."""

    def __init__(self, name):
        self._name = name

    def __getattr__(self, attribute):
        if attribute.startswith('_'):  # pytest reads such attributes during collection
            raise AttributeError(attribute)
        return getattr(pytest.importorskip(self._name), attribute)


def photograph(height, width):
    """Return synthetic uint8 pixels (height, width, 3) with gradients, edges and noise, as in a photograph."""
    rows, columns = np.mgrid[:height, :width] / 60
    shades = np.stack([np.sin(rows + columns), np.cos(2 * rows), np.sin(columns**2 / 3)], -1)
    edges = ((rows.astype(int) + columns.astype(int)) % 2)[:, :, None] * 0.6
    noise = np.random.default_rng(0).normal(scale=0.05, size=(height, width, 3))
    return (255 * (0.35 + 0.25 * shades + edges * 0.5 + noise).clip(0, 1)).astype(np.uint8)


def randomize(module, seed=0):
    """Set every parameter to random values, because an initial 0 or 1 could hide an error."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            noise = torch.randn(
                parameter.shape,
                generator=generator,
                dtype=torch.float64,
                device='cpu',
            )
            parameter.copy_(0.2 * noise + (parameter.ndim == 1))
    return module


def equal_weights(ours, theirs):
    """Return whether a module or state dict has the weights of another, which may have more."""
    own, others = (one.state_dict() if isinstance(one, torch.nn.Module) else one for one in (ours, theirs))
    weights = {name: tensor for name, tensor in own.items() if 'relative_coords_table' not in name}
    return all(torch.equal(tensor, others[name]) for name, tensor in weights.items())


def tiny(**options):
    """Return a tiny backbone with random weights, in evaluation mode."""
    from swin_dense import SwinBackbone  # after what some tests do before they import it

    return randomize(SwinBackbone(**TINY, **options)).eval()


def assert_same(ours, expected, **tolerance):
    """Compare tensors one by one, by default to 1e-9; gradients that do not exist are None on both sides."""
    for found, wanted in zip(ours, expected, strict=True):
        assert (found is None) == (wanted is None)
        if found is not None:
            torch.testing.assert_close(found, wanted, **tolerance or {'rtol': 1e-9, 'atol': 1e-9})


def folders_named_in(path):
    """Return the folders of this machine that a file, or a member of a zip archive, names: of code, home, temporary."""
    packages = (sysconfig.get_path(name) for name in ('stdlib', 'purelib', 'platlib'))
    folders = {str(ROOT), str(Path.home()), str(path.parent), f'{tempfile.gettempdir()}{os.sep}', *packages}
    folders -= {os.sep, os.devnull}  # no folder, in place of a home
    contents = [path.read_bytes()]
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            contents += [name.encode() for name in archive.namelist()]
            contents += [archive.read(name) for name in archive.namelist()]
    return sorted(folder for folder in folders if any(folder.encode() in content for content in contents))


@contextlib.contextmanager
def small_disk(folder, size):
    """Mount a tmpfs of a size such as '600k' on a folder, or skip the test if mounting is not permitted."""
    command = ['mount', '-t', 'tmpfs', '-o', f'size={size}', 'tmpfs', str(folder)]
    if not shutil.which('mount') or subprocess.run(command, capture_output=True).returncode:
        pytest.skip('mounting a tmpfs is not permitted here')
    try:
        yield
    finally:
        subprocess.run(['umount', '--lazy', str(folder)], check=True)


def pytest_configure(config):
    """Let one process write the cache of yapf, which mmengine imports, before the xdist workers start.

    yapf writes the cache in place on its first import, so that a second process could read half a file.
    """
    if not hasattr(config, 'workerinput'):
        with contextlib.suppress(ImportError):  # an optional package
            import_module('yapf.yapflib.yapf_api')


@pytest.hookimpl(tryfirst=True)  # before the option -m selects tests
def pytest_collection_modifyitems(items):
    """Mark `long` tests as `slow`, so that ``-m "not slow"`` leaves them out, and put tests/export first.

    An idle process takes the last tests of another, and would repeat the long fixtures of tests/export.
    """
    for item in items:
        if item.get_closest_marker('long'):
            item.add_marker(pytest.mark.slow)
    items.sort(key=lambda item: 'export' not in item.path.parts)


@pytest.fixture(autouse=True)
def _seed():
    torch.manual_seed(0)


@pytest.fixture(autouse=True, scope='session')
def _empty_folder(tmp_path_factory):
    """Run the tests in an empty folder: what a clone holds after a demo or a training makes no difference to them."""
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp('an empty folder'))
        yield


@contextlib.contextmanager
def quick_configs():
    """Cache the metafiles that mmengine parses, and keep it from formatting configs; the values stay the same.

    mmengine parses all of mmdet's or mmseg's metafiles for each base config from there. It lays out the text of a
    config with yapf four times per training, which takes longer than ten steps of a tiny model.
    """
    try:
        from mmengine.config import config
        from mmengine.config import utils as config_utils
    except ImportError:  # an optional package
        yield
        return

    def unformatted(text, **options):
        ast.parse(text)  # yapf refuses invalid Python too
        return text, False

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(config_utils, 'load', functools.cache(config_utils.load))
        patch.setattr(config, 'FormatCode', unformatted, raising=False)  # a fork may format elsewhere
        yield


@pytest.fixture(autouse=True, scope='session')
def _quick_configs():
    with quick_configs():
        yield


@pytest.fixture(scope='session')
def demo_data(tmp_path_factory):
    """Create a small demo data set in a folder whose path contains spaces."""
    out = tmp_path_factory.mktemp('demo data') / 'small set'
    command = [sys.executable, ROOT / 'tools' / 'make_demo_data.py', out, '--train', '8', '--val', '4', '--seed', '3']
    subprocess.run(command, check=True, capture_output=True)
    return out
