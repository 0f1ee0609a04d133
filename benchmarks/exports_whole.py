"""Compare time and memory of exported whole models with those of the frameworks.

    python benchmarks/exports_whole.py --out benchmarks/exports_whole

The models have Swin-T, heads for COCO and ADE20K, random weights, and score thresholds low enough to find boxes. Each
model and implementation runs in a separate process, from one resized image to boxes or classes; masks are not pasted
into the image. Times are medians. Memory is the peak of the process minus its memory before the model was loaded.
Writes ``OUT.json``, which ``benchmarks/exports.py`` adds to its tables. Run it only on an idle machine.
"""

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import exports
import numpy as np
from bench_host import held_mib, processor
from PIL import Image

MODELS = {
    'Mask R-CNN': ('mask-rcnn_swin-t-p4-w7_fpn_1x_coco', (800, 1216)),
    'Cascade Mask R-CNN': ('cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-1x_coco', (800, 1216)),
    'UPerNet': ('swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512', (512, 683)),
}
WAYS = ('PyTorch', 'ONNX Runtime', 'OpenVINO', 'OpenVINO bfloat16')
CANDIDATES = 1000  # boxes above the threshold before the final non-maximum suppression


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True, help='path of the report without .json')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--threads', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--models', nargs='+', default=list(MODELS), choices=list(MODELS))
    parser.add_argument('--worker', nargs=4, help=argparse.SUPPRESS)  # way, folder, threads, rounds
    args = parser.parse_args()
    if args.worker:
        way, folder, threads, rounds = args.worker
        print(json.dumps(measured(way, Path(folder), int(threads), int(rounds))))
        return
    report: dict[str, Any] = {'processor': processor(), 'rounds': args.rounds, 'rows': []}
    for name in args.models:
        with tempfile.TemporaryDirectory() as folder:
            nodes = prepare(*MODELS[name], Path(folder))
            for threads in args.threads:
                row = {'model': name, 'size': MODELS[name][1], 'threads': threads, 'nodes': nodes}
                for way in WAYS:
                    command = [sys.executable, __file__, '--out', str(args.out), '--worker', way, folder]
                    done = subprocess.run(
                        [*command, str(threads), str(args.rounds)], check=True, capture_output=True, text=True
                    )
                    row[way] = json.loads(done.stdout.splitlines()[-1])
                report['rows'].append(row)
                args.out.with_suffix('.json').write_text(json.dumps(report, indent=1) + '\n')
    backbones = args.out.with_name(args.out.name.removesuffix('_whole'))
    exports.write(json.loads(backbones.with_suffix('.json').read_text()), backbones)


def prepare(recipe: str, size: tuple[int, int], folder: Path) -> int:
    """Write the config, the weights, the image and the exported file to a folder; return the file's number of nodes."""
    import torch
    from mmengine.registry import MODELS as REGISTRY
    from mmengine.registry import init_default_scope

    from swin_dense.export.whole import PICTURE, export_whole
    from swin_dense.recipes.files import load_recipe

    config = load_recipe(recipe)
    config.model.backbone.pop('init_cfg', None)
    pipeline = config.test_dataloader.dataset.pipeline
    for transform in pipeline:
        if transform.type == 'Resize':
            transform.update(scale=size[::-1], keep_ratio=False)
    picture = folder / 'photo.png'
    with Image.open(PICTURE) as image:
        image.resize(size[::-1]).save(picture)
    torch.manual_seed(0)
    init_default_scope(config.default_scope)
    model = REGISTRY.build(config.model).eval()
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, folder / 'weights.pth')
    if config.default_scope == 'mmdet':
        set_threshold(config, model, np.asarray(Image.open(picture))[:, :, ::-1])
    config.dump(folder / 'config.py')
    paths = (str(folder / name) for name in ('config.py', 'weights.pth', 'model.onnx'))
    return export_whole(*paths, image=str(picture)).nodes


