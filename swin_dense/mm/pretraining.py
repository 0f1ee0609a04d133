"""SimMIM and feature distillation in mmengine: models, preprocessor, loss of held-out images, a hook that watches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

import torch
import torch.nn.functional as F
from mmengine.dist import is_main_process
from mmengine.evaluator import BaseMetric
from mmengine.hooks import Hook
from mmengine.model import BaseDataPreprocessor, BaseModel
from mmengine.registry import DATASETS, HOOKS, METRICS, MODELS
from torch import Tensor

from swin_dense.features.images import Statistic, normalize
from swin_dense.pretraining.base import Pretraining
from swin_dense.pretraining.distillation import FeatureDistillation
from swin_dense.pretraining.simmim import SimMIM
from swin_dense.pretraining.teacher_sources import load_teacher
from swin_dense.pretraining.unlabelled import UnlabelledImages
from swin_dense.utils.choices import IMAGENET_MEAN, IMAGENET_STD

DATASETS.register_module(module=UnlabelledImages)

_PICTURED = 4  # images of the first batch, one row each
_GREY = 0.5
_HISTORY = 'pretraining_history'  # in the message hub, and so in checkpoints


@MODELS.register_module()
class ImageNormalizer(BaseDataPreprocessor):
    """Normalise batches of images (B, C, H, W) in [0, 1] with any number of channels.

    Args:
        mean: one number per channel, or one for all, on the scale 0 to 1; the default is that of ImageNet.
        std: likewise.
    """

    def __init__(self, mean: Statistic = IMAGENET_MEAN, std: Statistic = IMAGENET_STD) -> None:
        super().__init__()
        self.mean, self.std = mean, std

    def forward(self, data: Any, training: bool = False) -> Any:
        """Move a batch to the device and normalise its 'inputs'."""
        data = self.cast_data(data)
        return {**data, 'inputs': normalize(data['inputs'], self.mean, self.std)}

    def undo(self, img: Tensor) -> Tensor:
        """Return images as they were before normalisation."""
        if self.mean is None or self.std is None:
            return img
        zero, one = (normalize(torch.full_like(img, value), self.mean, self.std) for value in (0.0, 1.0))
        return (img - zero) / (one - zero)


@MODELS.register_module()
class SimMIMPretrainer(SimMIM, BaseModel):
    """:class:`SimMIM` as a model of mmengine's Runner.

    Args:
        backbone: config of a SwinDense or SwinDenseV2.
        teacher: config of the frozen teacher, with an ``init_cfg``, or None.
        data_preprocessor: config of an :class:`ImageNormalizer`.
        init_cfg: see mmengine's BaseModel.
        **options: options of :class:`SimMIM`.

    Raises:
        ValueError: the teacher has no weights, or see :class:`SimMIM`.
        TypeError: see :class:`SimMIM`.
    """

    data_preprocessor: ImageNormalizer

    def __init__(
        self,
        backbone: Mapping[str, Any],
        *,
        teacher: Mapping[str, Any] | None = None,
        data_preprocessor: Mapping[str, Any] | None = None,
        init_cfg: Any = None,
        **options: Any,
    ) -> None:
        if teacher is not None and not teacher.get('init_cfg'):
            raise ValueError(
                "the teacher has no weights; set model.teacher.init_cfg=dict(type='Pretrained', checkpoint=FILE)"
            )
        built_teacher = None if teacher is None else MODELS.build(teacher)
        super().__init__(MODELS.build(backbone), teacher=built_teacher, **options)
        self.init_cfg = init_cfg
        self.data_preprocessor = MODELS.build(data_preprocessor or {'type': 'ImageNormalizer'})

    def init_weights(self) -> None:
        """Initialise the model, and load the teacher, which is no submodule."""
        super().init_weights()
        if self.teacher is not None:
            cast('Any', self.teacher).init_weights()

    def forward(  # type: ignore[override]
        self, inputs: Tensor, index: Tensor | None = None, mode: str = 'tensor'
    ) -> Any:
        """Run the model on normalised images (B, C, H, W), whose numbers seed their masks in the mode 'predict'.

        The mode 'loss' returns the losses; 'predict' returns, for each image, its 'loss_pixels', the 'hidden' pixels
        (1, H, W) and the 'reconstruction' (C, H, W) in [0, 1]; 'tensor' returns the output of the network.
        """
        if mode == 'loss':
            return SimMIM.forward(self, inputs)
        if mode == 'tensor':
            return self.reconstruct(inputs, self.draw_mask(inputs))
        mask = _masks_of(self, inputs, index)
        output = self.reconstruct(inputs, mask)
        parts = zip(inputs.split(1), output.split(1), mask.split(1), strict=True)
        losses = [self.pixel_loss(*part) for part in parts]
        if self.norm_target is not None:
            mean, deviation = self.local_statistics(inputs)
            output = output * deviation + mean
        pictures = self.data_preprocessor.undo(output.float())
        found = zip(losses, self.hidden_pixels(inputs, mask), pictures, strict=True)
        return [{'loss_pixels': loss, 'hidden': hidden, 'reconstruction': picture} for loss, hidden, picture in found]


@MODELS.register_module()
class FeatureDistillationPretrainer(FeatureDistillation, BaseModel):
    """:class:`FeatureDistillation` as a model of mmengine's Runner.

    Args:
        backbone: config of a SwinDense or SwinDenseV2.
        teacher: the teacher by name, see :func:`swin_dense.pretraining.teacher_sources.load_teacher`.
        data_preprocessor: config of an :class:`ImageNormalizer`, whose normalisation is undone for the teacher.
        init_cfg: see mmengine's BaseModel.
        **options: options of :class:`FeatureDistillation`, but for ``mean`` and ``std``.

    Raises:
        ValueError: see :class:`FeatureDistillation`.
        TypeError: see :class:`FeatureDistillation`.
    """

    data_preprocessor: ImageNormalizer

    def __init__(
        self,
        backbone: Mapping[str, Any],
        teacher: str,
        *,
        data_preprocessor: Mapping[str, Any] | None = None,
        init_cfg: Any = None,
        **options: Any,
    ) -> None:
        preprocessor = MODELS.build(data_preprocessor or {'type': 'ImageNormalizer'})
        statistics = {'mean': preprocessor.mean, 'std': preprocessor.std}
        super().__init__(MODELS.build(backbone), load_teacher(teacher), **statistics, **options)
        self.init_cfg = init_cfg
        self.data_preprocessor = preprocessor

    def forward(  # type: ignore[override]
        self,
        inputs: Tensor,
        index: Tensor | None = None,
        maps: Sequence[Tensor] | None = None,
        mode: str = 'tensor',
    ) -> Any:
        """Run the model on normalised images (B, C, H, W), with the teacher's maps if they are stored.

        The mode 'loss' returns the loss; 'predict' returns, for each image, its 'loss_features', the 'hidden' pixels
        (1, H, W), whose cells ``index`` seeds, and pictures of the teacher's 'target' and its 'prediction' by the last
        level, (3, rows, columns) in [0, 1]; 'tensor' returns the maps of the backbone.
        """
        if mode == 'tensor':
            return self.backbone(inputs)
        if mode == 'loss':
            return FeatureDistillation.forward(self, inputs, maps)
        mask = _masks_of(self, inputs, index)
        targets = self.targets(inputs, maps)
        predictions = self.predict(inputs, mask)
        losses = self.feature_losses(predictions, targets)
        _, shown = self.levels[-1]
        pictures = [_in_colours(*pair) for pair in zip(targets[shown], predictions[-1], strict=True)]
        found = zip(losses, self.hidden_pixels(inputs, mask), pictures, strict=True)
        return [
            {'loss_features': loss, 'hidden': hidden, 'target': target, 'prediction': prediction}
            for loss, hidden, (target, prediction) in found
        ]


def _masks_of(model: Pretraining, inputs: Tensor, index: Tensor | None) -> Tensor:
    """Return the masks of held-out images, which their numbers seed."""
    seeds = range(len(inputs)) if index is None else index.tolist()
    return torch.cat([model.draw_mask(inputs[:1], torch.Generator().manual_seed(seed)) for seed in seeds])


def _in_colours(target: Tensor, prediction: Tensor) -> tuple[Tensor, Tensor]:
    """Return two maps (C, rows, columns) as colours (3, rows, columns) in [0, 1]: the target's principal components."""
    cells = target.flatten(1).float()
    mean = cells.mean(1, keepdim=True)
    directions = torch.linalg.svd(cells - mean, full_matrices=False).U[:, :3]

    def components(one: Tensor) -> Tensor:
        return directions.T @ (one.flatten(1).float() - mean)

    low, high = components(target).aminmax(dim=1, keepdim=True)

    def coloured(one: Tensor) -> Tensor:
        scaled = (components(one) - low) / (high - low).clamp(min=1e-6)
        return _as_colours(scaled.clamp(0, 1).unflatten(1, one.shape[1:]))

    return coloured(target), coloured(prediction)


