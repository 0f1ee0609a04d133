"""Generate a small data set in the formats of COCO and ADE20K: shapes pasted onto photographs.

The photographs are part of scikit-image and matplotlib, so nothing is downloaded. Training and validation use different
photographs. OUT/coco and OUT/ADEChallengeData2016 have the layout of the real data sets and contain the same scenes.
"""

from __future__ import annotations

import argparse
import colorsys
import json
import math
import shutil
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import matplotlib
import numpy as np
import skimage.data
from PIL import Image, ImageDraw
from skimage.measure import find_contours, label
from tqdm import tqdm

PHOTOGRAPHS = {
    'train': ['astronaut.png', 'coffee.png', 'rocket.jpg', 'motorcycle_left.png', 'grass.png', 'camera.png', 'ihc.png'],
    'val': ['grace_hopper.jpg', 'chelsea.png', 'gravel.png', 'brick.png', 'coins.png'],
}
# ADE20K has no classes for shapes. Each has the name of a similar class, in both formats: a disc is a ball, a ring a
# clock, a square a box, a triangle a flag, and a star a light. The ids of COCO have gaps.
CATEGORIES = {'ball': 1, 'clock': 2, 'box': 4, 'flag': 7, 'light': 8}
ADE_LABELS = {'ball': 120, 'clock': 149, 'box': 42, 'flag': 150, 'light': 83}
ADE_BACKGROUND = 1  # wall
ADE_NOT_ANNOTATED = 0
# The ranges of hues overlap, so that colour is not sufficient to classify a shape.
HUES = {'ball': 0.0, 'clock': 0.2, 'box': 0.4, 'flag': 0.6, 'light': 0.8}
HUE_SPREAD = 0.13
ADE_FOLDERS = {'train': 'training', 'val': 'validation'}
SUPERSAMPLING = 4


@dataclass
class Instance:
    """The visible part of one object, or of a crowd of objects."""

    category: str
    mask: np.ndarray
    is_crowd: bool = False


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('out', type=Path, metavar='OUT', help='output folder')
    parser.add_argument('--train', type=int, default=240, help='training images (default: %(default)s)')
    parser.add_argument('--val', type=int, default=60, help='validation images (default: %(default)s)')
    parser.add_argument('--seed', type=int, default=0, help='the same seed makes the same files (default: %(default)s)')
    parser.add_argument('--force', action='store_true', help='replace an existing output folder')
    args = parser.parse_args()
    if args.train < 1 or args.val < 1:
        parser.error(f'--train and --val must be at least 1, got {args.train} and {args.val}')
    if args.out.exists() and not args.force:
        parser.error(f'{args.out} already exists; give another folder, or --force to replace it')

    args.out.absolute().parent.mkdir(parents=True, exist_ok=True)
    # Write to a temporary folder and rename it at the end, so that an incomplete data set is never used.
    unfinished = Path(tempfile.mkdtemp(prefix=f'.{args.out.name}-', dir=args.out.absolute().parent))
    try:
        for split, count in (('train', args.train), ('val', args.val)):
            write_split(unfinished, split, count, args.seed)
        if args.out.exists():
            shutil.rmtree(args.out)
        unfinished.chmod(0o755)
        unfinished.rename(args.out)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)
    print(
        f'{args.train} training and {args.val} validation images in {args.out}/coco and {args.out}/ADEChallengeData2016'
    )


