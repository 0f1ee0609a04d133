"""Metrics of a framework and of exported files on the validation images, and panoptic quality."""

import copy
import json
from collections import Counter
from pathlib import Path

import numpy as np
import torch
from mmengine.registry import METRICS, init_default_scope
from mmengine.runner import Runner
from mmengine.structures import InstanceData, PixelData
from PIL import Image
from pycocotools.coco import COCO


@torch.no_grad()
def accuracy(config, model, files):
    """Return the metrics of a model, and of each file in its runtime, on the validation images.

    For a panoptic model these include the panoptic quality ``PQ``, with the annotations of ``annotated_segments``.
    """
    init_default_scope(config.default_scope)
    loader = Runner.build_dataloader(config.val_dataloader)
    evaluators = [METRICS.build(config.val_evaluator) for _ in (model, *files)]
    for evaluator in evaluators:
        evaluator.dataset_meta = loader.dataset.metainfo
    panoptic = [[] for _ in evaluators]
    for batch in loader:
        expected = model.test_step(copy.deepcopy(batch))
        for evaluator, file, maps in zip(evaluators, (None, *files), panoptic, strict=True):
            samples = [sample if file is None else with_prediction(sample, file) for sample in expected]
            evaluator.process(batch, [sample.to_dict() for sample in samples])
            maps += [
                (sample.img_id, sample.pred_panoptic_seg.sem_seg[0].numpy())
                for sample in samples
                if 'pred_panoptic_seg' in sample
            ]
    found = [
        {name: float(value) for name, value in evaluator.evaluate(len(loader.dataset)).items()}
        for evaluator in evaluators
    ]
    if panoptic[0]:
        truth = annotated_segments(config.val_dataloader.dataset)
        for metrics, maps in zip(found, panoptic, strict=True):
            metrics['PQ'] = panoptic_quality(
                [(truth[image], ids) for image, ids in maps], len(loader.dataset.metainfo['classes'])
            )
    return found


def with_prediction(sample, file):
    """Return a copy of a framework's sample with the prediction of a file instead of the framework's."""
    sample = copy.deepcopy(sample)
    prediction = file.predict(sample.img_path)
    if prediction.labels is not None:
        sample.pred_sem_seg = PixelData(data=torch.from_numpy(prediction.labels)[None])
        return sample
    if prediction.panoptic is not None:
        sample.pred_panoptic_seg = PixelData(sem_seg=torch.from_numpy(prediction.panoptic)[None])
    found = prediction.record['instances']
    sample.pred_instances = InstanceData(
        bboxes=torch.tensor([one['box'] for one in found]).reshape(-1, 4),
        scores=torch.tensor([one['score'] for one in found]),
        labels=torch.tensor([one['label'] for one in found], dtype=torch.int64),
    )
    if found and 'mask' in found[0]:
        sample.pred_instances.masks = [one['mask'] for one in found]
    return sample


def annotated_segments(dataset):
    """Return the annotated map of segments of each image by its id: class plus 1000 times a number; -1 is not known.

    Args:
        dataset: config of a ``CocoDataset`` with masks of instances, and maps of the other classes in ``seg``.
    """
    root = Path(dataset.data_root)
    content = json.loads((root / dataset.ann_file).read_text())
    coco = COCO(root / dataset.ann_file)
    labels = {category['id']: dataset.metainfo.classes.index(category['name']) for category in content['categories']}
    maps = {}
    for image in content['images']:
        background = np.asarray(Image.open(root / dataset.data_prefix.seg / f'{Path(image["file_name"]).stem}.png'))
        ids = np.where(background == 255, -1, background.astype(int))
        for number, annotation in enumerate(coco.imgToAnns[image['id']], 1):
            mask = coco.annToMask(annotation).astype(bool)
            ids[mask] = -1 if annotation['iscrowd'] else labels[annotation['category_id']] + 1000 * number
        maps[image['id']] = ids
    return maps


def panoptic_quality(pairs, classes):
    """Return the mean panoptic quality over the classes that are annotated or predicted.

    Args:
        pairs: for each image, the annotated map of segments, in which -1 is ignored, and the predicted one, in which
            the number of classes means no segment.
        classes: number of classes.
    """
    overlap, hits, predicted, annotated = Counter(), Counter(), Counter(), Counter()
    for truth, found in pairs:
        matched = set()
        for segment in set(np.unique(truth)) - {-1}:
            mask = truth == segment
            annotated[segment % 1000] += 1
            for other in set(np.unique(found[mask])) - {classes}:
                both = (mask & (found == other)).sum()
                union = mask.sum() + ((found == other) & (truth != -1)).sum() - both
                if other % 1000 == segment % 1000 and both / union > 0.5:
                    overlap[segment % 1000] += both / union
                    hits[segment % 1000] += 1
                    matched.add(other)
        for other in set(np.unique(found)) - {classes}:
            mask = found == other
            if other in matched or (mask & (truth != -1)).sum() > 0.5 * mask.sum():
                predicted[other % 1000] += 1
    return float(np.mean([2 * overlap[one] / (annotated[one] + predicted[one]) for one in annotated | predicted]))
