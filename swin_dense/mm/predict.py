"""Predictions of detectors and segmentors, through the Inferencers of mmdet and mmseg."""

from __future__ import annotations

import importlib
from typing import Any

import numpy as np
from mmengine.config import Config, ConfigDict
from mmengine.registry import DATASETS
from torch import nn

from swin_dense.runtime import Prediction


class Predictor:
    """A detector or segmentor with loaded weights, to be called with image files.

    Args:
        config: config of mmdet or mmseg.
        checkpoint: file or address of the weights of the whole model.
        device: device; None uses CUDA if available, else the CPU.
        score: minimum score of detections.

    Attributes:
        classes: class names by label.
        model: the model.

    Raises:
        ValueError: the config belongs to neither framework, its model cannot be built, or the checkpoint does not fit.
    """

    def __init__(self, config: Config, checkpoint: str, device: str | None = None, score: float = 0.3) -> None:
        scope = config.get('default_scope')
        if scope not in ('mmdet', 'mmseg'):
            raise ValueError(f"the config must have default_scope = 'mmdet' or 'mmseg', got {scope!r}")
        dataset = test_dataset(config)
        self._is_detector = scope == 'mmdet'
        self._score = score
        apis = importlib.import_module(f'{scope}.apis')
        try:
            if self._is_detector:
                self._inferencer = apis.DetInferencer(config, checkpoint, device, show_progress=False)
            else:
                self._inferencer = apis.MMSegInferencer(config, checkpoint, device=device)
        except Exception as error:  # the frameworks raise exceptions of any type for wrong configs and files
            reason = f'{type(error).__name__}: {error}'.partition('\n')[0]
            raise ValueError(
                f'the model of the config cannot be built, or {checkpoint} is not a checkpoint of it ({reason})'
            ) from error
        self.model: nn.Module = self._inferencer.model
        self._name_classes(config.default_scope, dataset)

    def __call__(self, path: str) -> Prediction:
        """Return the prediction for an image file."""
        if self._is_detector:
            result = self._inferencer(path, return_vis=True, pred_score_thr=self._score)
            return Prediction({'image': path, 'instances': self._instances(result)}, result['visualization'][0])
        result = self._inferencer(path, return_vis=True)
        labels = result['predictions'].astype(np.uint8)
        segments = [
            {'class': self.classes[label], 'label': int(label), 'share': float((labels == label).mean())}
            for label in np.unique(labels)
        ]
        return Prediction({'image': path, 'segments': segments}, result['visualization'], labels)

    def _instances(self, result: dict[str, Any]) -> list[dict[str, Any]]:
        found = result['predictions'][0]
        masks = found.get('masks', [None] * len(found['labels']))
        instances = []
        for label, score, box, mask in zip(found['labels'], found['scores'], found['bboxes'], masks, strict=True):
            if score >= self._score:
                instance = {'class': self.classes[label], 'label': label, 'score': score, 'box': box}
                instances.append(instance if mask is None else {**instance, 'mask': mask})
        return instances

    def _name_classes(self, scope: str, dataset: ConfigDict) -> None:
        """Take class names from the config, because the frameworks invent names if a checkpoint contains none."""
        model: Any = self.model
        with DATASETS.switch_scope_and_registry(scope) as registry:
            known = getattr(registry.get(dataset.type), 'METAINFO', {})
        meta = {**known, **dataset.get('metainfo', {})}
        if meta.get('classes'):
            model.dataset_meta = {key: meta.get(key) for key in ('classes', 'palette')}
            self._inferencer.visualizer.dataset_meta = model.dataset_meta
        self.classes: tuple[str, ...] = tuple(model.dataset_meta['classes'])


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
