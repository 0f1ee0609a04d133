"""Train and test a small Mask R-CNN and a small UPerNet on generated data, and print the results."""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import skimage.data
from mmcv.ops import get_compiler_version, get_compiling_cuda_version
from PIL import Image, ImageOps
from rich.console import Console
from rich.table import Table

from swin_dense import create_backbone, extract_pyramid
from swin_dense.utils.packages import versions_of

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT / 'examples'))
from pictures import draw_pyramid  # noqa: E402

MODELS = {
    'mask_rcnn': ('Mask R-CNN', 'configs/demo/mask-rcnn_swin-demo_fpn.py'),
    'upernet': ('UPerNet', 'configs/demo/upernet_swin-demo.py'),
}
QUICK = {
    'mask_rcnn': ['train_cfg.max_epochs=1', 'train_cfg.val_interval=1', 'default_hooks.checkpoint.interval=1'],
    'upernet': [
        'train_cfg.max_iters=4',
        'train_cfg.val_interval=4',
        'default_hooks.checkpoint.interval=4',
        'default_hooks.logger.interval=2',
    ],
}
METRICS = ('coco/bbox_mAP', 'coco/bbox_mAP_50', 'coco/segm_mAP', 'coco/segm_mAP_50', 'mIoU', 'aAcc')
PACKAGES = ('torch', 'mmcv', 'mmengine', 'mmdet', 'mmsegmentation', 'numpy', 'swin-dense')
PICTURES = 6
SWIN_DENSE = ['-m', 'swin_dense']

console = Console()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument('out', type=Path, metavar='OUT', help='output folder; an existing data set in it is reused')
    parser.add_argument('--quick', action='store_true', help='use a few images and iterations, as a smoke test')
    args = parser.parse_args()
    args.out.mkdir(parents=True, exist_ok=True)
    seconds: dict[str, float] = {}
    summary: dict[str, object] = {}

    data_folder = args.out / ('data-quick' if args.quick else 'data')
    if not data_folder.exists():
        with timed('data', 'Generating the data set', seconds):
            few = ['--train', '8', '--val', '4'] if args.quick else []
            run([str(ROOT / 'tools/make_demo_data.py')], [str(data_folder), *few], args.out / 'data.log')
    for key, (name, config) in MODELS.items():
        folder = args.out / key
        data = data_folder / ('coco/' if key == 'mask_rcnn' else 'ADEChallengeData2016')
        config = str(ROOT / config)
        common = ['--work-dir', str(folder), '--set', *data_options(key, data), *(QUICK[key] if args.quick else [])]
        with timed(f'{key}/train', f'Training {name} from scratch', seconds):
            run(SWIN_DENSE, ['train', config, *common], folder / 'train.log')
        checkpoint = last_checkpoint(folder)
        with timed(f'{key}/test', f'Testing {name} on the validation images', seconds):
            shutil.rmtree(folder / 'shown', ignore_errors=True)
            show = ['--show-dir', str(folder / 'shown')]
            common += ['default_hooks.visualization.score_thr=0.5'] if key == 'mask_rcnn' else []
            run(SWIN_DENSE, ['test', config, checkpoint, *show, *common], folder / 'test.log')
        summary.update(read_metrics(folder))
        contact_sheet(folder / 'shown', args.out / f'{key}.png')
    with timed('pyramid', 'Feature pyramid of a photograph', seconds):
        draw_photograph_pyramid(last_checkpoint(args.out / 'mask_rcnn'), args.out / 'pyramid.png')

    summary['seconds'] = {name: round(value, 1) for name, value in seconds.items()}
    installed = map(versions_of, PACKAGES)
    summary['versions'] = {name: version for found in installed for name, version in found.items()}
    summary['operators of mmcv'] = get_compiler_version()
    (args.out / 'summary.json').write_text(json.dumps(summary, indent=2) + '\n')
    print_summary(summary, args.out)


def data_options(key: str, data: Path) -> list[str]:
    """Return the config overrides that set the data paths of a demo config."""
    options = [f'{split}_dataloader.dataset.data_root={data}' for split in ('train', 'val', 'test')]
    if key == 'mask_rcnn':
        annotations = data / 'annotations' / 'instances_val2017.json'
        options += [f'{split}_evaluator.ann_file={annotations}' for split in ('val', 'test')]
    return options