def write_split(root: Path, split: str, count: int, seed: int) -> None:
    """Write one split in both formats to ``root``."""
    images = root / 'coco' / f'{split}2017'
    ade_images = root / 'ADEChallengeData2016' / 'images' / ADE_FOLDERS[split]
    ade_labels = root / 'ADEChallengeData2016' / 'annotations' / ADE_FOLDERS[split]
    for folder in (images, ade_images, ade_labels, root / 'coco' / 'annotations'):
        folder.mkdir(parents=True, exist_ok=True)

    rng = np.random.default_rng([seed, split == 'val'])
    photographs = [load_photograph(name) for name in PHOTOGRAPHS[split]]
    coco: dict[str, list] = {
        'images': [],
        'annotations': [],
        'categories': [{'id': id_, 'name': name, 'supercategory': 'shape'} for name, id_ in CATEGORIES.items()],
    }
    for number in tqdm(range(1, count + 1), f'{split} images'):
        image, instances = make_scene(rng, photographs[rng.integers(len(photographs))])
        height, width = image.shape[:2]
        Image.fromarray(image).save(images / f'{number:012}.jpg', quality=92)
        coco['images'].append({'id': number, 'file_name': f'{number:012}.jpg', 'height': height, 'width': width})
        for instance in instances:
            coco['annotations'].append(annotation(instance, number, len(coco['annotations']) + 1))
        name = f'ADE_{split}_{number:08}'
        shutil.copy(images / f'{number:012}.jpg', ade_images / f'{name}.jpg')
        Image.fromarray(label_map(instances, image.shape[:2])).save(ade_labels / f'{name}.png')
    (root / 'coco' / 'annotations' / f'instances_{split}2017.json').write_text(json.dumps(coco))


def load_photograph(name: str) -> np.ndarray:
    """Return a photograph of scikit-image or matplotlib as (H, W, 3) uint8."""
    folders = Path(skimage.data.__file__).parent, Path(matplotlib.get_data_path(), 'sample_data')
    path = next(folder / name for folder in folders if (folder / name).is_file())
    return np.asarray(Image.open(path).convert('RGB'))


def make_scene(rng: np.random.Generator, photograph: np.ndarray) -> tuple[np.ndarray, list[Instance]]:
    """Return an image and its visible instances, from the bottom to the top layer."""
    height, width = (int(side) for side in 16 * rng.integers(8, 13, 2))
    zoom = rng.uniform(1.0, min(2.0, photograph.shape[0] / height, photograph.shape[1] / width))
    crop_height, crop_width = int(height * zoom), int(width * zoom)
    top = rng.integers(photograph.shape[0] - crop_height + 1)
    left = rng.integers(photograph.shape[1] - crop_width + 1)
    crop = Image.fromarray(photograph[top : top + crop_height, left : left + crop_width])
    image = np.asarray(crop.resize((width, height), Image.Resampling.BICUBIC)).astype(np.float32)
    image = np.clip(image * rng.uniform(0.7, 1.1), 0, 255)

    pasted = []
    if rng.random() < 0.15:
        crowd = np.zeros((height, width), bool)
        center = rng.uniform(0.2, 0.8, 2) * (width, height)
        for _ in range(rng.integers(8, 14)):
            position = center + rng.normal(0, 12, 2)
            crowd |= paste(rng, image, 'ball', position, radius=rng.uniform(3, 5))
        pasted.append(Instance('ball', crowd, is_crowd=True))
    for category in rng.choice(list(CATEGORIES), rng.integers(2, 6)):
        position = rng.uniform(0.1, 0.9, 2) * (width, height)
        pasted.append(Instance(str(category), paste(rng, image, str(category), position, rng.uniform(12, 34))))

    return image.astype(np.uint8), list(visible(pasted))


