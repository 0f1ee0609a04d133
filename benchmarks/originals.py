"""Run what fails in other Swins, on their real packages, and the same in this one.

    .venv/bin/python benchmarks/originals.py                     # all rows; writes benchmarks/results/originals.json
    .venv/bin/python benchmarks/originals.py bfloat16 frozen_stages

Each row is a function below, which you can read and run on its own. It does what a user did in a public thread: with
the original if ``ours`` is False, with swin_dense if it is True. It returns what came out. An error that it raises is a
failure, as is a :class:`WrongResult`, for what goes wrong without an error. Each side runs in a process of its own. An
original that fails no longer is reported as such.

The rows of timm and transformers run in another environment, .venv-peers, which ``make test`` creates.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / 'benchmarks/results/originals.json'
PEERS = ROOT / '.venv-peers/bin/python'
SMALL = {'embed_dims': 32, 'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}
LONGEST = 110  # characters of an error's first line


class WrongResult(Exception):
    """Wrong numbers, or weights that were not loaded, without an error."""


@dataclass(frozen=True)
class Row:
    """A failure of another Swin."""

    user: str  # what a user does
    package: str  # the distribution of the original
    thread: str  # 'owner/repository#number', a public issue or pull request about it
    run: Callable[[bool], str]

    @property
    def of_peers(self) -> bool:
        """Whether the row needs the environment .venv-peers."""
        return self.package in ('timm', 'transformers')


ROWS: dict[str, Row] = {}


def row(user: str, package: str, thread: str) -> Callable[[Callable[[bool], str]], Callable[[bool], str]]:
    """Add a function to the rows under its name."""

    def add(run: Callable[[bool], str]) -> Callable[[bool], str]:
        ROWS[run.__name__] = Row(user, package, thread, run)
        return run

    return add


def mm_swin(ours: bool, package: str = 'mmdet', **options: Any) -> Any:
    """Build a small Swin of mmdet or mmseg, or ours with the same options."""
    if ours:
        from swin_dense import SwinDense as Swin
    elif package == 'mmdet':
        from mmdet.models.backbones.swin import SwinTransformer as Swin
    else:
        from mmseg.models.backbones.swin import SwinTransformer as Swin
    return Swin(**{**SMALL, **options})


def images(*shape: int) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(0))


def with_random_weights(model: nn.Module) -> nn.Module:
    """Draw all weights anew, because some, such as the norms of a fresh Swin V2, are 0 and hide what a block does."""
    generator = torch.Generator().manual_seed(0)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.data = 0.1 * noise + (parameter.ndim == 1)
    return model.eval()


def largest_difference(found: Sequence[Tensor], expected: Sequence[Tensor]) -> float:
    """Return the largest difference between the maps of two models, relative to the largest value of the map."""
    return max(float((a - b).abs().max() / b.abs().max()) for a, b in zip(found, expected, strict=True))


# The rows of mmdet, mmsegmentation and mmengine.


@row('freeze stages, and train with DDP without `find_unused_parameters=True`', 'mmdet', 'open-mmlab/mmdetection#11570')
def frozen_stages(ours: bool) -> str:
    """One process is enough to show it. mmengine, too, calls train() after it has wrapped the model."""
    import torch.distributed as dist

    dist.init_process_group('gloo', store=dist.HashStore(), rank=0, world_size=1)
    model = nn.parallel.DistributedDataParallel(mm_swin(ours, frozen_stages=1))
    model.train()
    for _ in range(2):
        loss = torch.stack([level.mean() for level in model(images(1, 3, 64, 64))]).sum()
        loss.backward()
    dist.destroy_process_group()
    return 'trains'


@row('cast the whole model to bfloat16', 'mmdet', 'open-mmlab/mmdetection#7182')
def bfloat16(ours: bool) -> str:
    """Under autocast, mmdet computes. Its attention mask stays in float32 when the model is cast."""
    backbone = mm_swin(ours).bfloat16()
    maps = backbone(images(1, 3, 64, 96).bfloat16())
    return f'{len(maps)} maps in {maps[0].dtype}'.replace('torch.', '')


@row("start from the authors' ImageNet weights, unconverted", 'mmsegmentation', 'open-mmlab/mmsegmentation#953')
def authors_weights(ours: bool) -> str:
    from swin_dense import SwinBackbone, export_state_dict

    weights = export_state_dict(SwinBackbone(**SMALL), 'official')
    torch.save({'model': weights}, 'swin_tiny.pth')
    backbone = mm_swin(ours, 'mmseg', init_cfg={'type': 'Pretrained', 'checkpoint': 'swin_tiny.pth'})
    before = {name: parameter.clone() for name, parameter in backbone.named_parameters()}
    backbone.init_weights()
    loaded = [name for name, parameter in backbone.named_parameters() if not torch.equal(parameter, before[name])]
    if 'patch_embed.projection.weight' not in loaded:
        raise WrongResult(f'{len(loaded)} of {len(before)} weights loaded, no warning')
    return 'loads them'


@row(
    'load weights of window 7 into window 12',
    'mmsegmentation',
    'SwinTransformer/Swin-Transformer-Semantic-Segmentation#32',
)
def other_window(ours: bool) -> str:
    torch.save(mm_swin(ours, 'mmseg', window_size=7).state_dict(), 'window7.pth')
    pretrained = {'type': 'Pretrained', 'checkpoint': 'window7.pth'}
    backbone = mm_swin(ours, 'mmseg', window_size=12, init_cfg=pretrained)
    backbone.init_weights()
    backbone(images(1, 3, 64, 64))
    return 'resizes the position tables'


@row('use absolute positions at another image size', 'mmdet', 'open-mmlab/mmdetection#8187')
def absolute_positions(ours: bool) -> str:
    backbone = mm_swin(ours, use_abs_pos_embed=True, pretrain_img_size=224)
    backbone(images(1, 3, 320, 320))
    return 'resizes them'


def onnx_file(ours: bool) -> tuple[Any, Any]:
    """Export a backbone for images of any size and number; return it and the session that runs the file.

    torch's newer exporter (``dynamo=True``) changes nothing for the original: wrong numbers at most other sizes.
    """
    import onnxruntime

    backbone = mm_swin(ours)
    backbone.eval()
    if ours:
        from swin_dense import export_model

        export_model(backbone, 'swin.onnx')
    else:
        axes = {0: 'batch', 2: 'height', 3: 'width'}
        options = {'input_names': ['img'], 'dynamic_axes': {'img': axes}, 'dynamo': False}
        torch.onnx.export(backbone, images(1, 3, 224, 224), 'swin.onnx', **options)
    return backbone, onnxruntime.InferenceSession('swin.onnx')


@torch.no_grad()
def compared(ours: bool, *shape: int) -> str:
    """Compare an exported file with the backbone on images of a shape."""
    backbone, session = onnx_file(ours)
    img = images(*shape)
    found = session.run(None, {session.get_inputs()[0].name: img.numpy()})
    difference = largest_difference([torch.from_numpy(level) for level in found], backbone(img))
    if difference > 1e-4:
        raise WrongResult(f'outputs off by up to {100 * difference:.0f} % of the largest value')
    return "PyTorch's numbers"


@row('export to ONNX, and run the file on two images', 'mmdet', 'open-mmlab/mmdetection#7160')
def onnx_batch(ours: bool) -> str:
    return compared(ours, 2, 3, 224, 224)


@row(
    'export to ONNX, and run the file at another size',
    'mmdet',
    'SwinTransformer/Swin-Transformer-Object-Detection#223',
)
def onnx_size(ours: bool) -> str:
    return compared(ours, 1, 3, 320, 256)


@row('resume a training on torch 2.6 or later', 'mmengine', 'open-mmlab/mmengine#1655')
def resume(ours: bool) -> str:
    if ours:
        import swin_dense  # noqa: F401  lets torch read the message hub in mmengine's files
    from mmengine.model import BaseModel
    from mmengine.runner import Runner

    class Model(BaseModel):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(1, 1)

        def forward(self, inputs: list[Tensor], mode: str = 'tensor') -> dict[str, Tensor]:
            return {'loss': self.linear(torch.stack(inputs)).mean()}

    for epochs in (1, 2):
        runner = Runner(
            Model(),
            'work_dir',
            train_dataloader={'dataset': [{'inputs': torch.ones(1)}], 'sampler': {'type': 'DefaultSampler'}},
            train_cfg={'by_epoch': True, 'max_epochs': epochs},
            optim_wrapper={'optimizer': {'type': 'SGD', 'lr': 0.1}},
            resume=epochs == 2,
            experiment_name=f'until epoch {epochs}',
            log_level='ERROR',
        )
        runner.train()
    return f'continues to epoch {runner.epoch}'


# The rows of timm and transformers.


@row('take features at 480 x 640', 'timm', 'huggingface/pytorch-image-models#2438')
def opposite_edges(ours: bool) -> str:
    """Pixels at the right edge must not change features at the left edge of stage 0, hundreds of pixels away."""
    if ours:
        from swin_dense import SwinBackbone

        backbone: Any = SwinBackbone('t')
    else:
        import timm

        backbone = timm.create_model('swin_tiny_patch4_window7_224', features_only=True, img_size=(480, 640))
    with_random_weights(backbone)
    img = images(1, 3, 480, 640)
    changed = img.clone()
    changed[..., -4:] = 0
    first, second = (backbone(x)[0] for x in (img, changed))
    left = (first - second)[..., 0] if ours else (first - second)[:, :, 0]  # timm: (B, H, W, C)
    if left.any():
        raise WrongResult(f'pixels at the right edge leak into the left edge, by up to {left.abs().max():.1f}')
    return 'no leak'


@row('give an image of any size, such as 97 x 133', 'timm', 'huggingface/pytorch-image-models#2410')
def any_size(ours: bool) -> str:
    """Without ``strict_img_size=False``, which timm's maintainer names in the thread, 512 x 384 fails too."""
    if ours:
        from swin_dense import SwinBackbone

        backbone: Any = SwinBackbone('t')
    else:
        import timm

        backbone = timm.create_model('swin_tiny_patch4_window7_224', features_only=True, strict_img_size=False)
    return f'{len(backbone(images(1, 3, 97, 133)))} maps'


