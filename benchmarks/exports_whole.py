"""Compare time and memory of exported whole models with those of the frameworks.

    python benchmarks/exports_whole.py --out benchmarks/results/exports_whole.json
    python benchmarks/exports_whole.py --out benchmarks/results/exports_whole.json --folder files --only-export
    python benchmarks/exports_whole.py --out benchmarks/results/exports_whole.json --folder files --models 'DINO Swin-T'

The models have heads for COCO and ADE20K, random weights, and score thresholds low enough to find boxes. Each model and
implementation runs in a separate process, from one resized image to boxes or classes; the masks of boxes are not pasted
into the image, but those of Mask2Former, INSTANCES of them, get its size. Times are medians. Memory is the peak of the
process minus its memory before the model was loaded. Int8 is ONNX Runtime's dynamic quantisation. Results of other
models and processors in the report stay. With a folder, files are exported once. Measure times only on an idle machine.
"""

import argparse
import copy
import functools
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
from bench_host import held_mib
from harness import answer_of, in_turns, seconds_of
from measurements import Run
from PIL import Image

MODELS = {
    'Mask R-CNN': ('mask-rcnn_swin-t-p4-w7_fpn_1x_coco', (800, 1216)),
    'Cascade Mask R-CNN': ('cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-1x_coco', (800, 1216)),
    'UPerNet': ('swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512', (512, 683)),
    'DINO Swin-T': ('dino-5scale_swin-l_8xb2-12e_coco', (800, 1216)),
    'DINO Swin-L': ('dino-5scale_swin-l_8xb2-12e_coco', (800, 1216)),
    'Mask2Former': ('mask2former_swin-t-p4-w7-224_8xb2-lsj-50e_coco', (800, 1216)),
    'Mask2Former of mmseg': ('mask2former_swin-t_8xb2-160k_ade20k-512x512', (512, 683)),
}
WAYS = ('PyTorch', 'ONNX Runtime', 'ONNX Runtime int8', 'OpenVINO', 'OpenVINO bfloat16')
CANDIDATES = 1000  # boxes above the threshold before the final non-maximum suppression
INSTANCES = 30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--out', type=Path, required=True, help='.json file')
    parser.add_argument('--rounds', type=int, default=5)
    parser.add_argument('--threads', type=int, nargs='+', default=[1, 2])
    parser.add_argument('--models', nargs='+', default=list(MODELS), choices=list(MODELS))
    parser.add_argument('--ways', nargs='+', default=list(WAYS), choices=WAYS)
    parser.add_argument('--folder', type=Path, help='keep the exported files here, and do not export them again')
    parser.add_argument('--only-export', action='store_true', help='measure no times of images')
    parser.add_argument('--worker', nargs=4, help=argparse.SUPPRESS)  # model or way, folder, threads, rounds
    args = parser.parse_args()
    if args.worker:
        way, folder, threads, rounds = args.worker
        figures = (
            prepare(way, Path(folder)) if way in MODELS else measured(way, Path(folder), int(threads), int(rounds))
        )
        print(json.dumps(figures))
        return
    for name in args.models:
        with tempfile.TemporaryDirectory() as temporary:
            folder = args.folder / name if args.folder else Path(temporary)
            folder.mkdir(parents=True, exist_ok=True)
            names = {'model': name, 'size': ' x '.join(map(str, MODELS[name][1]))}
            if not (folder / 'int8.onnx').exists():
                run = Run(args.out)
                for way, size, value, quantity, unit in worker(args.out, name, folder):
                    of_file = {'what': 'export', 'way': way, **names}
                    run.add(value, quantity, unit, **(of_file | ({'size': size} if size else {})))
            for threads in [] if args.only_export else args.threads:
                run = Run(args.out, threads=threads)
                for way in args.ways:
                    found = worker(args.out, way, folder, threads, args.rounds)
                    run.add(found['ms'], 'time', 'ms', what='inference', way=way, **names)
                    run.add(found['mib'], 'peak memory', 'MiB', what='inference', way=way, **names)


def worker(out: Path, what: str, folder: Path, threads: int = 0, rounds: int = 0) -> Any:
    """Export a model, or measure a way to run it, in a process of its own, for the peak of its memory."""
    return answer_of(__file__, '--out', out, '--worker', what, folder, threads, rounds)


