"""A Swin with a linear head on its mean token, as published classifiers are, and loading them whole."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

from torch import Tensor, nn

from swin_dense import checks
from swin_dense.archs import Arch, resolve_arch, split_name
from swin_dense.checkpoint.fit import Options, fit
from swin_dense.checkpoint.hook import loading_converted
from swin_dense.checkpoint.load import Checkpoint, find_backbone
from swin_dense.checkpoint.report import CheckpointError, Report
from swin_dense.checkpoint.source import Source
from swin_dense.checkpoint.target import Target
from swin_dense.checkpoint.told import told_options
from swin_dense.create import BACKBONES
from swin_dense.model import SwinBackbone

_logger = logging.getLogger('swin_dense.checkpoint')


class SwinClassifier(nn.Module):
    """Swin Transformer that scores an image for every class: norm, mean over tokens, linear layer.

    Args:
        name: 'swin_t', 'swinv2_t' and the like, or an architecture as :class:`SwinBackbone` takes it.
        num_classes: how many scores.
        clamp_window: whether windows shrink to maps that they do not fit inside of and lose their shift there. The
            published classifiers do so, dense models do not; see :class:`SwinBackbone`.
        **options: of :class:`SwinBackbone` or :class:`SwinV2Backbone`.

    Attributes:
        backbone: whose last output norm is the classifier's final norm.
        head: the linear layer.
    """

    def __init__(
        self,
        name: str | Mapping[str, Any] | Arch = 'swin_t',
        num_classes: int = 1000,
        *,
        clamp_window: bool = True,
        **options: Any,
    ) -> None:
        super().__init__()
        if 'out_indices' in options:
            raise TypeError('a classifier reads the last stage; leave out_indices out')
        network = (split_name(name)[0] if isinstance(name, str) else None) or 'swin'
        stages = len(options['depths'] if options.get('depths') else resolve_arch(name, network).depths)
        self.backbone: SwinBackbone = BACKBONES[network](
            name, out_indices=(stages - 1,), clamp_window=clamp_window, **options
        )
        self.head = nn.Linear(self.backbone.out_channels[-1], checks.integer('num_classes', num_classes))
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)

    def forward(self, img: Tensor) -> Tensor:
        """Return the scores of images, (B, in_channels, H, W), before any softmax: (B, num_classes)."""
        return self.head(self.backbone(img)[-1].mean((2, 3)))


def load_classifier(
    classifier: SwinClassifier,
    source: Checkpoint,
    *,
    prefix: str | None = None,
    ema: bool = False,
    trust: bool = False,
    log: Callable[[str], Any] | None = _logger.info,
) -> Report:
    """Load a whole classifier of any family: all of its weights, or none and an error that says why.

    Args:
        classifier: to load into.
        source: as for :func:`swin_dense.load_checkpoint`, and so are the others.
        prefix: where the backbone is in the checkpoint.
        ema: take the running average of the weights.
        trust: unpickle classes that are not known to be harmless.
        log: takes the text of the report.

    Returns:
        The report on the backbone, which has been logged.

    Raises:
        CheckpointError: the checkpoint cannot be read or does not fit. The classifier keeps its weights.
    """
    return _load(classifier, find_backbone(source, Target.of(classifier.backbone).grid, prefix, ema, trust), log)


def create_classifier(
    checkpoint: Checkpoint, name: str | None = None, *, trust: bool = False, **options: Any
) -> SwinClassifier:
    """Build the classifier that a checkpoint holds, with its weights, ready for inference.

    Args:
        checkpoint: as for :func:`swin_dense.load_checkpoint`.
        name: of the model, where the checkpoint does not tell, or to refuse any other.
        trust: unpickle classes that are not known to be harmless.
        **options: of :class:`SwinClassifier`, before those that the checkpoint tells.

    Raises:
        CheckpointError: the checkpoint cannot be read, or holds no whole classifier.
    """
    found = find_backbone(checkpoint, None, None, False, trust)
    told = told_options(found, any_heads=name is not None)
    head = _head(found)
    arch = told.pop('arch')
    if isinstance(arch, str):
        arch = f'{found.network}_{arch}'
    elif found.version == 2:
        raise CheckpointError(f'{found.described}: a Swin V2 of no published size; build SwinClassifier yourself')
    classifier = SwinClassifier(name or arch, **{'num_classes': len(head['weight']), **told, **options})
    _load(classifier, found, _logger.info)
    return classifier.eval()


def _load(classifier: SwinClassifier, found: Source, log: Callable[[str], Any] | None) -> Report:
    head = _head(found)
    wanted = tuple(classifier.head.weight.shape)
    if tuple(head['weight'].shape) != wanted:
        classes, channels = head['weight'].shape
        raise CheckpointError(
            f'{found.described} ({found.family}): its head has {classes} classes over {channels} channels, the model '
            f'{wanted[0]} over {wanted[1]}; build SwinClassifier of its size with num_classes={classes}'
        )
    target = Target.of(classifier.backbone)
    parameters, report = fit(found, target, Options(final_norm='norm.weight' in found.parameters))
    if report.new:
        raise CheckpointError(f'{found.described} ({found.family}): it has no final norm, which a classifier needs')
    with loading_converted():
        classifier.backbone.load_state_dict({target.names[name]: tensor for name, tensor in parameters.items()})
    classifier.head.load_state_dict(head)
    for key in found.head_keys:
        report.left_out.pop(key, None)
    if log is not None:
        log(f'{report}\n  head: {wanted[0]} classes')
    return report


def _head(found: Source) -> dict[str, Tensor]:
    head = found.head
    if head.keys() != {'weight', 'bias'} or head['weight'].ndim != 2:
        raise CheckpointError(f'{found.described} ({found.family}) holds no linear head of a classifier')
    return head