@row('use absolute positions in Swin V2', 'transformers', 'huggingface/transformers#37161')
def absolute_positions_of_v2(ours: bool) -> str:
    if ours:
        from swin_dense import SwinV2Backbone

        SwinV2Backbone(**SMALL, use_abs_pos_embed=True)(images(1, 3, 224, 224))
    else:
        from transformers import Swinv2Config, Swinv2Model

        config = Swinv2Config(image_size=224, use_absolute_embeddings=True, depths=[2, 2], num_heads=[3, 6])
        Swinv2Model(config)(images(1, 3, 224, 224))
    return 'adds them'


@row('compute Swin V2 in float16 at 224 x 224', 'transformers', 'huggingface/transformers#31589')
def float16_of_v2(ours: bool) -> str:
    """Window 8 pads maps of 28 x 28 tokens. The key of padding is 0, which float16 divides by 0."""
    if ours:
        from swin_dense import SwinV2Backbone

        out = SwinV2Backbone(**SMALL, window_size=8).eval().half()(images(1, 3, 224, 224).half())[-1]
    else:
        from transformers import Swinv2Config, Swinv2Model

        config = Swinv2Config(image_size=224, window_size=8, depths=[2, 2], num_heads=[3, 6])
        out = Swinv2Model(config).eval().half()(images(1, 3, 224, 224).half()).last_hidden_state
    if out.isnan().any():
        raise WrongResult(f'NaN in {int(100 * out.isnan().float().mean())} % of the numbers')
    return 'finite numbers'