@contextmanager
def timed(key: str, title: str, seconds: dict[str, float]) -> Iterator[None]:
    console.print(f'[bold]{title}[/]')
    started = time.perf_counter()
    yield
    seconds[key] = time.perf_counter() - started


def run(program: list[str], arguments: list[str], log: Path) -> None:
    """Run a Python program, print its progress, and write its output to ``log``."""
    log.parent.mkdir(parents=True, exist_ok=True)
    command = [sys.executable, '-W', 'ignore', *program, *arguments]
    # On a GPU the detector needs operators for CUDA, which a mmcv that was compiled without nvcc lacks.
    on_cpu = {'CUDA_VISIBLE_DEVICES': ''} if get_compiling_cuda_version() == 'not available' else {}
    environment = {**os.environ, **on_cpu}
    with (
        log.open('w') as file,
        subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=environment
        ) as process,
    ):
        for line in process.stdout or ():
            file.write(line)
            file.flush()
            if progress := read_progress(line):
                console.print(f'  {progress}', highlight=False)
    if process.returncode:
        tail = '\n'.join(log.read_text().splitlines()[-15:])
        sys.exit(f'{tail}\n\n{program[-1]} failed with exit status {process.returncode}; see {log} for its full output')


def read_progress(line: str) -> str | None:
    """Return a short progress text from a log line of mmengine, or None if the line has no progress."""
    match = re.search(r'(Epoch|Iter)\((train|test)\)\s+(?:\[(\d+)\])?\[\s*(\d+)/(\d+)\].* eta: (\S+)', line)
    if match is None:
        return None
    epoch = f'epoch {match[3]}, ' if match[3] else ''
    loss = re.search(r' loss: ([\d.]+)', line)
    return f'{epoch}{match[4]}/{match[5]}' + (f', loss {loss[1]}' if loss else '') + f', {match[6]} left'


def read_metrics(folder: Path) -> dict[str, float]:
    """Return the metrics of the newest test run, as fractions of 1."""
    report = json.loads(max(folder.glob('*/*.json'), key=lambda path: path.stat().st_mtime).read_text())
    percent = {'mIoU', 'aAcc'}
    return {name: report[name] / (100 if name in percent else 1) for name in METRICS if name in report}


def last_checkpoint(folder: Path) -> str:
    return (folder / 'last_checkpoint').read_text().strip()


def contact_sheet(shown: Path, target: Path) -> None:
    """Combine the first drawn test images (ground truth left, prediction right) in one image, in equal cells."""
    painted = sorted(path for path in shown.rglob('*') if path.suffix in ('.jpg', '.png'))
    tiles = [Image.open(path).convert('RGB') for path in painted[:PICTURES]]
    width, height = tiles[0].size
    columns = 2
    sheet = Image.new('RGB', (columns * (width + 8), -(-len(tiles) // columns) * (height + 8)), 'white')
    for index, tile in enumerate(tiles):
        cell = ImageOps.pad(tile, (width, height), color='white')
        sheet.paste(cell, (index % columns * (width + 8), index // columns * (height + 8)))
    sheet.save(target)


def draw_photograph_pyramid(checkpoint: str, target: Path) -> None:
    """Draw the pyramid of the backbone that the demo has trained in its detector."""
    photograph = Path(skimage.data.__file__).with_name('astronaut.png')
    pyramid = extract_pyramid(create_backbone(checkpoint=checkpoint), photograph)
    draw_pyramid(pyramid, photograph).savefig(target)


def print_summary(summary: dict, out: Path) -> None:
    table = Table('metric', 'validation', title='Results')
    for name in METRICS:
        if name in summary:
            table.add_row(name, f'{summary[name]:.3f}')
    console.print(table)
    console.print(f'Operators of mmcv: {summary["operators of mmcv"]}')
    seconds = sum(summary['seconds'].values())
    console.print(
        f'{seconds:.0f} s in total. {out} contains summary.json, images of ground truth and predictions '
        "(mask_rcnn.png, upernet.png), and pyramid.png, the four levels of the detector's backbone."
    )


if __name__ == '__main__':
    try:
        main()
    except KeyboardInterrupt:
        sys.exit('stopped; the next run keeps the data set, and trains from the beginning')
