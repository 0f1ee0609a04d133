"""Count how many boxes of a detector in tiles agree with those of the whole image.

    python benchmarks/tiled_detections.py CONFIG CHECKPOINT DATA --json benchmarks/tiled_detections.json

CONFIG and CHECKPOINT are those of the Mask R-CNN of `make demo`, DATA its folder of data. The script joins validation
images to mosaics that fit into memory as a whole, runs the detector on each as a whole and in tiles, and matches
instances of the same class by their overlap (IoU of at least 0.5, each once, by descending score). It also counts
instances of which at least 0.8 lie in another one of their class: an object with another extent, or one in front of it.
"""

import argparse
import json
import tempfile
from pathlib import Path

import numpy as np
import torch
from PIL import Image
from pycocotools import mask as coco_mask

from swin_dense.recipes.files import load_recipe
from swin_dense.workbench.predict import Predictor

MOSAICS, ROWS, COLUMNS = 4, 3, 4
SETTINGS = ((192, 0), (192, 32), (192, 64), (192, 96))
SCORE = 0.3


def mosaics(data: Path, folder: Path) -> list[Path]:
    """Write images of ROWS x COLUMNS validation images each, shifted so that tiles do not coincide with them."""
    images = [np.asarray(Image.open(path)) for path in sorted((data / 'coco' / 'val2017').glob('*.jpg'))]
    height, width = (min(image.shape[axis] for image in images) for axis in (0, 1))
    images = [image[:height, :width] for image in images]
    paths = []
    for index in range(MOSAICS):
        chosen = [images[(index * ROWS * COLUMNS + offset) % len(images)] for offset in range(ROWS * COLUMNS)]
        rows = [np.concatenate(chosen[row * COLUMNS : (row + 1) * COLUMNS], 1) for row in range(ROWS)]
        paths.append(folder / f'{index}.png')
        Image.fromarray(np.concatenate(rows)[17:, 29:]).save(paths[-1])
    return paths


def matched(ours: list[dict], theirs: list[dict]) -> list[tuple[int, int]]:
    """Return pairs of indices of instances of the same class that overlap."""
    boxes = [[[x, y, right - x, bottom - y] for x, y, right, bottom in map(box_of, part)] for part in (ours, theirs)]
    overlaps = coco_mask.iou(*boxes, [0] * len(theirs)) if ours and theirs else np.zeros((len(ours), len(theirs)))
    pairs, taken = [], set()
    for index, one in enumerate(ours):
        free = [i for i, other in enumerate(theirs) if i not in taken and other['label'] == one['label']]
        best = max(free, key=lambda i: overlaps[index, i], default=None)
        if best is not None and overlaps[index, best] >= 0.5:
            pairs.append((index, best))
            taken.add(best)
    return pairs


def nested(instances: list[dict]) -> int:
    """Return the number of pairs of a class of which one box lies in the other."""
    boxes = [[x, y, right - x, bottom - y] for x, y, right, bottom in map(box_of, instances)]
    inside = coco_mask.iou(boxes, boxes, [1] * len(boxes)) >= 0.8 if boxes else np.zeros((0, 0), bool)
    labels = np.array([one['label'] for one in instances])
    return int(np.triu((inside | inside.T) & (labels[:, None] == labels), 1).sum())


def compared(predictor: Predictor, wholes: dict[Path, list[dict]], tile: int, overlap: int) -> dict:
    """Return counts over all mosaics, of objects up to the overlap and of all objects."""
    counts: dict = {'tile': tile, 'overlap': overlap, 'whole': 0, 'tiles': 0, 'agree': 0, 'up_to_overlap': 0}
    counts.update(up_to_overlap_agree=0, doubles=0, nested=0, nested_whole=0)
    offsets = []
    for path, whole in wholes.items():
        tiles = predictor.predict_tiles(str(path), tile, overlap).record['instances']
        pairs = matched(tiles, whole)
        found = {other for _, other in pairs}
        small = [i for i, one in enumerate(whole) if side(one) <= overlap]
        counts['whole'] += len(whole)
        counts['tiles'] += len(tiles)
        counts['agree'] += len(pairs)
        counts['up_to_overlap'] += len(small)
        counts['up_to_overlap_agree'] += len(found.intersection(small))
        rest = [one for i, one in enumerate(tiles) if i not in {ours for ours, _ in pairs}]
        counts['doubles'] += len(matched(rest, [whole[i] for i in found]))
        counts['nested'] += nested(tiles)
        counts['nested_whole'] += nested(whole)
        offsets += [np.abs(np.subtract(tiles[i]['box'], whole[j]['box'])).max() for i, j in pairs if j in small]
    counts['median_offset_pixels'] = round(float(np.median(offsets)), 3) if offsets else None
    counts['largest_offset_pixels'] = round(float(np.max(offsets)), 2) if offsets else None
    return counts


def box_of(instance: dict) -> list[float]:
    return instance['box']


def side(instance: dict) -> float:
    left, top, right, bottom = instance['box']
    return max(right - left, bottom - top)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('config')
    parser.add_argument('checkpoint')
    parser.add_argument('data', type=Path)
    parser.add_argument('--json', type=Path, help='file for the results')
    args = parser.parse_args()
    predictor = Predictor(load_recipe(args.config), args.checkpoint, 'cpu', SCORE)
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        paths = mosaics(args.data, Path(folder))
        size = Image.open(paths[0]).size[::-1]
        report = {'mosaics': len(paths), 'size': size, 'score': SCORE}
        wholes = {path: predictor.predict(str(path)).record['instances'] for path in paths}
        report['settings'] = [compared(predictor, wholes, *setting) for setting in SETTINGS]
    text = json.dumps(report, indent=2)
    print(text)
    if args.json:
        args.json.write_text(text + '\n')


if __name__ == '__main__':
    main()
