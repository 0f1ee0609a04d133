"""The unpickler reads weights from every file format of torch and from plain pickles, and runs no code in them."""

import builtins
import collections
import io
import os
import pickle
import random
import sys
import types
import zipfile

import numpy as np
import pytest
import torch

from swin_dense.checkpoint import unpickler
from swin_dense.checkpoint.unpickler import ALLOWED, RefusedError, StandIn, read_pickle
from tests.checkpoint import test_hostile_files as hostile
from tests.checkpoint.helpers import SAVERS, Runs, save_zipped
from tests.checkpoint.programs import NAMES, pickle_program, pushed, zipped_records

# Objects that a name can stand for.
KNOWN = [*ALLOWED.values(), unpickler._storage_from_bytes]


def loads(program):
    return unpickler.Unpickler(io.BytesIO(program), len(program)).load()


@pytest.mark.parametrize('save', SAVERS)
def test_weights_of_torch(tmp_path, save):
    weights = collections.OrderedDict(
        contiguous=torch.randn(2, 3),
        view=torch.arange(12.0).view(3, 4).T[1:],
        parameter=torch.nn.Parameter(torch.ones(2)),
        half=torch.ones(2).bfloat16(),
        noted=torch.ones(2),
    )
    if save is save_zipped and hasattr(torch, 'uint16'):  # before torch 2.3
        weights['uint16'] = torch.arange(3).to(torch.uint16)  # a type without a class of storages
    weights['noted'].note = 'an attribute'
    weights._metadata = {'': {'version': 1}}
    others = {
        'epoch': 3,
        'names': ['x', ('y', None, 1.5)],
        'size': torch.Size([2, 3]),
    }
    save({'state_dict': weights, **others}, tmp_path / 'a.pth')
    found = read_pickle(tmp_path / 'a.pth')
    loaded = found.pop('state_dict')
    assert found == others
    assert loaded.keys() == weights.keys()
    for name, tensor in weights.items():
        assert loaded[name].dtype == tensor.dtype
        assert torch.equal(loaded[name], tensor)


def native(value):
    """Return the type of an array, or of a number, in the byte order of this machine."""
    return np.asarray(value).dtype.newbyteorder('=')


@pytest.mark.parametrize('protocol', range(2, pickle.HIGHEST_PROTOCOL + 1))
@pytest.mark.parametrize('dtype', ['<f4', '>f8', 'f2', 'i8', '?', 'U3', '>U3', 'S4', 'c8'])
def test_arrays(tmp_path, protocol, dtype):
    array = np.arange(6).reshape(2, 3).astype(dtype)
    value = {
        'c': array,
        'fortran': np.asfortranarray(array),
        'number': array[1, 1],
        'none': array[:0],
    }
    (tmp_path / 'a.pkl').write_bytes(pickle.dumps(value, protocol))
    found = read_pickle(tmp_path / 'a.pkl')
    for name, expected in value.items():
        np.testing.assert_array_equal(found[name], expected)
        assert native(found[name]) == native(expected)


@pytest.mark.parametrize('protocol', [2, 5])
@pytest.mark.parametrize('dtype', ['M8[D]', 'O', [('a', 'f4'), ('b', 'i8')], 'V8'])
def test_arrays_of_other_types_are_empty(tmp_path, protocol, dtype):
    array = np.zeros(3, dtype)
    value = {
        'a': array,
        'number': array[0],
        'b': np.ones(2),
    }
    (tmp_path / 'a.pkl').write_bytes(pickle.dumps(value, protocol))
    found = read_pickle(tmp_path / 'a.pkl')
    assert found['a'].size == 0
    assert found['b'].tolist() == [1, 1]


# A kind of call each; test_no_other_name_is_resolved tries many names.
HARMFUL = {
    'function': Runs(os.system, 'touch ran'),
    'import': Runs(builtins.__import__, 'this'),
    'array': Runs(np.ndarray, (1 << 40,)),
    'matrix': Runs(np.zeros(1).__reduce__()[0], np.matrix, (0,), b'b'),
    'memory': Runs(bytearray, 1 << 45),
    'module': torch.nn.Linear(1, 1),
}


