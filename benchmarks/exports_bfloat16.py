"""Compare a whole model in OpenVINO's bfloat16 with float32: the same instances or classes, and the metrics.

    swin-dense train mask-rcnn_swin-demo_fpn --work-dir work_dirs/demo/mask_rcnn   # or `make demo`
    python benchmarks/exports_bfloat16.py configs/demo/mask-rcnn_swin-demo_fpn.py \\
        work_dirs/demo/mask_rcnn/epoch_8.pth --image photo.jpg --out benchmarks/exports_bfloat16.json

The model is exported once and predicts the validation images of its config. Instances with a score of at least SCORE
agree if the other precision has one with the same label and a box with an IoU of at least OVERLAP; classes agree pixel
by pixel. The evaluator of the config computes the metrics. Results of other models in the report stay.
"""

from __future__ import annotations

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import openvino
from bench_host import processor
from exports_smaller import metrics
from mmengine.registry import init_default_scope
from mmengine.runner import Runner
from pycocotools import mask as coco_mask

from swin_dense import runtime
from swin_dense.recipes.files import load_recipe
from swin_dense.workbench.configs.settings import merge_settings, parse_settings
from swin_dense.workbench.export.whole import export_whole

SCORE = 0.3
OVERLAP = 0.9
PRECISIONS = ('float32', 'bfloat16')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('--out', type=Path, required=True, help='JSON file to write')
    parser.add_argument('--set', nargs='+', default=[], metavar='KEY=VALUE', help='change entries of the config')
    parser.add_argument('--image', help='image to verify the export on, in which a detector finds something')
    args = parser.parse_args()
    config = load_recipe(args.config)
    merge_settings(config, parse_settings(args.set))
    name = Path(args.config).stem
    report: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {'rows': []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'model.onnx'
        export_whole(config, args.checkpoint, path, image=args.image)
        row: dict[str, Any] = {'model': name, 'processor': processor(), 'openvino': openvino.__version__}
        files = {one: runtime.load(path, runtime='openvino', precision=one, score=0.0) for one in PRECISIONS}
        row['metrics'] = {one: metrics(config, file) for one, file in files.items()}
        row['agree'], row['compared'] = agreement(config, *files.values())
    report['rows'] = [*(other for other in report['rows'] if other['model'] != name), row]
    args.out.write_text(json.dumps(report, indent=1) + '\n')


def agreement(config: Any, one: runtime.Model, other: runtime.Model) -> tuple[int, int]:
    """Return how many instances, or pixels, of the validation images agree, and how many were compared."""
    agree = compared = 0
    init_default_scope(config.default_scope)
    loader = Runner.build_dataloader(copy.deepcopy(config.val_dataloader))
    for sample in (sample for batch in loader for sample in batch['data_samples']):
        found = [model.predict(sample.img_path) for model in (one, other)]
        if found[0].labels is not None:
            agree += int((found[0].labels == found[1].labels).sum())
            compared += found[0].labels.size
            continue
        both = [prediction.record['instances'] for prediction in found]
        for ours, theirs in (both, both[::-1]):
            sure = [instance for instance in ours if instance['score'] >= SCORE]
            agree += sum(has_partner(instance, theirs) for instance in sure)
            compared += len(sure)
    return agree, compared


def has_partner(instance: dict[str, Any], others: list[dict[str, Any]]) -> bool:
    boxes = [other['box'] for other in others if other['label'] == instance['label']]
    overlaps = coco_mask.iou(in_coco([instance['box']]), in_coco(boxes), [0] * len(boxes)) if boxes else np.zeros(1)
    return bool(np.max(overlaps) >= OVERLAP)


def in_coco(boxes: list[list[float]]) -> np.ndarray:
    """Return boxes (x1, y1, x2, y2) as (x, y, width, height)."""
    given = np.array(boxes, np.float64)
    return np.hstack([given[:, :2], given[:, 2:] - given[:, :2]])


if __name__ == '__main__':
    main()
