"""The unpickler reads weights from every file format of torch and from plain pickles, and runs no code in them."""

import argparse
import builtins
import collections
import copyreg
import datetime
import enum
import io
import os
import pickle
import random
import subprocess
import sys
import tarfile
import types
import zipfile

import numpy as np
import pytest
import torch

from swin_dense.checkpoint import unpickler
from swin_dense.checkpoint.unpickler import ALLOWED, RefusedError, StandIn, read_pickle
from tests.fuzzing.checkpoints import NAMES, pickle_program


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


SAVERS = [save_zipped, save_legacy, save_plain]


@pytest.mark.parametrize('save', SAVERS)
def test_weights_of_torch(tmp_path, save):
    weights = collections.OrderedDict(
        a=torch.randn(2, 3), b=torch.nn.Parameter(torch.ones(2)), c=torch.ones(2).bfloat16()
    )
    weights['d'] = torch.arange(12.0).view(3, 4).T[1:]
    if save is save_zipped and hasattr(torch, 'uint16'):  # before torch 2.3
        weights['e'] = torch.arange(3).to(torch.uint16)  # a type without a class of storages
    weights['f'] = torch.ones(2)
    weights['f'].note = 'an attribute'
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


class Settings(dict):
    """A dict class of a training program, with attributes."""


class Mode(enum.Enum):
    FAST = 1


@pytest.mark.parametrize('save', SAVERS)
def test_objects_of_training_programs_are_stand_ins(tmp_path, save):
    """A dict of any class keeps its items, so that weights in it are found; nothing else is kept or called."""
    settings = Settings(weights=torch.ones(3), inner=collections.defaultdict(list, a=[1]))
    settings.frozen = True
    value = {
        'settings': settings,
        'args': argparse.Namespace(lr=0.1),
        'elapsed': datetime.timedelta(3),
        Mode.FAST: {Mode.FAST, 'x'},
        'queue': collections.deque([1, 2]),
        'table': np.zeros(2, [('a', 'f4'), ('b', 'i8')]),
        'random': np.random.RandomState(0),
    }
    save(value, tmp_path / 'a.pth')
    found = read_pickle(tmp_path / 'a.pth')
    assert torch.equal(found['settings']['weights'], torch.ones(3))
    assert dict(found['settings']['inner']) == {'a': [1]}
    kinds = {name: found[name].kind for name in ('settings', 'args', 'elapsed', 'queue')}
    assert kinds == {
        'settings': f'{__name__}.Settings',
        'args': 'argparse.Namespace',
        'elapsed': 'datetime.timedelta',
        'queue': 'collections.deque',
    }
    assert not any(hasattr(found[name], '__dict__') or found[name].is_module for name in kinds)
    assert len(found) == len(value)


