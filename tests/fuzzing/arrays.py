"""Arrays of any shape and type, with options of the feature extraction."""

from __future__ import annotations

import contextlib
import math
import warnings
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st

from swin_dense.features.pyramid import extract_pyramid
from tests.fuzzing.common import ODD, TAKEN, Kind, refused, some_of, toy
from tests.fuzzing.programs import words_of

SIDES = st.integers(1, 40)
ARRAYS = st.tuples(
    st.one_of(st.lists(st.integers(0, 9), max_size=4), st.tuples(SIDES, SIDES, st.just(3))),
    st.sampled_from(words_of('uint8 uint16 int32 float32 float64 bool >u2 complex64 object U1')),
    st.sampled_from([0, 1, 0.5, -3, 255, math.nan, math.inf]),
    st.booleans(),
)
PYRAMID_OPTIONS = {
    'levels': st.lists(st.sampled_from([4, 8, 16]), max_size=2),
    'mean': st.sampled_from([None, 0.5, (0.5, 0.5, 0.5), (100, 100, 100)]),
    'std': st.sampled_from([None, 0.5, (0.5, 0.5, 0.5), 0]),
    'bgr': st.booleans(),
    'batch_size': st.integers(-1, 3),
    'tile': st.one_of(st.sampled_from([56, 112]), st.integers(-1, 60)),
    'overlap': st.one_of(st.sampled_from([0, 56]), st.integers(-1, 60)),
    'page': st.integers(-1, 2),
    'max_side': st.integers(-1, 9),
    'device': st.sampled_from(['cpu', 'meta0', '']),
    'dtype': st.sampled_from(['float16', 'float64', 'int8', 'x', torch.float32, torch.int8]),
    'autocast': st.sampled_from(['bfloat16', 'float64', torch.bfloat16]),
    'gradients': st.booleans(),
}


def try_arrays(example: Any) -> str:
    (shape, dtype, value, as_tensor), options = example
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')  # casts of NaN and infinity to integers
        image: Any = np.full(shape, value).astype(dtype)
    if as_tensor:
        with contextlib.suppress(TypeError, ValueError):  # torch does not support every dtype of NumPy
            image = torch.from_numpy(image)
    try:
        pyramid = extract_pyramid(toy(), image, **options)
    except (ValueError, TypeError) as error:  # ImageError is a ValueError
        return refused(error)
    for single in pyramid if isinstance(pyramid, list) else [pyramid]:
        assert all(level.isfinite().all() for level in single.values())
    return TAKEN


KINDS = {
    'arrays for extract_pyramid, with options': Kind(st.tuples(ARRAYS, some_of(PYRAMID_OPTIONS, ODD)), try_arrays, 18),
}
