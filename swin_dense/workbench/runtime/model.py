"""Load a detector or segmentor from its file and run it on images."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Sequence
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swin_dense.utils import checks, packages
from swin_dense.utils.choices import EXPORTED, PRECISIONS
from swin_dense.workbench.runtime import instances, painting, pictures, queries
from swin_dense.workbench.runtime.outputs import Instances, Outputs, Prediction
from swin_dense.workbench.runtime.sessions import (
    FORMAT,
    SESSIONS,
    ForkedProcessError,
    OnnxRuntime,
    OpenVino,
    check_precision,
)
from swin_dense.workbench.runtime.stopwatch import Stopwatch

if TYPE_CHECKING:
    from swin_dense.workbench.runtime.pictures import Picture

RECORD_FORMAT = 1  # version of records, in `format`; raised when an earlier version of this package would misread one


def load(
    path: str | PathLike[str],
    *,
    runtime: str | None = None,
    score: float = 0.3,
    threads: int = 0,
    precision: str = 'float32',
) -> Model:
    """Load a model from a file of ``swin-dense export CONFIG CHECKPOINT --out FILE``.

    Args:
        path: the ``.onnx`` file, or the ``.xml`` file that OpenVINO made of it, beside its ``.bin`` file.
        runtime: 'onnxruntime' or 'openvino'; None takes 'openvino' for an ``.xml`` file, else 'onnxruntime'.
        score: minimum score of detections.
        threads: number of CPU threads; 0 uses the default of the runtime.
        precision: 'float32', or 'bfloat16' with OpenVINO on a processor that computes in it, which `swin-dense doctor`
            tells. It is faster there, and may exchange near ties.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or incomplete, was not written by ``swin-dense export``, contains only a
            backbone, or was written by a later version of this package; or the runtime does not compute in the
            precision here.
        RuntimeError: the process was forked from one that used OpenVINO, and the runtime is OpenVINO.
        ImportError: the runtime, OpenCV or pycocotools is not installed.
    """
    suffix = Path(path).suffix.lower()
    if runtime is None:
        runtime = EXPORTED.get(suffix, 'onnxruntime')
    checks.one_of('runtime', runtime, SESSIONS)
    if suffix == '.xml' and runtime != 'openvino':
        raise ValueError(f'{path} is a file of OpenVINO, which {runtime} does not read; leave the runtime out')
    checks.rate('score', score)
    checks.integer('threads', threads, minimum=0)
    checks.one_of('precision', precision, PRECISIONS)
    if not Path(path).is_file():
        raise FileNotFoundError(f'there is no file {path}')
    check_precision(runtime, precision)
    packages.require('the runtime', 'cv2', 'pycocotools')
    try:
        session = SESSIONS[runtime](path, threads, precision)
    except (ImportError, ForkedProcessError):
        raise
    except Exception as error:  # each library has its own exception types
        reason = checks.shortened(' '.join(str(error).split()))
        cause = 'be damaged or incomplete'
        if precision != 'float32':
            cause += f', or not be possible in {precision}'
        raise ValueError(f'{runtime} cannot load {path}, which may {cause}: {reason}') from error
    if session.facts is None:
        raise ValueError(
            f'{path} contains no whole model; write one with `swin-dense export CONFIG CHECKPOINT --out FILE`'
        )
    try:
        facts = json.loads(session.facts)
    except ValueError as error:
        raise ValueError(f'the metadata of {path} is damaged ({error}); export the model again') from error
    checks.file_format(str(path), facts, FORMAT)
    if facts['task'] == 'segmentation' and 'size' not in session.inputs:
        raise ValueError(
            f'{path} has lost the optional input `size` of a segmentor, which openvino.convert_model and other tools '
            "remove; convert it with openvino.save_model(openvino.Core().read_model('model.onnx'), 'model.xml')"
        )
    return Model(session, facts, score)


class ImagePredictor:
    """Predicts images. Subclasses read images, and predict pixels as they read them."""

    classes: Sequence[str]  # names by label
    palette: Sequence[Sequence[int]]  # RGB colour of each class
    is_detector: bool  # whether the model predicts instances
    bands: Sequence[int] | None = (0, 1, 2)  # of an image, counted from 0, that the model reads; None for all

    def outputs(self, pixels: np.ndarray, picture: Any = None, clock: Stopwatch | None = None) -> Outputs:
        """Return what the model predicts for the pixels of a picture, or of a region of it."""
        raise NotImplementedError

    def read(self, picture: Any) -> np.ndarray:
        """Return the pixels of a picture, (H, W) or (H, W, C)."""
        raise NotImplementedError

    def _to_paint(self, pixels: np.ndarray) -> np.ndarray | None:
        """Return the pixels as (H, W, 3) uint8 in RGB; None if they are no colours."""
        return pixels

    def notes_on(self, pictures: Sequence[Picture]) -> list[str]:
        """Return notes on pictures that reading changes, by lost bits or turns; decode an example of each kind."""
        from swin_dense.images.kinds import Reader, notes_on_reading  # needs PIL, without which arrays are predicted

        def decode(picture: Picture) -> np.ndarray | None:
            with contextlib.suppress(Exception):  # of any decoder, which `read` raises again
                return self.read(picture)
            return None

        cure = 'train the model on such images, read in the same way'
        reader = Reader('predict', decode, lambda _: cure, chooses_bands=self.bands is None)
        return notes_on_reading(pictures, reader)

    def __call__(self, picture: Picture) -> dict[str, Any]:
        """Return the ``record`` of :class:`Prediction` for an image: a file, or anything that :meth:`predict` takes."""
        return self._predicted(picture, Stopwatch())[2]

    def predict(self, picture: Picture, clock: Stopwatch | None = None, *, paint: bool = True) -> Prediction:
        """Return the complete prediction for an image.

        Args:
            picture: a file, the bytes of a file, a PIL image, or (H, W, 3) uint8 in RGB. The model of a config does not
                take bytes.
            clock: measures the steps 'read', 'prepare', 'run' and 'finish'.
            paint: whether to draw the prediction on the image.
        """
        clock = clock or Stopwatch()
        pixels, outputs, record = self._predicted(picture, clock)
        shown = self._to_paint(pixels) if paint else None
        painted = None if shown is None else painting.painted(shown, record, outputs, self.palette)
        clock.lap('finish')
        return Prediction(record, painted, outputs.labels, outputs.panoptic)

    def _predicted(self, picture: Any, clock: Stopwatch) -> tuple[np.ndarray, Outputs, dict[str, Any]]:
        """Return the pixels of a picture, what the model predicts for them, and the record of that."""
        pixels = self.read(picture)
        clock.lap('read')
        outputs = self.outputs(pixels, picture, clock)
        image = str(picture) if isinstance(picture, (str, PathLike)) else None
        height, width = pixels.shape[:2]
        record = {'format': RECORD_FORMAT, 'image': image, 'height': height, 'width': width}
        labels, found, panoptic = outputs
        if labels is not None:
            record['segments'] = shares(np.bincount(labels.ravel()), self.classes)
        if panoptic is not None:
            record['segments'] = queries.described(panoptic, self.classes)
        if found is not None:
            record['instances'] = _listed(found, self.classes)
        return pixels, outputs, record


class Model(ImagePredictor):
    """A detector or segmentor in a runtime. Calling it with an image returns a record in types that JSON supports.

    Attributes:
        classes: class names by label.
        facts: metadata of the file: task, classes, resizing and so on.
    """

    def __init__(self, session: OnnxRuntime | OpenVino, facts: dict[str, Any], score: float) -> None:
        self._session = session
        self._score = score
        self.facts = facts
        self.classes: list[str] = facts['classes']
        self.palette = facts.get('palette', [])
        self.is_detector = facts['task'] == 'detection'

    def read(self, picture: Picture) -> np.ndarray:
        return pictures.read(picture)

    def run(self, img: np.ndarray, size: int | Sequence[int] | None = None) -> list[np.ndarray]:
        """Return the raw outputs of the file.

        Args:
            img: (B, 3, H, W) float32, BGR from 0 to 255, already resized; B must be 1 for a detector.
            size: side or (height, width) of the class maps of a segmentor in pixels; None is that of ``img``.

        Raises:
            TypeError: ``img`` has another dtype, or ``size`` is not of integers.
            ValueError: ``img`` has another shape, or a size that the model does not support, or ``size`` is not
                positive or given for a detector.
        """
        self._check(img)
        if size is None:
            return self._session.run({'img': img})
        if self.is_detector:
            raise ValueError(f'size is an input of segmentors, and this model is a detector; got {size}')
        sides = np.array(checks.pair('size', size), np.int64)
        return self._session.run({'img': img, 'size': sides})

    def _check(self, img: np.ndarray) -> None:
        if not isinstance(img, np.ndarray) or img.dtype != np.float32:
            raise TypeError(f'img must be an array of float32, got {getattr(img, "dtype", type(img).__name__)}')
        is_batch = img.ndim == 4 and img.shape[1] == 3 and img.size > 0
        if not is_batch or (self.is_detector and len(img) != 1):
            batch = 1 if self.is_detector else 'B'
            raise ValueError(f'img must have the shape ({batch}, 3, H, W), got {img.shape}')
        limits = self.facts.get('limits', {})
        divisor = limits.get('divisor', 1)
        queries = limits.get('queries', 0)
        height, width = img.shape[2:]
        fixed = self._session.size
        fits = fixed[0] in (None, height) and fixed[1] in (None, width)
        if not fits:
            sides = 'x'.join(str(side or 'any') for side in fixed)
            raise ValueError(
                f'the file is for inputs of {sides} pixels, got {height}x{width}; resize or pad the image to that, or '
                'export a file for any size'
            )
        if height % divisor or width % divisor:
            raise ValueError(
                f'height and width of the input must be multiples of {divisor} for this model, got {height}x{width}; '
                'pad it at the right and at the bottom'
            )
        tokens = 0
        for stride in limits.get('strides', []):
            tokens += -(-height // stride) * -(-width // stride)
        if tokens < queries:
            raise ValueError(
                f'the input {height}x{width} is too small for this model: it selects the best {queries} of the tokens '
                f'of all feature maps, and these have {tokens}; resize the image to a larger size'
            )

    def prepared(self, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the input for an image, (H, W, 3) uint8 in RGB, and its (height, width) without padding."""
        img, resized = pictures.model_input(pixels, self.facts)
        self._check(img)
        return img, resized

    def outputs(self, pixels: np.ndarray, picture: Any = None, clock: Stopwatch | None = None) -> Outputs:
        """Return what the model predicts for an image, (H, W, 3) uint8 in RGB, in the size of the image."""
        clock = clock or Stopwatch()
        size = (pixels.shape[0], pixels.shape[1])
        img, resized = self.prepared(pixels)
        clock.lap('prepare')
        outputs = self.run(img, None if self.is_detector else size)
        clock.lap('run')
        if not self.is_detector:
            return Outputs(labels=outputs[0][0])
        if 'queries' in self.facts:
            input_size = (img.shape[2], img.shape[3])
            settings = self.facts['queries']
            found, panoptic = queries.predicted(outputs, input_size, size, settings, self._score)
            return Outputs(None, found, panoptic)
        boxes, scores, labels, *probabilities = outputs
        kept = scores >= self._score
        x_factor = resized[1] / size[1]
        y_factor = resized[0] / size[0]
        factors = np.array([x_factor, y_factor, x_factor, y_factor], np.float32)
        boxes = boxes[kept] / factors
        full_masks = []
        if probabilities:
            threshold = self.facts['mask_threshold']
            for mask, box in zip(probabilities[0][kept], boxes, strict=True):
                full_masks.append(instances.pasted(mask, box, threshold, *size))
        return Outputs(instances=Instances(boxes, scores[kept], labels[kept], full_masks))


def _listed(found: Instances, classes: Sequence[str]) -> list[dict[str, Any]]:
    listed: list[dict[str, Any]] = []
    for box, score, label in zip(found.boxes, found.scores, found.labels, strict=True):
        name = classes[label]
        listed.append({'class': name, 'label': int(label), 'score': float(score), 'box': box.tolist()})
    for instance, mask in zip(listed, found.masks, strict=False):  # there may be no masks
        instance['mask'] = instances.encode_rle(mask)
    return listed


def shares(counts: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the classes of a map in a record, from the number of pixels of each; others are pixels without data."""
    counts = counts[: len(classes)]
    total = counts.sum()
    found = []
    for label in np.flatnonzero(counts):
        share = float(counts[label] / total)
        found.append({'class': classes[label], 'label': int(label), 'share': share})
    return found