HARMFUL = {
    'system': Runs(os.system, 'touch ran'),
    'eval': Runs(eval, 'open("ran", "w")'),
    'exec': Runs(exec, 'open("ran", "w")'),
    'popen': Runs(subprocess.Popen, ['touch', 'ran']),
    'loads': Runs(pickle.loads, b''),
    'getattr': Runs(getattr, collections.Counter, 'update'),
    'array': Runs(np.ndarray, (1 << 40,)),
    'matrix': Runs(np.zeros(1).__reduce__()[0], np.matrix, (0,), b'b'),
    'load': Runs(np.load, 'a.pth'),
    'import': Runs(builtins.__import__, 'this'),
    'memory': Runs(bytearray, 1 << 45),
    'module': torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize('save', SAVERS)
@pytest.mark.parametrize('name', HARMFUL)
def test_no_code_runs(tmp_path, monkeypatch, save, name):
    monkeypatch.chdir(tmp_path)
    save({'a': HARMFUL[name], 'weights': torch.ones(2)}, tmp_path / 'a.pth')
    sys.modules.pop('this', None)
    try:
        found = read_pickle(tmp_path / 'a.pth')
    except RefusedError:
        assert name == 'array'  # numpy.ndarray is an argument, but never called
    else:
        assert isinstance(found['a'], StandIn) or (name == 'matrix' and not callable(found['a']))
        assert found['a'].is_module == (name == 'module')
        assert torch.equal(found['weights'], torch.ones(2))
    assert os.listdir(tmp_path) == ['a.pth']
    assert 'this' not in sys.modules


def test_only_these_names_are_resolved():
    """Extending this list extends what a file can call."""
    dtypes = {str(value) for value in vars(torch).values() if isinstance(value, torch.dtype)}
    assert ALLOWED.keys() - dtypes == {
        'numpy.ndarray',
        'numpy.dtype',
        *(f'numpy.{core}.multiarray.{name}' for core in ('core', '_core') for name in ('_reconstruct', 'scalar')),
        *(f'numpy.{core}.numeric._frombuffer' for core in ('core', '_core')),
        '_codecs.encode',
        'builtins.bytes',
        'collections.OrderedDict',
        'torch.Size',
        'torch._utils._rebuild_tensor',
        'torch._utils._rebuild_tensor_v2',
        'torch._utils._rebuild_tensor_v3',
        'torch._utils._rebuild_parameter',
        'torch._utils._rebuild_parameter_with_state',
        'torch._utils._rebuild_device_tensor_from_cpu_tensor',
        'torch._utils._rebuild_device_tensor_from_numpy',
        'torch._tensor._rebuild_from_type_v2',
        'torch.storage._load_from_bytes',
        'torch.storage.UntypedStorage',
    }
    own = {value for name, value in ALLOWED.items() if isinstance(value, types.FunctionType)}
    assert {function.__module__ for function in own} == {unpickler.__name__}
    others = {value for value in ALLOWED.values() if isinstance(value, type)} - {unpickler._Array}
    assert others == {collections.OrderedDict, torch.Size, torch.UntypedStorage}


def test_no_other_name_is_resolved(monkeypatch):
    """Neither names of every kind nor random programs import a module, or make an object of another type."""
    seen = []
    is_watching = False

    def watch(event, details):
        if is_watching and event.split('.')[0] in ('import', 'exec', 'compile', 'open', 'os', 'subprocess', 'socket'):
            seen.append((event, details))

    sys.addaudithook(watch)
    chance = random.Random(0)
    programs = [pickle_program(chance) for _ in range(3000)]
    reader = unpickler.Unpickler(io.BytesIO(b''))
    is_watching = True
    try:
        for module, name in NAMES:
            value = reader.find_class(module, name)
            assert isinstance(value, StandIn) or any(value is allowed for allowed in ALLOWED.values())
        outcomes = collections.Counter(_kind_of_result(program) for program in programs)
    finally:
        is_watching = False
    assert not seen
    assert outcomes['read'] > 100
    assert outcomes['refused'] > 100


def _kind_of_result(program):
    try:
        value = unpickler.load(io.BytesIO(program), encoding='latin1')
    except Exception:
        return 'refused'
    pending, types_found = [value], set()
    while pending:
        value = pending.pop()
        if type(value) not in types_found:
            types_found.add(type(value))
            pending += list(value.values()) if isinstance(value, dict) else []
            pending += list(value) if isinstance(value, (list, tuple)) else []
    plain = {int, str, bytes, bytearray, float, bool, type(None), list, tuple, dict, set, frozenset}
    ours = {StandIn, collections.OrderedDict, torch.Size, torch.dtype, torch.Tensor, type, types.FunctionType}
    ours.add(type(torch.UntypedStorage))  # a class of its own before torch 2.3
    assert all(issubclass(kind, (np.ndarray, np.dtype, np.generic)) for kind in types_found - plain - ours)
    return 'read'


@pytest.mark.parametrize(
    ('code', 'why'),
    [
        # Sets the state of the class OrderedDict, which could replace a method.
        (b'\x80\x02ccollections\nOrderedDict\n}X\x01\x00\x00\x00aK\x01sb.', 'may not be changed'),
        (b'\x80\x02ctorch\nSize\n}X\x01\x00\x00\x00aK\x01sb.', 'may not be changed'),
        # Calls the result of a call, and types that are only arguments.
        (b'\x80\x02ccollections\nOrderedDict\n)R)R.', 'may not be called'),
        (b'\x80\x02ctorch.storage\nUntypedStorage\nK\x09\x85R.', 'may not be called'),
        (b'\x80\x02cnumpy\nndarray\nK\x09\x85R.', 'may not be called'),
        (b'\x80\x02(K\x01inumpy\nndarray\n.', 'may not be called'),
        (b'\x80\x02(cnumpy\nndarray\nK\x01o.', 'may not be called'),
        # A data type with fields, whose offsets NumPy does not check.
        (
            b'\x80\x02cnumpy\ndtype\nX\x02\x00\x00\x00f4\x85R(K\x03X\x01\x00\x00\x00<N)}K\x04K\x01K\x00tb.',
            'may not be changed',
        ),
        # The extension registry.
        (b'\x80\x02\x82\x01.', 'extension'),
        (b'\x80\x02\x83\x01\x00.', 'extension'),
        (b'\x80\x02\x84\x01\x00\x00\x00.', 'extension'),
        # Objects outside of the pickle.
        (b'\x80\x02X\x06\x00\x00\x00moduleQ.', 'outside of the pickle'),
        (b'\x80\x02K\x01Q.', 'outside of the pickle'),
        (b'\x80\x02(X\x07\x00\x00\x00storageK\x01K\x02K\x03K\x04)tQ.', 'outside of the pickle'),
    ],
)
def test_forbidden_operations_are_refused(code, why):
    before = dict(vars(collections.OrderedDict))
    with pytest.raises(RefusedError, match=why):
        unpickler.load(io.BytesIO(code))
    assert dict(vars(collections.OrderedDict)) == before


@pytest.mark.parametrize(
    'code',
    [
        b'\x80\x02c__builtin__\neval\n.',
        b'\x80\x04\x8c\x0bcollections\x8c\x10OrderedDict.copy\x93.',
        b'\x80\x04\x8c\x00\x8c\x1afilled once reconstructed\n\x93.',  # see mm/resume.py
        b'\x80\x04\x8c\x05torch\x8c\x0aSize.index\x93.',
        b'\x80\x02(cposix\nsystem\nX\x02\x00\x00\x00lso.',
        b'\x80\x02(X\x02\x00\x00\x00lsiposix\nsystem\n.',
        b'\x80\x04cposix\nsystem\nX\x02\x00\x00\x00ls\x85}\x92.',
        # Called again, changed, filled, and in the persistent ID of a module in a legacy file.
        b'\x80\x02cposix\nsystem\nX\x02\x00\x00\x00ls\x85R)R.',
        b'\x80\x02cposix\nsystem\n}X\x0c\x00\x00\x00__setstate__K\x01sb.',
        b'\x80\x02cposix\nsystem\n(K\x01K\x02eK\x03a.',
        b'\x80\x02(X\x06\x00\x00\x00modulecposix\nsystem\nNNtQ.',
    ],
)
def test_other_names_become_stand_ins(code):
    value = unpickler.load(io.BytesIO(code))
    assert type(value) is StandIn
    assert not value
    assert not hasattr(value, '__setstate__') or '__setstate__' not in vars(StandIn)


def test_the_name_of_a_stand_in_cannot_control_the_terminal():
    assert unpickler.load(io.BytesIO(b'\x80\x02ca\x1b[2J\nb\n.')).kind == r"'a\x1b[2J.b'"


def test_the_extension_registry_is_not_consulted(monkeypatch):
    copyreg.add_extension('posix', 'system', 9)
    monkeypatch.setitem(copyreg._extension_cache, 9, os.system)
    try:
        with pytest.raises(RefusedError, match='extension'):
            unpickler.load(io.BytesIO(b'\x80\x02\x82\x09.'))
    finally:
        copyreg.remove_extension('posix', 'system', 9)


@pytest.mark.parametrize('content', [b'PK\x03\x04 a zipped file', pickle.dumps(Runs(os.system, 'touch ran'))])
def test_a_nested_storage_is_read_with_the_same_restrictions(tmp_path, monkeypatch, content):
    """A plain pickle stores a tensor as a file of torch.save in bytes, which torch would load without restrictions."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((RefusedError, RuntimeError)):
        unpickler.load(io.BytesIO(pickle.dumps(Runs(torch.storage._load_from_bytes, content))))
    assert not os.listdir(tmp_path)


def test_attributes_of_dicts_are_left_out():
    code = b'\x80\x02ccollections\nOrderedDict\n)R}X\x05\x00\x00\x00itemsK\x01sb.'
    assert not unpickler.load(io.BytesIO(code)).items()


def test_a_program_in_torchscript_is_refused(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / 'a.pth'))
    with pytest.raises(RefusedError, match='code in TorchScript'):
        read_pickle(tmp_path / 'a.pth')


def claiming(size, stride, offset=0):
    """Return a tensor of 4 numbers whose pickle claims another shape."""

    class Claims(torch.Tensor):
        def __reduce_ex__(self, protocol):
            storage = torch.ones(4).storage()
            return torch._utils._rebuild_tensor_v2, (storage, offset, size, stride, False, collections.OrderedDict())

    return Claims()


@pytest.mark.filterwarnings('ignore:TypedStorage')
class TestClaims:
    """A small file that claims large contents neither reads foreign memory nor fills the memory."""

    @pytest.mark.parametrize('save', SAVERS)
    @pytest.mark.parametrize(
        ('size', 'stride', 'offset'), [((5,), (1,), 0), ((4,), (1,), 1), ((2, 2), (9, 1), 0), ((4,), (1,), -1)]
    )
    def test_a_tensor_beyond_its_data(self, tmp_path, save, size, stride, offset):
        """torch would enlarge the storage, with whatever the memory of the process held there before."""
        save({'a': claiming(size, stride, offset)}, tmp_path / 'a.pth')
        with pytest.raises(RefusedError, match='exceeds its data'):
            read_pickle(tmp_path / 'a.pth')

    def test_a_tensor_of_one_repeated_value(self, tmp_path):
        save_zipped({'a': claiming((1 << 40,), (0,)), 'b': torch.ones(2)}, tmp_path / 'a.pth')
        found = read_pickle(tmp_path / 'a.pth')
        assert type(found['a']) is StandIn
        assert torch.equal(found['b'], torch.ones(2))

    @pytest.mark.parametrize('claimed', [8, 1 << 20, 1 << 40])
    def test_a_storage_that_a_legacy_file_does_not_contain(self, tmp_path, claimed):
        """torch allocates it and fills only those that the file lists, so that it held what the memory held before."""
        save_legacy({'a': torch.full((4,), 7.0)}, tmp_path / 'a.pth')
        content = (tmp_path / 'a.pth').read_bytes()
        keys = content.rindex(b'\x80\x02]q')  # the list of storages, followed by their data
        program = content[:keys].replace(b'K\x04N', b'\x8a\x08' + claimed.to_bytes(8, 'little') + b'N')
        (tmp_path / 'a.pth').write_bytes(program + b'\x80\x02]q\x00.' + bytes(64))
        if claimed == 8:
            assert torch.equal(read_pickle(tmp_path / 'a.pth')['a'], torch.zeros(4))
        else:
            # torch may lack the memory for a terabyte before the size is checked.
            errors = RefusedError if claimed == 1 << 20 else (RefusedError, RuntimeError)
            with pytest.raises(errors, match=r'more data than the file|memory'):
                read_pickle(tmp_path / 'a.pth')

    def test_an_array_beyond_its_data(self):
        """NumPy would read beyond the end of the list."""
        content = pickle.dumps(np.array([1, 'a'], object), 2)
        assert content.count(b'K\x02\x85') == 1
        with pytest.raises(RefusedError, match='exceeds its data'):
            unpickler.load(io.BytesIO(content.replace(b'K\x02\x85', b'J\x00\x00\x00\x01\x85')))

    def test_an_archive_that_unpacks_to_far_more(self, tmp_path):
        torch.save({'a': torch.zeros(1 << 20)}, tmp_path / 'plain.pth')
        packed = zipfile.ZipFile(tmp_path / 'a.pth', 'w', zipfile.ZIP_DEFLATED)
        with zipfile.ZipFile(tmp_path / 'plain.pth') as plain, packed:
            for entry in plain.infolist():
                packed.writestr(entry.filename, plain.read(entry))
        with pytest.raises(RefusedError, match='more than 20 times its size'):
            read_pickle(tmp_path / 'a.pth')

    def test_an_archive_that_torch_would_extract(self, tmp_path):
        """A tar file whose first name begins as a pickle, which torch extracts into the folder of temporary files."""
        with tarfile.open(tmp_path / 'a.pth', 'w:') as archive:
            archive.addfile(tarfile.TarInfo('\udc80\x02\udc8a\nl\udcfc\udc9cF\udcf9 j\udca8P\x19.'))
        with pytest.raises(RefusedError, match='tar archive'):
            read_pickle(tmp_path / 'a.pth')
