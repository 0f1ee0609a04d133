"""What tests of folders of features share: small photographs, toys, and readers by other packages than ours."""

import json
import os
import random
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from PIL import Image

from swin_dense import SwinBackbone
from swin_dense.__main__ import main
from tests.conftest import ROOT, TINY, IfInstalled, photograph, randomize

zarr, safetensors, parquet = IfInstalled('zarr'), IfInstalled('safetensors.torch'), IfInstalled('pyarrow.parquet')

WORKER = Path(__file__).with_name('extraction_worker.py')
PHOTOGRAPH = photograph(300, 451)


def in_format(file_format, *values, marks=()):
    """Return a case of a parametrised test, which is skipped where the format cannot be written."""
    if find_spec(file_format) is None:
        return pytest.param(file_format, *values, marks=pytest.mark.skip(f'needs {file_format}'))
    return pytest.param(file_format, *values, marks=marks)


EVERY_FORMAT = [in_format('safetensors'), in_format('zarr')]


def command_line(monkeypatch, out, *always):
    """Return what runs the command line in this process with a toy backbone, and the toy."""
    toy = randomize(SwinBackbone(**TINY)).eval()
    monkeypatch.setattr('swin_dense.commands._extract.build_backbone', lambda args: toy)
    return lambda *args: main(['features', *map(str, args), '--out', str(out), *always]), toy


def make_images(folder, count, broken=True):
    """Write small photographs of a few sizes into nested folders, and two files that are no images."""
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
    """Read a feature file with the package that its format belongs to: (maps, image size)."""
    if path.suffix == '.safetensors':
        with safetensors.safe_open(path, 'pt') as file:
            size = tuple(json.loads(file.metadata()['image_size']))
        return {int(name): level.clone() for name, level in safetensors.load_file(path).items()}, size  # not mapped
    group = zarr.open_group(path, mode='r')
    return {int(name): torch.from_numpy(array[:]) for name, array in group.arrays()}, tuple(group.attrs['image_size'])


def rows_of(out):
    """Return the rows of all parts by path, none of which may be there twice."""
    rows = [row for part in sorted(out.glob('part-*.parquet')) for row in parquet.ParquetFile(part).read().to_pylist()]
    found = {row['path']: row for row in rows}
    assert len(found) == len(rows), 'an image has two rows'
    return found


def finished_in(out):
    return {path for path, row in rows_of(out).items() if row['error'] is None}


def failures_in(out):
    return sorted(Path(path).name for path, row in rows_of(out).items() if row['error'] is not None)


def maps_of(out, image):
    """Return the maps and the size of an image in a folder."""
    return load(out / rows_of(out)[str(image)]['file'])


def tree(folder):
    """Return every file below a folder with its bytes."""
    return {str(p.relative_to(folder)): p.read_bytes() for p in sorted(Path(folder).rglob('*')) if p.is_file()}


def features_in(out):
    """Return the files of maps with their bytes."""
    return {name: content for name, content in tree(out).items() if name.startswith('features')}


def start(*args, launcher=(), **environment):
    """Start the command line with a toy as a program of its own, which prints every image that it has done."""
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
    """Wait until a program of :func:`start` has done so many images, or has ended."""
    return [line for _, line in zip(range(count), process.stdout, strict=False)]