# Running the rows.


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('rows', nargs='*', metavar='ROW', help=f'some of {", ".join(ROWS)}; all, if left out')
    parser.add_argument('--peers', type=Path, default=PEERS, help='Python with timm and transformers')
    parser.add_argument('--side', choices=('original', 'ours'), help='run a row in this process, and print its outcome')
    args = parser.parse_args()
    if unknown := [name for name in args.rows if name not in ROWS]:
        parser.error(f'there is no row {unknown[0]}; the rows are {", ".join(ROWS)}')
    if args.side:
        print(json.dumps(outcome(args.rows[0], args.side)))
        return
    done = {}
    for name in args.rows or ROWS:
        done[name] = both_sides(name, args.peers if ROWS[name].of_peers else Path(sys.executable))
        print(f'{name}: {described(done[name])}', flush=True)
    if not args.rows:
        RESULTS.write_text(json.dumps(done, indent=1) + '\n')


def both_sides(name: str, python: Path) -> dict[str, Any]:
    """Run both sides of a row, each in a process and a folder of its own."""
    report = {'user': ROWS[name].user, 'package': ROWS[name].package, 'thread': ROWS[name].thread}
    for side in ('original', 'ours'):
        command = [str(python), '-W', 'ignore', __file__, name, '--side', side]
        environment = {**os.environ, 'PYTHONPATH': str(ROOT), 'OMP_NUM_THREADS': '1'}
        with tempfile.TemporaryDirectory() as folder:
            process = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
        if process.returncode:
            raise RuntimeError(f'{" ".join(command)}\n{process.stderr}')
        report[side] = json.loads(process.stdout.splitlines()[-1])
    return report


def outcome(name: str, side: str) -> dict[str, Any]:
    """Run one side of a row in this process, and return what came out, or why it failed, with versions."""
    warnings.simplefilter('ignore')
    if ROWS[name].of_peers:
        # timm and transformers import torchvision. This module imports swin_dense, which the row `resume` must not.
        from bench_models import stand_in_for_torchvision_operators

        stand_in_for_torchvision_operators()
    torch.manual_seed(0)
    versions = {package: version(package) for package in (ROWS[name].package, 'torch')}
    try:
        return {'gave': ROWS[name].run(side == 'ours'), 'failed': False, 'versions': versions}
    except WrongResult as wrong:
        return {'gave': str(wrong), 'failed': True, 'versions': versions}
    except Exception as error:
        return {'gave': f'{type(error).__name__}: {first_line(error)}', 'failed': True, 'versions': versions}


def first_line(error: Exception) -> str:
    """Return the first sentence of an error's message, or as much of it as fits."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    beginning = lines[1] if lines[0].endswith(':') else lines[0]
    sentence = beginning.partition('. ')[0].rstrip('.')
    return sentence if len(sentence) <= LONGEST else sentence[:LONGEST].rpartition(' ')[0] + ' ...'


def described(report: dict[str, Any]) -> str:
    """Return one line on a row, which says so if the original has not failed, or ours has."""
    original, ours = report['original'], report['ours']
    first = original['gave'] if original['failed'] else f'NO LONGER FAILS ({original["gave"]})'
    second = f'FAILS ({ours["gave"]})' if ours['failed'] else ours['gave']
    return f'{report["package"]} {original["versions"][report["package"]]}: {first}; here: {second}'


if __name__ == '__main__':
    main()
