"""Train a small DINO and a small Mask2Former, export them, and compare the accuracy of their files with mmdet's.

    python benchmarks/exports_trained.py work_dirs/trained --out benchmarks/exports_trained.json

The data are those of ``make demo``: coloured shapes, five classes, and the background as a class of its own for
Mask2Former. ``swin-dense train`` trains the models, ``swin-dense export`` writes the files. Box AP, mask AP and PQ on
the validation images are computed from mmdet's predictions and from those of each file in each way to run it. Int8 is
ONNX Runtime's dynamic quantisation. A second call goes on with what is in the folder.
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

from bench_host import processor
from exports_smaller import in_int8

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT))
MODELS = {'DINO': 'dino', 'Mask2Former': 'mask2former_panoptic'}
EPOCHS = {'DINO': 20, 'Mask2Former': 14}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('folder', type=Path, help='data, models and files')
    parser.add_argument('--out', type=Path, required=True, help='.json file')
    parser.add_argument('--models', nargs='+', default=list(MODELS), choices=list(MODELS))
    parser.add_argument('--epochs', type=int, help='epochs of the training (default: 20 and 14)')
    args = parser.parse_args()
    data = made_data(args.folder / 'data')
    for name in args.models:
        config, weights, model = trained(name, args.folder / MODELS[name], data, args.epochs or EPOCHS[name])
        report = json.loads(args.out.read_text()) if args.out.exists() else {}
        report[name] = {
            'processor': processor(),
            'checkpoint': weights.name,
            'images': 60,
            **evaluated(config, weights, model),
        }
        args.out.write_text(json.dumps(report, indent=1) + '\n')


def made_data(folder: Path, *options: str) -> Path:
    """Write the data of ``make demo`` with maps of the background to a folder that does not exist, and return it."""
    if not folder.exists():
        subprocess.run([sys.executable, ROOT / 'tools' / 'make_demo_data.py', folder, *options], check=True)
        from tests.workbench.export.query_models import write_backgrounds

        write_backgrounds(folder)
    return folder


def trained(name: str, folder: Path, data: Path, epochs: int) -> tuple[Path, Path, Path]:
    """Train and export a model in a folder, or go on there; return its config, its weights and its file."""
    folder.mkdir(parents=True, exist_ok=True)
    config = folder / 'config.py'
    config_of(name, data.resolve(), epochs).dump(config)
    command('train', config, '--work-dir', folder, '--resume')
    weights = folder / (folder / 'last_checkpoint').read_text().rpartition('/')[2]
    # A file of other weights is not used.
    model, image = folder / f'{weights.stem}.onnx', data / 'coco' / 'val2017' / '000000000001.jpg'
    if not model.exists():
        command('export', config, weights, '--out', model, '--image', image)
    return config, weights, model


def evaluated(config: Path, weights: Path, model: Path) -> dict[str, Any]:
    """Return AP and PQ of mmdet and of the file on the validation images, for each way to run the file."""
    from mmengine.config import Config

    from swin_dense import runtime
    from swin_dense.workbench.predict import Predictor
    from tests.workbench.export.accuracy import accuracy

    small = in_int8(model)
    files = {
        'ONNX Runtime': runtime.load(model, score=0.0),
        'OpenVINO': runtime.load(model, runtime='openvino', score=0.0),
        'OpenVINO bfloat16': runtime.load(model, runtime='openvino', precision='bfloat16', score=0.0),
        'ONNX Runtime int8': runtime.load(small, score=0.0),
    }
    loaded = Config.fromfile(config)
    predictor = Predictor(loaded, str(weights), 'cpu')
    metrics = accuracy(loaded, predictor.model, list(files.values()))
    return {
        'file_mib': model.stat().st_size / 2**20,
        'int8_mib': small.stat().st_size / 2**20,
        **dict(zip(['mmdet', *files], metrics, strict=True)),
    }


def config_of(name: str, data: Path, epochs: int) -> Any:
    """Return the config of a small model and its training."""
    from tests.mm.demo import demo_config
    from tests.workbench.export.query_models import trainable_config

    config = trainable_config(MODELS[name], data)
    model = config.model
    model.backbone = {**demo_config('mmdet', data).model.backbone, 'out_indices': model.backbone.out_indices}
    if name == 'DINO':
        model.neck.in_channels = [64, 128, 256]
    else:
        model.panoptic_head.in_channels = [32, 64, 128, 256]
    config.train_cfg.max_epochs = config.train_cfg.val_interval = epochs
    config.param_scheduler[1].update(T_max=epochs, end=epochs)
    config.default_hooks.checkpoint.update(interval=2, max_keep_ckpts=1)
    return config


def command(*arguments: Any) -> None:
    """Run a subcommand of ``swin-dense``, and raise an error if it fails."""
    subprocess.run([sys.executable, '-m', 'swin_dense', *map(str, arguments)], check=True)


if __name__ == '__main__':
    main()
