"""Score an exported file, without torch: AP of a detector by pycocotools, mIoU of a segmentor by numpy.

    python examples/evaluate_file.py model.onnx data/coco/val2017 data/coco/annotations/instances_val2017.json
    python examples/evaluate_file.py model.onnx data/roads/val data/roads/val_masks

The last argument is a file in COCO's format, or the folder of masks with the names of the images, whose values are the
indices of the classes; 255 is ignored.
"""

import argparse
from collections.abc import Callable
from pathlib import Path

import numpy as np
from PIL import Image
from pycocotools.coco import COCO
from pycocotools.cocoeval import COCOeval

from swin_dense import runtime

IGNORED = 255


def average_precision(model: Callable, images: Path, annotations: Path) -> dict[str, float]:
    """Return the AP of boxes and of masks, if the model has masks.

    Args:
        model: a function of a path that returns a record as ``swin_dense.runtime.Model`` does, with all scores.
    """
    truth = COCO(str(annotations))
    ids = {one['name']: one['id'] for one in truth.loadCats(truth.getCatIds())}
    results = []
    for image in truth.loadImgs(truth.getImgIds()):
        for one in model(images / image['file_name'])['instances']:
            left, top, right, bottom = one['box']
            result = {'image_id': image['id'], 'category_id': ids[one['class']], 'score': one['score']}
            result['bbox'] = [left, top, right - left, bottom - top]
            results.append(result | ({'segmentation': one['mask']} if 'mask' in one else {}))
    kinds = ['bbox', 'segm'] if results and 'segmentation' in results[0] else ['bbox']
    return {kind: _evaluated(truth, results, kind) for kind in kinds}


def _evaluated(truth: COCO, results: list[dict], kind: str) -> float:
    evaluation = COCOeval(truth, truth.loadRes(results), kind)
    evaluation.evaluate()
    evaluation.accumulate()
    evaluation.summarize()
    return float(evaluation.stats[0])


def mean_iou(predict: Callable, images: Path, masks: Path, classes: int) -> float:
    """Return the mean over classes of intersection over union, of all pixels of all images together.

    Args:
        predict: a function of a path that returns the class of every pixel, (H, W).
    """
    counts = np.zeros((classes, classes), np.int64)  # pixels by true and predicted class
    for mask in sorted(masks.iterdir()):
        (image,) = images.glob(f'{mask.stem}.*')
        true = np.array(Image.open(mask)).astype(np.int64)
        found = np.asarray(predict(image), np.int64)
        known = true != IGNORED
        counts += np.bincount(true[known] * classes + found[known], minlength=classes**2).reshape(classes, classes)
    union = counts.sum(0) + counts.sum(1) - counts.diagonal()
    return float((counts.diagonal()[union > 0] / union[union > 0]).mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('model', help='.onnx file of swin-dense export')
    parser.add_argument('images', type=Path)
    parser.add_argument('truth', type=Path, help='.json file, or folder of masks')
    args = parser.parse_args()
    model = runtime.load(args.model, score=0)
    if args.truth.is_dir():
        score = mean_iou(lambda image: model.predict(image).labels, args.images, args.truth, len(model.classes))
        print(f'mIoU {score:.4f}')
    else:
        print(average_precision(model, args.images, args.truth))


if __name__ == '__main__':
    main()
