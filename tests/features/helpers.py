"""Helpers for tests of feature folders: small images, tiny backbones, and readers that do not use swin_dense."""

import json
import multiprocessing
import random
import sys

import torch
from PIL import Image

from swin_dense.commands._main import main
from tests.conftest import IfInstalled, assert_near, photograph, tiny

safetensors, parquet = IfInstalled('safetensors.torch'), IfInstalled('pyarrow.parquet')

PHOTOGRAPH = photograph(300, 451)


def maps_of(backbone, img):
    """Return the maps (C, H, W) of one image (C, H, W) that is normalised, by stride."""
    with torch.no_grad():
        outs = backbone(img[None].float())
    return {stride: out[0] for stride, out in zip(backbone.out_strides, outs, strict=True)}


def close(pyramid, maps, tolerance=1e-5):
    assert list(pyramid) == list(maps)
    for stride, level in maps.items():
        assert_near(pyramid[stride], level, tolerance)


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

    def run(*args):
        return main(
            [
                'features',
                *map(str, args),
                '--out',
                str(out),
                *always,
            ]
        )

    return run, toy


def make_images(folder, count, broken=True):
    """Write small images of a few sizes into nested folders, and optionally two files that are not images."""
    generator = random.Random(0)
    paths = []
    for index in range(count):
        height, width = generator.choice(
            [
                (40, 52),
                (33, 64),
                (52, 40),
            ]
        )
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
    """Read a feature file; return the maps and the image size."""
    with safetensors.safe_open(path, 'pt') as file:
        size = tuple(json.loads(file.metadata()['image_size']))
    maps = safetensors.load_file(path)
    return {int(name): level.clone() for name, level in maps.items()}, size  # no mmap


def rows_of(out):
    """Return the rows of all parts by path; fail if a path occurs twice."""
    rows = []
    for part in sorted(out.glob('part-*.parquet')):
        rows += parquet.ParquetFile(part).read().to_pylist()
    found = {row['path']: row for row in rows}
    assert len(found) == len(rows), 'an image has two rows'
    return found


def stored_maps(out, image):
    """Return the maps and the image size that a feature folder holds for an image."""
    return load(out / rows_of(out)[str(image)]['file'])


def pooled(level, pool):
    """Pool a map (C, H, W) to a vector in float64, by the definition of the pooling."""
    level = level.double()
    if pool == 'avg':
        return level.mean((1, 2))
    return level.clamp(min=1e-6).pow(3).mean((1, 2)).pow(1 / 3)


def tree(folder):
    """Return the content of every file below a folder, by relative path."""
    files = sorted(path for path in folder.rglob('*') if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}
