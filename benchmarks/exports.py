"""Export a backbone to all formats, count the nodes of its graphs, and time the files in ONNX Runtime and OpenVINO.

    python benchmarks/exports.py --out benchmarks/exports             # sizes of graphs and files, and their errors
    python benchmarks/exports.py --out benchmarks/exports --speed     # the same, and times compared with eager

Writes ``OUT.json`` and the tables ``OUT.md``. For each number of threads, eager and all files alternate in one process,
and times are medians over rounds. Run it with ``--speed`` only on an idle machine.
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import torch

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
    parser.add_argument('--out', type=Path, required=True, help='path of the report without .json')
    parser.add_argument('--speed', action='store_true', help='also time the files; needs an idle machine')
    parser.add_argument('--rounds', type=int, default=15)
    args = parser.parse_args()
    torch.manual_seed(0)
    backbone = create_backbone(args.arch)
    report: dict[str, Any] = {'arch': args.arch, 'torch': torch.__version__, 'files': [], 'speed': []}
    with tempfile.TemporaryDirectory() as folder:
        for name, suffix, options in WAYS:
            path = Path(folder) / f'x{suffix}'
            start = time.process_time()
            exported = export_model(backbone, path, **options)
            report['files'].append(
                {
                    'sizes': name,
                    'suffix': suffix,
                    'nodes': exported.nodes,
                    'bytes': path.stat().st_size,
                    'worst_error': max(exported.errors.values()),
                    'cpu_seconds': time.process_time() - start,
                }
            )
            write(report, args.out)
        if args.speed:
            report['speed'] = [times(backbone, Path(folder), *size, args.rounds) for size in SIZES]
        write(report, args.out)


def write(report: dict[str, Any], out: Path) -> None:
    out.with_suffix('.json').write_text(json.dumps(report, indent=1) + '\n')
    out.with_suffix('.md').write_text(tables(report))


def times(backbone: SwinBackbone, folder: Path, height: int, width: int, rounds: int) -> dict[str, Any]:
    """Return the median time of one image in ms, by implementation and number of threads."""
    free, fixed = folder / 'free.onnx', folder / 'fixed.onnx'
    export_model(backbone, free)
    export_model(backbone, fixed, dynamic=False, size=(height, width))
    img = torch.randn(1, 3, height, width)
    result: dict[str, Any] = {'size': [height, width]}
    for threads in THREADS:
        torch.set_num_threads(threads)
        ways: dict[str, Callable[[], Any]] = {'eager': partial(torch.no_grad()(backbone), img)}
        for file, path in (('any size', free), ('fixed', fixed)):
            for name, session in (('ONNX Runtime', OnnxRuntime), ('OpenVINO', OpenVino)):
                ways[f'{name}, {file}'] = partial(session(path, threads).run, {'img': img.numpy()})
        seconds: dict[str, list[float]] = {name: [] for name in ways}
        for name, way in [*ways.items()] * (rounds + 2):
            start = time.perf_counter()
            way()
            seconds[name].append(time.perf_counter() - start)
        for name, values in seconds.items():  # the first two rounds are warm-ups
            result.setdefault(name, {})[str(threads)] = 1e3 * statistics.median(values[2:])
    return result


def tables(report: dict[str, Any]) -> str:
    lines = [
        '# Exported files',
        '',
        f'Written by `benchmarks/exports.py`: {report["arch"]}, random weights, torch {report["torch"]}. The error is',
        'the largest of any output, relative to its largest value, at sizes or batches other than in the trace.',
        "TorchScript's nodes include one for every constant.",
        '',
        '| file | takes | nodes | MiB | error | CPU seconds to export and check |',
        '| --- | --- | --- | --- | --- | --- |',
    ]
    lines += [
        f'| `{file["suffix"]}` | {file["sizes"]} | {file["nodes"]:,} | {file["bytes"] / 2**20:.0f} '
        f'| {file["worst_error"]:.0e} | {file["cpu_seconds"]:.0f} |'
        for file in report['files']
    ]
    if not report['speed']:
        return '\n'.join([*lines, '', 'Speed: not measured yet.', ''])
    names = [name for name in report['speed'][0] if name != 'size']
    lines += ['', 'Milliseconds per image.', '', '| image | threads | ' + ' | '.join(names) + ' |']
    lines.append('| --- ' * (2 + len(names)) + '|')
    for row in report['speed']:
        for threads in map(str, THREADS):
            cells = ' | '.join(f'{row[name][threads]:.0f}' for name in names)
            lines.append(f'| {row["size"][0]} x {row["size"][1]} | {threads} | {cells} |')
    return '\n'.join([*lines, ''])


if __name__ == '__main__':
    main()
