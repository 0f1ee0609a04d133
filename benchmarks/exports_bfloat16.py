"""Compare a whole model in OpenVINO's bfloat16 with float32: the same instances or classes, and the metrics.

    swin-dense train mask-rcnn_swin-demo_fpn --work-dir work_dirs/demo/mask_rcnn   # or `make demo`
    python benchmarks/exports_bfloat16.py configs/demo/mask-rcnn_swin-demo_fpn.py \\
        work_dirs/demo/mask_rcnn/epoch_8.pth --image photo.jpg --out benchmarks/exports_bfloat16.json

The model is exported once and predicts the validation images of its config. Agreement is computed as ``swin-dense
quantize`` does it, and the metrics by the evaluator of the config. Results of other models in the report stay.
"""

from __future__ import annotations

import json
import tempfile
from functools import partial
from pathlib import Path
from typing import Any

import openvino
from bench_host import processor
from exports_smaller import metrics, parse_args
from mmengine.registry import DATASETS, init_default_scope

from swin_dense import runtime
from swin_dense.utils.choices import PRECISIONS
from swin_dense.workbench.export.whole import export_whole
from swin_dense.workbench.runtime.quantization import LOWEST, Reference, difference


def main() -> None:
    args, config = parse_args(__doc__)
    name = Path(args.config).stem
    report: dict[str, Any] = json.loads(args.out.read_text()) if args.out.exists() else {'rows': []}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'model.onnx'
        export_whole(config, args.checkpoint, path, image=args.image)
        row: dict[str, Any] = {'model': name, 'processor': processor(), 'openvino': openvino.__version__}
        load = partial(runtime.load, path, runtime='openvino')
        row['metrics'] = {one: metrics(config, load(precision=one, score=0.0)) for one in PRECISIONS}
        expected, found = (load(precision=one, score=LOWEST) for one in PRECISIONS)
        row['different'], row['compared'] = difference(Reference(expected), found, images_of(config))
    report['rows'] = [*(other for other in report['rows'] if other['model'] != name), row]
    args.out.write_text(json.dumps(report, indent=1) + '\n')


def images_of(config: Any) -> list[Path]:
    """Return the files of the validation images of a config."""
    init_default_scope(config.default_scope)
    dataset = DATASETS.build(config.val_dataloader.dataset)
    return [Path(dataset.get_data_info(index)['img_path']) for index in range(len(dataset))]


if __name__ == '__main__':
    main()
