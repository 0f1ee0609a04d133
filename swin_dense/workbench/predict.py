"""Predictions of detectors and segmentors of mmdet and mmseg, as their own test pipelines and models compute them."""

from __future__ import annotations

import copy
import hashlib
import re
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.dataset import Compose
from mmengine.device import get_device
from mmengine.model import revert_sync_batchnorm
from mmengine.registry import DATASETS, TRANSFORMS, DefaultScope, init_default_scope
from torch import nn

from swin_dense.images.pixels import decoding, naming
from swin_dense.mm.bands import LoadBands
from swin_dense.utils import private_mm
from swin_dense.workbench.configs.experiment import framework_of
from swin_dense.workbench.configs.own_classes import make_palette
from swin_dense.workbench.loading import build_whole, saved_names
from swin_dense.workbench.runtime import queries
from swin_dense.workbench.runtime.model import ImagePredictor
from swin_dense.workbench.runtime.outputs import Instances, Outputs
from swin_dense.workbench.runtime.stopwatch import Stopwatch


class Predictor(ImagePredictor):
    """A detector or segmentor of a config, with the weights of a file or an address, to be called with image files.

    Class names and colours are those of the checkpoint, or of the test data set if it has none. Without ``device``, it
    is CUDA if available, else the CPU. ``score`` is the minimum of detections.
    """

    def __init__(
        self,
        config: Config,
        checkpoint: str,
        device: str | None = None,
        score: float = 0.3,
        allow_partial: bool = False,
    ) -> None:
        scope = framework_of(config)
        config = copy.deepcopy(config)
        dataset = test_dataset(config)
        first, *steps = dataset.pipeline
        if 'Load' not in str(first['type']):
            raise ValueError(f'the first step of the test pipeline must load the image, got {first["type"]!r}')
        self._scope = scope
        self.is_detector = scope == 'mmdet'
        self._score = score
        init_default_scope(scope)
        self._to_float32 = first.pop('to_float32', False)
        self._loader = TRANSFORMS.build(first)
        if isinstance(self._loader, LoadBands):
            self.bands = self._loader.normalization.bands
        # New images have no annotations; to load those of panoptic models needs panopticapi, which is not on PyPI.
        without_annotations = [step for step in steps if 'Annotation' not in str(step['type'])]
        self._pipeline = Compose(without_annotations)
        model, content = build_whole(config, checkpoint, allow_partial)
        self.model: Any = revert_sync_batchnorm(model).to(device or get_device()).eval()
        with DATASETS.switch_scope_and_registry(scope) as registry:
            kind: Any = registry.get(dataset.type) if isinstance(dataset.type, str) else dataset.type
        known = private_mm.metainfo_of(kind, dataset.get('metainfo') or {})
        self._name_classes(saved_names(content), known)

    def read(self, picture: Any) -> np.ndarray:
        """Return an image as the first step of the test pipeline loads it, from its file or its pixels (H, W, C)."""
        if isinstance(picture, np.ndarray) and not isinstance(self._loader, LoadBands):
            return np.ascontiguousarray(picture[:, :, ::-1])
        source = {'img': picture} if isinstance(picture, np.ndarray) else {'img_path': picture}
        with naming(picture), decoding():
            return self._loader(source)['img']

    def _to_paint(self, pixels: np.ndarray) -> np.ndarray | None:
        is_picture = pixels.dtype == np.uint8 and pixels.ndim == 3 and pixels.shape[2] == 3
        return pixels[:, :, ::-1] if is_picture else None

    @torch.no_grad()
    def outputs(self, loaded: np.ndarray, path: Any = None, clock: Stopwatch | None = None) -> Outputs:
        """Return what the model predicts for an image, as the loader gives it."""
        clock = clock or Stopwatch()
        img = loaded.astype(np.float32) if self._to_float32 else loaded
        shape = loaded.shape[:2]
        results = {'img': img, 'img_id': 0, 'img_path': path, 'img_shape': shape, 'ori_shape': shape}
        with DefaultScope.overwrite_default_scope(self._scope):
            packed = self._pipeline(results)
            data = {'inputs': [packed['inputs']], 'data_samples': [packed['data_samples']]}
            clock.lap('prepare')
            (sample,) = self.model.test_step(data)
            clock.lap('run')
        if not self.is_detector:
            labels = sample.pred_sem_seg.data[0].cpu().numpy()
            return Outputs(labels=labels.astype(np.int32))
        panoptic = None
        if 'pred_panoptic_seg' in sample:
            panoptic = sample.pred_panoptic_seg.sem_seg[0].cpu().numpy()
        if 'pred_instances' not in sample:
            return Outputs(panoptic=panoptic)
        found = sample.pred_instances
        found = found[found.scores >= self._score].cpu().numpy()
        masks = list(found.masks) if 'masks' in found else []
        boxes = np.zeros((len(masks), 4), np.float32)
        if 'bboxes' in found:
            boxes = found.bboxes
        if masks and not boxes.any():  # such as SOLO, which predicts only masks
            boxes = np.stack([queries.box_around(mask) for mask in masks])
        return Outputs(None, Instances(boxes, found.scores, found.labels, masks), panoptic)

    def _name_classes(self, saved: Mapping[str, Any], known: Mapping[str, Any]) -> None:
        """Set names and colours from the checkpoint, or from the test data set if the checkpoint has no names."""
        counts = [len(meta.get('classes') or ()) for meta in (saved, known)]
        meta = saved if counts[0] else known
        expected = _classes_of_head(self.model)
        self.classes: tuple[str, ...] = tuple(meta.get('classes') or ())
        if expected is not None and len(self.classes) != expected:
            raise ValueError(
                f'the head predicts {expected} classes, but the checkpoint has {counts[0]} class names and the test '
                f'data set {counts[1]}. Names come from the checkpoint, or from the data set if the checkpoint has '
                "none (delete its meta['dataset_meta'] if it is wrong), and must be as many: set "
                f'test_dataloader.dataset.metainfo.classes to {expected} names'
            )
        count = len(self.classes)
        palette = meta.get('palette')
        if not isinstance(palette, (list, tuple)) or len(palette) < count:
            palette = make_palette(count)
        self.palette: list[tuple[int, ...]] = []
        for colour in palette[:count]:
            self.palette.append(tuple(map(int, colour)))
        self.model.dataset_meta = {'classes': self.classes, 'palette': self.palette}


