"""What a data set's first transform makes of images: from all headers, and from one decoded image of each kind."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, NamedTuple

import numpy as np
from mmengine.registry import TRANSFORMS

from swin_dense.images.headers import read_header
from swin_dense.images.kinds import TRANSPOSED, Reader, notes_on_losses, read_kinds, scale_of, view
from swin_dense.images.pixels import ImageError
from swin_dense.images.reading import pixels_of
from swin_dense.utils import checks
from swin_dense.workbench.configs.experiment import FILE_LOADERS, is_local
from swin_dense.workbench.configs.files import missing_files

_ASKED = 5  # images that another loader is asked for
_NAMED = 5  # files that an error names


class LoadedSize(NamedTuple):
    """How an image is loaded: its size (width, height), its EXIF orientation, and whether that is applied."""

    size: tuple[int, int]
    orientation: int
    is_upright: bool


class ImageReport(NamedTuple):
    """What :func:`check_images` returns."""

    missing: dict[str, str]
    loaded: dict[str, LoadedSize]
    notes: list[str]


def check_images(
    paths: Sequence[str],
    load: Any,
    most: int = 1000,
    every_image: bool = False,
    samples: Mapping[str, Any] | None = None,
) -> ImageReport:
    """Check the headers of images, and decode one image of each kind of header, or every image.

    A transform of another class, or with a storage backend, is asked for some images: only it knows whether they exist.

    Args:
        paths: the images.
        load: the config of the transform that loads them.
        most: the number of headers to read at most, evenly spaced.
        every_image: whether to decode every image.
        samples: by path, the dict of the data set that the transform gets; without, a dict with only ``img_path``.

    Returns:
        missing: the images that are no files, with the reason; if there are any, nothing else was checked.
        loaded: how the checked images are loaded, as far as their headers can be read.
        notes: what loading loses or turns.

    Raises:
        ValueError: images cannot be decoded.
    """
    name = load.get('type', '').rpartition('.')[2]
    if not reads_files(load):
        return ImageReport({}, _ask(sample_evenly(paths, _ASKED, every_image), load, samples or {}), [])
    missing = missing_files(paths)
    if missing:
        return ImageReport(missing, {}, [])
    paths = sample_evenly(paths, most, every_image)
    decode = _decoder(load, name)
    if every_image:
        _check_decodable(paths, decode)
    kinds = read_kinds(paths, _reader(load, name, decode))
    found: dict[str, LoadedSize] = {}
    hidden: dict[bool, list[str]] = {True: [], False: []}  # by whether they are read upright
    for kind in kinds:
        if kind.header is None:
            found[kind.decoded] = LoadedSize((kind.shape[1], kind.shape[0]), 1, True)
            continue
        orientation = kind.header.orientation
        is_transposed = orientation in TRANSPOSED
        for path, (width, height) in kind.files:
            size = (height, width) if kind.is_upright and is_transposed else (width, height)
            found[path] = LoadedSize(size, orientation, kind.is_upright)
            if orientation in (2, 3, 4) or (is_transposed and width == height):
                hidden[kind.is_upright].append(path)
    notes = notes_on_losses(kinds, len(paths))
    for is_upright, turned in hidden.items():
        if turned:
            cure = 'color_type=color_ignore_orientation of LoadImageFromFile reads files other than TIFF as stored'
            notes.append(
                f'{len(turned)} of {len(paths)} images, such as {turned[0]}, have an EXIF orientation that their sizes '
                f'do not show, and are read {view(is_upright)}: their annotations must be of the same view'
                + (f' ({cure})' if is_upright and name == 'LoadImageFromFile' else '')
            )
    return ImageReport({}, found, notes)


def reads_files(load: Any) -> bool:
    """Return whether a transform reads an image from the local file at its path."""
    return load.get('type', '').rpartition('.')[2] in FILE_LOADERS and is_local(load)


def _ask(paths: Sequence[str], load: Any, samples: Mapping[str, Any]) -> dict[str, LoadedSize]:
    """Load images with a transform of any class; raise ValueError for those that it cannot load."""
    transform = TRANSFORMS.build(dict(load))
    found = {}
    reasons = []
    for path in paths:
        try:
            results = transform(copy.deepcopy(samples.get(path, {'img_path': path})))
            if results is None:
                raise ValueError('it returns None')
        except Exception as error:  # of any loader
            reasons.append(f'{path} ({type(error).__name__}: {error})')
            continue
        if isinstance(results.get('img'), np.ndarray):
            found[path] = LoadedSize(results['img'].shape[1::-1], 1, True)
    if reasons:
        raise ValueError(
            f'{load["type"]} cannot load {len(reasons)} of {len(paths)} images: {checks.first_few(reasons)}'
        )
    return found


def _reader(load: Any, name: str, decode: Callable[[str], Any]) -> Reader:
    """Return what a transform keeps of images; it raises ValueError for those that cannot be decoded."""

    def checked(path: str) -> Any:
        _check_decodable([path], decode)
        return decode(path)

    def stored(path: str) -> Any:
        checked(path)  # also its normalisation
        return bands.stored(pixels_of(path)).permute(1, 2, 0).numpy()

    if name == 'LoadImageFromFile':
        return Reader(name, checked, _read_whole)
    bands = TRANSFORMS.build(load)
    fills_range = bands.normalization.scale is None
    return Reader(name, stored, _read_whole, fills_range, chooses_bands=True)


def _read_whole(options: Mapping[str, Any]) -> str:
    how = ', '.join(f'{option}={value}' for option, value in {**options, 'mean': 0, 'std': 1}.items())
    return f'LoadBands(normalization=dict({how})) reads them whole: docs/geotiff.md'


def _decoder(load: Any, name: str) -> Callable[[str], Any]:
    """Return the function that decodes a path as a transform does, (H, W) or (H, W, C), in the type of its decoder."""
    import mmcv.transforms  # noqa: F401  registers LoadImageFromFile

    step = dict(load)
    if name == 'LoadImageFromFile':
        step['to_float32'] = False
    transform = TRANSFORMS.build(step)

    def decode(path: str) -> Any:
        results = transform({'img_path': path})
        if results is None:
            raise ValueError('it cannot be decoded')
        return results['img']

    return decode


def _check_decodable(paths: Sequence[str], decode: Callable[[str], Any]) -> None:
    """Raise ValueError if some images cannot be decoded."""

    def reason(path: str) -> str:
        try:
            decode(path)
            return ''
        except Exception as error:  # of any decoder
            return str(error) or type(error).__name__

    with ThreadPoolExecutor() as pool:
        why = dict(zip(paths, pool.map(reason, paths), strict=True))
    damaged = [path for path in paths if why[path]]
    if damaged:
        described = []
        for path in damaged[:_NAMED]:
            header = read_header(path)
            kind = 'its header cannot be read'
            if header is not None:
                kind = f'{header.format}, {header.bands} bands of {header.bits} bits'
                kind += ' as floats' * (header.kind == 'f')
            described.append(f'{path} ({kind}: {why[path]})')
        shown = ', '.join(described) + ', ...' * (len(damaged) > _NAMED)
        raise ValueError(f'{len(damaged)} of {len(paths)} images cannot be decoded: {shown}; {_cure(damaged[0])}')


def _cure(path: str) -> str:
    """Return what to do about an image that the framework cannot decode."""
    try:
        values = pixels_of(path).values
    except (ImageError, OSError):
        return 'replace them'
    bands = 1 if values.ndim == 2 else values.shape[2]
    how = f'scale={scale_of(values)}, mean=0, std=1, bands={tuple(range(bands))}'
    return f'read them with LoadBands(normalization=dict({how})): docs/geotiff.md'


def other_size(said: str, size: tuple[int, int], read: str, loaded: LoadedSize, advice: str) -> str:
    """Return what to say of an image that is loaded in another size than its annotations have.

    ``said`` and ``read`` begin the two halves of the sentence; ``advice`` is for where its orientation is not why.
    """
    sizes = f'{said} {size[0]:g} x {size[1]:g} pixels, but {read} as {loaded.size[0]} x {loaded.size[1]}'
    if loaded.orientation not in TRANSPOSED or size != loaded.size[::-1]:
        return f'{sizes}; {advice}'
    if loaded.is_upright:
        return (
            f'{sizes} after its EXIF orientation; annotate upright images, or read them as stored, in each split: '
            '--set train_dataloader.dataset.pipeline.0.color_type=color_ignore_orientation'
        )
    return (
        f'{sizes} without its EXIF orientation; annotate the images as stored, or read them upright, in each split: '
        '--set train_dataloader.dataset.pipeline.0.color_type=color'
    )


def sample_evenly(items: Sequence[Any], count: int, every_image: bool = False) -> list[Any]:
    """Return the items to look at: up to ``count`` evenly spaced ones, or all."""
    count = len(items) if every_image else min(count, len(items))
    indices = np.linspace(0, len(items) - 1, count)
    return [items[round(index)] for index in indices]