@pytest.mark.parametrize('save', SAVERS)
@pytest.mark.parametrize('name', HARMFUL)
def test_no_code_runs(tmp_path, monkeypatch, save, name):
    monkeypatch.chdir(tmp_path)
    save({'a': HARMFUL[name], 'weights': torch.ones(2)}, tmp_path / 'a.pth')
    sys.modules.pop('this', None)
    found = read_pickle(tmp_path / 'a.pth')
    if name in ('array', 'matrix'):
        assert found['a'].size == 0
    else:
        assert isinstance(found['a'], StandIn)
        assert found['a'].is_module == (name == 'module')
    assert torch.equal(found['weights'], torch.ones(2))
    assert os.listdir(tmp_path) == ['a.pth']
    assert 'this' not in sys.modules


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
    reader = unpickler.Unpickler(io.BytesIO(b''), 0)
    is_watching = True
    try:
        for module, name in NAMES:
            value = reader.find_class(module, name)
            assert any(value is allowed for allowed in KNOWN) or isinstance(value, StandIn)
        outcomes = collections.Counter(_kind_of_result(program) for program in programs)
    finally:
        is_watching = False
    assert not seen
    assert outcomes['read'] > 100
    assert outcomes['refused'] > 100


PLAIN = (int, str, bytes, bytearray, float, bool, type(None), list, tuple, dict, set, frozenset)
OF_WEIGHTS = (unpickler.StateDict, unpickler.Array, unpickler.DType, torch.Size, torch.dtype, torch.Tensor)
HARMLESS = (*PLAIN, *OF_WEIGHTS, StandIn, type, types.FunctionType)


def _kind_of_result(program):
    try:
        value = loads(program)
    except Exception:
        return 'refused'
    pending, seen = [value], set()
    while pending:
        value = pending.pop()
        assert type(value) in HARMLESS or isinstance(value, np.generic)
        if type(value) not in seen:
            seen.add(type(value))
            pending += value.values() if isinstance(value, dict) else ()
            pending += value if isinstance(value, (list, tuple)) else ()
    return 'read'


@pytest.mark.parametrize(
    'code',
    [
        b'\x80\x02c__builtin__\neval\n.',
        b'\x80\x04\x8c\x0bcollections\x8c\x10OrderedDict.copy\x93.',
        b'\x80\x04\x8c\x05torch\x8c\x0aSize.index\x93.',
        b'\x80\x02(cposix\nsystem\nX\x02\x00\x00\x00lso.',
        b'\x80\x02(X\x02\x00\x00\x00lsiposix\nsystem\n.',
        b'\x80\x04cposix\nsystem\nX\x02\x00\x00\x00ls\x85}\x92.',
        # Called again, changed, filled, and in the persistent ID of a module in a legacy file.
        b'\x80\x02cposix\nsystem\n(K\x01K\x02eK\x03a.',
    ],
)
def test_other_names_become_stand_ins(code):
    assert isinstance(loads(code), StandIn)


def test_the_name_of_a_stand_in_cannot_control_the_terminal():
    assert loads(b'\x80\x02ca\x1b[2J\nb\n.').kind == r"'a\x1b[2J.b'"


@pytest.mark.parametrize('content', [b'PK\x03\x04 a zipped file', pickle.dumps(Runs(os.system, 'touch ran'))])
def test_a_nested_storage_is_read_with_the_same_restrictions(tmp_path, monkeypatch, content):
    """A plain pickle stores a tensor as a file of torch.save in bytes, which torch would load without restrictions."""
    monkeypatch.chdir(tmp_path)
    with pytest.raises((EOFError, zipfile.BadZipFile)):
        loads(pickle.dumps(Runs(torch.storage._load_from_bytes, content)))
    assert not os.listdir(tmp_path)


def test_a_program_in_torchscript_is_refused(tmp_path):
    torch.jit.script(torch.nn.Linear(2, 2)).save(str(tmp_path / 'a.pth'))
    with pytest.raises(RefusedError, match='code in TorchScript'):
        read_pickle(tmp_path / 'a.pth')


FOUR, CALL = pushed(4), b'c__main__\nA\n('


