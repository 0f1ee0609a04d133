"""Export a whole detector or segmentor to one ONNX file, and compare it with its framework before it is kept."""

from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch
from torch import nn

from swin_dense.export import formats
from swin_dense.export.export import check_opset, checked_path
from swin_dense.export.formats import ExportError
from swin_dense.export.pooling import replace_adaptive_pools
from swin_dense.export.verify import Comparison, Exported, Run, write_verified
from swin_dense.utils import packages
from swin_dense.workbench.export import agreement, gate
from swin_dense.workbench.export.detectors import Detector, OneStageDetector, TwoStageDetector
from swin_dense.workbench.export.operators import translations
from swin_dense.workbench.export.queries import MaskDetector, QueryDetector
from swin_dense.workbench.export.segmentor import MaskSegmentor, Segmentor
from swin_dense.workbench.runtime import pictures
from swin_dense.workbench.runtime.sessions import FORMAT, KEY

if TYPE_CHECKING:
    from mmengine.config import Config

# Portrait of Eileen Collins by NASA, in the public domain.
PICTURE = Path(__file__).with_name('assets') / 'astronaut.jpg'
# (height, width) of the image for tracing, and of the images for the comparison.
EXAMPLE = (256, 320)
SIZES = ((333, 500), (480, 352), (600, 797))
# Compares a file with its framework on pixels (H, W, 3), BGR. Returns the share that differs and the number compared.
Compare = Callable[[Run, np.ndarray], tuple[float, int]]


