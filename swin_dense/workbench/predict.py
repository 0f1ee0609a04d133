"""Predictions of detectors and segmentors, through the Inferencers of mmdet and mmseg."""

from __future__ import annotations

import colorsys
import copy
import importlib
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.dataset import Compose
from mmengine.registry import DATASETS, TRANSFORMS, DefaultScope
from torch import nn

from swin_dense.utils.pixels import LargeImage, naming
from swin_dense.utils.tiles import Box, Tile
from swin_dense.workbench.runtime import Prediction, pictures, queries
from swin_dense.workbench.runtime.model import Outputs, begun_record, predict_in_tiles, shares


class Predictor:
    """A detector or segmentor with loaded weights, to be called with image files.

    Args:
        config: config of mmdet or mmseg.
        checkpoint: file or address of the weights of the whole model.
        device: device; None uses CUDA if available, else the CPU.
        score: minimum score of detections.

    Attributes:
        classes: class names by label: those of the checkpoint, or of the test data set if it has none.
        palette: RGB colour of each class.
        model: the model.

    Raises:
        ValueError: the config belongs to neither framework or has no test data set, its model cannot be built, the
            checkpoint does not fit, or the class names are not as many as the classes of the head.
    """

    def __init__(self, config: Config, checkpoint: str, device: str | None = None, score: float = 0.3) -> None:
        scope = config.get('default_scope')
        if scope not in ('mmdet', 'mmseg'):
            raise ValueError(f"the config must have default_scope = 'mmdet' or 'mmseg', got {scope!r}")
        config = copy.deepcopy(config)
        dataset = test_dataset(config)
        # It does nothing for an image without annotations, but needs panopticapi, which is not on PyPI.
        dataset.pipeline = [step for step in dataset.pipeline if 'LoadPanopticAnnotations' not in str(step['type'])]
        self._is_detector = scope == 'mmdet'
        self._score = score
        self._pipeline = copy.deepcopy(dataset.pipeline)
        first = self._pipeline[0]
        self._load_bands: Any = None
        if str(first['type']).endswith('LoadBands'):
            self._load_bands = TRANSFORMS.build(first)
            dataset.pipeline[0] = {'type': 'LoadImageFromFile'}  # the Inferencers accept no other
        apis = importlib.import_module(f'{scope}.apis')
        inferencer: Any = apis.DetInferencer if self._is_detector else apis.MMSegInferencer
        saved: dict[str, Any] = {}

        class Inferencer(inferencer):  # the framework invents names if a checkpoint contains none
            def _load_weights_to_model(self, model: nn.Module, checkpoint: dict, cfg: Config) -> None:
                super()._load_weights_to_model(model, checkpoint, cfg)
                meta = checkpoint.get('meta', {})
                # Older versions saved CLASSES and PALETTE in `meta` itself.
                saved.update({key.lower(): value for key, value in (meta.get('dataset_meta') or meta).items()})

        try:
            options = {'show_progress': False} if self._is_detector else {}
            self._inferencer: Any = Inferencer(config, checkpoint, device=device, **options)
        except Exception as error:  # the frameworks raise exceptions of any type for wrong configs and files
            reason = f'{type(error).__name__}: {error}'.partition('\n')[0]
            raise ValueError(
                f'the model of the config cannot be built, or {checkpoint} is not a checkpoint of it ({reason})'
            ) from error
        self.model: Any = self._inferencer.model
        self._name_classes(saved, _metainfo(scope, dataset))

    def predict(self, path: str) -> Prediction:
        """Return the prediction for an image file; it is not painted if the model takes other bands than RGB."""
        if self._load_bands is not None:
            with self._load_bands.open_large(path) as image:
                return self._in_tiles(image, max(image.size), 0)
        pictures.read(path)  # raises an error of one line for what the Inferencers cannot read
        if self._is_detector:
            result = self._inferencer(path, return_vis=True, pred_score_thr=self._score, return_datasamples=True)
            (sample,) = result['predictions']
            record = begun_record(path, sample.ori_shape)
            ids = None
            if 'pred_panoptic_seg' in sample:
                ids = sample.pred_panoptic_seg.sem_seg[0].cpu().numpy()
                record['segments'] = queries.described(ids, self.classes)
                del sample.pred_panoptic_seg  # pred2dict needs panopticapi for it
            if 'pred_instances' in sample:
                record['instances'] = self._instances(self._inferencer.pred2dict(sample))
            return Prediction(record, result['visualization'][0], panoptic=ids)
        result = self._inferencer(path, return_vis=True)
        labels = result['predictions'].astype(np.int32)
        record = begun_record(path, labels.shape)
        record['segments'] = shares(np.bincount(labels.ravel()), self.classes)
        return Prediction(record, result['visualization'], labels)

    def predict_tiles(
        self, path: str, tile: int, overlap: int | None = None, make_labels: Callable[..., Any] = np.zeros
    ) -> Prediction:
        """Return the prediction for an image file in tiles; see ``swin_dense.runtime.Model.predict_tiles``."""
        reader = pictures if self._load_bands is None else self._load_bands
        with reader.open_large(path) as image:
            return self._in_tiles(image, tile, overlap, make_labels)

    def _in_tiles(
        self, image: LargeImage, tile: int, overlap: int | None, make_labels: Callable[..., Any] = np.zeros
    ) -> Prediction:
        steps = [step for step in self._pipeline[1:] if 'LoadAnnotations' not in str(step['type'])]
        pipeline = Compose(steps)

        def predict(part: Tile) -> Outputs:
            img = self._read(image, part.read)
            shape = img.shape[:2]
            packed = pipeline(
                {'img': img, 'img_id': 0, 'img_path': image.source, 'img_shape': shape, 'ori_shape': shape}
            )
            data = {'inputs': [packed['inputs']], 'data_samples': [packed['data_samples']]}
            with torch.no_grad():
                (sample,) = self.model.test_step(data)
            return self._outputs(sample)

        with DefaultScope.overwrite_default_scope('mmdet' if self._is_detector else 'mmseg'):
            return predict_in_tiles(
                image.source, image.size, predict, self.classes, self._is_detector, tile, overlap, make_labels
            )

    def _read(self, image: LargeImage, box: Box) -> np.ndarray:
        """Return what the first step of the pipeline loads of a region."""
        if self._load_bands is not None:
            with naming(image.source):
                return self._load_bands.read(image.pixels(box))
        bgr = np.ascontiguousarray(image.read(*box)[:, :, ::-1])
        return bgr.astype(np.float32) if self._pipeline[0].get('to_float32') else bgr

    def _outputs(self, sample: Any) -> Outputs:
        """Return what ``predict_in_tiles`` takes from the prediction of a tile."""
        if not self._is_detector:
            return sample.pred_sem_seg.data[0].cpu().numpy(), None, None
        panoptic = sample.pred_panoptic_seg.sem_seg[0].cpu().numpy() if 'pred_panoptic_seg' in sample else None
        if 'pred_instances' not in sample:
            return None, None, panoptic
        found = sample.pred_instances[sample.pred_instances.scores >= self._score].cpu().numpy()
        masks = list(found.masks) if 'masks' in found else []
        return None, (found.bboxes, found.scores, found.labels, masks), panoptic

    def _instances(self, found: dict[str, Any]) -> list[dict[str, Any]]:
        masks = found.get('masks', [None] * len(found['labels']))
        instances = []
        for label, score, box, mask in zip(found['labels'], found['scores'], found['bboxes'], masks, strict=True):
            if score >= self._score:
                instance = {'class': self.classes[label], 'label': label, 'score': score, 'box': box}
                instances.append(instance if mask is None else {**instance, 'mask': mask})
        return instances

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
            hues = [colorsys.hsv_to_rgb(index / count, 0.8, 0.9) for index in range(count)]
            palette = [[round(255 * part) for part in colour] for colour in hues]
        # mmdet needs tuples.
        self.palette: list[tuple[int, ...]] = [tuple(map(int, colour)) for colour in palette[:count]]
        self._inferencer.model.dataset_meta = {'classes': self.classes, 'palette': self.palette}
        self._inferencer.visualizer.dataset_meta = self._inferencer.model.dataset_meta


