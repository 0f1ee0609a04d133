"""Check whether a detector or segmentor can be exported whole. All unsupported parts are named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Part:
    """A supported part of a model. A subclass is not supported, because it may predict something else.

    Attributes:
        types: supported types as 'package.Type'; none allows any type.
        values: attributes and their supported values; an attribute that is absent has the supported value.
        is_optional: whether the part may be absent.
    """

    types: tuple[str, ...] = ()
    values: Mapping[str, Any] = field(default_factory=dict)
    is_optional: bool = False

    def reasons_against(self, where: str, part: Any) -> Iterator[str]:
        kind = type(part)
        if self.types and f'{kind.__module__.partition(".")[0]}.{kind.__name__}' not in self.types:
            yield f'{where} is a {kind.__name__} of {kind.__module__}; supported: {", ".join(self.types)}'
            return
        for name, supported in self.values.items():
            value = getattr(part, name, supported)
            if value != supported:
                yield f'{where} is a {kind.__name__} with {name}={value!r}; supported: {supported!r}'


@dataclass(frozen=True)
class Settings:
    """A supported part of ``test_cfg``.

    Attributes:
        names: the supported settings.
    """

    names: tuple[str, ...]

    def reasons_against(self, where: str, settings: Mapping[str, Any]) -> Iterator[str]:
        for name in settings:
            if name not in self.names:
                yield f'{where} has {name}={settings[name]!r}; supported: {", ".join(self.names)}'
        for name in ('nms_pre', 'max_per_img'):
            if name in self.names and settings.get(name, -1) <= 0:
                yield f'{where} must have {name} above 0, got {settings.get(name)}'
        if settings.get('mask_thr_binary', 0) < 0:
            yield f'{where}.mask_thr_binary is below 0, which selects probabilities; supported: 0 and above'
        nms = settings.get('nms', {})
        kind = nms.get('type', 'nms')
        if kind != 'nms':
            yield f"{where}.nms is {kind!r}; supported: 'nms'"
        for name in nms:
            if kind == 'nms' and name not in ('type', 'iou_threshold', 'split_thr'):
                yield f'{where}.nms has {name}={nms[name]!r}; supported: iou_threshold'


Table = dict[str, Part | Settings]

# A graph for all image sizes cannot express windows that depend on the size.
_BACKBONE: Table = {'backbone': Part(values={'clamp_window': False})}


def _dense_head(where: str, kind: str) -> Table:
    return {
        where: Part((kind,), {'use_sigmoid_cls': True}),
        f'{where}.loss_cls': Part(values={'custom_cls_channels': False}),
        f'{where}.prior_generator': Part(('mmdet.AnchorGenerator',)),
        f'{where}.bbox_coder': Part(('mmdet.DeltaXYWHBBoxCoder',)),
    }


def _extractor(where: str, is_optional: bool = False) -> Table:
    return {
        where: Part(('mmdet.SingleRoIExtractor',), is_optional=is_optional),
        f'{where}.roi_layers': Part(('mmcv.RoIAlign',), {'pool_mode': 'avg', 'use_torchvision': False}, is_optional),
    }


_ONE_STAGE: Table = {
    **_BACKBONE,
    'data_preprocessor': Part(('mmdet.DetDataPreprocessor',)),
    **_dense_head('bbox_head', 'mmdet.RetinaHead'),
    'test_cfg': Settings(('score_thr', 'nms_pre', 'nms', 'max_per_img', 'min_bbox_size')),
}
_TWO_STAGE: Table = {
    **_BACKBONE,
    'data_preprocessor': Part(('mmdet.DetDataPreprocessor',)),
    **_dense_head('rpn_head', 'mmdet.RPNHead'),
    'roi_head': Part(('mmdet.StandardRoIHead', 'mmdet.CascadeRoIHead'), {'with_shared_head': False}),
    **_extractor('roi_head.bbox_roi_extractor'),
    'roi_head.bbox_head': Part(
        ('mmdet.Shared2FCBBoxHead', 'mmdet.Shared4Conv1FCBBoxHead', 'mmdet.ConvFCBBoxHead'),
        {'with_cls': True, 'with_reg': True},
    ),
    'roi_head.bbox_head.loss_cls': Part(values={'custom_cls_channels': False, 'custom_activation': False}),
    'roi_head.bbox_head.bbox_coder': Part(('mmdet.DeltaXYWHBBoxCoder',)),
    **_extractor('roi_head.mask_roi_extractor', is_optional=True),
    'roi_head.mask_head': Part(('mmdet.FCNMaskHead',), is_optional=True),
    'test_cfg.rpn': Settings(('nms_pre', 'nms', 'max_per_img', 'min_bbox_size')),
    'test_cfg.rcnn': Settings(('score_thr', 'nms', 'max_per_img', 'mask_thr_binary')),
}
DETECTORS = {
    'mmdet.FasterRCNN': _TWO_STAGE,
    'mmdet.MaskRCNN': _TWO_STAGE,
    'mmdet.CascadeRCNN': _TWO_STAGE,
    'mmdet.RetinaNet': _ONE_STAGE,
}
SEGMENTORS: dict[str, Table] = {
    'mmseg.EncoderDecoder': {
        **_BACKBONE,
        'data_preprocessor': Part(('mmseg.SegDataPreProcessor',)),
        'data_preprocessor.test_cfg': Part(values={'size': None, 'size_divisor': None}, is_optional=True),
        'test_cfg': Part(values={'mode': 'whole'}),
    }
}
_TRANSFORMS = ('LoadImageFromFile', 'Resize', 'LoadAnnotations', 'PackDetInputs', 'PackSegInputs')


def reasons_against_detector(detector: nn.Module) -> Iterator[str]:
    """Yield the reasons why a detector of mmdet cannot be exported, one per part."""
    yield from _reasons(detector, DETECTORS)


def reasons_against_segmentor(segmentor: nn.Module) -> Iterator[str]:
    """Yield the reasons why a segmentor of mmseg cannot be exported, one per part."""
    from mmseg.models.decode_heads.decode_head import BaseDecodeHead

    yield from _reasons(segmentor, SEGMENTORS)
    if getattr(segmentor, 'out_channels', None) == 1:
        yield 'model.decode_head has one output for two classes (a binary head); supported: one output per class'
    for where, head in _parts('model', segmentor, ['decode_head']):
        for method in ('predict', 'predict_by_feat'):
            if getattr(type(head), method, None) is not getattr(BaseDecodeHead, method):
                yield f'{where} is a {type(head).__name__}, which overrides `{method}`'


def _reasons(model: nn.Module, tables: Mapping[str, Table]) -> Iterator[str]:
    """Yield the reasons against a model: its type, or each part that its table does not allow."""
    yield from (reasons := list(Part(tuple(tables)).reasons_against('model', model)))
    if reasons:
        return
    kind = type(model)
    table = tables[f'{kind.__module__.partition(".")[0]}.{kind.__name__}']
    refused: list[str] = []
    for path, row in table.items():
        if any(path.startswith(f'{parent}.') for parent in refused):
            continue  # other types may lack the part
        found = _parts('model', model, path.split('.'))
        reasons = [reason for where, part in found for reason in row.reasons_against(where, part)]
        if not found and not (isinstance(row, Part) and row.is_optional):
            reasons = [f'model has no {path}']
        if reasons:
            refused.append(path)
        yield from dict.fromkeys(reasons)


def _parts(where: str, part: Any, names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return (where, part) at a path below a part; each stage of a cascade counts, and None is no part."""
    if part is None:
        return []
    if isinstance(part, nn.ModuleList):
        return [found for index, one in enumerate(part) for found in _parts(f'{where}[{index}]', one, names)]
    if not names:
        return [(where, part)]
    return _parts(f'{where}.{names[0]}', getattr(part, names[0], None), names[1:])


