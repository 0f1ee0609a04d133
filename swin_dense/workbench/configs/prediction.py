"""Look whether mmseg can predict with the settings of a config, before a training fails at its first validation."""

from __future__ import annotations

from typing import Any

from swin_dense.workbench.configs.experiment import Experiment, dicts

_PADDING = ('Pad', 'ResizeToMultiple')  # transforms that record the size of the padded image


def check_prediction(experiment: Experiment) -> None:
    """Raise ValueError for a segmentor that cannot predict in windows as ``model.test_cfg`` says."""
    model = experiment.model.get('module') or experiment.model  # that of test-time augmentation
    windows = model.get('test_cfg') or {}
    if experiment.scope != 'mmseg' or windows.get('mode') != 'slide':
        return
    crop: Any = windows.get('crop_size')
    stride: Any = windows.get('stride')
    are_pairs = _is_pair(crop) and _is_pair(stride)
    if not are_pairs or any(not 0 < step <= side for step, side in zip(stride, crop, strict=True)):
        raise ValueError(
            "model.test_cfg.mode='slide' needs the height and width of its windows and the steps between them, which "
            f'may not be larger; got crop_size={crop} and stride={stride}: give, for example, --set '
            'model.test_cfg.crop_size=512,512 model.test_cfg.stride=341,341'
        )
    if any(part.get('type') == 'Mask2FormerHead' for part in dicts(model.get('decode_head'))):
        _check_padding(experiment, model)


def _check_padding(experiment: Experiment, model: Any) -> None:
    """Raise ValueError if images are padded, as Mask2FormerHead resizes the masks of a window to the padded image."""
    padding = (model.get('data_preprocessor') or {}).get('test_cfg')
    steps = [
        f'{data.address}.pipeline.{index} ({step["type"]})'
        for data in experiment.of(('val', 'test'))
        for index, step in enumerate(data.pipeline)
        if step.get('type') in _PADDING
    ]
    cures = []
    if padding:
        cures.append(
            f'add --set model.data_preprocessor.test_cfg=None, which is {dict(padding)} (a SwinDense takes images of '
            'any size)'
        )
    if steps:
        cures.append(f'remove {", ".join(steps)} from the config')
    if cures:
        raise ValueError(
            "model.test_cfg.mode='slide' does not work with mmseg's Mask2FormerHead if images are padded, because it "
            f'gives the masks of each window the size of the whole image; {"; ".join(cures)}'
        )


def _is_pair(value: Any) -> bool:
    return isinstance(value, (list, tuple)) and len(value) == 2 and all(isinstance(one, int) for one in value)
