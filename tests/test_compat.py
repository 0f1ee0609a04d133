"""What stands in for newer parts of torch, tried with whatever torch is here; and that nobody goes past it."""

import ast
import collections
import io
import os
import pickle

import pytest
import torch

from swin_dense import compat
from tests.conftest import ROOT

PACKAGE = ROOT / 'swin_dense'
# What torch 2.1 lacks, or has in another form.
NEWER = {
    'custom_op', 'is_compiling', 'is_exporting', 'is_autocast_enabled', 'get_autocast_dtype', 'uint16',
    'register_load_state_dict_pre_hook', 'add_safe_globals', 'get_safe_globals', 'safe_globals', 'OutOfMemoryError',
}  # fmt: skip


def newer_names(source):
    """Yield the attributes among NEWER that a file takes from anything but ``compat``."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Attribute) and node.attr in NEWER:
            owner = ast.unparse(node.value)
            if owner != 'compat' and owner.partition('.')[0] in ('torch', 'self', 'module', 'model'):
                yield f'{owner}.{node.attr}'


def test_what_old_versions_lack_is_taken_from_one_place():
    found = {
        str(path.relative_to(PACKAGE)): names
        for path in PACKAGE.rglob('*.py')
        if path.name != 'compat.py' and (names := list(newer_names(path.read_text())))
    }
    assert not found
    seen = set(newer_names('@torch.library.custom_op("a")\ndef f(): torch.uint16'))
    assert seen == {'torch.library.custom_op', 'torch.uint16'}


def test_a_plain_operator_has_the_gradient_that_is_registered():
    @compat._Operator
    def double(x, factor):
        return 2 * x * factor

    def save(ctx, inputs, output):
        ctx.factor = inputs[1]

    assert double.register_fake(save) is save
    double.register_autograd(lambda ctx, grad: (7 * grad * ctx.factor, None), setup_context=save)
    x = torch.ones(3, requires_grad=True)
    out = double(x, 5)
    out.sum().backward()
    assert out.tolist() == [10, 10, 10]
    assert x.grad.tolist() == [35, 35, 35]


class Runs:
    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


@pytest.fixture
def load(tmp_path):
    def save_and_load(value):
        torch.save(value, tmp_path / 'a.pth')
        return torch.load(tmp_path / 'a.pth', pickle_module=compat._CarefulPickle, weights_only=False)

    return save_and_load


@pytest.mark.parametrize('legacy', [False, True])
def test_the_careful_unpickler_reads_weights(tmp_path, legacy):
    weights = collections.OrderedDict(a=torch.randn(2, 3), b=torch.nn.Parameter(torch.ones(2)), c=torch.ones(2).half())
    value = {'state_dict': weights, 'epoch': 3, 'names': ['x', ('y', None, 1.5)], 'size': torch.Size([2, 3])}
    torch.save(value, tmp_path / 'a.pth', _use_new_zipfile_serialization=not legacy)
    found = torch.load(tmp_path / 'a.pth', pickle_module=compat._CarefulPickle, weights_only=False)
    assert found['names'] == value['names']
    assert found['size'] == value['size']
    assert found['state_dict'].keys() == weights.keys()
    for name, tensor in weights.items():
        assert found['state_dict'][name].dtype == tensor.dtype
        assert torch.equal(found['state_dict'][name], tensor)


@pytest.mark.parametrize(
    'value',
    [
        Runs(os.system, 'touch ran'),
        Runs(eval, 'open("ran", "w")'),
        Runs(getattr, 'a', 'upper'),
        Runs(pickle.loads, b''),
        torch.nn.Linear(1, 1),
    ],
    ids=['system', 'eval', 'getattr', 'loads', 'module'],
)
def test_the_careful_unpickler_runs_nothing(load, tmp_path, monkeypatch, value):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(pickle.UnpicklingError, match=r'GLOBAL|may not ask'):  # the second where swin_dense.mm is there
        load({'a': value})
    assert not (tmp_path / 'ran').exists()


def test_what_is_allowed_cannot_be_changed():
    # The state of OrderedDict, the class: a pickle may not give it another method.
    code = b'\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.'
    with pytest.raises(pickle.UnpicklingError, match='may not be changed'):
        pickle_loads(code)


def test_nothing_that_a_call_returned_is_called():
    code = b'\x80\x02ccollections\nOrderedDict\n)R)R.'
    with pytest.raises(pickle.UnpicklingError, match='may not be called'):
        pickle_loads(code)


def pickle_loads(code):
    return compat._CarefulPickle.load(io.BytesIO(code))
