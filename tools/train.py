"""Train a detector of mmdet or a segmentor of mmseg."""

from __future__ import annotations

import torch
from mmengine.runner import Runner
from runner_config import load_config, make_parser

import swin_dense  # noqa: F401  registers SwinDense and lets torch read the checkpoints of mmengine


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument('--amp', action='store_true', help='train in automatic mixed precision')
    parser.add_argument(
        '--auto-scale-lr', action='store_true', help='scale the learning rate with the total batch size'
    )
    parser.add_argument(
        '--resume',
        nargs='?',
        const='auto',
        metavar='CHECKPOINT',
        help='resume from this checkpoint, or from the newest in the work directory',
    )
    args = parser.parse_args()
    cfg = load_config(args, parser)

    if args.amp:
        if not torch.cuda.is_available():
            parser.error('--amp needs a CUDA device, and none is available')
        cfg.optim_wrapper.type = 'AmpOptimWrapper'
        cfg.optim_wrapper.loss_scale = 'dynamic'
    if args.auto_scale_lr:
        if 'base_batch_size' not in cfg.get('auto_scale_lr', {}):
            parser.error(f'--auto-scale-lr needs auto_scale_lr=dict(base_batch_size=...) in {args.config}')
        cfg.auto_scale_lr.enable = True
    if args.resume is not None:
        cfg.resume = True
        cfg.load_from = None if args.resume == 'auto' else args.resume

    Runner.from_cfg(cfg).train()


if __name__ == '__main__':
    main()
