"""Quantise four models with ``swin-dense quantize``, and compare the files in float32 and in int8.

    python benchmarks/quantize.py work_dirs/quantize --demo work_dirs/demo --out benchmarks/quantize.json
    python benchmarks/quantize.py work_dirs/quantize --demo work_dirs/demo --out benchmarks/quantize.json --only speed
    python benchmarks/exports_whole.py --folder work_dirs/whole --models 'Mask R-CNN' --only-export --out whole.json
    python benchmarks/quantize.py work_dirs/quantize --full work_dirs/whole --out benchmarks/quantize.json

The models are the Mask R-CNN and the UPerNet of ``make demo``, and the DINO and the Mask2Former of
``exports_trained.py``; those that are not there are trained. The photographs for quantisation and the images for the
metrics come from ``tools/make_demo_data.py`` with another seed: no model was trained on them, and no choice of layers
was made on them. Metrics are computed by the evaluator of the config, agreement as ``swin-dense quantize`` does it.

Times are medians of one image of SIZE on --threads threads, for the outputs of the file; measure them on an idle
machine. With --full, the file is a Mask R-CNN of published size with random weights, whose predictions mean nothing: it
is quantised with the same layers in float, and only its times are measured. Results of other models in the report stay.
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
PARTS = ['files', 'metrics', 'agreement', 'speed']
# The ways to run a model: which file, and the options of ``runtime.load``.
WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    'ONNX Runtime': ('float', {'runtime': 'onnxruntime'}),
    'ONNX Runtime int8': ('int8', {'runtime': 'onnxruntime'}),
    'OpenVINO': ('float', {'runtime': 'openvino'}),
    'OpenVINO bfloat16': ('float', {'runtime': 'openvino', 'precision': 'bfloat16'}),
    'OpenVINO int8': ('int8', {'runtime': 'openvino'}),
    'OpenVINO int8, bfloat16': ('int8', {'runtime': 'openvino', 'precision': 'bfloat16'}),
}
# Those that others are compared with, in the same library.
FLOAT = ('ONNX Runtime', 'OpenVINO')
Files = dict[str, Path]  # the float file and the int8 file of a model, as 'float' and 'int8'


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='data, models and files')
    parser.add_argument('--out', type=Path, required=True, help='.json file')
    parser.add_argument('--demo', type=Path, help='folder of `make demo` (default: FOLDER/demo)')
    parser.add_argument('--models', nargs='+', default=[*DEMO, *QUERIES], choices=[*DEMO, *QUERIES])
    parser.add_argument('--only', nargs='+', default=PARTS[:-1], choices=PARTS, help='default: all but speed')
    parser.add_argument('--full', type=Path, help='folder of exports_whole.py: only times, of its Mask R-CNN')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--threads', type=int, default=2)
    args = parser.parse_args()
    args.folder.mkdir(parents=True, exist_ok=True)
    photographs, images = _data(args.folder)
    if args.full is not None:
        files = {'float': args.full / 'Mask R-CNN' / 'model.onnx', 'int8': args.folder / 'full_int8.onnx'}
        if not files['int8'].exists():
            quantize_untested(*files.values(), photographs[::6])
        add(args.out, FULL, sizes(files) | speed(files, args.rounds, args.threads))
        return
    for name in args.models:
        files = {'float': args.folder / f'{name}.onnx', 'int8': args.folder / f'{name}_int8.onnx'}
        demo = args.demo or args.folder / 'demo'
        if 'files' in args.only:
            prepared(name, files['float'], demo)
            add(args.out, name, quantized(files, photographs))
        if 'metrics' in args.only:
            config, weights = prepared(name, files['float'], demo)
            add(args.out, name, {'images': len(images), 'metrics': metrics(config, weights, files)})
        if 'agreement' in args.only:
            add(args.out, name, {'agreement': agreement(files, images)})
        if 'speed' in args.only:
            add(args.out, name, speed(files, args.rounds, args.threads))


def _data(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the photographs for quantisation and the images for the metrics."""
    counts = ['--train', str(PHOTOGRAPHS), '--val', str(IMAGES)]
    data = made_data(folder / 'data', '--seed', str(SEED), *counts)
    first, second = (sorted((data / 'coco' / f'{split}2017').iterdir()) for split in ('train', 'val'))
    return first, second


