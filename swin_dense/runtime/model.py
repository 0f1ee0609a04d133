"""A whole model from its file, ready for pictures."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import Any

import numpy as np

from swin_dense.runtime import masks, painting, pictures
from swin_dense.runtime.sessions import SESSIONS, Session
from swin_dense.utils import checks

Picture = str | PathLike[str] | np.ndarray


@dataclass(frozen=True)
class Prediction:
    """What a model says about a picture.

    Attributes:
        record: the same in types that JSON has.
        painted: the picture with the prediction in it, (H, W, 3), uint8, RGB.
        labels: class of every pixel, (H, W), uint8; None of a detector.
    """

    record: dict[str, Any]
    painted: np.ndarray
    labels: np.ndarray | None = None


def load(path: str | PathLike[str], *, runtime: str = 'onnxruntime', score: float = 0.3, threads: int = 0) -> Model:
    """Return the model that ``swin-dense export CONFIG CHECKPOINT FILE`` wrote to a file.

    Args:
        path: the ``.onnx`` file.
        runtime: 'onnxruntime' or 'openvino'.
        score: detections below it are left out.
        threads: of the CPU; 0 are as many as the runtime likes.

    Raises:
        FileNotFoundError: there is no such file.
        ValueError: the file is not from ``swin-dense export``, or holds a backbone alone.
        ImportError: the runtime is not installed.
    """
    checks.one_of('runtime', runtime, SESSIONS)
    checks.rate('score', score)
    checks.integer('threads', threads, minimum=0)
    if not Path(path).is_file():
        raise FileNotFoundError(f'there is no file {path}')
    session = SESSIONS[runtime](path, threads)
    if session.facts is None:
        raise ValueError(f'{path} holds no whole model: write one with `swin-dense export CONFIG CHECKPOINT FILE`')
    return Model(session, json.loads(session.facts), score)


class Model:
    """A detector or segmentor in a runtime. Calling it with a picture returns what JSON can hold.

    Attributes:
        classes: names, by label.
        facts: what the file says of itself.
    """

    def __init__(self, session: Session, facts: dict[str, Any], score: float) -> None:
        self._session = session
        self._score = score
        self.facts = facts
        self.classes: list[str] = facts['classes']

    def __call__(self, picture: Picture) -> dict[str, Any]:
        """Return the record of a picture, a file or (H, W, 3) uint8 in RGB: see :class:`Prediction`."""
        return self._look(picture)[0]

    def predict(self, picture: Picture) -> Prediction:
        """Return all about a picture, a file or (H, W, 3) uint8 in RGB."""
        record, paint, labels = self._look(picture)
        return Prediction(record, paint(), labels)

    def run(self, img: np.ndarray, **inputs: np.ndarray) -> list[np.ndarray]:
        """Return the outputs of the file as they are.

        Args:
            img: (B, 3, H, W) float32, BGR from 0 to 255, resized already; B is 1 for a detector.
            inputs: others that the file has.
        """
        return self._session.run({'img': img, **inputs})

    def _look(self, picture: Picture) -> tuple[dict[str, Any], Callable[[], np.ndarray], np.ndarray | None]:
        pixels = pictures.read(picture)
        height, width = pixels.shape[:2]
        size = pictures.size_in_model(height, width, self.facts['resize'])
        img = pictures.resized(pixels, *size)[None, :, :, ::-1].transpose(0, 3, 1, 2).astype(np.float32)
        record = {'image': None if isinstance(picture, np.ndarray) else str(picture)}
        if self.facts['task'] == 'detection':
            found, masks_found = self._instances(self.run(img), pixels, size)
            paint = partial(painting.instances, pixels, found, masks_found, self.facts['palette'])
            return {**record, 'instances': found}, paint, None
        (labels,) = self.run(img, size=np.array(pixels.shape[:2]))
        label_map = labels[0].astype(np.uint8)
        segments = [
            {'class': self.classes[label], 'label': int(label), 'share': float((label_map == label).mean())}
            for label in np.unique(label_map)
        ]
        paint = partial(painting.segments, pixels, label_map, self.facts['palette'])
        return {**record, 'segments': segments}, paint, label_map

    def _instances(
        self, outputs: list[np.ndarray], pixels: np.ndarray, size: tuple[int, int]
    ) -> tuple[list[dict[str, Any]], list[np.ndarray]]:
        height, width = pixels.shape[:2]
        factors = np.array([size[1] / width, size[0] / height] * 2, np.float32)
        found, masks_found = [], []
        boxes, scores, labels, *probabilities = outputs
        for index in np.flatnonzero(scores >= self._score):
            box, label = boxes[index] / factors, int(labels[index])
            instance = {
                'class': self.classes[label],
                'label': label,
                'score': float(scores[index]),
                'box': box.tolist(),
            }
            if probabilities:
                mask = masks.pasted(probabilities[0][index], box, self.facts['mask_threshold'], height, width)
                masks_found.append(mask)
                instance['mask'] = masks.run_lengths(mask)
            found.append(instance)
        return found, masks_found
