"""Change the size of images in a recipe, in all its pipelines alike."""

from __future__ import annotations

from typing import Any

from mmengine.config import Config, ConfigDict

from swin_dense.workbench.configs.experiment import Experiment, dicts

_RESIZES = ('Resize', 'RandomResize', 'RandomChoiceResize')
_CROPS = {'RandomCrop': 'crop_size', 'Pad': 'size'}  # the setting that is a size
# Settings of other steps that are sizes in pixels, which nothing here changes.
_OTHER_SIZES = ('img_scale', 'size', 'random_size_range', 'border')
_CROP_STEP = 32  # pixels: the stride of the last level, so that crops stay whole there


def set_image_size(experiment: Experiment, longest: int) -> str:
    """Change the images of a test to ``longest`` pixels on their longer side, and every other size in proportion.

    These are the scales and crops of all pipelines, the size to which a segmentor pads batches, and the windows of a
    test in windows. Crops become multiples of 32 pixels.

    Returns:
        What was changed, for a note.

    Raises:
        ValueError: no step of the test pipeline states a size, or a step states one that this function does not know.
    """
    config = experiment.config
    found = {max(scale) for step in _steps(config, 'test_dataloader') for scale in _scales(step)}
    if len(found) != 1:
        raise ValueError(
            f'--image-size replaces the size of test images, and this recipe states {len(found)}; '
            'set the scales of its pipelines with --set'
        )
    (before,) = found
    factor = longest / before
    for name in ('train_dataloader', 'val_dataloader', 'test_dataloader', 'tta_pipeline'):
        for step in _steps(config, name):
            _scale_step(step, factor)
    preprocessor = config.model.get('data_preprocessor') or {}
    for augment in dicts(preprocessor.get('batch_augments') or []):
        _scale_step(augment, factor)
    of_test = config.model.get('test_cfg') or {}
    for settings, name in ((preprocessor, 'size'), (of_test, 'crop_size'), (of_test, 'stride')):
        if settings.get(name):
            settings[name] = _whole_steps(settings[name], factor)
    return f'the longer side of test images has {longest} pixels instead of {before}, and other sizes are scaled alike'


def _steps(config: Config, name: str) -> list[ConfigDict]:
    return [step for step in dicts(config.get(name) or []) if 'type' in step]


def _scales(step: ConfigDict) -> list[tuple[int, int]]:
    """Return the scales of a step that resizes: (width, height), in any order."""
    if step.get('type') not in _RESIZES:
        return []
    stated = step.get('scale') or step.get('scales') or []
    pairs = [stated] if stated and isinstance(stated[0], int) else stated
    return [(pair[0], pair[1]) for pair in pairs]


def _scale_step(step: ConfigDict, factor: float) -> None:
    own = _CROPS.get(step.get('type'))
    unknown = [name for name in _OTHER_SIZES if step.get(name) and name != own]
    if unknown:
        raise ValueError(
            f'--image-size does not change {unknown[0]} of {step.get("type")}; '
            'set the sizes of the pipelines with --set'
        )
    scales = [tuple(max(1, round(side * factor)) for side in pair) for pair in _scales(step)]
    if scales:
        name = 'scale' if step.get('scale') else 'scales'
        step[name] = scales[0] if isinstance(step[name][0], int) else scales
    if own is not None and step.get(own):
        step[own] = _whole_steps(step[own], factor)


def _whole_steps(size: Any, factor: float) -> tuple[int, ...]:
    """Return a size, (height, width), at another scale."""
    return tuple(max(_CROP_STEP, round(side * factor / _CROP_STEP) * _CROP_STEP) for side in size)
