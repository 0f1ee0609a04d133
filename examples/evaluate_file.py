"""Score an exported file, without torch: AP of a detector by pycocotools, IoU of a segmentor by numpy, for each class.

    python examples/evaluate_file.py model.onnx data/coco/val2017 data/coco/annotations/instances_val2017.json
    python examples/evaluate_file.py model.onnx data/roads/val data/roads/val_masks

The last argument is a file in COCO's format, or the folder of masks with the names of the images. The names of the
classes, the values of the masks and those that are ignored are those of the config that the file was exported from.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from swin_dense import runtime

IGNORED = 255  # label of pixels that do not count


def average_precision(model: Callable, images: Path, annotations: Path) -> dict[str, float]:
    """Return the AP of boxes and of masks, if the model has masks; the arguments are those of precisions_of_classes."""
    found = precisions_of_classes(model, images, annotations)
    return {kind: mean(by_class.values()) for kind, by_class in found.items()}


def precisions_of_classes(model: Callable, images: Path, annotations: Path) -> dict[str, dict[str, float]]:
    """Return the AP of boxes and of masks, if the model has masks, by class; nan for one without objects.

    Args:
        model: a function of a path that returns a record as ``swin_dense.runtime.Model`` does, with all scores.
    """
    truth = read_annotations(annotations)
    ids = {one['name']: one['id'] for one in truth.loadCats(truth.getCatIds())}
    results = []
    for image in truth.loadImgs(truth.getImgIds()):
        for one in model(images / image['file_name'])['instances']:
            if one['class'] not in ids:
                raise ValueError(
                    f'the model predicts {one["class"]!r}, which is no category of {annotations}, whose categories are '
                    f'{", ".join(ids)}'
                )
            left, top, right, bottom = one['box']
            result = {'image_id': image['id'], 'category_id': ids[one['class']], 'score': one['score']}
            result['bbox'] = [left, top, right - left, bottom - top]
            results.append(result | ({'segmentation': one['mask']} if 'mask' in one else {}))
    kinds = ['bbox', 'segm'] if results and 'segmentation' in results[0] else ['bbox']
    return {kind: _evaluated(truth, results, kind) for kind in kinds}


def read_annotations(path: Path) -> COCO:
    """Read a file in COCO's format, and number its annotations from 1: pycocotools takes an id of 0 for no match."""
    truth = COCO(str(path))
    for number, one in enumerate(truth.dataset['annotations'], 1):
        one['id'] = number
        one.setdefault('iscrowd', 0)
        one.setdefault('area', one['bbox'][2] * one['bbox'][3])
    truth.createIndex()
    return truth


def _evaluated(truth: COCO, results: list[dict], kind: str) -> dict[str, float]:
    found = COCO()  # of loadRes, which takes no empty list
    found.dataset = {**truth.dataset, 'annotations': []}
    found.createIndex()
    evaluation = COCOeval(truth, truth.loadRes(results) if results else found, kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    # By IoU, recall, class, range of areas (first all) and number of instances for each image (last the largest).
    precisions = evaluation.eval['precision'][:, :, :, 0, -1]
    names = [one['name'] for one in truth.loadCats(evaluation.params.catIds)]
    by_class = {}
    for index, name in enumerate(names):
        values = precisions[:, :, index]
        by_class[name] = float(values.mean()) if (values > -1).all() else np.nan
    return by_class


def mean_iou(predict: Callable, images: Path, masks: Path, classes: int, labels: Sequence[int] | None = None) -> float:
    """Return the mean of the IoU of all classes that occur; the arguments are those of ious_of_classes."""
    return mean(ious_of_classes(predict, images, masks, classes, labels))


def ious_of_classes(
    predict: Callable, images: Path, masks: Path, classes: int, labels: Sequence[int] | None = None
) -> list[float]:
    """Return the intersection over union of each class, over all images together; nan for one that does not occur.

    Args:
        predict: a function of a path that returns the class of every pixel, (H, W).
        labels: the class of each value of a mask, 0 to 255, where 255 is ignored; None if it is the value itself.
    """
    label_of_value = np.arange(256) if labels is None else np.asarray(labels)
    by_stem: dict[str, Path] = {}
    for path in sorted(images.iterdir()):
        if path.stem in by_stem:
            raise ValueError(f'{by_stem[path.stem]} and {path} have the same mask; move one of them away')
        by_stem[path.stem] = path
    counts = np.zeros((classes, classes), np.int64)  # pixels by true and predicted class
    for mask in sorted(masks.iterdir()):
        if mask.stem not in by_stem:
            raise ValueError(f'there is no image {images / mask.stem}.* for the mask {mask}')
        values = np.array(Image.open(mask))
        found = np.asarray(predict(by_stem[mask.stem]), np.int64)
        if values.shape != found.shape or values.max() > 255:
            raise ValueError(
                f'the mask {mask} is an array {values.shape} with values up to {values.max()}; it must have the size '
                f'of its image, {found.shape}, and one channel of 8 bits'
            )
        true = label_of_value[values]
        known = true != IGNORED
        wrong = np.unique(values[known & (true >= classes)])
        if len(wrong):
            raise ValueError(
                f'the mask {mask} has the values {", ".join(map(str, wrong))}, which the config of the model neither '
                'maps to a class (--mask-values) nor ignores (--ignore)'
            )
        counts += np.bincount(true[known] * classes + found[known], minlength=classes**2).reshape(classes, classes)
    if np.count_nonzero(counts.sum(1)) <= 1 and labels is None:
        raise ValueError(
            f'the masks in {masks} have pixels of one class at most, beside those that are ignored; if their values '
            'are not the indices of the classes, give labels'
        )
    union = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return [float(both / either) if either else np.nan for both, either in zip(counts.diagonal(), union, strict=True)]


def mean(values: Sequence[float]) -> float:
    """Return the mean of the values that are numbers."""
    return float(np.nanmean(list(values)))


def print_scores(title: str, scores: Mapping[str, float]) -> None:
    """Print the mean of scores, and that of each class."""
    print(f'{title} {mean(scores.values()):.4f}')
    for name, score in scores.items():
        print(f'  {name}: ' + ('does not occur' if np.isnan(score) else f'{score:.4f}'))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', help='.onnx file of swin-dense export')
    parser.add_argument('images', type=Path)
    parser.add_argument('truth', type=Path, help='.json file, or folder of masks')
    args = parser.parse_args()
    model = runtime.load(args.model, score=0)
    if args.truth.is_dir():
        labels = model.facts.get('label_of_mask_value')
        scores = ious_of_classes(
            lambda image: model.predict(image, paint=False).labels, args.images, args.truth, len(model.classes), labels
        )
        print_scores('mIoU', dict(zip(model.classes, scores, strict=True)))
    else:
        for kind, by_class in precisions_of_classes(model, args.images, args.truth).items():
            print_scores(f'AP of {kind}', by_class)


if __name__ == '__main__':
    main()
