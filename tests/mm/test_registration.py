"""SwinDense is registered if only the backbone can be imported; a config with another class gets the reason."""

import itertools

import mmengine.registry
import pytest
from mmengine.registry import HOOKS, OPTIM_WRAPPER_CONSTRUCTORS, STRATEGIES, TRANSFORMS, Registry

import swin_dense.mm
from tests.conftest import TINY
from tests.processes import python

# Builds a type of a config in the registry of a kind, or prints the error.
TRY = f"""
import mmengine.registry
def built(kind, **config):
    try:
        return type(getattr(mmengine.registry, kind).build(config)).__name__
    except Exception as error:
        return f'{{type(error).__name__}}: {{error}}'
TINY = {TINY}
"""


def test_swin_dense_is_built_where_none_of_its_hooks_can_be_imported():
    modules = sorted(set(swin_dense.mm._HOMES.values()))
    code = f"""
import sys
sys.modules.update(dict.fromkeys({modules}))
{TRY}
for name in ('swin_dense.SwinDense', 'SwinDense', 'SwinDenseV2'):
    assert 'SwinDense' in built('MODELS', type=name, **TINY).split(':')[0]
error = built('HOOKS', type='ResumeOptimizer')
assert error.startswith('ModuleNotFoundError: import of swin_dense.mm.resume halted'), error
"""
    python('-W', 'ignore', '-c', code)


def test_a_config_gets_the_reason_why_swin_dense_cannot_be_imported():
    """mmengine itself says only that the name is not in its registry."""
    code = f"""
import sys
sys.modules['swin_dense.models.layers'] = None
{TRY}
import swin_dense
reason = '(ModuleNotFoundError: import of swin_dense.models.layers halted'
swin_dense._registration.register_with_mmengine()  # again, as mmengine's import in another thread does
for name in ('swin_dense.SwinDense', 'SwinDense', 'swin_dense.SwinDenseV2'):
    error = built('MODELS', type=name)
    assert error.startswith('ImportError: SwinDense') and reason in error, error
errors = []
for _ in range(2):
    try:
        mmengine.registry.MODELS.get('SwinDense')()
    except ImportError as error:
        errors.append(error)
assert errors[0] is not errors[1]  # whose traceback grows each time
try:
    swin_dense.SwinDense
except ImportError as error:
    assert reason in str(error), error
else:
    raise AssertionError
"""
    python('-W', 'ignore', '-c', code)


BY_REGISTRY = {
    'TRANSFORMS': ['IgnoreMaskValues', 'LoadBands', 'MapMaskValues'],
    'HOOKS': ['ResumeOptimizer', 'UseGraphs'],
    'OPTIM_WRAPPER_CONSTRUCTORS': ['SwinLayerDecayConstructor'],
    'STRATEGIES': ['ResumableFSDPStrategy'],
    'FUNCTIONS': ['swin_auto_wrap_policy'],
}


def test_every_public_name_is_registered():
    names = [*itertools.chain(*BY_REGISTRY.values()), 'SwinDense', 'SwinDenseV2']
    assert sorted(names) == sorted(swin_dense.mm.__all__)
    for registry, names in BY_REGISTRY.items():
        for name in names:
            assert getattr(mmengine.registry, registry).get(name).__module__ == 'swin_dense.mm'


@pytest.mark.parametrize(
    ('registry', 'config'),
    [
        (HOOKS, {'type': 'ResumeOptimizer'}),
        (TRANSFORMS, {'type': 'MapMaskValues', 'values': [1]}),
        (
            OPTIM_WRAPPER_CONSTRUCTORS,
            {
                'type': 'SwinLayerDecayConstructor',
                'optim_wrapper_cfg': {'optimizer': {'lr': 0.1}},
                'paramwise_cfg': {'decay_rate': 0.9},
            },
        ),
        (STRATEGIES, {'type': 'ResumableFSDPStrategy'}),
    ],
)
def test_a_config_builds_the_class(registry: Registry, config):
    assert type(registry.build(config)) is getattr(swin_dense.mm, config['type'])
