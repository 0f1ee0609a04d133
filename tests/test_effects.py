"""What importing the package and building a backbone change in a process, besides adding modules of their own."""

import pytest

from tests.conftest import TINY, needs
from tests.processes import python

STATE = f"""
import ctypes, logging, os, sys, warnings
import torch
calls = []
class Library(ctypes.CDLL):
    def __getattr__(self, name):
        calls.extend([name] if name == 'mallopt' else [])
        return super().__getattr__(name)
ctypes.CDLL = Library
TINY = {TINY}

def state():
    named = [(name, one) for name, one in logging.root.manager.loggerDict.items() if isinstance(one, logging.Logger)]
    found = {{
        'finders': [type(one).__name__ for one in sys.meta_path],
        'loggers': {{
            name: (one.level, one.propagate, [*one.handlers]) for name, one in [('root', logging.root), *named]
            if name.partition('.')[0] != 'swin_dense' and (one.level or one.handlers or not one.propagate)
        }},
        'warnings': [*warnings.filters],
        'environment': dict(os.environ),
        'mallopt': len(calls),
        'dtype': torch.get_default_dtype(),
        'threads': (torch.get_num_threads(), torch.get_num_interop_threads()),
        'gradients': torch.is_grad_enabled(),
        'algorithms': (torch.are_deterministic_algorithms_enabled(), torch.backends.cudnn.benchmark),
        'precision': torch.get_float32_matmul_precision(),
        'random': torch.get_rng_state().tolist(),
        'forward': [vars(kind)['forward'] for kind in (torch.nn.Linear, torch.nn.LayerNorm, torch.nn.Dropout)],
    }}
    if hasattr(torch.serialization, 'get_safe_globals'):
        found['safe globals'] = set(map(str, torch.serialization.get_safe_globals()))
    if 'mmengine' in sys.modules:
        import mmengine.registry
        from mmengine.config.utils import MODULE2PACKAGE
        from mmengine.runner import CheckpointLoader
        found['packages'] = set(MODULE2PACKAGE)
        found['loaders'] = {{prefix: one.__code__.co_filename for prefix, one in CheckpointLoader._schemes.items()}}
        for name, one in vars(mmengine.registry).items():
            if isinstance(one, mmengine.registry.Registry):
                found[name] = {{*one.module_dict, *(f'{{scope}}::' for scope in one.children)}}
    return found

def changes(before):
    after = state()
    return {{name: after[name] for name in before if before[name] != after[name]}}
"""


def test_the_import_and_a_backbone_leave_the_process_as_it_is():
    """Allowed: a finder, which registers SwinDense when mmengine is imported, and the allocator, for a backbone."""
    code = f"""{STATE}
before = state()
from swin_dense import SwinBackbone, create_backbone, load_checkpoint
assert changes(before) == {{'finders': ['_AfterMmengine', *before['finders']]}}, changes(before)
SwinBackbone(**TINY)
assert changes(before).keys() - {{'random', 'finders'}} <= {{'mallopt'}}, changes(before)
"""
    python('-c', code)


@needs('tifffile')
def test_all_public_names_and_the_packages_that_read_images_leave_it_too():
    code = f"""{STATE}
import swin_dense, PIL.Image, tifffile
before = state()
for name in swin_dense.__all__:
    getattr(swin_dense, name)
import swin_dense.explore.page, swin_dense.features.folder, swin_dense.runtime
from swin_dense.features import Extractor
assert not changes(before), changes(before)
"""
    python('-c', code)


@pytest.mark.parametrize('variables', [{'SWIN_DENSE_REGISTER': '0', 'SWIN_DENSE_KEEP_MEMORY': '0'}])
def test_what_is_allowed_can_be_switched_off(variables):
    code = f"""{STATE}
before = state()
from swin_dense import SwinBackbone
SwinBackbone(**TINY)
assert changes(before).keys() <= {{'random'}}, changes(before)
"""
    python('-c', code, **variables)


@needs('mmengine')
def test_beside_mmengine_names_are_added_and_one_loader_is_replaced():
    code = f"""{STATE}
import mmengine.runner, mmengine.registry, mmengine._strategy
before = state()
mmengine.registry.MODELS.build(dict(type='swin_dense.SwinDense', **TINY))
found = changes(before)
registries = {{'MODELS', 'HOOKS', 'TRANSFORMS', 'OPTIM_WRAPPER_CONSTRUCTORS', 'STRATEGIES', 'FUNCTIONS'}}
allowed = {{*registries, 'packages', 'loaders'}}
assert found.keys() <= allowed | {{'random', 'mallopt'}}, found
for name in allowed - {{'loaders'}}:
    assert found[name] > before[name], name
assert {{prefix for prefix, file in found['loaders'].items() if file != before['loaders'][prefix]}} == {{''}}
assert found['packages'] - before['packages'] == {{'swin_dense'}}
"""
    python('-W', 'ignore', '-c', code)
