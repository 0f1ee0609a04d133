"""The imports and registrations of the package, also without mmengine, or with a broken mmengine or triton."""

import ast
import importlib
import inspect
import os
import re
import sys
from pathlib import Path

import pytest

import swin_dense
from tests.conftest import OPTIONAL_PACKAGES, ROOT, needs, some
from tests.processes import python

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
    return python('-c', code, PYTHONPATH=os.pathsep.join([*map(str, path), str(ROOT)])).stdout


def test_without_mmengine():
    names = ['mmengine', 'mmcv', 'mmdet', 'mmseg', 'cv2', 'pycocotools']
    absent = f'import sys; sys.modules.update(dict.fromkeys({names}))\n'
    assert run(absent + CORE).count('pip install mmengine') == 2


def test_importing_the_package_imports_little():
    """A backbone needs no exporter, no runtime and no mmengine, and `swin-dense --help` no torch."""
    code = """
import sys, swin_dense
assert not {'torch', 'numpy', 'mmengine'} & sys.modules.keys()
swin_dense.SwinBackbone
swin_dense.SwinBackbone(dict(embed_dims=16, depths=(1, 1), num_heads=(1, 1)))
loaded = {name.removeprefix('swin_dense.') for name in sys.modules if name.startswith('swin_dense.')}
rooms = {name.split('.')[0] for name in loaded}
assert rooms == {'_registration', 'archs', 'checkpoint', 'models', 'ops', 'utils'}, rooms
helpers = {name for name in loaded if name.startswith(('checkpoint.', 'utils.'))}
known = {'checks', 'compat', 'lazy', 'memory', 'names', 'private'}
assert helpers == {'checkpoint.late', 'checkpoint.report', *(f'utils.{name}' for name in known)}, helpers
assert 'mmengine' not in sys.modules
"""
    run(code)


def test_public_names_are_listed_found_and_typed():
    pages = re.findall(r'^- \[`swin_dense\.(\w+)', (ROOT / 'docs' / 'reference.md').read_text(), re.M)
    importlib.import_module('swin_dense.analysis')  # packages that were imported are not listed for that
    listed = set(dir(swin_dense)) | {'SwinDense', 'SwinDenseV2'}
    assert listed == {*pages, *swin_dense.__all__, 'integrations', '__version__'}
    assert listed - {'__version__'} <= set(re.findall(r'\w+', swin_dense.__doc__))  # help(swin_dense) begins with it
    assert typed_homes(swin_dense) == swin_dense._HOMES
    assert swin_dense._HOMES.keys() == {*swin_dense.__all__, 'SwinDense', 'SwinDenseV2'}


@needs('mmengine')
def test_public_names_lead_to_their_files():
    names = re.findall(r'^- \[`(swin_dense\..+)`\]\(\.\./(.+)\)$', (ROOT / 'docs' / 'reference.md').read_text(), re.M)
    for name, file in names:
        module, _, attribute = name.rpartition('.')
        public = inspect.unwrap(getattr(importlib.import_module(module), attribute))
        assert Path(inspect.getsourcefile(public)) == ROOT / file
    assert len(names) > 15


def typed_homes(package):
    """Return the module of each name that a package imports for type checkers."""
    tree = ast.parse(Path(package.__file__).read_text())
    (typed,) = (node for node in tree.body if isinstance(node, ast.If) and ast.unparse(node.test) == 'TYPE_CHECKING')
    return {alias.name: node.module for node in typed.body for alias in node.names}


@pytest.mark.parametrize('name', ['export', 'features'])
def test_names_of_a_package_are_listed_found_and_typed(name):
    package = importlib.import_module(f'swin_dense.{name}')
    assert dir(package) == sorted(package.__all__)
    assert typed_homes(package) == package._HOMES
    assert package._HOMES.keys() == set(package.__all__)
    assert all(hasattr(package, one) for one in package.__all__)


def test_packages_are_attributes():
    run('import swin_dense; swin_dense.features.Extractor, swin_dense.ops.window_attention, swin_dense.runtime.load')
    with pytest.raises(AttributeError, match="has no attribute 'no_such_name'"):
        _ = swin_dense.no_such_name


BUILD = 'print(type(MODELS.build(dict(type={!r}, embed_dims=16, num_heads=(1, 2, 4, 8)))).__name__)'


@needs('mmengine')
@pytest.mark.parametrize(
    'imports',
    [
        'import swin_dense; from mmengine.registry import MODELS',
        'from mmengine.registry import MODELS; import swin_dense',
        'from swin_dense import SwinBackbone; import mmengine.registry; from mmengine import MODELS',
        'import swin_dense.features; from mmengine.registry import MODELS',
        'import swin_dense; dir(swin_dense); from mmengine.registry import MODELS',  # looks whether it is installed
        'from swin_dense import SwinDense; from mmengine.registry import MODELS',
    ],
)
def test_swin_dense_is_registered_in_any_order(imports):
    assert run(f'{imports}\n{BUILD.format("SwinDense")}').split()[-1] == 'SwinDense'


