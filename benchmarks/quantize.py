"""Quantise four models with ``swin-dense quantize``, and compare the files in float32 and in int8.

    python benchmarks/quantize.py work_dirs/quantize --demo work_dirs/demo --out benchmarks/quantize.json
    python benchmarks/quantize.py work_dirs/quantize --demo work_dirs/demo --out benchmarks/quantize.json --only-speed
    python benchmarks/exports_whole.py --folder work_dirs/whole --models 'Mask R-CNN' --only-export --out whole.json
    python benchmarks/quantize.py work_dirs/quantize --full work_dirs/whole --out benchmarks/quantize.json

The models are the Mask R-CNN and the UPerNet of ``make demo``, and the DINO and the Mask2Former of
``exports_trained.py``; those that are not there are trained. The photographs for quantisation and the images for the
metrics come from ``tools/make_demo_data.py`` with another seed: no model was trained on them, and no choice of layers
was made on them. Metrics are computed by the evaluator of the config, agreement as ``swin-dense quantize`` does it.

Times are medians of one image of SIZE on one thread, for the outputs of the file; measure them on an idle machine. With
--full, the file is a Mask R-CNN of published size with random weights, whose predictions mean nothing: it is quantised
with the same layers in float, and only its times are measured. Results of other models in the report stay.
"""

import argparse
import json
import statistics
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
from bench_host import processor
from exports_trained import EPOCHS, ROOT, command, made_data, trained
from exports_trained import MODELS as QUERIES
from exports_trained import config_of as config_with_queries

from swin_dense import runtime
from swin_dense.utils.packages import version_of
from swin_dense.workbench.export.whole import PICTURE
from swin_dense.workbench.runtime import pictures, quantization, quantizer

DEMO = {
    'Mask R-CNN': ('mask_rcnn', 'mask-rcnn_swin-demo_fpn.py', 'mmdet'),
    'UPerNet': ('upernet', 'upernet_swin-demo.py', 'mmseg'),
}
FULL = 'Mask R-CNN Swin-T, random weights'
SEED, PHOTOGRAPHS, IMAGES = 7, 120, 120
SIZE = (800, 1216)
WAYS = {'ONNX Runtime': 'onnxruntime', 'OpenVINO': 'openvino'}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='data, models and files')
    parser.add_argument('--out', type=Path, required=True, help='.json file')
    parser.add_argument('--demo', type=Path, help='folder of `make demo` (default: FOLDER/demo)')
    parser.add_argument('--models', nargs='+', default=[*DEMO, *QUERIES], choices=[*DEMO, *QUERIES])
    parser.add_argument('--only-speed', action='store_true', help='measure only times, of files that are there')
    parser.add_argument('--full', type=Path, help='folder of exports_whole.py: only times, of its Mask R-CNN')
    parser.add_argument('--rounds', type=int, default=5)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    photographs, images = _data(args.folder)
    if args.full is not None:
        model, int8 = args.full / 'Mask R-CNN' / 'model.onnx', args.folder / 'full_int8.onnx'
        if not int8.exists():
            quantize_untested(model, int8, photographs[::6])
        add(args.out, FULL, sizes(model, int8) | {'speed': speed(model, int8, args.rounds)})
        return
    for name in args.models:
        int8 = args.folder / f'{name}_int8.onnx'
        if args.only_speed:
            model = args.folder / f'{name}.onnx'
            add(args.out, name, {'speed': speed(model, int8, args.rounds)})
            continue
        config, weights, model = model_of(name, args.folder, args.demo or args.folder / 'demo')
        figures = quantized(model, int8, photographs)
        figures |= {'images': len(images), 'metrics': metrics(config, weights, model, int8)}
        figures['agreement'] = {way: agreement(model, int8, library, images) for way, library in WAYS.items()}
        add(args.out, name, figures)