def _metainfo(scope: str, dataset: ConfigDict) -> dict[str, Any]:
    """Return the metadata of a data set: those of its class, and ``metainfo`` of its config."""
    with DATASETS.switch_scope_and_registry(scope) as registry:
        kind: Any = registry.get(dataset.type) if isinstance(dataset.type, str) else dataset.type
    # mmengine's method also reads names from a file, if `metainfo` contains its path.
    return getattr(kind, '_load_metainfo', dict)(dataset.get('metainfo') or {})


def _classes_of_head(model: Any) -> int | None:
    """Return the number of classes that a model predicts, or None if it has no known head."""
    if getattr(model, 'out_channels', None) == 1:  # a binary head of mmseg
        return 2
    owner = getattr(model, 'roi_head', model)
    # The fusion head counts things and stuff.
    heads = [getattr(model, 'panoptic_fusion_head', None)]
    heads += [getattr(owner, name, None) for name in ('bbox_head', 'mask_head', 'decode_head')]
    head = next((head for head in heads if head is not None), None)
    return getattr(head[-1] if isinstance(head, nn.ModuleList) else head, 'num_classes', None)


def test_dataset(config: Config) -> ConfigDict:
    """Return the data set in the ``test_dataloader`` of a config, which has the test pipeline and the class names.

    Raises:
        ValueError: there is none, or it wraps other data sets.
    """
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