def prepared(name: str, path: Path, demo: Path) -> tuple[Any, Path]:
    """Train and export a model if that is not done; return its config for the data beside the file, and its weights."""
    from tests.mm.demo import demo_config

    folder = path.parent
    if name in QUERIES:
        # It is trained on the data of the demo.
        _, weights, model = trained(name, folder / QUERIES[name], made_data(folder / 'training data'), EPOCHS[name])
        path.unlink(missing_ok=True)
        path.hardlink_to(model)
        return config_with_queries(name, (folder / 'data').resolve(), EPOCHS[name]), weights
    key, recipe, framework = DEMO[name]
    if not (demo / key / 'last_checkpoint').exists():
        subprocess.run([sys.executable, ROOT / 'tools' / 'demo.py', demo], check=True)
    weights = demo / key / (demo / key / 'last_checkpoint').read_text().rpartition('/')[2]
    if not path.exists():
        image = demo / 'data' / 'coco' / 'val2017' / '000000000001.jpg'
        command('export', ROOT / 'configs' / 'demo' / recipe, weights, '--out', path, '--image', image)
    return demo_config(framework, (folder / 'data').resolve()), weights


def quantized(files: Files, photographs: list[Path]) -> dict[str, Any]:
    """Quantise a file as the command does, and return what was done."""
    start = time.perf_counter()
    done = runtime.quantize(files['float'], photographs, files['int8'])
    return {
        **sizes(files),
        'seconds': time.perf_counter() - start,
        'photographs': len(photographs),
        'loss held out': done.loss,
        'compared': done.compared,
        'float': done.in_float,
        'int8': done.in_int8,
    }


def quantize_untested(model: Path, int8: Path, photographs: list[Path]) -> None:
    """Quantise a file with random weights: all layers but those that stay in float from the start."""
    float_model = runtime.load(model)
    groups = quantizer.groups_of(model)
    inputs = (float_model.prepared(pictures.read(photograph))[0] for photograph in photographs)
    ranges = quantizer.measured_ranges(model, inputs)
    in_int8 = [group for group in groups if not quantizer.is_sensitive(group)]
    quantizer.Quantizer(model, groups, ranges).write(in_int8, int8)


def sizes(files: Files) -> dict[str, float]:
    return {f'{kind}_mib': path.stat().st_size / 2**20 for kind, path in files.items()}


def loaded(files: Files, way: str, **options: Any) -> runtime.Model:
    kind, chosen = WAYS[way]
    return runtime.load(files[kind], **chosen, **options)


def metrics(config: Any, weights: Path, files: Files) -> dict[str, dict[str, float]]:
    """Return the metrics of the framework, and of the files in each way to run them."""
    from swin_dense.workbench.predict import Predictor
    from tests.workbench.export.accuracy import accuracy

    models = [loaded(files, way, score=0.0) for way in WAYS]
    predictor = Predictor(config, str(weights), 'cpu')
    return dict(zip(['framework', *WAYS], accuracy(config, predictor.model, models), strict=True))


def agreement(files: Files, images: list[Path]) -> dict[str, float]:
    """Return the share of predictions that agree with those of the float file in the same library, for other ways."""
    references = {way: quantization.Reference(loaded(files, way, score=quantization.LOWEST)) for way in FLOAT}
    found = {}
    for way in WAYS:
        if way not in FLOAT:
            reference = next(reference for name, reference in references.items() if way.startswith(name))
            model = loaded(files, way, score=quantization.LOWEST)
            found[way] = 1 - quantization.difference(reference, model, images)[0]
    return found


def speed(files: Files, rounds: int, threads: int) -> dict[str, Any]:
    """Return the time of one image of SIZE in ms, in each way to run the files."""
    img = pictures.resized(pictures.read(PICTURE), *SIZE)[:, :, ::-1].transpose(2, 0, 1)[None].astype(np.float32)
    found = {}
    for way in WAYS:
        model = loaded(files, way, threads=threads)
        model.run(img)
        times = []
        for _ in range(rounds):
            start = time.perf_counter()
            model.run(img)
            times.append(time.perf_counter() - start)
        found[way] = 1000 * statistics.median(times)
    return {'threads': threads, 'rounds': rounds, 'speed': found}


def add(out: Path, name: str, figures: dict[str, Any]) -> None:
    """Add figures to those of a model in the report."""
    report = json.loads(out.read_text()) if out.exists() else {}
    versions = {package: version_of(package) for package in ('onnxruntime', 'openvino')}
    report[name] = {**report.get(name, {}), 'processor': processor(), 'versions': versions, **figures}
    out.write_text(json.dumps(report, indent=1) + '\n')


if __name__ == '__main__':
    main()
