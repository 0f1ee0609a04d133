"""The unpickler reads weights from every file format of torch and from plain pickles, and runs no code in them."""

import collections
import io
import os
import pickle

import numpy as np
import pytest
import torch

from swin_dense.checkpoint import unpickler
from swin_dense.checkpoint.unpickler import RefusedError, read_pickle


class Runs:
    """An object whose unpickling calls a function."""

    def __init__(self, function, *arguments):
        self.call = function, arguments

    def __reduce__(self):
        return self.call


def save_zipped(value, path):
    torch.save(value, path)


def save_legacy(value, path):
    torch.save(value, path, _use_new_zipfile_serialization=False)


def save_plain(value, path):
    path.write_bytes(pickle.dumps(value))


@pytest.mark.parametrize('save', [save_zipped, save_legacy])
def test_weights_of_torch(tmp_path, save):
    weights = collections.OrderedDict(a=torch.randn(2, 3), b=torch.nn.Parameter(torch.ones(2)), c=torch.ones(2).half())
    weights._metadata = {'': {'version': 1}}
    value = {'state_dict': weights, 'epoch': 3, 'names': ['x', ('y', None, 1.5)], 'size': torch.Size([2, 3])}
    save(value, tmp_path / 'a.pth')
    found = read_pickle(tmp_path / 'a.pth')
    assert found['names'] == value['names']
    assert found['size'] == value['size']
    assert found['state_dict'].keys() == weights.keys()
    for name, tensor in weights.items():
        assert found['state_dict'][name].dtype == tensor.dtype
        assert torch.equal(found['state_dict'][name], tensor)


@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize('dtype', ['<f4', '>f8', 'f2', 'i8', '?', 'U3', 'M8[D]', 'O'])
def test_arrays(tmp_path, protocol, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    value = {'c': array, 'fortran': np.asfortranarray(array), 'number': array[1, 1], 'none': array[:0]}
    (tmp_path / 'a.pkl').write_bytes(pickle.dumps(value, protocol))
    found = read_pickle(tmp_path / 'a.pkl')
    for name, expected in value.items():
        np.testing.assert_array_equal(found[name], expected)
        assert np.asarray(found[name]).dtype.newbyteorder('=') == np.asarray(expected).dtype.newbyteorder('=')


@pytest.mark.parametrize('save', [save_zipped, save_legacy, save_plain])
@pytest.mark.parametrize(
    'value',
    [
        Runs(os.system, 'touch ran'),
        Runs(eval, 'open("ran", "w")'),
        Runs(os.getcwd),
        Runs(pickle.loads, b''),
        Runs(np.ndarray, (1 << 40,)),
        Runs(np._core.multiarray._reconstruct, np.matrix, (0,), b'b'),
        Runs(np.load, 'a.pth'),
        torch.nn.Linear(1, 1),
    ],
    ids=['system', 'eval', 'getcwd', 'loads', 'array', 'matrix', 'load', 'module'],
)
def test_no_code_runs(tmp_path, monkeypatch, save, value):
    monkeypatch.chdir(tmp_path)
    save({'a': value}, tmp_path / 'a.pth')
    with pytest.raises(RefusedError):
        read_pickle(tmp_path / 'a.pth')
    assert os.listdir(tmp_path) == ['a.pth']


@pytest.mark.parametrize('save', [save_zipped, save_legacy, save_plain])
def test_the_stand_in_for_getattr_returns_no_attribute(tmp_path, save):
    save({'a': Runs(getattr, collections.Counter, 'update')}, tmp_path / 'a.pth')
    assert not callable(read_pickle(tmp_path / 'a.pth')['a'])


@pytest.mark.parametrize(
    ('code', 'why'),
    [
        # Sets the state of the class OrderedDict, which could replace a method.
        (b'\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.', 'may not be changed'),
        # Sets attributes of the result of a call.
        (b'\x80\x02ctorch\ndevice\nX\x03\x00\x00\x00cpu\x85R}X\x01\x00\x00\x00aK\x01sb.', 'may not be changed'),
        # Calls the result of a call.
        (b'\x80\x02ccollections\nOrderedDict\n)R)R.', 'may not be called'),
        # Creates an array of another type, whose own code would fill it.
        (b'\x80\x02cnumpy.core.multiarray\n_reconstruct\nccollections\nOrderedDict\n\x85R.', 'an array of the type'),
        # Unusual opcodes to create objects, and the extension registry.
        (b'\x80\x02(icollections\nOrderedDict\n.', 'unusual'),
        (b'\x80\x02(ccollections\nOrderedDict\no.', 'unusual'),
        (b'\x80\x04ccollections\nOrderedDict\n)}\x92.', 'unusual'),
        (b'\x80\x02\x82\x01.', 'unusual'),
        # Other spellings: a name of Python 2, a dotted name, and the name of arrays on torch's list (mm/resume.py).
        (b'\x80\x02c__builtin__\neval\n.', 'builtins.eval'),
        (b'\x80\x04\x8c\x0bcollections\x8c\x10OrderedDict.copy\x93.', 'collections.OrderedDict.copy'),
        (b'\x80\x04\x8c\x00\x8c\x1afilled once reconstructed\n\x93.', 'filled'),
        # The persistent ID of a module, as in legacy files of torch.save.
        (b'\x80\x02(X\x06\x00\x00\x00moduleccollections\nOrderedDict\nNNtQ.', 'module'),
    ],
)
def test_forbidden_operations_are_refused(code, why):
    before = dict(vars(collections.OrderedDict))
    with pytest.raises(RefusedError, match=why):
        unpickler.load(io.BytesIO(code))
    assert dict(vars(collections.OrderedDict)) == before


@pytest.mark.parametrize('content', [b'PK\x03\x04 a zipped file', pickle.dumps(Runs(os.system, 'touch ran'))])
def test_a_nested_storage_is_read_with_the_same_restrictions(tmp_path, monkeypatch, content):
    """A plain pickle stores a tensor as a file of torch.save in bytes, which torch would load without restrictions."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises(RefusedError):
        unpickler.load(io.BytesIO(pickle.dumps(Runs(torch.storage._load_from_bytes, content))))
    assert not os.listdir(tmp_path)


def test_tensors_in_a_plain_pickle(tmp_path):
    tensors = {'a': torch.arange(6.0).reshape(2, 3), 'b': torch.ones(2, dtype=torch.bfloat16)}
    (tmp_path / 'a.pkl').write_bytes(pickle.dumps(tensors))
    found = read_pickle(tmp_path / 'a.pkl')
    assert all(torch.equal(tensor, found[name]) for name, tensor in tensors.items())


def test_attributes_of_dicts_are_left_out():
    code = b'\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb.'
    assert not unpickler.load(io.BytesIO(code)).items()


def test_a_program_in_torchscript_is_refused(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / 'a.pth'))
    with pytest.raises(RefusedError, match='code in TorchScript'):
        read_pickle(tmp_path / 'a.pth')
