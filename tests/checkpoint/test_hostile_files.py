"""No file crashes a reader, hangs it, or makes it use more memory than it has; nor torch.load after the import."""

import io
import json
import struct
import subprocess
import sys
import zipfile

import pytest

from tests.conftest import ROOT, needs
from tests.fuzzing.hostile import pushed

START = b'\x80\x02'


def named(module, name):
    return f'c{module}\n{name}\n'.encode()


def dtype(kind, flags, size=-1):
    """Return the operations that make an array's type and set its state."""
    state = pushed(3) + pushed('<') + b'NNN' + pushed(size) + pushed(size) + pushed(flags)
    return named('numpy', 'dtype') + pushed(kind) + b'\x89\x88\x87R(' + state + b'tb'


def array(kind, flags, length, data):
    empty = named('numpy._core.multiarray', '_reconstruct') + named('numpy', 'ndarray') + b'K\x00\x85N\x87R'
    return empty + b'(' + pushed(1) + pushed(length) + b'\x85' + dtype(kind, flags) + b'\x89' + data + b'tb'


def scalar(kind, flags, size=-1):
    return named('numpy._core.multiarray', 'scalar') + dtype(kind, flags, size) + ADDRESS + b'\x86R'


def storage(length):
    return b'(' + pushed('storage') + named('torch', 'FloatStorage') + pushed('0') + pushed('cpu') + length + b'tQ'


def tensor(length, offset, size, stride):
    """Return the operations that make a tensor in the storage '0', of which the file has 4 numbers."""
    return named('torch._utils', '_rebuild_tensor_v2') + b'(' + storage(length) + offset + size + stride + b'\x89NtR'


ADDRESS = named('_codecs', 'encode') + pushed('AAAAAAAA') + pushed('latin1') + b'\x86R'
FOUR, ONE, HUGE = pushed(4), pushed(1), pushed(10**10)
PROGRAMS = {
    'an address in an array': array('O', 0, 1, ADDRESS),
    'an address as a number': scalar('O', 0),
    'text of another size': scalar('S1', 0, 1 << 30),
    'a list as numbers': array('f8', 63, 1_000_000, b'](K\x01e'),
    'a short list of objects': array('O', 63, 100_000_000, b'](K\x01e'),
    'a large array': named('numpy', 'ndarray') + pushed(2**31 - 1) + b'\x85\x85R',
    'an array filled again': array('f8', 0, 1, ADDRESS) + b'(' + ONE + ONE + b'\x85' + dtype('f8', 0) + b'\x89NTb',
    'a number of a memo': b'Nr\xff\xff\xff\x7f',
    'a length of bytes': b'\x96' + struct.pack('<Q', 1 << 38),
    'zeros': named('builtins', 'bytes') + pushed(10**12) + b'\x85R',
    'the hash of nested tuples': b'})' + b'\x85' * 1_000_000 + b'Ns',
    'the hash of a doubled tuple': b'})' + b'2\x86' * 60 + b'Ns',
    'a codec': named('_codecs', 'encode') + pushed('a') + pushed('idna') + b'\x86R',
    'a new function': named('_codecs', 'encode') + b'N}' + pushed('__code__') + b'Ns\x86b',
    'the data of another': tensor(HUGE, pushed(0), HUGE + b'\x85', ONE + b'\x85'),
    'a size beyond the storage': tensor(FOUR, pushed(0), pushed(10**6) + b'\x85', ONE + b'\x85'),
    'an offset beyond the storage': tensor(FOUR, pushed(10**6), ONE + b'\x85', ONE + b'\x85'),
    'a negative stride': tensor(FOUR, pushed(3), FOUR + b'\x85', pushed(-1) + b'\x85'),
    'a stride of 0': tensor(FOUR, pushed(0), pushed(10**5) + pushed(10**5) + b'\x86', b'K\x00K\x00\x86'),
    'a tensor set anew': tensor(FOUR, pushed(0), FOUR + b'\x85', ONE + b'\x85') + storage(FOUR) + HUGE + b'\x86b',
}
# Those that torch.load refuses without this package; it has faults of its own with others.
OF_ARRAYS = [name for name, program in PROGRAMS.items() if b'numpy' in program]
READ = """
import resource, signal, sys
from pathlib import Path
resource.setrlimit(resource.RLIMIT_AS, (6 << 30,) * 2)
import swin_dense.mm
from tests.fuzzing import hostile
for path in sorted(Path(sys.argv[1]).iterdir()):
    signal.alarm(60)
    print(path.name, getattr(hostile, sys.argv[2])(path), sep=': ', flush=True)
"""


