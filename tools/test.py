"""Test a detector of mmdet or a segmentor of mmseg."""

from __future__ import annotations

import argparse
import copy
import os
from pathlib import Path

from mmengine.config import Config, ConfigDict
from runner_config import build_runner, check_data, load_config, make_parser

import swin_dense  # noqa: F401  registers SwinDense and lets torch read the checkpoints of mmengine


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument('checkpoint', help='checkpoint file or address')
    parser.add_argument(
        '--out', help='mmdet: write the predictions to this .pkl; mmseg: write label maps to this folder'
    )
    parser.add_argument('--show-dir', help='paint predictions beside the ground truth into this folder')
    parser.add_argument('--tta', action='store_true', help='test-time augmentation, by the config or flips')
    args = parser.parse_args()
    if '://' not in args.checkpoint and not Path(args.checkpoint).is_file():
        parser.error(f'there is no checkpoint file {args.checkpoint!r}')
    cfg = load_config(args, parser)
    cfg.load_from = args.checkpoint
    is_detector = cfg.get('default_scope') == 'mmdet'

    if args.tta:
        _augment(cfg, is_detector, parser)
    if args.show_dir:
        _paint(cfg, is_detector, args.show_dir, parser)
    if args.out:
        _write_predictions(cfg, is_detector, args.out, parser)
    check_data(cfg, ('test',), parser)
    build_runner(cfg, parser).test()


def _augment(cfg: Config, is_detector: bool, parser: argparse.ArgumentParser) -> None:
    if 'tta_model' not in cfg or 'tta_pipeline' not in cfg:
        if not is_detector:
            parser.error('--tta needs tta_model and tta_pipeline in the config')
        cfg.tta_model = {
            'type': 'DetTTAModel',
            'tta_cfg': {'nms': {'type': 'nms', 'iou_threshold': 0.5}, 'max_per_img': 100},
        }
        cfg.tta_pipeline = _flipped(cfg.test_dataloader.dataset.pipeline)
    if is_detector and cfg.model.get('roi_head', {}).get('mask_head'):
        print('mmdet cannot merge masks in test-time augmentation: testing the boxes only')
        cfg.model.roi_head.mask_head = None
        cfg.model.roi_head.mask_roi_extractor = None
        cfg.test_evaluator.metric = 'bbox'
    cfg.model = ConfigDict(**cfg.tta_model, module=cfg.model)
    cfg.test_dataloader.dataset.pipeline = cfg.tta_pipeline


def _flipped(pipeline: list) -> list:
    """Return a test pipeline of mmdet that ends in the image and its mirror image."""
    flips = [{'type': 'RandomFlip', 'prob': 1.0}, {'type': 'RandomFlip', 'prob': 0.0}]
    pack = copy.deepcopy(pipeline[-1])
    pack['meta_keys'] = (*pack.get('meta_keys', ()), 'flip', 'flip_direction')
    return [*copy.deepcopy(pipeline[:-1]), {'type': 'TestTimeAug', 'transforms': [flips, [pack]]}]


def _paint(cfg: Config, is_detector: bool, folder: str, parser: argparse.ArgumentParser) -> None:
    hook = cfg.default_hooks.get('visualization')
    if hook is None:
        parser.error('--show-dir needs default_hooks.visualization in the config')
    hook.draw = True
    if is_detector:
        hook.test_out_dir = os.path.abspath(folder)  # relative, it would go below the work directory
    else:
        hook.interval = 1
        cfg.visualizer.save_dir = folder


def _write_predictions(cfg: Config, is_detector: bool, out: str, parser: argparse.ArgumentParser) -> None:
    if not is_detector:
        cfg.test_evaluator.output_dir = out
        cfg.test_evaluator.keep_results = True
        return
    if not out.endswith(('.pkl', '.pickle')):
        parser.error(f'--out of a detector must end in .pkl or .pickle, got {out!r}')
    evaluators = cfg.test_evaluator if isinstance(cfg.test_evaluator, list) else [cfg.test_evaluator]
    cfg.test_evaluator = [*evaluators, {'type': 'DumpDetResults', 'out_file_path': out}]


if __name__ == '__main__':
    main()
