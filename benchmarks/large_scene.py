"""Measure time and peak memory of a GeoTIFF of nine bands to features, and through a segmentor in tiles.

    python benchmarks/large_scene.py --size 10000 --json benchmarks/large_scene.json

Writes a mosaic of scikit-image's photographs as counts of nine bands (uint16, with a georeference), runs the commands
`swin-dense features` with a Swin-T and `swin-dense predict --tile` with the UPerNet of the demo, each in a process of
its own and with random weights (the values do not matter here), and removes the files.
"""

import argparse
import itertools
import json
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import skimage.data
import tifffile
import torch
from bench_host import processor
from mmengine.registry import MODELS, init_default_scope

import swin_dense
from swin_dense import SwinBackbone
from swin_dense.recipes.files import load_recipe

BLOCK = 512
GEOREFERENCE = [
    (33550, 'd', 3, (10.0, 10.0, 0.0), True),
    (33922, 'd', 6, (0.0, 0.0, 0.0, 600000.0, 5400000.0, 0.0), True),
    (34735, 'H', 8, (1, 1, 0, 1, 3072, 0, 1, 32632), True),
]
SCALE = (255.0,) * 3 + (8160.0,) * 6


def write_scene(path: Path, side: int) -> None:
    """Write a tiled GeoTIFF of nine bands: colours, and counts that are made of them."""
    photographs = (skimage.data.astronaut(), skimage.data.retina()[:BLOCK, :BLOCK])
    blocks = [np.concatenate([one, *([one.astype(np.uint16) * 30] * 2)], 2, dtype=np.uint16) for one in photographs]
    tiles = itertools.islice(itertools.cycle(blocks), (-(-side // BLOCK)) ** 2)
    options = {'photometric': 'minisblack', 'planarconfig': 'contig', 'extratags': GEOREFERENCE}
    tifffile.imwrite(path, tiles, shape=(side, side, 9), dtype='uint16', tile=(BLOCK, BLOCK), **options)


def write_segmentor(folder: Path) -> list[str]:
    """Write config and weights of the demo's UPerNet for nine bands; return their paths."""
    config = load_recipe('upernet_swin-demo')
    config.model.backbone.in_channels = 9
    config.model.data_preprocessor.update(mean=None, std=None, bgr_to_rgb=False)
    load = {'type': 'swin_dense.mm.LoadBands', 'scale': SCALE, 'clamp': True}
    config.test_dataloader.dataset.pipeline[0] = load
    init_default_scope('mmseg')
    torch.save({'state_dict': MODELS.build(config.model).state_dict(), 'meta': {}}, folder / 'weights.pth')
    config.dump(folder / 'config.py')
    return [str(folder / 'config.py'), str(folder / 'weights.pth')]


def measured(*arguments: str) -> dict:
    """Run ``swin-dense`` in a process, and return its seconds and its peak memory."""
    start = time.perf_counter()
    child = subprocess.Popen([sys.executable, '-W', 'ignore', '-m', 'swin_dense', *arguments])
    _, status, usage = os.wait4(child.pid, 0)
    if status:
        raise SystemExit(f'the command failed: {" ".join(arguments)}')
    minutes, processor = (time.perf_counter() - start) / 60, (usage.ru_utime + usage.ru_stime) / 60
    peak = round(usage.ru_maxrss / 2**20, 2)
    return {'minutes': round(minutes, 2), 'processor_minutes': round(processor, 2), 'peak_gib': peak}


def written_gib(folder: Path) -> float:
    return round(sum(file.stat().st_size for file in folder.rglob('*.safetensors')) / 2**30, 2)


def measure_features(scene: Path, folder: Path) -> dict:
    torch.save(SwinBackbone('t', in_channels=9).state_dict(), folder / 'swin.pth')
    common = ['--checkpoint', str(folder / 'swin.pth'), '--preset', 'satlas-sentinel2-ms', '--device', 'cpu']
    tiles = ['--tile', '3584', '--overlap', '224', '--dtype', 'float16', '--levels', '8', '16', '32']
    return {
        'model': 'Swin-T, strides 8 to 32 in float16, tiles of 3584 and an overlap of 224',
        **measured('features', str(scene), '--out', str(folder / 'features'), *common, *tiles),
        'written_gib': written_gib(folder / 'features'),
    }


def measure_segmentor(scene: Path, folder: Path, side: int) -> dict:
    out = folder / 'predictions'
    files = [*write_segmentor(folder), str(scene)]
    report = {
        'model': 'UPerNet of the demo (a Swin of 32 channels), tiles of 1120 and an overlap of 112',
        **measured('predict', *files, '--out', str(out), '--tile', '1120', '--overlap', '112', '--device', 'cpu'),
    }
    with tifffile.TiffFile(out / 'scene.labels.tif') as file:
        page = file.pages[0]
        assert page.shape == (side, side)
        assert page.tags[33922].value == GEOREFERENCE[1][3]
    return report


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, default=10000, help='side of the scene in pixels')
    parser.add_argument('--folder', type=Path, help='folder for temporary files')
    parser.add_argument('--json', type=Path, help='file for the results, to which those of `--only` are added')
    parser.add_argument('--only', choices=('features', 'segmentor'), help='measure only one command')
    args = parser.parse_args()
    torch.manual_seed(0)
    report: dict = {
        'size': args.size,
        'bands': 9,
        'threads': int(os.environ.get('OMP_NUM_THREADS', os.cpu_count() or 1)),
        'processor': processor(),
        'torch': torch.__version__,
        'swin_dense': swin_dense.__version__,
        'load_before': os.getloadavg()[0],
    }
    with tempfile.TemporaryDirectory(dir=args.folder) as name:
        folder = Path(name)
        scene = folder / 'scene.tif'
        write_scene(scene, args.size)
        report['scene_gib'] = round(scene.stat().st_size / 2**30, 2)
        if args.only != 'segmentor':
            report['features'] = measure_features(scene, folder)
        if args.only != 'features':
            report['segmentor'] = measure_segmentor(scene, folder, args.size)
    if args.only and args.json and args.json.exists():
        report = {**json.loads(args.json.read_text()), **report}
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + '\n')


if __name__ == '__main__':
    main()