def test_an_integration_names_the_package_that_is_missing(monkeypatch):
    monkeypatch.setitem(sys.modules, 'timm', None)
    monkeypatch.delitem(sys.modules, 'swin_dense.integrations.timm', raising=False)
    with pytest.raises(ImportError, match=r'timm needs timm, .*pip install '):
        importlib.import_module('swin_dense.integrations.timm')


@needs('mmengine')
def test_a_type_with_its_package_needs_no_import():
    code = f'from mmengine.registry import MODELS\n{BUILD.format("swin_dense.SwinDenseV2")}'
    assert run(code).split()[-1] == 'SwinDenseV2'


def test_mmengine_may_be_installed_after_the_import(tmp_path):
    """As in a notebook."""
    code = f"""
import sys, swin_dense
import swin_dense._registration as registration
registered = []
registration.import_module = registered.append
path, sys.path[:] = sys.path[:], []
for _ in range(2):
    try:
        import mmengine
    except ModuleNotFoundError:
        print('absent')
sys.path[:] = [{str(tmp_path)!r}, *path]
import mmengine
print(mmengine.state, *registered)
"""
    (tmp_path / 'mmengine.py').write_text("state = 'installed'")
    assert run(code).split() == ['absent', 'absent', 'installed', 'swin_dense.mm']


@pytest.mark.parametrize('is_first', [True, False], ids=['before', 'after'])
def test_a_library_may_replace_layers_of_torch_before_or_after_the_import(is_first):
    patch = """
import functools, torch
from torch import nn
calls = []
def replaced(kind, forward):
    @functools.wraps(forward)
    def counted(self, x):
        calls.append((kind, tuple(x.shape)))
        return forward(self, x)
    return counted
for kind in (nn.Dropout, nn.Linear):
    kind.forward = replaced(kind, kind.forward)
"""
    first, second = (patch, 'import swin_dense\n')[:: 1 if is_first else -1]
    code = f"""
{first}
{second}
from swin_dense.ops.linear import is_supported
model = swin_dense.SwinBackbone(arch=dict(embed_dims=16, depths=(1,), num_heads=(2,)), strides=(4,), attn_drop_rate=0.5)
model(torch.rand(1, 3, 28, 28))
assert (nn.Dropout, (1, 2, 49, 49)) in calls, calls
assert not is_supported(torch.rand(2000, 100), torch.rand(100, 100), None)
"""
    run(code)


@pytest.mark.slow
@pytest.mark.long  # `make test-core` runs these tests themselves
def test_the_tests_of_the_core_can_be_collected():
    code = f"""
import os, sys, pytest
from benchmarks.stacks import CORE
os.environ['PYTEST_DISABLE_PLUGIN_AUTOLOAD'] = '1'  # zarr has a plugin
sys.modules.update(dict.fromkeys({OPTIONAL_PACKAGES}))
os.chdir({str(ROOT)!r})
assert pytest.main(['--collect-only', '-q', '-p', 'no:cacheprovider', *CORE]) == 0
"""
    run(code)


def test_torch_dynamo_is_not_imported():
    """Importing torch._dynamo takes as long as all the rest; the oldest versions import it in `import torch`."""
    code = "import sys, torch\nbefore = '{0}' in sys.modules\n{1}assert before or '{0}' not in sys.modules"
    absent = "sys.modules.update(dict.fromkeys(['mmengine', 'mmcv', 'mmdet', 'mmseg']))\nimport swin_dense\n"
    run(code.format('torch._dynamo', absent))


# What this package imports of mmengine.
MMENGINE = {
    'config/__init__.py': '',
    'config/utils.py': 'MODULE2PACKAGE = {}',
    'logging.py': 'class HistoryBuffer: pass\ndef print_log(*args, **kwargs): pass',
    'registry.py': 'class MODELS: register_module = staticmethod(lambda: lambda cls: cls)',
    'model.py': 'class BaseModule: pass\nPretrainedInit = initialize = None',
}


@pytest.mark.parametrize(
    ('line', 'reason'),
    [
        ('import pkg_resources_that_is_gone', "No module named 'pkg_resources_that_is_gone'"),
        ('MODELS = int.no_such_attribute', "type object 'int' has no attribute 'no_such_attribute'"),
        ('raise OSError("libgomp.so: not found")', 'libgomp.so: not found'),
    ],
)
def test_an_mmengine_that_cannot_be_imported(tmp_path, line, reason):
    for name, content in {**MMENGINE, '__init__.py': line}.items():
        path = tmp_path / 'mmengine' / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(content)
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