def export_whole(
    config: str | PathLike[str] | Config,
    checkpoint: str | PathLike[str],
    path: str | PathLike[str],
    *,
    image: str | PathLike[str] | None = None,
    opset: int | None = None,
    allow_partial: bool = False,
) -> Exported:
    """Export a detector of mmdet or a segmentor of mmseg to an ``.onnx`` file of standard operators, for any size.

    The file takes ``img``, (B, 3, H, W) float32, BGR from 0 to 255, already resized; B is 1 for a detector. The graph
    includes normalisation, padding and thresholds; ``swin_dense.runtime`` does the other steps. It returns

    - of a segmentor, ``labels``, (B, H, W) int32. The optional input ``size``, (2,) int64, sets another height and
      width of them: like mmseg, the file then resizes logits, not classes.
    - of a detector, ``boxes`` (N, 4) in pixels of that image, ``scores`` (N,), ``labels`` (N,) int32 and, with masks,
      ``masks`` (N, h, w), the probabilities inside the boxes.
    - of MaskFormer and Mask2Former of mmdet, the probabilities ``classes`` (Q, C + 1) and the logits ``masks``
      (Q, h, w) of all queries.

    The file is verified before it is kept: it runs in ONNX Runtime on an image at three sizes other than that of the
    trace, and its instances must match those of the framework's own ``predict`` in box, label, score and mask, and its
    classes and segments pixel by pixel; where too much differs, the mirror image decides.

    Args:
        config: a config, or the name of a recipe.
        checkpoint: file or address of the weights of the whole model.
        path: the destination. An existing file is overwritten.
        image: image for the comparison, in which a detector must find something; None is a built-in portrait.
        opset: version of ONNX, at least 18; None is 20.
        allow_partial: accept a checkpoint that does not fill the model, and log a warning; the missing ones are random.

    Returns:
        The result of the export. Its ``errors`` map image shapes to the share of instances, or of pixels, that differ.

    Raises:
        ValueError: an argument has an invalid value, or the config or the checkpoint cannot be read.
        CheckpointError: the checkpoint does not fill the model.
        FileNotFoundError: ``image`` does not exist.
        ImportError: a package is missing; the message names it.
        ExportError: a part of the model is not supported, a detector finds nothing in the image, or the file differs
            from the model. The new file is removed; an existing file stays.

    Examples:
        >>> export_whole('mine.py', 'work_dirs/mine/epoch_12.pth', 'model.onnx')  # doctest: +SKIP
    """
    from swin_dense.workbench.checking.masks import labels_of_values  # imports the frameworks
    from swin_dense.workbench.predict import Predictor, test_dataset
    from swin_dense.workbench.recipes.files import load_recipe  # imports mmengine

    path = checked_path(path, ['.onnx'])
    check_opset(opset, path.suffix)
    if image is not None and not Path(image).is_file():
        raise FileNotFoundError(f'there is no file {image}')
    packages.require('an .onnx file', 'onnxruntime', *formats.PACKAGES)
    loaded = load_recipe(str(config)) if isinstance(config, (str, PathLike)) else config
    predictor = Predictor(loaded, str(checkpoint), 'cpu', allow_partial=allow_partial)
    model = predictor.model
    dataset = test_dataset(loaded)
    pipeline = dataset.pipeline
    reasons = [*gate.reasons_against(model), *gate.reasons_against_pipeline(pipeline)]
    if reasons:
        raise ExportError(f'this {type(model).__name__} cannot be exported whole: {"; ".join(reasons)}')
    facts: dict[str, Any] = {'format': FORMAT, 'classes': predictor.classes, 'palette': predictor.palette}
    facts.update(gate.preparation_of(pipeline))
    if not predictor.is_detector:
        facts['label_of_mask_value'] = labels_of_values(dataset)
    plan = planned_detector if predictor.is_detector else planned_segmentor
    graph, interface, compare = plan(model, facts)
    replace_adaptive_pools(graph)
    graph.eval().requires_grad_(False)
    picture = pictures.read(image or PICTURE)[:, :, ::-1]
    divisor = facts.get('limits', {}).get('divisor', 1)
    shapes = []
    for height, width in SIZES:
        full_height = -(-height // divisor) * divisor
        full_width = -(-width // divisor) * divisor
        shapes.append((1, 3, full_height, full_width))
    comparison = Comparison(
        shapes,
        lambda run, shape: compared(compare, run, pictures.resized(picture, *shape[2:])),
        agreement.LARGEST_SHARE,
        '{error:.1%} of its predictions differ from those of the framework, at most {limit:.0%} is allowed',
        f'the model finds nothing in {image or "the built-in image"}; choose one with objects of its classes (image=)',
    )
    write = partial(formats.write_onnx, graph, interface, opset)
    return write_verified(path, write, comparison)


def compared(compare: Compare, run: Run, pixels: np.ndarray) -> tuple[float, int]:
    """Compare a file on an image, and again on its mirror image if too much differs; return the better result.

    Rounding decides near ties between boxes. A tie changes a few instances, which of few are more than the share that
    is allowed; the mirror image has others. A wrong file differs on both.
    """
    result = compare(run, pixels)
    if result[0] > agreement.LARGEST_SHARE:
        share, count = compare(run, pixels[:, ::-1])
        if count:
            return min(result, (share, count))
    return result


def planned_detector(detector: Any, facts: dict[str, Any]) -> tuple[nn.Module, formats.Interface, Compare]:
    """Return the traceable version of a detector, its inputs and outputs, and the comparison; complete its facts."""
    graph = graph_of(copy.deepcopy(detector))
    example = torch.zeros(1, 3, *EXAMPLE)
    facts.update(task='detection', limits=_limits(graph, example))
    if isinstance(graph, MaskDetector):
        facts['queries'] = settings_of_queries(detector)
    else:
        head = detector.roi_head if hasattr(detector, 'roi_head') else detector.bbox_head
        settings = head.test_cfg
        facts['score_threshold'] = settings.get('score_thr', 0.0)
        facts['mask_threshold'] = settings.mask_thr_binary if 'masks' in graph.OUTPUTS else None
        most = settings.max_per_img

    def compare(run: Run, pixels: np.ndarray) -> tuple[float, int]:
        outputs = run({'img': _image(pixels)})
        if 'queries' in facts:
            sample = agreement.predicted(detector, pixels)
            return agreement.share_of_other_masks(sample, outputs, facts['queries'])
        ours = agreement.instances_of_file(outputs, pixels.shape[:2], facts['mask_threshold'])
        theirs = agreement.instances_of_framework(detector, pixels)
        return agreement.share_of_unmatched(theirs, ours, facts['score_threshold'], most)

    divisor = facts['limits']['divisor']
    ranges = {}
    if divisor > 1:
        for side in ('height', 'width'):
            ranges[side] = divisor * torch.export.Dim(f'{side}_steps', min=2)
    free = {2: 'height', 3: 'width'}
    metadata = {KEY: json.dumps(facts)}
    interface = formats.Interface((example,), (free,), ('img',), graph.OUTPUTS, metadata, ranges, translations)
    return graph, interface, compare


def graph_of(detector: nn.Module) -> Detector:
    """Return the traceable version of a detector that ``gate`` accepts; parts of the detector are replaced."""
    if hasattr(detector, 'panoptic_head'):
        return MaskDetector(detector)
    if hasattr(detector, 'num_queries'):
        return QueryDetector(detector)
    if hasattr(detector, 'roi_head'):
        return TwoStageDetector(detector)
    return OneStageDetector(detector)


@torch.no_grad()
def _limits(graph: Detector, example: torch.Tensor) -> dict[str, Any]:
    """Return which sizes of the input a detector supports: multiples of a divisor, with enough tokens for its queries.

    The tokens are the pixels of feature maps, which have the given strides.
    """
    graph.eval()
    strides = [EXAMPLE[0] // x.shape[2] for x in graph.maps(example)]
    divisor = 1
    for name, part in graph.detector.named_modules():
        if name.startswith(('backbone', 'neck')) and isinstance(part, nn.Upsample):
            divisor = max(strides)
    selects_tokens = getattr(graph.detector, 'as_two_stage', False)
    queries = graph.detector.num_queries if selects_tokens else 0
    return {'divisor': divisor, 'queries': queries, 'strides': strides}


def settings_of_queries(detector: Any) -> dict[str, Any]:
    """Return the settings of ``runtime.queries`` for a MaskFormer or Mask2Former, with mmdet's defaults."""
    head = detector.panoptic_fusion_head
    given = head.test_cfg
    settings: dict[str, Any] = {
        'divisor': detector.data_preprocessor.pad_size_divisor,
        'things': head.num_things_classes,
        'instances': None,
        'panoptic': None,
    }
    if given.get('instance_on', False):
        settings['instances'] = given.get('max_per_image', 100)
    if given.get('panoptic_on', True):
        settings['panoptic'] = {
            'object_mask_thr': given.get('object_mask_thr', 0.8),
            'iou_thr': given.get('iou_thr', 0.8),
            'filter_low_score': given.get('filter_low_score', False),
        }
    return settings


def planned_segmentor(segmentor: Any, facts: dict[str, Any]) -> tuple[nn.Module, formats.Interface, Compare]:
    """Return the same for a segmentor."""

    def compare(run: Run, pixels: np.ndarray) -> tuple[float, int]:
        turned = pixels[::-1, ::-1]
        (ours,) = run({'img': _image(pixels, turned)})
        shares = []
        for own, image in zip(ours, (pixels, turned), strict=True):
            differs = own != agreement.classes_of_framework(segmentor, image, image.shape[:2])
            shares.append(differs.mean())
        other = np.array(pixels.shape[:2]) * 3 // 2
        (resized,) = run({'img': _image(pixels), 'size': other})
        differs = resized[0] != agreement.classes_of_framework(segmentor, pixels, other.tolist())
        return float(max(np.mean(shares), differs.mean())), ours.size

    facts['task'] = 'segmentation'
    images = torch.zeros(2, 3, *EXAMPLE)  # tracing treats a size of 1 as a constant
    size = torch.zeros(2, dtype=torch.int64)
    free_sides: dict[int, str] = {0: 'batch', 2: 'height', 3: 'width'}
    # Attention over the tokens of any batch cannot be traced for batches of 1, but the file runs with them.
    ranges = {'batch': torch.export.Dim('batch', min=2)}
    metadata = {KEY: json.dumps(facts)}
    names = ('img', 'size')
    interface = formats.Interface((images, size), (free_sides, {}), names, ('labels',), metadata, ranges, translations)
    kind = MaskSegmentor if hasattr(segmentor.decode_head, 'query_embed') else Segmentor
    return kind(copy.deepcopy(segmentor)), interface, compare


def _image(*pictures: np.ndarray) -> np.ndarray:
    """Convert pictures, each (H, W, 3) uint8, BGR, to the input of the file, (B, 3, H, W) float32."""
    channels_last = np.stack(pictures)
    return channels_last.transpose(0, 3, 1, 2).astype(np.float32)
