"""Swin classifiers: a backbone with a linear head on the mean token, and loading them from checkpoints."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from swin_dense.archs import Arch, resolve_arch, split_name
from swin_dense.checkpoint import convert_before_load
from swin_dense.checkpoint.fit import Target
from swin_dense.checkpoint.hub import HubMixin
from swin_dense.checkpoint.infer import find_adapter
from swin_dense.checkpoint.load import Checkpoint, find_backbone, load_found
from swin_dense.models.create import BACKBONES, network_of, options_for
from swin_dense.models.swin import SwinBackbone
from swin_dense.utils import checks, compat

_HEAD = 'head.weight'


class SwinClassifier(HubMixin):
    """Swin Transformer for image classification: backbone, norm, mean over tokens, linear layer.

    Args:
        name: 'swin_t', 'swinv2_t' and the like, or ``arch`` of :class:`SwinBackbone`.
        num_classes: number of scores.
        clamp_window: whether to shrink windows, and to drop their shift, on maps that are not larger than the window.
            Published classifiers do this, dense models do not; see :class:`SwinBackbone`.
        **options: options of :class:`SwinBackbone` or :class:`SwinV2Backbone`.

    Attributes:
        backbone: the backbone; its last output norm is the final norm of the classifier.
        head: the linear layer.

    Examples:
        >>> classifier = SwinClassifier('swin_t', num_classes=10)
        >>> classifier(torch.rand(2, 3, 224, 224)).shape
        torch.Size([2, 10])
    """

    is_swin_classifier = True  # load_checkpoint cannot import this class, so it reads this flag

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
        network = network_of(name) or 'swin'
        stages = len(options['depths'] if options.get('depths') else resolve_arch(name, network).depths)
        self.backbone: SwinBackbone = BACKBONES[network](
            name, out_indices=(stages - 1,), clamp_window=clamp_window, **options
        )
        self.head = nn.Linear(self.backbone.out_channels[-1], checks.integer('num_classes', num_classes))
        nn.init.trunc_normal_(self.head.weight, std=0.02)
        nn.init.zeros_(self.head.bias)
        compat.register_load_state_dict_pre_hook(self, convert_before_load)

    def _kept_by_other_windows(self) -> dict[str, Any]:
        return self.backbone._kept_by_other_windows()

    if TYPE_CHECKING:  # nn.Module declares neither arguments nor results

        def __call__(self, img: Tensor) -> Tensor: ...

    def forward(self, img: Tensor) -> Tensor:
        """Return the scores of images, (B, in_channels, H, W), before softmax: (B, num_classes)."""
        return self.head(self.backbone(img)[-1].mean((2, 3)))


def create_classifier(
    checkpoint: Checkpoint,
    name: str | None = None,
    *,
    adapter_checkpoint: Checkpoint | None = None,
    prefix: str | None = None,
    trust: bool = False,
    **options: Any,
) -> SwinClassifier:
    """Build a classifier from a checkpoint and load its weights, ready for inference.

    Args:
        checkpoint: anything that :func:`swin_dense.load_checkpoint` accepts.
        name: name of the model; needed if it cannot be inferred from the checkpoint, and otherwise checked against it.
        adapter_checkpoint: the file of an adapter that was trained from ``checkpoint``, see
            :func:`swin_dense.save_adapter`. If it contains a head, that of ``checkpoint`` is not used.
        prefix: which backbone of the checkpoint, if it contains several; see :func:`swin_dense.load_checkpoint`.
        trust: unpickle classes that are not known to be harmless.
        **options: options of :class:`SwinClassifier`; they override those inferred from the checkpoint.

    Raises:
        CheckpointError: a checkpoint cannot be read, they contain no complete classifier, or the adapter was trained
            from another checkpoint.
    """
    found = find_backbone(checkpoint, prefix, trust=trust)
    adapter, inferred = find_adapter(adapter_checkpoint)
    network, inferred = options_for(found, name, {**inferred, **options})
    inferred.pop('out_indices', None)
    arch: Any = inferred.pop('arch')
    if isinstance(arch, dict):  # a dict does not contain the family, which SwinClassifier takes from the name
        arch, inferred = 't', {**arch, **inferred}
    with_head = found
    if adapter is not None and _HEAD in adapter.parameters:
        with_head = adapter
    if _HEAD in with_head.parameters:
        inferred.setdefault('num_classes', len(with_head.parameters[_HEAD]))
    classifier = SwinClassifier(f'{network}_{split_name(arch)[1]}', **inferred)
    for part in (found, adapter):
        if part is not None:
            module = classifier if part is with_head else classifier.backbone
            load_found(Target.of(module), part)
    return classifier.eval()
