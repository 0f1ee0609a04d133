"""Metrics of a framework and of exported files on the validation images."""

import copy

import torch
from mmengine.registry import METRICS, init_default_scope
from mmengine.runner import Runner
from mmengine.structures import InstanceData, PixelData


@torch.no_grad()
def accuracy(config, model, files):
    """Return the metrics of a model, and of each file in its runtime, on the validation images."""
    init_default_scope(config.default_scope)
    loader = Runner.build_dataloader(config.val_dataloader)
    evaluators = [METRICS.build(config.val_evaluator) for _ in (model, *files)]
    for evaluator in evaluators:
        evaluator.dataset_meta = loader.dataset.metainfo
    for batch in loader:
        samples = model.test_step(copy.deepcopy(batch))
        predicted = [samples, *([with_prediction(one, file) for one in samples] for file in files)]
        for evaluator, of_one in zip(evaluators, predicted, strict=True):
            evaluator.process(batch, [sample.to_dict() for sample in of_one])
    metrics = [evaluator.evaluate(len(loader.dataset)) for evaluator in evaluators]
    return [{name: float(value) for name, value in found.items()} for found in metrics]


def with_prediction(sample, file):
    """Return a copy of a framework's sample with the prediction of a file instead of the framework's."""
    sample = copy.deepcopy(sample)
    prediction = file.predict(sample.img_path)
    if prediction.labels is not None:
        sample.pred_sem_seg = PixelData(data=torch.from_numpy(prediction.labels)[None])
        return sample
    found = prediction.record['instances']
    fields = {name: torch.tensor([one[name] for one in found]) for name in ('box', 'score', 'label')}
    sample.pred_instances = InstanceData(
        bboxes=fields['box'].reshape(-1, 4),
        scores=fields['score'],
        labels=fields['label'].long(),
    )
    if found and 'mask' in found[0]:
        sample.pred_instances.masks = [one['mask'] for one in found]
    return sample