def set_threshold(config: Any, model: Any, pixels: np.ndarray) -> None:
    """Set the score threshold so that CANDIDATES boxes are above it."""
    import torch

    from swin_dense.export.detectors import OneStageDetector, TwoStageDetector, dense_levels, flatten_map

    img = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None].float()
    with torch.no_grad():
        if hasattr(model, 'roi_head'):
            graph = TwoStageDetector(model)
            maps = graph.maps(img)
            scores = graph._classified(maps, graph._proposals(maps, img), img)[1].flatten()
            settings = config.model.test_cfg.rcnn
        else:
            found = dense_levels(model.bbox_head, OneStageDetector(model).maps(img))
            scores = torch.cat([flatten_map(logits).sigmoid().flatten() for logits, _, _ in found])
            settings = config.model.test_cfg
    settings.score_thr = scores.topk(CANDIDATES).values[-1].item()


def measured(way: str, folder: Path, threads: int, rounds: int) -> dict[str, float]:
    """Return the time of one image in ms and the memory in MiB of one implementation."""
    run = prepared(way, folder, threads)
    before = held_mib()
    seconds = []
    predict = run()
    for _ in range(rounds + 2):
        start = time.perf_counter()
        predict()
        seconds.append(time.perf_counter() - start)
    return {'ms': 1e3 * statistics.median(seconds[2:]), 'mib': held_mib('VmHWM') - before}


def prepared(way: str, folder: Path, threads: int) -> Callable[[], Callable[[], Any]]:
    """Import the libraries of an implementation, and return a function that loads the model and returns a predictor."""
    picture = folder / 'photo.png'
    pixels = np.asarray(Image.open(picture))[:, :, ::-1]
    img = np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)
    if way == 'PyTorch':
        import torch

        from swin_dense.mm.predict import Predictor
        from swin_dense.recipes.files import load_recipe

        torch.set_num_threads(threads)

        def in_torch() -> Callable[[], Any]:
            predictor = Predictor(load_recipe(str(folder / 'config.py')), str(folder / 'weights.pth'), 'cpu')
            return lambda: without_pasting(predictor.model, pixels)

        return in_torch
    if way == 'ONNX Runtime':
        import onnxruntime  # noqa: F401  its memory must not be counted

        from swin_dense.runtime.sessions import OnnxRuntime

        def in_onnx_runtime() -> Callable[[], Any]:
            session = OnnxRuntime(folder / 'model.onnx', threads)
            return lambda: session.run({'img': img})

        return in_onnx_runtime
    import openvino

    def in_openvino() -> Callable[[], Any]:
        hint = 'bf16' if 'bfloat16' in way else 'f32'
        options = {'INFERENCE_PRECISION_HINT': hint, 'INFERENCE_NUM_THREADS': threads}
        compiled = openvino.Core().compile_model(folder / 'model.onnx', 'CPU', options)
        return lambda: [out.copy() for out in compiled({'img': img}).values()]

    return in_openvino


def without_pasting(model: Any, pixels: np.ndarray) -> Any:
    """Return the predictions of mmdet or mmseg without pasting masks into the image, as in an exported file."""
    from unittest import mock

    from swin_dense.export.agreement import classes_of_framework, instances_of_framework

    if not hasattr(model, 'bbox_head') and not hasattr(model, 'roi_head'):
        return classes_of_framework(model, pixels, pixels.shape[:2])
    if not getattr(getattr(model, 'roi_head', None), 'with_mask', False):
        return instances_of_framework(model, pixels)
    heads = model.roi_head.mask_head
    head = heads[-1] if hasattr(heads, '__len__') else heads

    def unpasted(mask_preds: Any, labels: Any, activate_map: bool = False, **_: Any) -> Any:
        masks = mask_preds if activate_map else mask_preds.sigmoid()
        return masks[range(len(masks)), labels]

    with mock.patch.object(head, '_predict_by_feat_single', unpasted):
        return instances_of_framework(model, pixels)


if __name__ == '__main__':
    main()