def paste(
    rng: np.random.Generator, image: np.ndarray, category: str, position: np.ndarray, radius: float
) -> np.ndarray:
    """Draw one shape into ``image`` in place and return its mask, (H, W) bool."""
    height, width = image.shape[:2]
    canvas = Image.new('L', (width * SUPERSAMPLING, height * SUPERSAMPLING))
    draw = ImageDraw.Draw(canvas)
    draw.polygon([tuple(SUPERSAMPLING * point) for point in outline(rng, category, position, radius)], fill=255)
    if category == 'clock':
        x, y = SUPERSAMPLING * position
        hole = SUPERSAMPLING * radius * 0.5
        draw.ellipse((x - hole, y - hole, x + hole, y + hole), fill=0)
    alpha = np.asarray(canvas.resize((width, height), Image.Resampling.BOX)).astype(np.float32)[..., None] / 255
    hue = (HUES[category] + rng.uniform(-HUE_SPREAD, HUE_SPREAD)) % 1
    colour = 255 * np.array(colorsys.hsv_to_rgb(hue, rng.uniform(0.6, 1.0), rng.uniform(0.6, 1.0)))
    texture = 0.25 * (image[::-1, ::-1] - 128)
    image[:] = (1 - alpha) * image + alpha * np.clip(colour + texture, 0, 255)
    return alpha[..., 0] > 0.5


def outline(rng: np.random.Generator, category: str, center: np.ndarray, radius: float) -> np.ndarray:
    """Return the corners of a shape, (corners, 2) as x and y in pixels."""
    corners = {'ball': 64, 'clock': 64, 'box': 4, 'flag': 3, 'light': 10}[category]
    angles = rng.uniform(0, 2 * math.pi) + np.arange(corners) * 2 * math.pi / corners
    radii = np.full(corners, radius)
    if category == 'light':
        radii[::2] *= 0.45
    return center + radii[:, None] * np.stack([np.cos(angles), np.sin(angles)], 1)


def visible(pasted: list[Instance]) -> Iterator[Instance]:
    """Yield the instances without the parts covered by later ones. Nearly hidden instances are omitted."""
    for index, instance in enumerate(pasted):
        covered = np.zeros_like(instance.mask)
        for later in pasted[index + 1 :]:
            covered |= later.mask
        mask = instance.mask & ~covered
        if mask.sum() >= max(60, 0.35 * instance.mask.sum()):
            yield Instance(instance.category, mask, instance.is_crowd)


def annotation(instance: Instance, image_id: int, id_: int) -> dict:
    """Return an instance as an annotation in COCO format."""
    mask = instance.mask
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    has_hole = label(~np.pad(mask, 1), connectivity=1).max() > 1
    return {
        'id': id_,
        'image_id': image_id,
        'category_id': CATEGORIES[instance.category],
        'bbox': [int(v) for v in (columns[0], rows[0], np.ptp(columns) + 1, np.ptp(rows) + 1)],
        'area': int(mask.sum()),
        'iscrowd': int(instance.is_crowd),
        # Polygons cannot have holes, and COCO encodes crowds as run lengths.
        'segmentation': encode_rle(mask) if instance.is_crowd or has_hole else polygons(mask),
    }


def encode_rle(mask: np.ndarray) -> dict:
    """Return COCO's uncompressed run-length encoding: alternating runs of 0 and 1, column by column."""
    flat = mask.flatten(order='F')
    changes = np.flatnonzero(np.diff(flat)) + 1
    counts = np.diff([0, *changes, len(flat)]).tolist()
    return {'size': list(mask.shape), 'counts': [0, *counts] if flat[0] else counts}


def polygons(mask: np.ndarray) -> list[list[float]]:
    """Return the outlines of a mask without holes, in COCO's order x1, y1, x2, y2, ..."""
    # find_contours places pixel centres at integers; in COCO the origin is the corner of the first pixel.
    contours = [contour - 0.5 for contour in find_contours(np.pad(mask, 1).astype(float), 0.5)]
    return [contour[:-1, ::-1].round(2).flatten().tolist() for contour in contours]


def label_map(instances: list[Instance], size: tuple[int, int]) -> np.ndarray:
    """Return an ADE20K label map. Crowds are labelled as not annotated."""
    labels = np.full(size, ADE_BACKGROUND, np.uint8)
    for instance in instances:
        labels[instance.mask] = ADE_NOT_ANNOTATED if instance.is_crowd else ADE_LABELS[instance.category]
    return labels


if __name__ == '__main__':
    main()