def reasons_against_pipeline(pipeline: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the reasons why a test pipeline cannot be reproduced outside its framework."""
    resizes = 0
    for transform in pipeline:
        name = _transform(transform)
        if name not in _TRANSFORMS:
            yield f'the test pipeline has {name}; supported: {", ".join(_TRANSFORMS)}'
        if name == 'LoadImageFromFile':
            allowed = {'to_float32': False, 'color_type': 'color', 'imdecode_backend': 'cv2'}
            yield from _unsupported_values(name, transform, allowed)
        if name == 'Resize':
            resizes += 1
            yield from _unsupported_values(name, transform, {'interpolation': 'bilinear', 'backend': 'cv2'})
    if resizes > 1:
        yield f'the test pipeline has Resize {resizes} times'


def resize_of(pipeline: Sequence[Mapping[str, Any]]) -> dict[str, Any] | None:
    """Return the settings of ``Resize`` in a test pipeline for ``swin_dense.runtime``, or None if it has none."""
    for transform in pipeline:
        if _transform(transform) == 'Resize':
            scale, factor = transform.get('scale'), transform.get('scale_factor')
            return {
                'scale': _pair(scale) if scale else None,
                'scale_factor': None if scale else _pair(factor),
                'keep_ratio': bool(transform.get('keep_ratio', False)),
            }
    return None


def _transform(transform: Mapping[str, Any]) -> str:
    kind = transform['type']
    return kind.rpartition('.')[2] if isinstance(kind, str) else kind.__name__


def _unsupported_values(name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    for key, value in known.items():
        if given.get(key, value) != value:
            yield f'{name} of the test pipeline has {key}={given[key]!r}; supported: {value!r}'


def _pair(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value, value]