def packed(program, **options):
    """Return a file as torch writes it, with one storage of 16 bytes."""
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, 'w', **options) as archive:
        for name, content in {'data.pkl': program, 'data/0': bytes(16), 'version': b'3\n'}.items():
            archive.writestr(f'a/{name}', content)
    return stream.getvalue()


@needs('mmengine')
@pytest.mark.skipif(sys.platform == 'win32', reason='needs limits of processes')
@pytest.mark.parametrize(
    ('reader', 'names'), [('read_by_this_package', list(PROGRAMS)), ('read_by_torch', OF_ARRAYS)], ids=['ours', 'torch']
)
def test_programs_that_claim_what_is_not_there(tmp_path, reader, names):
    for name in names:
        program = START + b'}' + pushed('a') + PROGRAMS[name] + b's.'
        (tmp_path / f'{name}.pth').write_bytes(packed(program))
        (tmp_path / f'{name}.pkl').write_bytes(program)
    command = [sys.executable, '-c', READ, str(tmp_path), reader]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    outcomes = done.stdout.splitlines()
    assert done.returncode == 0, f'{done.returncode} after {outcomes[-1:]}: {done.stderr[-500:]}'
    assert len(outcomes) == 2 * len(names)


@needs('mmengine')
@pytest.mark.skipif(sys.platform == 'win32', reason='needs limits of processes')
@pytest.mark.parametrize('count', [500, pytest.param(100_000, marks=pytest.mark.long)])
def test_mutated_files(count):
    """Sizes, flags, lengths, names and steps of files of every format; see tests/fuzzing/hostile.py."""
    command = [sys.executable, '-m', 'tests.fuzzing.hostile', '0', str(count)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    last = done.stdout.replace('\r', '\n').splitlines()[-1]
    assert done.returncode == 0, f'{done.returncode} after the mutant {last}: {done.stderr[-500:]}'
    outcomes = json.loads(last.removeprefix('done: ').replace("'", '"'))
    assert sum(outcomes.values()) == 2 * count
    assert outcomes['read'] > count / 10
    assert outcomes['read by torch'] > 0


def test_storages_of_a_file_share_no_bytes(tmp_path):
    """Records that overlap, or that are compressed, could be far larger than the file."""
    from swin_dense.checkpoint.unpickler import UnpicklingError, read_pickle

    (tmp_path / 'a.pth').write_bytes(packed(b'\x80\x02}.', compression=zipfile.ZIP_DEFLATED))
    with pytest.raises(UnpicklingError, match='is compressed'):
        read_pickle(tmp_path / 'a.pth')
    stream = io.BytesIO()
    with zipfile.ZipFile(stream, 'w') as archive:
        keys = [str(number) for number in range(100)]
        tensors = [tensor(pushed(5000), pushed(0), ONE + b'\x85', ONE + b'\x85') for _ in keys]
        tensors = [part.replace(pushed('0'), pushed(key), 1) for part, key in zip(tensors, keys, strict=True)]
        archive.writestr('a/data.pkl', START + b'](' + b''.join(tensors) + b'e.')
        archive.writestr('a/data/0', bytes(20000))
        first = archive.getinfo('a/data/0')
        for key in keys[1:]:
            entry = zipfile.ZipInfo(f'a/data/{key}')
            entry.file_size = entry.compress_size = first.file_size
            entry.CRC, entry.header_offset = first.CRC, first.header_offset
            archive.filelist.append(entry)
            archive.NameToInfo[entry.filename] = entry
    (tmp_path / 'b.pth').write_bytes(stream.getvalue())
    with pytest.raises((UnpicklingError, zipfile.BadZipFile)):
        read_pickle(tmp_path / 'b.pth')
