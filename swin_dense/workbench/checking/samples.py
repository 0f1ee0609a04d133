"""Some images of a data set, loaded by its own pipeline: a step that fails is named before the training meets it."""

from __future__ import annotations

import copy
from typing import Any

from mmengine.dataset import Compose
from mmengine.registry import DATASETS

from swin_dense.utils.checks import described, first_few
from swin_dense.workbench.checking import hints
from swin_dense.workbench.checking.images import sample_evenly
from swin_dense.workbench.checking.stated import Source
from swin_dense.workbench.configs.experiment import DataSet, dicts
from swin_dense.workbench.configs.quietly import quiet, random_state_kept

_LOADED = 8  # images
_LOADING = ('Load', 'IgnoreMask', 'MapMask')  # starts of the names of steps that load annotations


def loading_steps(data: DataSet) -> list[Any]:
    """Return the steps of a pipeline that load annotations, those inside of test-time augmentation too."""
    steps = list(dicts(data.pipeline))[1:]
    return [step for step in steps if str(step.get('type')).rpartition('.')[2].startswith(_LOADING)]


def load_samples(source: Source) -> list[Any]:
    """Load some images with the pipeline of their data set, and with that of a data set around it that mixes images.

    Returns:
        what the last step returns for each image; mixed images, if a data set mixes them.

    Raises:
        ValueError: a step fails; it names the step and the image.
    """
    with random_state_kept():
        with quiet():
            pipeline = Compose([copy.deepcopy(dict(step)) for step in source.data.pipeline])
        loaded = [load_sample(source, sample, pipeline) for sample in sample_evenly(source.samples, _LOADED)]
        around = _mixing_dataset(source)
        return _mixed(source, around, pipeline) if around else [sample for sample in loaded if sample is not None]


def load_sample(source: Source, sample: Any, pipeline: Compose) -> Any:
    """Return a sample as a pipeline loads it, or None; ValueError names the step that fails, and the image."""
    results = copy.deepcopy(sample)
    for step in pipeline.transforms:
        try:
            with quiet():
                results = step(results)
        except Exception as error:  # of any transform
            path = sample.get('img_path')
            raise ValueError(
                f'{source.stated.name}: {path} cannot be loaded: {type(step).__name__} of {source.data.address}'
                f'.pipeline fails ({described(error)})'
            ) from error
        if results is None:  # a random transform that tries another image
            break
    return results


def _mixing_dataset(source: Source) -> Any:
    """Return the entry of the data set around this one that mixes its images, or None."""
    data = source.data
    for part in dicts((data.experiment.config.get(f'{data.split}_dataloader') or {}).get('dataset')):
        if part.get('type') == 'MultiImageMixDataset' and part.get('dataset') is data.entry:
            return part
    return None


def _mixed(source: Source, around: Any, pipeline: Any) -> list[Any]:
    source.built.pipeline = pipeline
    with quiet():
        mixed = DATASETS.build({**around, 'dataset': source.built})
    try:
        with quiet():
            return [mixed[index] for index in sample_evenly(range(len(source.samples)), _LOADED)]
    except Exception as error:  # of any transform
        kinds = first_few(step.get('type') for step in around.pipeline)
        raise ValueError(
            f'{source.stated.name}: {source.data.address.rpartition(".")[0]}.pipeline fails for mixed images '
            f'({described(error)}), of its steps {kinds}{hints.hint_on_mixing(around.pipeline)}'
        ) from error
