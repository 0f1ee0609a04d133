"""Helpers for tests of feature folders: small images, tiny backbones, and readers that do not use swin_dense."""

import json
import multiprocessing
import os
import random
import subprocess
import sys
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image

from swin_dense.__main__ import main
from tests.conftest import ROOT, IfInstalled, photograph, tiny

zarr, safetensors, parquet = IfInstalled('zarr'), IfInstalled('safetensors.torch'), IfInstalled('pyarrow.parquet')

WORKER = Path(__file__).with_name('extraction_worker.py')
PHOTOGRAPH = photograph(300, 451)


def in_format(file_format, *values, marks=()):
    """Return a case of a parametrised test; it is skipped if the package of the format is not installed."""
    if find_spec(file_format) is None or (file_format == 'zarr' and int(version('zarr').split('.')[0]) < 3):
        return pytest.param(file_format, *values, marks=pytest.mark.skip(f'needs {file_format}, of zarr version 3'))
    return pytest.param(file_format, *values, marks=marks)


EVERY_FORMAT = [in_format('safetensors'), in_format('zarr')]


def counted(pages):
    """Return how an error states a number of pages, which only tifffile counts."""
    return pages if find_spec('tifffile') else 'several'


def in_a_process(function):
    """Run a function in a forked process, which a signal may end; return the exit status."""
    process = multiprocessing.get_context('fork').Process(target=lambda: sys.exit(function()))
    process.start()
    process.join()
    return process.exitcode


def command_line(monkeypatch, out, *always):
    """Return a function that runs the command line in this process with a tiny backbone, and the backbone."""
    toy = tiny()
    monkeypatch.setattr('swin_dense.commands._backbone.build_backbone', lambda args: toy)
    return lambda *args: main(['features', *map(str, args), '--out', str(out), *always]), toy


def make_images(folder, count, broken=True):
    """Write small images of a few sizes into nested folders, and optionally two files that are not images."""
    generator = random.Random(0)
    paths = []
    for index in range(count):
        height, width = generator.choice([(40, 52), (33, 64), (52, 40)])
        top, left = generator.randrange(200), generator.randrange(300)
        path = folder / f'ordner {index % 3} ü' / f'x {index // 3}.png'
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(PHOTOGRAPH[top : top + height, left : left + width]).save(path)
        paths.append(path)
    if broken:
        (folder / 'empty.jpg').write_bytes(b'')
        (folder / 'text.png').write_text('text')
    return paths


def load(path):
    """Read a feature file with the package of its format; return the maps and the image size."""
    if path.suffix == '.safetensors':
        with safetensors.safe_open(path, 'pt') as file:
            size = tuple(json.loads(file.metadata()['image_size']))
        return {int(name): level.clone() for name, level in safetensors.load_file(path).items()}, size  # no mmap
    group = zarr.open_group(path, mode='r')
    return {int(name): torch.from_numpy(array[:]) for name, array in group.arrays()}, tuple(group.attrs['image_size'])


def rows_of(out):
    """Return the rows of all parts by path; fail if a path occurs twice."""
    rows = [row for part in sorted(out.glob('part-*.parquet')) for row in parquet.ParquetFile(part).read().to_pylist()]
    found = {row['path']: row for row in rows}
    assert len(found) == len(rows), 'an image has two rows'
    return found


def finished_in(out):
    return {path for path, row in rows_of(out).items() if row['error'] is None}


def failures_in(out):
    return sorted(Path(path).name for path, row in rows_of(out).items() if row['error'] is not None)


def maps_of(out, image):
    """Return the maps and the image size that a feature folder holds for an image."""
    return load(out / rows_of(out)[str(image)]['file'])


def tree(folder):
    """Return the content of every file below a folder, by relative path."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob('*')) if p.is_file()}


def features_in(out):
    """Return the content of the map files, by relative path."""
    return {name: content for name, content in tree(out).items() if name.startswith('features')}


def start(*args, launcher=(), **environment):
    """Start a process with the command line and a tiny backbone; it prints the name of each finished image."""
    path = os.pathsep.join([str(ROOT), os.environ.get('PYTHONPATH', '')])
    return subprocess.Popen(
        [sys.executable, *launcher, str(WORKER), *map(str, args)],
        env={**os.environ, 'PYTHONPATH': path, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def wait_for_images(process, count):
    """Wait until a process of :func:`start` has finished ``count`` images or has ended; return the printed lines."""
    return [line for _, line in zip(range(count), process.stdout, strict=False)]
