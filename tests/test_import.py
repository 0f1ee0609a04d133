"""Import of the core without mmengine, with a broken mmengine, and with a broken triton."""

import os
import subprocess
import sys

import pytest

from tests.conftest import OPTIONAL_PACKAGES, ROOT, some

CORE = """
import torch, swin_dense
backbone = swin_dense.SwinBackbone({'embed_dims': 16, 'depths': (1, 1), 'num_heads': (1, 1)})
backbone.load_state_dict(backbone.state_dict())
assert len(backbone(torch.zeros(1, 3, 32, 32))) == 2
assert 'SwinDense' not in swin_dense.__all__
assert all(hasattr(swin_dense, name) for name in swin_dense.__all__)
try:
    from swin_dense import SwinDense
except ImportError as error:
    print(error)
try:
    swin_dense.SwinDense
except ImportError as error:
    print(error)
"""


def run(code, path=()):
    environment = {**os.environ, 'PYTHONPATH': os.pathsep.join([*map(str, path), str(ROOT)])}
    done = subprocess.run([sys.executable, '-c', code], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_without_mmengine():
    absent = "import sys; sys.modules.update(dict.fromkeys(['mmengine', 'mmcv', 'mmdet', 'mmseg']))\n"
    assert run(absent + CORE).count('pip install mmengine') == 2


@pytest.mark.slow
@pytest.mark.long  # `make test-core` runs these tests themselves
def test_the_tests_of_the_core_can_be_collected():
    code = f"""
import os, sys, pytest
from benchmarks.stacks import CORE
os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'  # zarr has a plugin
sys.modules.update(dict.fromkeys({OPTIONAL_PACKAGES}))
assert pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', *CORE]) == 0
"""
    run(code)


def test_torch_dynamo_is_not_imported():
    """Importing torch._dynamo takes as long as all the rest; the oldest versions import it in `import torch`."""
    code = "import sys, torch\nbefore = '{0}' in sys.modules\n{1}assert before or '{0}' not in sys.modules"
    absent = "sys.modules.update(dict.fromkeys(['mmengine', 'mmcv', 'mmdet', 'mmseg']))\nimport swin_dense\n"
    run(code.format('torch._dynamo', absent))


@pytest.mark.parametrize(
    ('file', 'line', 'reason'),
    [
        ('__init__.py', 'import pkg_resources_that_is_gone', "No module named 'pkg_resources_that_is_gone'"),
        ('__init__.py', 'MODELS = int.no_such_attribute', "type object 'int' has no attribute 'no_such_attribute'"),
        ('__init__.py', 'raise OSError("libgomp.so: not found")', 'libgomp.so: not found'),
    ],
)
def test_an_mmengine_that_cannot_be_imported(tmp_path, file, line, reason):
    package = tmp_path / 'mmengine'
    package.mkdir()
    working = {
        '__init__.py': '',
        'config/__init__.py': '',
        'config/utils.py': 'MODULE2PACKAGE = {}',
        'logging.py': 'class HistoryBuffer: pass\ndef print_log(*args, **kwargs): pass',
        'registry.py': 'class MODELS: register_module = staticmethod(lambda: lambda cls: cls)',
        'model.py': 'class BaseModule: pass\nPretrainedInit = initialize = None',
    }
    for name, content in {**working, file: line}.items():
        (package / name).parent.mkdir(exist_ok=True)
        (package / name).write_text(content)
    assert run(CORE, [tmp_path]).count(reason) == 2


@pytest.mark.parametrize('source', some(['raise RuntimeError("0 active drivers")', '', '__version__ = "3.6"'], every=3))
def test_a_triton_that_cannot_be_used(tmp_path, source):
    """Its import raises, it is an empty package left by an uninstallation, or it has no compiler."""
    (tmp_path / 'triton').mkdir()
    (tmp_path / 'triton' / '__init__.py').write_text(source)
    run(
        'import torch, swin_dense\n'
        "backbone = swin_dense.SwinBackbone({'embed_dims': 16, 'depths': (1, 1), 'num_heads': (1, 1)})\n"
        'backbone(torch.zeros(1, 3, 32, 32))[-1].sum().backward()\n',
        [tmp_path],
    )
