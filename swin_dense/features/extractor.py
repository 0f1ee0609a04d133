"""Feature extraction for engines that map a class over batches of rows: Ray Data, datasets, Spark, Daft."""

from __future__ import annotations

import contextlib
import logging
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from functools import partial
from typing import Any

import numpy as np
import torch

from swin_dense.create import create_backbone
from swin_dense.features.extraction import Extraction, check_dtype, on_device
from swin_dense.features.runner import Item, Runner
from swin_dense.images.headers import Header
from swin_dense.images.normalization import Normalization
from swin_dense.utils import checks
from swin_dense.utils.choices import POOLINGS

_logger = logging.getLogger(__package__)
# Columns that may hold the images, in order of precedence. Only 'path' is also returned.
COLUMNS = ('bytes', 'image', 'path')


@dataclass(eq=False)
class Extractor:
    """Compute pooled features of batches of images, given as dicts of columns.

    Pickling stores only the arguments; unpickling loads the checkpoint again, so every machine needs access to it.

    Args:
        checkpoint: a file or an address; the architecture is inferred from it.
        levels: strides of the maps to pool; None for all of the backbone.
        pool: 'avg' or 'gem'.
        device: the device to compute on; None for a GPU if available, else the CPU.
        max_side: downscale images with a longer side until it has this many pixels.
        dtype: dtype of the vectors, 'float32' or 'float16'.
        autocast: dtype of ``torch.autocast``, 'float16' or 'bfloat16'; None for no autocast.
        batch_size: maximum number of images of equal size per batch; reduced if memory is short.
        workers: number of threads that read and decode images.
        page: page of multi-page files, counted from 0; None for the only one.
        prefix: which backbone of the checkpoint, if it contains several; see :func:`swin_dense.load_checkpoint`.
        normalization: see :func:`swin_dense.extract_pyramid`.

    Raises:
        ValueError: an option has an invalid value.
        CheckpointError: the checkpoint cannot be read.

    Examples:
        >>> import numpy as np
        >>> extract = Extractor('swin_t.in1k', levels=[32], pool='gem')
        >>> extract({'image': [np.zeros((64, 80, 3), np.uint8)] * 2})['level_32'].shape
        (2, 768)
    """

    checkpoint: str | os.PathLike
    levels: Sequence[int] | None = None
    pool: str = 'avg'
    device: str | None = None
    max_side: int | None = None
    dtype: torch.dtype | str = 'float32'
    autocast: torch.dtype | str | None = None
    batch_size: int = 8
    workers: int = 2
    page: int | None = None
    prefix: str | None = None
    normalization: Normalization | str | None = None

    def __post_init__(self) -> None:
        checks.one_of('pool', self.pool, POOLINGS)
        checks.integer('batch_size', self.batch_size)
        checks.integer('workers', self.workers, minimum=0)
        self._number = np.dtype(str(check_dtype('dtype', self.dtype, ('float32', 'float16'))).removeprefix('torch.'))
        device = self.device or ('cuda' if torch.cuda.is_available() else 'cpu')
        backbone = create_backbone(None, self.checkpoint, prefix=self.prefix)
        on_device(backbone, device)
        self._extraction = Extraction(
            backbone,
            self.normalization,
            self.levels,
            page=self.page,
            max_side=self.max_side,
            autocast=self.autocast,
        )
        self._runner = Runner(self._extraction, self.pool, self.batch_size, self.workers)
        self._seen: set[Header | None] = set()  # kinds of images that were checked

    def __reduce__(self) -> Any:
        return partial(type(self), **{field.name: getattr(self, field.name) for field in fields(self)}), ()

    def __call__(self, rows: Mapping[str, Any]) -> dict[str, Any]:
        """Return the features of a batch of images.

        Args:
            rows: columns, as numpy arrays or lists of equal length. The images are the first of these columns
                that exists: 'bytes' (contents of image files), 'image' (decoded images, or any other source of
                :func:`swin_dense.images.reading.read_image`), 'path'.

        Returns:
            The given columns except 'bytes' and 'image', and in addition 'level_s' (B, C) for each stride s, 'height'
            and 'width' in pixels, and 'error', an empty string on success. A row with an error has NaN features and
            zero height and width.

        Raises:
            ValueError: there is no column of images.
        """
        column = next((name for name in COLUMNS if name in rows), None)
        if column is None:
            raise ValueError(f'one of the columns {list(COLUMNS)} must contain the images, got {list(rows)}')
        images = rows[column]
        count = len(images)
        backbone = self._extraction.backbone
        channels = dict(zip(backbone.out_strides, backbone.out_channels, strict=True))
        vectors = {s: np.full((count, channels[s]), np.nan, self._number) for s in self._extraction.levels or ()}
        sizes = np.zeros((count, 2), np.int64)
        errors = np.full(count, '', object)  # not None: Arrow would infer the null type for a batch without errors
        for note in self._extraction.notes_on(images, self._seen):
            _logger.warning('%s', note)
        items = (Item(str(index), image) for index, image in enumerate(images))
        with contextlib.closing(self._runner.run(items)) as results:
            for item, size, levels in results:
                index = int(item.name)
                if isinstance(levels, str):
                    errors[index] = levels
                    continue
                sizes[index] = size
                for stride, vector in levels.items():
                    vectors[stride][index] = vector
        others = {name: values for name, values in rows.items() if name not in ('bytes', 'image')}
        features = {f'level_{stride}': values for stride, values in vectors.items()}
        return {**others, **features, 'height': sizes[:, 0], 'width': sizes[:, 1], 'error': errors}
