"""No file crashes a reader, hangs it, or makes it use more memory than it has; nor torch.load as mmengine calls it."""

import copy
import json
import struct
import subprocess
import sys
import zipfile

import pytest

from tests.checkpoint.hostile import TORCH_COMPARES_SIZES
from tests.checkpoint.programs import pushed, zipped_records
from tests.conftest import ROOT, needs

START = b'\x80\x02'


def named(module, name):
    return f'c{module}\n{name}\n'.encode()


DTYPE, NDARRAY = named('numpy', 'dtype'), named('numpy', 'ndarray')
RECONSTRUCT = named('numpy._core.multiarray', '_reconstruct')


def dtype(kind, flags, size=-1):
    """Return the operations that make an array's type and set its state."""
    state = pushed(3) + pushed('<') + b'NNN' + pushed(size) + pushed(size) + pushed(flags)
    return DTYPE + pushed(kind) + b'\x89\x88\x87R(' + state + b'tb'


def array(kind, flags, length, data):
    empty = RECONSTRUCT + NDARRAY + b'K\x00\x85N\x87R'
    return empty + b'(' + pushed(1) + pushed(length) + b'\x85' + dtype(kind, flags) + b'\x89' + data + b'tb'


def scalar(kind, flags, size=-1):
    return named('numpy._core.multiarray', 'scalar') + dtype(kind, flags, size) + ADDRESS + b'\x86R'


def storage(length):
    return b'(' + pushed('storage') + named('torch', 'FloatStorage') + pushed('0') + pushed('cpu') + length + b'tQ'


def tensor(length, offset, size, stride=None, sides=1):
    """Return the operations that make a tensor in the storage '0', of which the file has 4 numbers."""
    tupled = b'\x85' if sides == 1 else b'\x86'
    size, stride = size * sides + tupled, (stride or ONE) * sides + tupled
    return named('torch._utils', '_rebuild_tensor_v2') + b'(' + storage(length) + offset + size + stride + b'\x89NtR'


NONE, ONE, FOUR, HUGE = pushed(0), pushed(1), pushed(4), pushed(10**10)
ADDRESS = named('_codecs', 'encode') + pushed('AAAAAAAA') + pushed('latin1') + b'\x86R'
PROGRAMS = {
    'an address in an array': array('O', 0, 1, ADDRESS),
    'an address as a number': scalar('O', 0),
    'text of another size': scalar('S1', 0, 1 << 30),
    'a list as numbers': array('f8', 63, 1_000_000, b'](K\x01e'),
    'a short list of objects': array('O', 63, 100_000_000, b'](K\x01e'),
    'a large array': NDARRAY + pushed(2**31 - 1) + b'\x85\x85R',
    'an array filled again': array('f8', 0, 1, ADDRESS) + b'(' + ONE + ONE + b'\x85' + dtype('f8', 0) + b'\x89NTb',
    'a number of a memo': b'Nr\xff\xff\xff\x7f',
    'a length of bytes': b'\x96' + struct.pack('<Q', 1 << 38),
    'zeros': named('builtins', 'bytes') + pushed(10**12) + b'\x85R',
    'the hash of nested tuples': b'})' + b'\x85' * 1_000_000 + b'Ns',
    'the hash of a doubled tuple': b'})' + b'2\x86' * 60 + b'Ns',
    'a codec': named('_codecs', 'encode') + pushed('a') + pushed('idna') + b'\x86R',
    'a new function': named('_codecs', 'encode') + b'N}' + pushed('__code__') + b'Ns\x86b',
    'the data of another': tensor(HUGE, NONE, HUGE),
    'a size beyond the storage': tensor(FOUR, NONE, pushed(10**6)),
    'an offset beyond the storage': tensor(FOUR, pushed(10**6), ONE),
    'a negative stride': tensor(FOUR, pushed(3), FOUR, pushed(-1)),
    'a stride of 0': tensor(FOUR, NONE, pushed(10**5), NONE, sides=2),
    'a tensor set anew': tensor(FOUR, NONE, FOUR) + storage(FOUR) + HUGE + b'\x86b',
}
# Those that torch.load refuses without this package; it has faults of its own with others.
OF_ARRAYS = [name for name, program in PROGRAMS.items() if b'numpy' in program]
READ = """
import resource, signal, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (6 << 30,) * 2)
from tests.checkpoint import hostile
for path in sorted(Path(sys.argv[1]).iterdir()):
    signal.alarm(60)
    print(path.name, getattr(hostile, sys.argv[2])(path), sep=': ', flush=True)
"""


def packed(program, **options):
    """Return a file as torch writes it, with one storage of 16 bytes."""
    return zipped_records({'data.pkl': program, 'data/0': bytes(16)}, **options)


def run(*command):
    """Run Python in a process of its own; return the lines of its output, after which it ended as it should."""
    done = subprocess.run(
        [sys.executable, *command],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    lines = done.stdout.replace('\r', '\n').splitlines()
    assert done.returncode == 0, f'{done.returncode} after {lines[-1:]}: {done.stderr[-500:]}'
    return lines


has_limits = pytest.mark.skipif(sys.platform == 'win32', reason='needs limits of processes')


@needs('mmengine')
@has_limits
@pytest.mark.parametrize(
    ('reader', 'names'),
    [
        ('read_by_this_package', list(PROGRAMS)),
        ('read_by_torch', OF_ARRAYS),
    ],
    ids=['ours', 'torch'],
)
def test_programs_that_claim_what_is_not_there(tmp_path, reader, names):
    for name in names:
        program = START + b'}' + pushed('a') + PROGRAMS[name] + b's.'
        (tmp_path / f'{name}.pth').write_bytes(packed(program))
        (tmp_path / f'{name}.pkl').write_bytes(program)
    assert len(run('-c', READ, str(tmp_path), reader)) == 2 * len(names)


@needs('mmengine')
@has_limits
@pytest.mark.parametrize('count', [500, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_files(count):
    """Sizes, flags, lengths, names and steps of files of every format; see tests/checkpoint/hostile.py."""
    last = run('-m', 'tests.checkpoint.hostile', '0', str(count))[-1]
    outcomes = json.loads(last.removeprefix('done: ').replace("'", '"'))
    assert outcomes['read'] + outcomes['refused'] == count
    assert outcomes['read'] > count / 10
    if TORCH_COMPARES_SIZES:
        assert outcomes['read by torch'] + outcomes['refused by torch'] == count
        assert outcomes['read by torch'] > 0


def test_storages_of_a_file_share_no_bytes(tmp_path):
    """Records that overlap, or that are compressed, could be far larger than the file."""
    from swin_dense.checkpoint.unpickler import UnpicklingError, read_pickle

    (tmp_path / 'a.pth').write_bytes(packed(b'\x80\x02}.', compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(UnpicklingError, match='is compressed'):
        read_pickle(tmp_path / 'a.pth')
    keys = [str(number) for number in range(100)]
    one = tensor(pushed(5000), NONE, ONE)
    tensors = [one.replace(pushed('0'), pushed(key), 1) for key in keys]
    with zipfile.ZipFile(tmp_path / 'b.pth', 'w') as archive:
        archive.writestr('a/data.pkl', START + b'](' + b''.join(tensors) + b'e.')
        archive.writestr('a/data/0', bytes(20000))
        for key in keys[1:]:
            entry = copy.copy(archive.getinfo('a/data/0'))
            entry.filename = f'a/data/{key}'
            archive.filelist.append(entry)
            archive.NameToInfo[entry.filename] = entry
    with pytest.raises((UnpicklingError, zipfile.BadZipFile)):
        read_pickle(tmp_path / 'b.pth')