def _as_colours(img: Tensor) -> Tensor:
    """Return an image (C, H, W) as colours, (3, H, W): its first three channels, or its first."""
    return img[:3] if len(img) >= 3 else img[:1].expand(3, -1, -1)


@METRICS.register_module()
class HeldOutLoss(BaseMetric):
    """The mean loss of held-out images, each with one crop and one mask that never change.

    It is logged as 'held_out/error', because mmengine averages values with 'loss' in their name over validations.

    Args:
        loss: the name of the loss.
    """

    default_prefix = 'held_out'

    def __init__(self, loss: str = 'loss_pixels') -> None:
        super().__init__()
        self.loss = loss

    def process(self, data_batch: Any, data_samples: Sequence[dict[str, Any]]) -> None:
        """Collect the losses of a batch."""
        self.results += [float(sample[self.loss]) for sample in data_samples]

    def compute_metrics(self, results: list[float]) -> dict[str, float]:
        """Return the mean."""
        return {'error': sum(results) / len(results)}


@HOOKS.register_module()
class PretrainingHook(Hook):
    """Draw held-out images at every validation, and warn if the model begins to overfit.

    The pictures go to the visualizer of the runner, by default into ``vis_data/vis_image`` of the log directory. Each
    row is an image, the image with its hidden cells in grey, and the image with these cells as predicted. A
    reconstruction with ``norm_target`` takes brightness and contrast from the hidden pixels themselves. With a teacher
    to distil, the last two are the teacher's map and its prediction, in the colours of three principal components.

    Held-out images tell when pretraining has been too long for the data: their loss rises while that of the training
    images still falls (Liu et al., Swin Transformer V2, and its model hub). The warning comes when this has lasted two
    validations.

    Args:
        loss: the name of the training loss to compare with that of held-out images.
    """

    def __init__(self, loss: str = 'loss_pixels') -> None:
        self.loss = loss

    def after_val_iter(
        self, runner: Any, batch_idx: int, data_batch: Any = None, outputs: Sequence[Any] | None = None
    ) -> None:
        """Draw the first images."""
        if batch_idx or not is_main_process() or not outputs:
            return
        rows = []
        for img, output in list(zip(data_batch['inputs'], outputs, strict=True))[:_PICTURED]:
            img, hidden = img.cpu(), output['hidden'].cpu()
            parts = [img, img.where(~hidden, _GREY)]
            if 'reconstruction' in output:
                parts.append(img.where(~hidden, output['reconstruction'].cpu()))
            else:
                maps = [output['target'].cpu(), output['prediction'].cpu()]
                parts += [F.interpolate(one[None], img.shape[1:], mode='nearest-exact')[0] for one in maps]
            rows.append(torch.cat([_as_colours(part) for part in parts], 2))
        picture = (torch.cat(rows, 1).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).contiguous().numpy()
        runner.visualizer.add_image('reconstruction', picture, step=runner.iter)

    def after_val_epoch(self, runner: Any, metrics: Mapping[str, float] | None = None) -> None:
        """Compare with earlier validations."""
        held_out = (metrics or {}).get('held_out/error')
        name = f'train/{self.loss}'
        if held_out is None or name not in runner.message_hub.log_scalars:
            return
        history = list(runner.message_hub.get_info(_HISTORY, []))
        values, _ = runner.message_hub.get_scalar(name).data
        since = history[-1][0] if history else 0
        recent = values[-(runner.iter - since) :] if runner.iter > since else values[-1:]
        history.append((runner.iter, float(recent.mean()), float(held_out)))
        runner.message_hub.update_info(_HISTORY, history)
        best = min(history, key=lambda row: row[2])
        if len(history) > 2 and all(row[0] > best[0] and row[1] < best[1] for row in history[-2:]):
            runner.logger.warning(
                f'the loss of held-out images has risen from {best[2]:.4g} after {best[0]} iterations to '
                f'{held_out:.4g}, while that of training images fell from {best[1]:.4g} to {history[-1][1]:.4g}: the '
                'model is overfitting; train for fewer epochs or with more images, and use the best checkpoint'
            )
