"""Make torchvision's wheel, which is built for CUDA, load its compiled operators with a CPU build of torch.

Its library links to three CUDA libraries. The C compiler builds stubs of them, in which every function that torchvision
references returns 0. The CPU operators never call these functions.

As a program, it runs a script with these stubs: ``python -m tests.peers.cuda_stubs SCRIPT [ARGUMENT ...]``.
"""

import contextlib
import ctypes
import runpy
import shutil
import subprocess
import sys
import tempfile
from importlib.util import find_spec
from pathlib import Path

import torch

# Sonames, each with a predicate on the undefined symbols of torchvision's library, by name and version.
STUBS = {
    'libcudart.so.13': lambda symbol: symbol.endswith('@libcudart.so.13'),
    'libc10_cuda.so': lambda symbol: symbol.startswith(('_ZN3c104cuda', '_ZNK3c104cuda')),
    'libtorch_cuda.so': lambda symbol: symbol.startswith('_ZN2at4cuda'),
}


def load_operators() -> None:
    """Load torchvision's compiled operators, with stubs of the CUDA libraries if they are missing."""
    spec = find_spec('torchvision')
    if spec is None or spec.origin is None:
        return
    library = Path(spec.origin).with_name('_C.so')
    with contextlib.suppress(OSError):
        torch.ops.load_library(library)
        return
    if not (shutil.which('cc') and shutil.which('nm')):
        raise OSError("torchvision's wheel was built for CUDA; stubs for a CPU need cc and nm: apt install gcc")
    table = subprocess.run(
        ['nm', '-D', '--undefined-only', library],
        capture_output=True,
        text=True,
        check=True,
    )
    symbols = [line.split()[-1] for line in table.stdout.splitlines()]
    with tempfile.TemporaryDirectory() as folder:
        for soname, belongs in STUBS.items():
            names = [symbol.partition('@')[0] for symbol in symbols if belongs(symbol)]
            ctypes.CDLL(str(compile_stub(Path(folder), soname, names)), ctypes.RTLD_GLOBAL)
    torch.ops.load_library(library)


def compile_stub(folder: Path, soname: str, names: list[str]) -> Path:
    """Compile a library whose functions return 0; return its path."""
    (folder / 'stub.c').write_text('\n'.join(f'void *{name}(void) {{ return 0; }}' for name in names))
    (folder / 'stub.map').write_text(f'{soname} {{ global: *; }};')
    linked = f'-Wl,-soname,{soname},--version-script,{folder}/stub.map'
    command = ['cc', '-shared', '-fPIC', '-w', linked, '-o', folder / soname, folder / 'stub.c']
    subprocess.run(command, check=True)
    return folder / soname


if __name__ == '__main__':
    load_operators()
    sys.argv = sys.argv[1:]
    runpy.run_path(sys.argv[0], run_name='__main__')