def _data(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the photographs for quantisation and the images for the metrics."""
    counts = ['--train', str(PHOTOGRAPHS), '--val', str(IMAGES)]
    data = made_data(folder / 'data', '--seed', str(SEED), *counts)
    first, second = (sorted((data / 'coco' / f'{split}2017').iterdir()) for split in ('train', 'val'))
    return first, second


def model_of(name: str, folder: Path, demo: Path) -> tuple[Any, Path, Path]:
    """Return the config of a model for the data in a folder, its weights, and its file in the folder."""
    from tests.mm.demo import demo_config

    path = folder / f'{name}.onnx'
    if name in QUERIES:
        # It is trained on the data of the demo.
        _, weights, model = trained(name, folder / QUERIES[name], made_data(folder / 'training data'), EPOCHS[name])
        path.unlink(missing_ok=True)
        path.hardlink_to(model)
        return config_with_queries(name, (folder / 'data').resolve(), EPOCHS[name]), weights, path
    key, recipe, framework = DEMO[name]
    if not (demo / key / 'last_checkpoint').exists():
        subprocess.run([sys.executable, ROOT / 'tools' / 'demo.py', demo], check=True)
    weights = demo / key / (demo / key / 'last_checkpoint').read_text().rpartition('/')[2]
    if not path.exists():
        image = demo / 'data' / 'coco' / 'val2017' / '000000000001.jpg'
        command('export', ROOT / 'configs' / 'demo' / recipe, weights, '--out', path, '--image', image)
    return demo_config(framework, (folder / 'data').resolve()), weights, path


def quantized(model: Path, int8: Path, photographs: list[Path]) -> dict[str, Any]:
    """Quantise a file as the command does, and return what was done."""
    start = time.perf_counter()
    done = runtime.quantize(model, photographs, int8)
    return {
        'processor': processor(),
        'versions': {package: version_of(package) for package in ('onnxruntime', 'openvino')},
        **sizes(model, int8),
        'seconds': time.perf_counter() - start,
        'photographs': len(photographs),
        'loss held out': done.loss,
        'compared': done.compared,
        'float': done.in_float,
        'int8': done.in_int8,
    }


def quantize_untested(model: Path, int8: Path, photographs: list[Path]) -> None:
    """Quantise a file with random weights: all layers but those that stay in float from the start."""
    loaded = runtime.load(model)
    groups = quantizer.groups_of(model)
    inputs = (loaded.prepared(pictures.read(photograph))[0] for photograph in photographs)
    ranges = quantizer.measured_ranges(model, inputs)
    in_int8 = [group for group in groups if not quantizer.is_sensitive(group)]
    quantizer.Quantizer(model, groups, ranges).write(in_int8, int8)


def sizes(model: Path, int8: Path) -> dict[str, float]:
    return {'float_mib': model.stat().st_size / 2**20, 'int8_mib': int8.stat().st_size / 2**20}


def metrics(config: Any, weights: Path, model: Path, int8: Path) -> dict[str, dict[str, float]]:
    """Return the metrics of the framework, and of both files in each way to run them."""
    from swin_dense.workbench.predict import Predictor
    from tests.workbench.export.accuracy import accuracy

    files = {
        f'{way}{" int8" * (path == int8)}': runtime.load(path, runtime=library, score=0.0)
        for way, library in WAYS.items()
        for path in (model, int8)
    }
    predictor = Predictor(config, str(weights), 'cpu')
    return dict(zip(['framework', *files], accuracy(config, predictor.model, list(files.values())), strict=True))


def agreement(model: Path, int8: Path, library: str, images: list[Path]) -> float:
    """Return the share of predictions in which the int8 file agrees with the float file."""
    expected, found = (runtime.load(path, runtime=library, score=quantization.LOWEST) for path in (model, int8))
    return 1 - quantization.difference(quantization.Reference(expected), found, images)[0]


def speed(model: Path, int8: Path, rounds: int) -> dict[str, float]:
    """Return the time of one image of SIZE in ms, for both files in each way to run them."""
    img = pictures.resized(pictures.read(PICTURE), *SIZE)[:, :, ::-1].transpose(2, 0, 1)[None].astype(np.float32)
    found = {}
    for way, library in WAYS.items():
        for path in (model, int8):
            loaded = runtime.load(path, runtime=library, threads=1)
            loaded.run(img)
            times = []
            for _ in range(rounds):
                start = time.perf_counter()
                loaded.run(img)
                times.append(time.perf_counter() - start)
            found[f'{way}{" int8" * (path == int8)}'] = 1000 * statistics.median(times)
    return found


def add(out: Path, name: str, figures: dict[str, Any]) -> None:
    """Add figures to those of a model in the report."""
    report = json.loads(out.read_text()) if out.exists() else {}
    report[name] = {**report.get(name, {}), **figures}
    out.write_text(json.dumps(report, indent=1) + '\n')


if __name__ == '__main__':
    main()
