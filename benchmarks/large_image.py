"""Measure time and peak memory of a tiled pyramid, and fail if the memory exceeds a limit.

    python benchmarks/large_image.py --size 20000 20000 --arch swin_t --tile 1792 --overlap 224 --limit-gib 4
    python benchmarks/large_image.py --size 10000 10000 --format png --read-only

Writes a mosaic of photographs of scikit-image as TIFF, PNG or JPEG, extracts its pyramid to memory-mapped files with
random weights (the values do not matter here), and prints one JSON object. The files are removed afterwards.
"""

import argparse
import itertools
import json
import multiprocessing
import tempfile
import time
from pathlib import Path

import numpy as np
import skimage.data
import tifffile
import torch
from bench_host import held_mib, processor
from PIL import Image

from swin_dense import create_backbone
from swin_dense.features.pyramid import extract_pyramid
from swin_dense.features.regions import open_large_image
from swin_dense.features.tiling import exact_overlap
from swin_dense.utils.tiles import plan_tiles

TINY = {'embed_dims': 16, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}


def write_mosaic(path: Path, height: int, width: int, compression: str | None) -> None:
    """Write a mosaic of 512 x 512 photographs; a TIFF is tiled."""
    photographs = [
        skimage.data.astronaut(),
        skimage.data.retina()[:512, :512],
        skimage.data.hubble_deep_field()[:512, :512],
    ]
    rows, columns = -(-height // 512), -(-width // 512)
    if path.suffix != '.tif':
        row = np.concatenate([*itertools.islice(itertools.cycle(photographs), columns)], 1)[:, :width]
        Image.fromarray(np.tile(row, (rows, 1, 1))[:height]).save(path)
        return
    tiles = itertools.islice(itertools.cycle(photographs), rows * columns)
    shape = (height, width, 3)
    tifffile.imwrite(
        path, tiles, shape=shape, dtype='uint8', tile=(512, 512), photometric='rgb', compression=compression
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--size', type=int, nargs=2, default=(20000, 20000), metavar=('H', 'W'))
    parser.add_argument('--arch', default='swin_t', help='swin_t, swin_s, swin_b, swin_l or tiny (a test model)')
    parser.add_argument('--tile', type=int, default=1792)
    parser.add_argument('--overlap', type=int, help='in pixels (default: the smallest overlap with exact results)')
    parser.add_argument('--dtype', choices=('float16', 'float32'), default='float16', help='type of the output')
    parser.add_argument('--format', choices=('tif', 'png', 'jpg'), default='tif')
    parser.add_argument('--compression', help="compression of the TIFF, e.g. 'jpeg' or 'lzw' (default: none)")
    parser.add_argument('--read-only', action='store_true', help='only read the tiles')
    parser.add_argument('--threads', type=int, default=torch.get_num_threads())
    parser.add_argument('--limit-gib', type=float, default=4.0)
    parser.add_argument('--folder', type=Path, help='folder for temporary files')
    args = parser.parse_args()
    torch.set_num_threads(args.threads)
    torch.manual_seed(0)
    options = TINY if args.arch == 'tiny' else {}
    backbone = create_backbone('swin_t' if args.arch == 'tiny' else args.arch, **options)
    overlap = exact_overlap(backbone, backbone.out_strides)[0] if args.overlap is None else args.overlap

    with tempfile.TemporaryDirectory(dir=args.folder) as folder:
        source = Path(folder, f'image.{args.format}')
        # In another process, whose memory is not counted
        writer = multiprocessing.get_context('spawn').Process(
            target=write_mosaic, args=(source, *args.size, args.compression)
        )
        writer.start()
        writer.join()
        before = held_mib('VmHWM') / 2**10
        start = time.perf_counter()
        out = Path(folder, 'out')
        if args.read_only:
            out.mkdir()
            with open_large_image(source) as image:
                for tile in plan_tiles(image.size, (args.tile, args.tile), (overlap, overlap)):
                    image.read(*tile.read)
        else:
            extract_pyramid(
                backbone, source, tile=args.tile, overlap=overlap, out=out, dtype=getattr(torch, args.dtype)
            )
        seconds = time.perf_counter() - start
        written = sum(file.stat().st_size for file in out.iterdir())
    peak = held_mib('VmHWM') / 2**10
    megapixels = args.size[0] * args.size[1] / 1e6
    print(
        json.dumps(
            {
                'arch': args.arch,
                'size': list(args.size),
                'tile': args.tile,
                'overlap': overlap,
                'dtype': args.dtype,
                'format': args.format,
                'compression': args.compression,
                'read_only': args.read_only,
                'threads': args.threads,
                'processor': processor(),
                'torch': torch.__version__,
                'peak_rss_gib': round(peak, 3),
                'peak_rss_gib_before': round(before, 3),
                'seconds': round(seconds, 1),
                'seconds_per_megapixel': round(seconds / megapixels, 3),
                'written_gib': round(written / 2**30, 3),
            },
            indent=2,
        )
    )
    if peak > args.limit_gib:
        raise SystemExit(f'peak memory {peak:.2f} GiB exceeds the limit of {args.limit_gib} GiB')


if __name__ == '__main__':
    main()
