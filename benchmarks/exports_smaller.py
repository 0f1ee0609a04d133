"""Convert the file of a whole model to int8 and float16 with ONNX Runtime's tools; compare sizes and accuracy.

    swin-dense train mask-rcnn_swin-demo_fpn --work-dir work_dirs/demo/mask_rcnn   # or `make demo`
    python benchmarks/exports_smaller.py configs/demo/mask-rcnn_swin-demo_fpn.py \\
        work_dirs/demo/mask_rcnn/epoch_8.pth --image photo.jpg --out benchmarks/exports_smaller.json

The model is exported once. Each file then predicts the validation images of the config in ONNX Runtime and OpenVINO,
and the evaluator of the config computes the metrics.
"""

import argparse
import copy
import json
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import torch
from bench_host import processor
from mmengine.config import Config
from mmengine.registry import METRICS, init_default_scope
from mmengine.runner import Runner
from mmengine.structures import InstanceData, PixelData
from onnxruntime.quantization import quantize_dynamic
from onnxruntime.transformers.float16 import convert_float_to_float16

from swin_dense import runtime
from swin_dense.recipes.files import load_recipe
from swin_dense.workbench.configs.settings import merge_settings, parse_settings
from swin_dense.workbench.export.whole import export_whole
from swin_dense.workbench.runtime.sessions import SESSIONS


def main() -> None:
    args, config = parse_args(__doc__)
    report: dict[str, Any] = {
        'processor': processor(),
        'versions': {module.__name__: module.__version__ for module in (torch, onnx, onnxruntime)},
        'config': Path(args.config).stem,
        'files': [],
    }
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / 'model.onnx'
        export_whole(config, args.checkpoint, path, image=args.image)
        for name, file in converted(path).items():
            row: dict[str, Any] = {'file': name, 'bytes': file.stat().st_size}
            for library in SESSIONS:
                row[library] = metrics(config, runtime.load(file, runtime=library, score=0.0))
            report['files'].append(row)
    args.out.write_text(json.dumps(report, indent=1) + '\n')


def parse_args(description: str) -> tuple[argparse.Namespace, Config]:
    """Return the arguments of a comparison of a whole model's files, and the config that they give."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('--out', type=Path, required=True, help='JSON file to write')
    parser.add_argument('--set', nargs='+', default=[], metavar='KEY=VALUE', help='change entries of the config')
    parser.add_argument('--image', help='image to verify the export on, in which a detector finds something')
    args = parser.parse_args()
    config = load_recipe(args.config)
    merge_settings(config, parse_settings(args.set))
    return args, config


def converted(path: Path) -> dict[str, Path]:
    """Write the int8 and float16 files beside an ONNX file, as ``docs/deploy.md`` does, and return all three."""
    float16 = path.with_name('float16.onnx')
    half = convert_float_to_float16(onnx.load(path), keep_io_types=True)
    nodes = list({node.name: node for node in half.graph.node}.values())  # the converter writes some casts twice
    del half.graph.node[:]
    half.graph.node.extend(nodes)
    onnx.save(half, float16)
    return {'float32': path, 'int8': in_int8(path), 'float16': float16}


def in_int8(path: Path) -> Path:
    """Write the file with linear layers in int8 beside an ONNX file, and return it."""
    int8 = path.with_name('int8.onnx')
    quantize_dynamic(path, int8, op_types_to_quantize=['MatMul', 'Gemm'])
    return int8


def metrics(config: Any, model: runtime.Model) -> dict[str, float]:
    """Return the metrics of a file on the validation images of a config."""
    config = copy.deepcopy(config)
    init_default_scope(config.default_scope)
    loader = Runner.build_dataloader(config.val_dataloader)
    evaluator = METRICS.build(config.val_evaluator)
    evaluator.dataset_meta = loader.dataset.metainfo
    for batch in loader:
        samples = [with_prediction(sample, model) for sample in batch['data_samples']]
        evaluator.process(batch, [sample.to_dict() for sample in samples])
    return {name: float(value) for name, value in evaluator.evaluate(len(loader.dataset)).items()}


def with_prediction(sample: Any, model: runtime.Model) -> Any:
    """Add the prediction of a file to a sample of a framework."""
    prediction = model.predict(sample.img_path)
    if prediction.labels is not None:
        sample.pred_sem_seg = PixelData(data=torch.from_numpy(prediction.labels)[None])
        return sample
    found = prediction.record['instances']
    sample.pred_instances = InstanceData(
        bboxes=torch.from_numpy(np.array([one['box'] for one in found], np.float32).reshape(-1, 4)),
        scores=torch.tensor([one['score'] for one in found]),
        labels=torch.tensor([one['label'] for one in found], dtype=torch.int64),
    )
    if found and 'mask' in found[0]:
        sample.pred_instances.masks = [one['mask'] for one in found]
    return sample


if __name__ == '__main__':
    main()
