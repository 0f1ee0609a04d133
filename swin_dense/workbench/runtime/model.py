"""Load a detector or segmentor from its file and run it on images."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from os import PathLike
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from swin_dense.utils import checks
from swin_dense.utils.choices import PRECISIONS
from swin_dense.utils.tiles import Tile
from swin_dense.workbench.runtime import geotiff, masks, painting, pictures, queries, tiles
from swin_dense.workbench.runtime.coco import RECORD_FORMAT
from swin_dense.workbench.runtime.sessions import FORMAT, SESSIONS, Session, check_precision

if TYPE_CHECKING:
    from swin_dense.workbench.runtime.pictures import Picture


# The class of every pixel, the instances, and the segment of every pixel of an image.
Outputs = tuple[np.ndarray | None, queries.Found | None, np.ndarray | None]


@dataclass(frozen=True)
class Prediction:
    """The prediction of a model for an image.

    Attributes:
        record: the prediction in types that JSON supports.
        painted: the image with the prediction drawn on it, (H, W, 3), uint8, RGB; None with tiles.
        labels: class index of every pixel, (H, W), int32, or uint8 or uint16 with tiles; None for a detector. Pixels
            of a GeoTIFF without data have 255, or 65535 if there are more than 255 classes.
        panoptic: segment of every pixel, (H, W), int32, by the ``id`` of the segments in the record; pixels of no
            segment have another value. None if the model is not panoptic.
    """

    record: dict[str, Any]
    painted: np.ndarray | None = None
    labels: Any = None
    panoptic: np.ndarray | None = None


def load(
    path: str | PathLike[str],
    *,
    runtime: str = 'onnxruntime',
    score: float = 0.3,
    threads: int = 0,
    precision: str = 'float32',
) -> Model:
    """Load a model from a file of ``swin-dense export CONFIG CHECKPOINT --out FILE``.

    Args:
        path: the ``.onnx`` file.
        runtime: 'onnxruntime' or 'openvino'.
        score: minimum score of detections.
        threads: number of CPU threads; 0 uses the default of the runtime.
        precision: 'float32', or 'bfloat16' with OpenVINO on a processor that computes in it, which `swin-dense doctor`
            tells. It is faster there, and may exchange near ties.

    Raises:
        FileNotFoundError: the file does not exist.
        ValueError: the file is damaged or incomplete, was not written by ``swin-dense export``, contains only a
            backbone, or was written by a later version of this package; or the runtime does not compute in the
            precision here.
        ImportError: the runtime is not installed.
    """
    checks.one_of('runtime', runtime, SESSIONS)
    checks.rate('score', score)
    checks.integer('threads', threads, minimum=0)
    checks.one_of('precision', precision, PRECISIONS)
    if not Path(path).is_file():
        raise FileNotFoundError(f'there is no file {path}')
    check_precision(runtime, precision)
    try:
        session = SESSIONS[runtime](path, threads, precision)
    except ImportError:
        raise
    except Exception as error:  # each library has its own exception types
        reason = ' '.join(str(error).split())
        raise ValueError(f'{runtime} cannot load {path}, which may be damaged or incomplete: {reason}') from error
    if session.facts is None:
        raise ValueError(
            f'{path} contains no whole model; write one with `swin-dense export CONFIG CHECKPOINT --out FILE`'
        )
    try:
        facts = json.loads(session.facts)
    except ValueError as error:
        raise ValueError(f'the metadata of {path} is damaged ({error}); export the model again') from error
    checks.file_format(str(path), facts, FORMAT)
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
        pixels = pictures.read(picture)
        outputs = with_no_data(picture, self.outputs(pixels), len(self.classes))
        return whole_record(_name(picture), pixels.shape[:2], outputs, self.classes)

    def predict(self, picture: Picture) -> Prediction:
        """Return the complete prediction for an image: a file, a PIL image, or (H, W, 3) uint8 in RGB."""
        pixels = pictures.read(picture)
        outputs = with_no_data(picture, self.outputs(pixels), len(self.classes))
        record = whole_record(_name(picture), pixels.shape[:2], outputs, self.classes)
        return Prediction(record, painted(pixels, record, outputs, self.facts['palette']), outputs[0], outputs[2])

    def predict_tiles(
        self, picture: Picture, tile: int, overlap: int | None = None, make_labels: Callable[..., Any] = np.zeros
    ) -> Prediction:
        """Return the prediction for an image of any size in tiles, with memory for one tile at a time.

        Every tile is resized as the file requires, so choose tiles of about the size of the images of the training.

        Args:
            picture: a file, a PIL image, or an array (H, W, 3) uint8 in RGB. TIFF files of 8-bit RGB (with tifffile and
                zarr installed), memory-mapped and zarr arrays are read by regions, others as a whole.
            tile: side of the tiles in pixels.
            overlap: pixels read beyond each side of a tile, at least the size of the objects; None for tile // 4.
            make_labels: allocates the map of classes for (height, width) and a dtype.

        Raises:
            ValueError: the model is panoptic, whose segments cannot be merged, or a number is too small.
        """
        with pictures.open_large(picture) as image:
            return predict_in_tiles(
                _name(picture),
                image.size,
                lambda part: self.outputs(image.read(*part.read)),
                self.classes,
                self.facts['task'] == 'detection',
                tile,
                overlap,
                make_labels,
            )

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
        if self.facts['task'] == 'detection':
            raise ValueError(f'size is an input of segmentors, and this model is a detector; got {size}')
        return self._session.run({'img': img, 'size': np.array(checks.pair('size', size), np.int64)})

    def _check(self, img: np.ndarray) -> None:
        if not isinstance(img, np.ndarray) or img.dtype != np.float32:
            raise TypeError(f'img must be an array of float32, got {getattr(img, "dtype", type(img).__name__)}')
        is_detector = self.facts['task'] == 'detection'
        if img.ndim != 4 or img.shape[1] != 3 or not img.size or (is_detector and len(img) != 1):
            raise ValueError(f'img must have the shape ({1 if is_detector else "B"}, 3, H, W), got {img.shape}')
        limits = self.facts.get('limits', {})
        divisor, queries = limits.get('divisor', 1), limits.get('queries', 0)
        height, width = img.shape[2:]
        if height % divisor or width % divisor:
            raise ValueError(
                f'height and width of the input must be multiples of {divisor} for this model, got {height}x{width}; '
                'pad it at the right and at the bottom'
            )
        tokens = sum(-(-height // stride) * -(-width // stride) for stride in limits.get('strides', []))
        if tokens < queries:
            raise ValueError(
                f'the input {height}x{width} is too small for this model: it selects the best {queries} of the tokens '
                f'of all feature maps, and these have {tokens}; resize the image to a larger size'
            )

    def prepared(self, pixels: np.ndarray) -> tuple[np.ndarray, tuple[int, int]]:
        """Return the input of the file for an image, (H, W, 3) uint8 in RGB, and its (height, width) without padding.

        Raises:
            ValueError: the model does not support the size of the input.
        """
        img, resized = pictures.model_input(pixels, self.facts)
        self._check(img)
        return img, resized

    def outputs(self, pixels: np.ndarray) -> Outputs:
        """Return the classes, the instances and the segments of an image, (H, W, 3) uint8 in RGB, None for others."""
        size = (pixels.shape[0], pixels.shape[1])
        img, resized = self.prepared(pixels)
        if self.facts['task'] == 'segmentation':
            return self.run(img, size)[0][0], None, None
        if 'queries' not in self.facts:
            return None, self._instances(self.run(img), size, resized), None
        input_size = (img.shape[2], img.shape[3])
        return None, *queries.predicted(self.run(img), input_size, size, self.facts['queries'], self._score)

    def _instances(self, outputs: list[np.ndarray], size: tuple[int, int], resized: tuple[int, int]) -> queries.Found:
        """Return boxes in pixels of the image, scores, labels and masks of the instances."""
        boxes, scores, labels, *probabilities = outputs
        kept = scores >= self._score
        boxes = boxes[kept] / np.array([resized[1] / size[1], resized[0] / size[0]] * 2, np.float32)
        threshold = self.facts['mask_threshold']
        full_masks = [
            masks.pasted(mask, box, threshold, *size)
            for part in probabilities
            for mask, box in zip(part[kept], boxes, strict=True)
        ]
        return boxes, scores[kept], labels[kept], full_masks


def whole_record(image: str | None, size: Sequence[int], outputs: Outputs, classes: Sequence[str]) -> dict[str, Any]:
    """Return the record of an image that was predicted as a whole.

    Args:
        image: name of the image.
        size: its (height, width) in pixels.
        outputs: its classes, instances and segments.
        classes: class names by label.
    """
    labels, found, panoptic = outputs
    record = begun_record(image, size)
    if labels is not None:
        record['segments'] = shares(np.bincount(labels.ravel()), classes)
    if panoptic is not None:
        record['segments'] = queries.described(panoptic, classes)
    if found is not None:
        record['instances'] = _listed(*found[:3], [masks.run_lengths(mask) for mask in found[3]], classes)
    return record


def painted(
    pixels: np.ndarray, record: dict[str, Any], outputs: Outputs, palette: Sequence[Sequence[int]]
) -> np.ndarray:
    """Return an image, (H, W, 3) uint8 in RGB, with its prediction drawn on it.

    Args:
        pixels: the image, (H, W, 3) uint8 in RGB.
        record: what :func:`whole_record` returns for it.
        outputs: its classes, instances and segments.
        palette: RGB colour of each class.
    """
    labels, found, panoptic = outputs
    if labels is not None:
        return painting.segments(pixels, labels, palette)
    full_masks = found[3] if found is not None and panoptic is None else []
    if panoptic is not None:
        pixels = painting.panoptic(pixels, panoptic, record['segments'], palette)
    return painting.instances(pixels, record.get('instances', []), full_masks, palette)


def predict_in_tiles(
    image: str | None,
    size: tuple[int, int],
    predict: Callable[[Tile], Outputs],
    classes: Sequence[str],
    is_detector: bool,
    tile: int,
    overlap: int | None,
    make_labels: Callable[..., Any] = np.zeros,
) -> Prediction:
    """Return the prediction for an image in tiles; see :meth:`Model.predict_tiles`.

    Args:
        image: name of the image.
        size: its (height, width) in pixels.
        predict: returns the classes, the instances and the segments of a tile.
        classes: class names by label.
        is_detector: whether the model predicts instances.
        tile: side of the tiles in pixels.
        overlap: pixels read beyond each side of a tile; None for a quarter of the tile.
        make_labels: allocates the map of classes.
    """
    windows = tiles.plan(size, tile, overlap, is_detector)
    record = begun_record(image, size)
    if is_detector:
        found = tiles.instances(windows, size, lambda tile: _instances_of(predict(tile)))
        record['instances'] = _listed(*found, classes)
        return Prediction(record)
    with geotiff.no_data(image) as mask:
        labels = make_labels(size, np.uint8 if len(classes) + (mask is not None) <= 256 else np.uint16)

        def classes_of(tile: Tile) -> np.ndarray:
            found, _, _ = predict(tile)
            assert found is not None  # of a segmentor
            return found if mask is None else np.where(mask(tile.read), _empty(len(classes)), found)

        record['segments'] = shares(tiles.labels(windows, classes_of, labels), classes)
    return Prediction(record, labels=labels)


def with_no_data(picture: Any, outputs: Outputs, classes: int) -> Outputs:
    """Mark the pixels of a GeoTIFF that have no data in the map of its classes; see :class:`Prediction`."""
    labels, found, panoptic = outputs
    with geotiff.no_data(picture) as mask:
        if labels is not None and mask is not None:
            labels = np.where(mask((0, 0, *labels.shape)), _empty(classes), labels)
    return labels, found, panoptic


def _empty(classes: int) -> int:
    """Return what pixels without data have in a map of classes."""
    return 255 if classes <= 255 else 65535


def _instances_of(outputs: Outputs) -> queries.Found:
    _, found, panoptic = outputs
    if found is None or panoptic is not None:
        raise ValueError(
            f'segments of a panoptic model cannot be merged across tiles; leave {checks.argument("tile", ...)} out'
        )
    return found


def begun_record(image: str | None, size: Sequence[int]) -> dict[str, Any]:
    """Return the record of an image of (height, width) pixels, without instances and segments."""
    return {'format': RECORD_FORMAT, 'image': image, 'height': size[0], 'width': size[1]}


def _listed(
    boxes: np.ndarray, scores: np.ndarray, labels: np.ndarray, run_lengths: Sequence[Any], classes: Sequence[str]
) -> list[dict[str, Any]]:
    """Return the instances of a record; there may be no masks."""
    found = [
        {'class': classes[label], 'label': int(label), 'score': float(score), 'box': box.tolist()}
        for box, score, label in zip(boxes, scores, labels, strict=True)
    ]
    for instance, mask in zip(found, run_lengths, strict=False):
        instance['mask'] = mask
    return found


def shares(counts: np.ndarray, classes: Sequence[str]) -> list[dict[str, Any]]:
    """Return the classes of a map in a record, from the number of pixels of each; others are pixels without data."""
    counts = counts[: len(classes)]
    return [
        {'class': classes[label], 'label': int(label), 'share': float(counts[label] / counts.sum())}
        for label in np.flatnonzero(counts)
    ]


def _name(picture: Picture) -> str | None:
    return str(picture) if isinstance(picture, (str, PathLike)) else None