def prepare(name: str, folder: Path) -> list[tuple[str, str, float, str, str]]:
    """Write the config, the weights, the image and the exported files to a folder.

    Returns:
        Measurements of the export: way, size if it is not the model's, value, quantity and unit.
    """
    import torch
    from mmengine.registry import MODELS as REGISTRY
    from mmengine.registry import init_default_scope
    from onnxruntime.quantization import quantize_dynamic

    from swin_dense.workbench.export.whole import PICTURE, export_whole
    from swin_dense.workbench.recipes.files import load_recipe

    recipe, size = MODELS[name]
    config = load_recipe(recipe)
    config.model.backbone.pop('init_cfg', None)
    if name == 'DINO Swin-T':
        config.model.backbone.update(embed_dims=96, depths=(2, 2, 6, 2), num_heads=(3, 6, 12, 24), window_size=7)
        config.model.neck.in_channels = [96, 192, 384, 768]
    pipeline = config.test_dataloader.dataset.pipeline
    for transform in pipeline:
        if transform.type == 'Resize':
            transform.update(scale=size[::-1], keep_ratio=False)
    picture = folder / 'photo.png'
    with Image.open(PICTURE) as image:
        image.resize(size[::-1]).save(picture)
    torch.manual_seed(0)
    init_default_scope(config.default_scope)
    model = REGISTRY.build(copy.deepcopy(config.model)).eval()  # DINO changes its config
    for key, parameter in model.named_parameters():
        if key.endswith('weight') and ('cls_branches' in key or 'cls_embed' in key):  # otherwise all scores are equal
            torch.nn.init.normal_(parameter, std=0.15)
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, folder / 'weights.pth')
    if hasattr(model, 'roi_head'):
        set_threshold(config, model, np.asarray(Image.open(picture))[:, :, ::-1])
    config.dump(folder / 'config.py')
    del model
    paths = [str(folder / file) for file in ('config.py', 'weights.pth', 'model.onnx')]
    start = time.perf_counter()
    result = export_whole(*paths, image=str(picture))
    seconds, peak = time.perf_counter() - start, held_mib('VmHWM')
    int8 = result.path.with_name('int8.onnx')
    quantize_dynamic(result.path, int8, op_types_to_quantize=['MatMul', 'Gemm'])
    way, size_name, unit = 'ONNX Runtime', 'size of the file', 'of the largest value'
    return [
        (way, '', result.nodes, 'nodes of the graph', 'nodes'),
        (way, '', seconds, 'time', 's'),
        (way, '', peak, 'peak memory', 'MiB'),
        (way, '', result.path.stat().st_size / 2**20, size_name, 'MiB'),
        (f'{way} int8', '', int8.stat().st_size / 2**20, size_name, 'MiB'),
        *(
            (way, ' x '.join(map(str, shape)), error, 'difference from the framework', unit)
            for shape, error in result.errors.items()
        ),
    ]


def set_threshold(config: Any, model: Any, pixels: np.ndarray) -> None:
    """Set the score threshold so that CANDIDATES boxes are above it."""
    import torch

    from swin_dense.workbench.export.detectors import TwoStageDetector

    img = torch.from_numpy(pixels.transpose(2, 0, 1).copy())[None].float()
    with torch.no_grad():
        graph = TwoStageDetector(model)
        maps = graph.maps(img)
        scores = graph._classified(maps, graph._proposals(maps, img), img)[1].flatten()
    config.model.test_cfg.rcnn.score_thr = scores.topk(CANDIDATES).values[-1].item()


def measured(way: str, folder: Path, threads: int, rounds: int) -> dict[str, Any]:
    """Return the times of one image in ms and the memory in MiB of one implementation."""
    run = prepared(way, folder, threads)
    before = held_mib()
    times = in_turns({way: functools.partial(seconds_of, run())}, rounds, warm_up=2)[way]
    return {'ms': [1e3 * wall for _, wall in times], 'mib': held_mib('VmHWM') - before}


def prepared(way: str, folder: Path, threads: int) -> Callable[[], Callable[[], Any]]:
    """Import the libraries of a way, and return a function that loads the model and returns a predictor."""
    pixels = np.asarray(Image.open(folder / 'photo.png'))[:, :, ::-1]
    if way == 'PyTorch':
        import torch

        from swin_dense.workbench.predict import Predictor
        from swin_dense.workbench.recipes.files import load_recipe

        torch.set_num_threads(threads)

        def load() -> Callable[[], Any]:
            model = Predictor(load_recipe(str(folder / 'config.py')), str(folder / 'weights.pth'), 'cpu').model
            return lambda: without_pasting(model, pixels)

        return load
    from swin_dense.workbench.runtime.sessions import OnnxRuntime, OpenVino

    inputs = {'img': np.ascontiguousarray(pixels.transpose(2, 0, 1)[None], np.float32)}
    if 'ONNX Runtime' in way:
        import onnxruntime  # noqa: F401  its memory must not be counted

        session = functools.partial(OnnxRuntime, folder / ('int8.onnx' if 'int8' in way else 'model.onnx'), threads)
    else:
        import openvino  # noqa: F401  likewise

        dtype = 'bfloat16' if 'bfloat16' in way else 'float32'
        session = functools.partial(OpenVino, folder / 'model.onnx', threads, dtype)

    def load_file() -> Callable[[], Any]:
        run = session().run
        return lambda: finished(run(inputs), pixels)

    return load_file


def finished(outputs: list[np.ndarray], pixels: np.ndarray) -> Any:
    """Return the outputs of a file, and for Mask2Former INSTANCES instances with masks in the size of the image."""
    from swin_dense.workbench.runtime import queries

    if outputs[0].ndim != 2 or outputs[0].shape[1] == 4:  # classes of pixels, boxes
        return outputs
    size = (pixels.shape[0], pixels.shape[1])
    settings = {'divisor': 32, 'things': outputs[0].shape[1] - 1, 'instances': INSTANCES, 'panoptic': None}
    return queries.predicted(outputs, size, size, settings, 0.0)


def without_pasting(model: Any, pixels: np.ndarray) -> Any:
    """Return the predictions of mmdet or mmseg without pasting masks into the image, as in an exported file."""
    from unittest import mock

    from swin_dense.workbench.export.agreement import classes_of_framework, instances_of_framework

    if hasattr(model, 'panoptic_fusion_head'):
        model.panoptic_fusion_head.test_cfg.max_per_image = INSTANCES
        return instances_of_framework(model, pixels)
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
