"""What the losses of a segmentor make of its classes and of ignored pixels: each is asked, with a small stand-in."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch
from mmengine.dataset import Compose
from mmengine.registry import MODELS

from swin_dense.mm.mask_values import IGNORED_LABEL
from swin_dense.utils.checks import described
from swin_dense.workbench.checking.images import sample_evenly
from swin_dense.workbench.checking.samples import loading_steps
from swin_dense.workbench.checking.stated import Source
from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.configs.quietly import quiet, random_state_kept

_HEADS = ('decode_head', 'auxiliary_head')
_SIDE = 8  # pixels of the stand-in
_LOOKED_AT = 20  # masks, for ignored pixels
_LEAST = 1e-6  # share of a gradient


def check_losses(experiment: Experiment, source: Source) -> list[str]:
    """Ask each loss of the heads of mmseg for its gradient where pixels are ignored.

    Return a note on a loss that learns from pixels that the training data ignore. The default scope of mmengine must be
    that of the config.

    Raises:
        ValueError: a loss fails, on fewer channels than there are classes.
    """
    notes = []
    for address, head, loss in _losses(experiment):
        share = _share_of_ignored(address, head, loss)
        if share > _LEAST and _has_ignored(source):
            notes.append(
                f'{address} ({loss.get("type")}) does not ignore pixels of {IGNORED_LABEL}: of a stand-in, half of '
                f'whose pixels are ignored, they get {100 * share:.2g} % of the gradient; give them a class, or take '
                'another loss'
            )
    return notes


def _losses(experiment: Experiment) -> Iterator[tuple[str, Any, Any]]:
    """Yield the address, the head and the entry of each loss that compares maps of classes."""
    for name in _HEADS:
        heads = experiment.model.get(name) or []
        for number, head in enumerate(heads if isinstance(heads, (list, tuple)) else [heads]):
            place = f'model.{name}.{number}' if isinstance(heads, (list, tuple)) else f'model.{name}'
            losses = head.get('loss_decode') or []
            is_list = isinstance(losses, (list, tuple))
            for index, loss in enumerate(losses if is_list else [losses]):
                yield f'{place}.loss_decode' + f'.{index}' * is_list, head, loss


def _share_of_ignored(address: str, head: Any, entry: Any) -> float:
    """Return the share of a loss's gradient that ignored pixels get, as mmseg's heads call it."""
    count = head.get('num_classes')
    if not isinstance(count, int):
        return 0.0
    channels = head.get('out_channels') or count
    ignored = head.get('ignore_index', IGNORED_LABEL)
    with random_state_kept(), torch.enable_grad(), quiet():
        torch.manual_seed(0)
        logits = torch.randn(2, channels, _SIDE, _SIDE, requires_grad=True)
        labels = torch.arange(2 * _SIDE * _SIDE).remainder(count).reshape(2, _SIDE, _SIDE)
        labels[..., _SIDE // 2 :] = ignored
        try:
            loss = MODELS.build(copy.deepcopy(entry))(logits, labels, weight=None, ignore_index=ignored)
            (gradient,) = torch.autograd.grad(loss.sum(), logits)
        except Exception as error:  # of any loss
            if channels >= count:  # a loss may need more than a stand-in, or a GPU
                return 0.0
            raise ValueError(
                f'{address} ({entry.get("type")}) fails on maps of {channels} channels and labels from 0 to '
                f'{count - 1} ({described(error)}); --set {address}.use_sigmoid=True, or out_channels={count} of its '
                'head'
            ) from error
    sums = gradient.abs().sum((0, 1, 2))
    return float(sums[_SIDE // 2 :].sum() / sums.sum().clamp(min=1e-12))


def _has_ignored(source: Source) -> bool:
    """Return whether some of the masks looked at have ignored pixels."""
    pipeline = Compose([copy.deepcopy(dict(step)) for step in loading_steps(source.data)])
    masks = (pipeline(copy.deepcopy(sample)) for sample in sample_evenly(source.samples, _LOOKED_AT))
    return any(np.isin(IGNORED_LABEL, results.get('gt_seg_map', 0)) for results in masks)