def _classes_of_head(model: Any) -> int | None:
    """Return the number of classes that a model predicts, or None if it has no known head."""
    if getattr(model, 'out_channels', None) == 1:  # a binary head of mmseg
        return 2
    owner = getattr(model, 'roi_head', model)
    # The fusion head counts things and stuff.
    heads = [getattr(model, 'panoptic_fusion_head', None)]
    heads += [getattr(owner, name, None) for name in ('bbox_head', 'mask_head', 'decode_head')]
    head = next((head for head in heads if head is not None), None)
    if isinstance(head, nn.ModuleList):  # of a cascade
        head = head[-1]
    return getattr(head, 'num_classes', None)


def settings_digest(config: Config) -> str:
    """Return a short hash of the parts of a config that determine predictions: model, images and names."""
    dataset = test_dataset(config)
    of_images = [dataset.get(key) for key in ('type', 'metainfo', 'pipeline')]
    said = [config.get('default_scope'), config['model'], *of_images]
    text = re.sub(r' at 0x[0-9a-f]+', '', repr(said))  # of functions, which differ from run to run
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def test_dataset(config: Config) -> ConfigDict:
    """Return the data set in the ``test_dataloader`` of a config, which has the test pipeline and the class names."""
    dataset = (config.get('test_dataloader') or {}).get('dataset')
    if not dataset:
        raise ValueError(
            'the config has no test_dataloader.dataset, whose pipeline describes how images are read; add it, such as '
            'test_dataloader = val_dataloader'
        )
    if 'pipeline' not in dataset:
        raise ValueError(
            f'test_dataloader.dataset is a {dataset.get("type")} without a pipeline of its own, as data sets are that '
            'wrap others; set it to one of the wrapped data sets'
        )
    return dataset
