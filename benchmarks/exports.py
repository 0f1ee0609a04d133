"""Export a backbone to all formats, count the nodes of its graphs, and time the files in ONNX Runtime and OpenVINO.

    python benchmarks/exports.py             # sizes of graphs and files, and their errors
    python benchmarks/exports.py --speed     # the same, and times compared with eager

For each number of threads, eager and all files take turns in one process. Run it with ``--speed`` only on an idle
machine. ``tools/update_readme.py`` writes benchmarks/results/exports.md from the results.
"""

import argparse
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch
from harness import in_turns, seconds_of
from measurements import RESULTS, Run

from swin_dense import SwinBackbone, create_backbone, export_model
from swin_dense.workbench.runtime.sessions import OnnxRuntime, OpenVino

SIZES = ((512, 512), (800, 1344))
THREADS = (1, 2)
# Name, suffix, options of export_model.
WAYS: tuple[tuple[str, str, dict[str, Any]], ...] = (
    ('224 x 224, any batch', '.onnx', {'dynamic': False, 'batch': None}),
    ('224 x 224, any batch', '.pt2', {'dynamic': False, 'batch': None}),
    ('224 x 224, any batch', '.ts', {'dynamic': False, 'batch': None}),
    ('224 x 224, float16', '.onnx', {'dynamic': False, 'half': True}),
    ('any size', '.ts', {}),
    ('any size', '.onnx', {}),
    ('any size', '.pt2', {}),
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--arch', default='swin_t')
    parser.add_argument('--json', type=Path, default=RESULTS / 'exports.json')
    parser.add_argument('--speed', action='store_true', help='also time the files; needs an idle machine')
    parser.add_argument('--rounds', type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    backbone = create_backbone(args.arch)
    run = Run(args.json, arch=args.arch)
    with tempfile.TemporaryDirectory() as folder:
        for sizes, suffix, options in WAYS:
            path = Path(folder) / f'x{suffix}'
            start = time.process_time()
            exported = export_model(backbone, path, **options)
            seconds = time.process_time() - start
            names = {'what': 'export', 'model': suffix, 'way': sizes}
            run.add(exported.nodes, 'nodes of the graph', 'nodes', **names)
            run.add(path.stat().st_size / 2**20, 'size of the file', 'MiB', **names)
            run.add(max(exported.errors.values()), 'difference from the backbone', 'of the largest value', **names)
            run.add(seconds, 'processor time', 's', **names)
        for height, width in SIZES if args.speed else ():
            add_times(backbone, Path(folder), height, width, args)


def add_times(backbone: SwinBackbone, folder: Path, height: int, width: int, args: argparse.Namespace) -> None:
    """Add the time of one image, for each implementation and number of threads."""
    free, fixed = folder / 'free.onnx', folder / 'fixed.onnx'
    export_model(backbone, free)
    export_model(backbone, fixed, dynamic=False, size=(height, width))
    img = torch.randn(1, 3, height, width)
    for threads in THREADS:
        torch.set_num_threads(threads)
        ways: dict[str, Callable[[], Any]] = {'eager': partial(torch.no_grad()(backbone), img)}
        for file, path in (('any size', free), ('fixed', fixed)):
            for name, session in (('ONNX Runtime', OnnxRuntime), ('OpenVINO', OpenVino)):
                ways[f'{name}, {file}'] = partial(session(path, threads).run, {'img': img.numpy()})
        run = Run(args.json, arch=args.arch, threads=threads)
        timed = {name: partial(seconds_of, way) for name, way in ways.items()}
        for name, times in in_turns(timed, args.rounds, warm_up=2).items():
            names = {'what': 'inference', 'model': 'auto', 'size': f'1 x {height} x {width}', 'way': name}
            run.add([1e3 * wall for _, wall in times], 'time', 'ms', **names)


if __name__ == '__main__':
    main()