@pytest.mark.parametrize(
    ('program', 'message'),
    [
        # The same tuple could be given to any number of calls, or be a key again and again.
        (CALL + b'N' * 257 + b'tR', 'too many arguments'),
        (b'}(' + b'N' * 257 + b'tNs', 'a dict key of nested tuples'),
        (b'})\x85Ns', 'a dict key of nested tuples'),
        (pushed(1) + pushed(2) + b'a', 'it appends to a int'),
        (pushed(1) + pushed(2) + pushed(3) + b's', 'it sets items of a int'),
        (hostile.named('_codecs', 'encode') + pushed('a') + pushed('idna') + b'\x86R', "the codec 'idna'"),
        (hostile.tensor(FOUR, pushed(1), FOUR), 'is larger than its storage of 4'),
        (hostile.tensor(FOUR, pushed(0), pushed((1 << 16) + 1), pushed(0)), 'is larger than its storage of 4'),
        (hostile.tensor(FOUR, pushed(3), FOUR, pushed(-1)), 'and its strides do not fit'),
        (hostile.tensor(pushed(5), pushed(0), FOUR), '16 bytes for 5 numbers of torch.float32'),
    ],
)
def test_what_no_training_program_writes_is_refused(tmp_path, program, message):
    (tmp_path / 'a.pth').write_bytes(hostile.packed(b'\x80\x02' + program + b'.'))
    with pytest.raises(pickle.UnpicklingError, match=message):
        read_pickle(tmp_path / 'a.pth')


def test_what_is_just_allowed(tmp_path):
    assert isinstance(loads(b'\x80\x02' + CALL + b'N' * 256 + b'tR.'), StandIn)
    assert loads(b'\x80\x02}(' + b'N' * 256 + b'tNs.') == {(None,) * 256: None}
    expanded = hostile.tensor(FOUR, pushed(0), pushed(1 << 16), pushed(0))
    (tmp_path / 'a.pth').write_bytes(hostile.packed(b'\x80\x02' + expanded + b'.'))
    assert torch.equal(read_pickle(tmp_path / 'a.pth'), torch.zeros(1 << 16))
    assert unpickler._are_sizes([0, 2**63 - 1] * 32)
    for wrong in ([0] * 65, [-1], [2**63], ['1']):
        assert not unpickler._are_sizes(wrong)


def test_a_file_uses_each_of_its_bytes_four_times():
    reader = unpickler.Unpickler(io.BytesIO(), 10)
    reader.claim(40)
    reader.claim(0)
    for more in (1, -1):
        with pytest.raises(pickle.UnpicklingError, match='more data than it has'):
            reader.claim(more)


def test_a_file_of_a_big_endian_machine_is_refused(tmp_path):
    (tmp_path / 'a.pth').write_bytes(zipped_records({'data.pkl': b'\x80\x02}.', 'byteorder': b'big'}))
    with pytest.raises(pickle.UnpicklingError, match='on a big-endian machine'):
        read_pickle(tmp_path / 'a.pth')


@pytest.mark.parametrize(
    ('keys', 'message'), [(b']', r"lacks the storages \['0'\]"), (b'](X\1\0\0\0' + b'0e', 'ends before')]
)
def test_a_legacy_file_without_its_data_is_refused(keys, message):
    parts = [b'N', b'N', b'N', hostile.tensor(FOUR, pushed(0), FOUR), keys]
    content = b''.join(b'\x80\x02' + part + b'.' for part in parts)
    with pytest.raises(pickle.UnpicklingError, match=message):
        unpickler._read_legacy(io.BytesIO(content), len(content))


def test_sets_bytes_and_text_of_python_2():
    value = {'set': {1, 2}, 'frozen': frozenset('ab'), 'bytes': bytearray(b'ab')}
    assert loads(pickle.dumps(value, 5)) == value
    assert unpickler._bytes_of(np.dtype('f2'), (1,), 'é0') == 'é0'.encode('latin1')


def test_a_nested_file_contains_no_other():
    storage, file = io.BytesIO(), io.BytesIO()
    torch.save(torch.ones(2).untyped_storage(), storage, _use_new_zipfile_serialization=False)
    inner = Runs(torch.storage._load_from_bytes, storage.getvalue())
    assert loads(pickle.dumps(inner)).length == 8
    torch.save(inner, file)
    outer = Runs(torch.storage._load_from_bytes, file.getvalue())
    assert isinstance(loads(pickle.dumps(outer)), StandIn)


def test_a_tensor_is_not_the_storage_of_another():
    file = io.BytesIO()
    torch.save(torch.ones(2).untyped_storage(), file, _use_new_zipfile_serialization=False)
    storage = Runs(torch.storage._load_from_bytes, file.getvalue())
    expanded = Runs(torch._utils._rebuild_tensor_v2, storage, 0, (1000,), (0,), False, None)
    assert loads(pickle.dumps(expanded)).shape == (1000,)
    beyond = Runs(torch._utils._rebuild_tensor_v2, expanded, 0, (1000,), (1,), False, None)
    assert isinstance(loads(pickle.dumps(beyond)), StandIn)
