"""Load a detector or segmentor from its file and run it on images."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swin_dense.runtime import masks, painting, pictures
from swin_dense.runtime.sessions import FORMAT, SESSIONS, Session
from swin_dense.utils import checks

if TYPE_CHECKING:
    from swin_dense.runtime.pictures import Picture


@dataclass(frozen=True)
class Prediction:
    """The prediction of a model for an image.

    Attributes:
        record: the prediction in types that JSON supports.
        painted: the image with the prediction drawn on it, (H, W, 3), uint8, RGB.
        labels: class index of every pixel, (H, W), int32; None for a detector.
    """

    record: dict[str, Any]
    painted: np.ndarray
    labels: np.ndarray | None = None


def load(path: str | PathLike[str], *, runtime: str = 'onnxruntime', score: float = 0.3, threads: int = 0) -> Model:
    """Load a model from a file of ``swin-dense export CONFIG CHECKPOINT FILE``.

    Args:
        path: the ``.onnx`` file.
        runtime: 'onnxruntime' or 'openvino'.
        score: minimum score of detections.
        threads: number of CPU threads; 0 uses the default of the runtime.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or incomplete, was not written by ``swin-dense export``, contains only a
            backbone, or was written by a later version of this package.
        ImportError: the runtime is not installed.
    """
    checks.one_of('runtime', runtime, SESSIONS)
    checks.rate('score', score)
    checks.integer('threads', threads, minimum=0)
    if not Path(path).is_file():
        raise FileNotFoundError(f'there is no file {path}')
    try:
        session = SESSIONS[runtime](path, threads)
    except ImportError:
        raise
    except Exception as error:  # each library has its own exception types
        reason = ' '.join(str(error).split())
        raise ValueError(f'{runtime} cannot load {path}, which may be damaged or incomplete: {reason}') from error
    if session.facts is None:
        raise ValueError(f'{path} contains no whole model; write one with `swin-dense export CONFIG CHECKPOINT FILE`')
    facts = json.loads(session.facts)
    written = facts.get('format', FORMAT)  # absent in files of the first version
    if written > FORMAT:
        raise ValueError(
            f'{path} has the format {written} of a later version of swin_dense, this one reads {FORMAT}: update '
            'swin_dense here, or export the model again with this version'
        )
    return Model(session, facts, score)


class Model:
    """A detector or segmentor in a runtime. Calling it with an image returns a record in types that JSON supports.

    Attributes:
        classes: class names by label.
        facts: metadata of the file: task, classes, resizing and so on.
    """

    def __init__(self, session: Session, facts: dict[str, Any], score: float) -> None:
        self._session = session
        self._score = score
        self.facts = facts
        self.classes: list[str] = facts['classes']

    def __call__(self, picture: Picture) -> dict[str, Any]:
        """Return the ``record`` of :class:`Prediction` for an image: a file, a PIL image, or (H, W, 3) uint8 in RGB."""
        return self._predict(picture)[0]

    def predict(self, picture: Picture) -> Prediction:
        """Return the complete prediction for an image: a file, a PIL image, or (H, W, 3) uint8 in RGB."""
        record, paint, labels = self._predict(picture)
        return Prediction(record, paint(), labels)

    def run(self, img: np.ndarray, **inputs: np.ndarray) -> list[np.ndarray]:
        """Return the raw outputs of the file.

        Args:
            img: (B, 3, H, W) float32, BGR from 0 to 255, already resized; B must be 1 for a detector.
            **inputs: other inputs of the file.
        """
        return self._session.run({'img': img, **inputs})

    def _predict(self, picture: Picture) -> tuple[dict[str, Any], Callable[[], np.ndarray], np.ndarray | None]:
        pixels = pictures.read(picture)
        height, width = pixels.shape[:2]
        size = pictures.size_in_model(height, width, self.facts['resize'])
        img = pictures.resized(pixels, *size)[None, :, :, ::-1].transpose(0, 3, 1, 2).astype(np.float32)
        record = {'image': str(picture) if isinstance(picture, (str, PathLike)) else None}
        if self.facts['task'] == 'detection':
            found, masks_found = self._instances(self.run(img), pixels, size)
            paint = partial(painting.instances, pixels, found, masks_found, self.facts['palette'])
            return {**record, 'instances': found}, paint, None
        (labels,) = self.run(img, size=np.array(pixels.shape[:2]))
        label_map = labels[0]
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
