"""Check whether a detector or segmentor can be exported whole. All unsupported parts are named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from torch import nn


@dataclass(frozen=True)
class Part:
    """A supported part of a model. A subclass is not supported, because it may predict something else."""

    types: tuple[str, ...] = ()  # supported, as 'package.Type'; none allows any type
    values: Mapping[str, Any] = field(default_factory=dict)  # supported values of attributes, which may be absent
    is_optional: bool = False  # whether the part may be absent

    def reasons_against(self, where: str, part: Any) -> Iterator[str]:
        kind = type(part)
        if self.types and _kind(part) not in self.types:
            yield f'{where} is a {kind.__name__} of {kind.__module__}; supported: {", ".join(self.types)}'
            return
        for name, supported in self.values.items():
            value = getattr(part, name, supported)
            if value != supported:
                yield f'{where} is a {kind.__name__} with {name}={value!r}; supported: {supported!r}'


@dataclass(frozen=True)
class Settings:
    """A supported part of ``test_cfg``."""

    names: tuple[str, ...]  # of supported settings
    values: Mapping[str, Any] = field(default_factory=dict)  # settings with one supported value
    is_optional: bool = False  # whether the part may be absent

    def reasons_against(self, where: str, settings: Mapping[str, Any]) -> Iterator[str]:
        for name, value in settings.items():
            if name in self.values:
                if value != self.values[name]:
                    yield f'{where} has {name}={value!r}; supported: {self.values[name]!r}'
            elif name not in self.names:
                yield f'{where} has {name}={value!r}; supported: {", ".join(self.names)}'
        for name in ('nms_pre', 'max_per_img'):
            if name in self.names and settings.get(name, -1) <= 0:
                yield f'{where} must have {name} above 0, got {settings.get(name)}'
        if settings.get('mask_thr_binary', 0) < 0:
            yield f'{where}.mask_thr_binary is below 0, which selects probabilities; supported: 0 and above'


def _kind(part: Any) -> str:
    return f'{type(part).__module__.partition(".")[0]}.{type(part).__name__}'


Table = dict[str, Part | Settings]

# A graph for all image sizes cannot express windows that depend on the size.
_BACKBONE: Table = {'backbone': Part(values={'clamp_window': False})}
_DETECTOR: Table = {**_BACKBONE, 'data_preprocessor': Part(('mmdet.DetDataPreprocessor',))}


def _dense_head(
    where: str, kind: str, generator: str = 'mmdet.AnchorGenerator', coder: str = 'mmdet.DeltaXYWHBBoxCoder'
) -> Table:
    return {
        where: Part((kind,), {'use_sigmoid_cls': True}),
        f'{where}.loss_cls': Part(values={'custom_cls_channels': False}),
        f'{where}.prior_generator': Part((generator,)),
        f'{where}.bbox_coder': Part((coder,)),
    }


def _nms(where: str) -> Table:
    return {f'{where}.nms': Settings(('iou_threshold', 'split_thr'), {'type': 'nms'}, is_optional=True)}


def _extractor(where: str, is_optional: bool = False) -> Table:
    return {
        where: Part(('mmdet.SingleRoIExtractor',), is_optional=is_optional),
        f'{where}.roi_layers': Part(('mmcv.RoIAlign',), {'pool_mode': 'avg', 'use_torchvision': False}, is_optional),
    }


def _one_stage(head: Table) -> Table:
    return {
        **_DETECTOR,
        **head,
        'test_cfg': Settings(('score_thr', 'nms_pre', 'nms', 'max_per_img', 'min_bbox_size')),
        **_nms('test_cfg'),
    }


def _box_queries(head: str) -> Table:
    return {
        **_BACKBONE,
        # With padding, every part would have to know the mask.
        'data_preprocessor': Part(('mmdet.DetDataPreprocessor',), {'pad_size_divisor': 1}),
        'bbox_head': Part((head,)),
        'bbox_head.loss_cls': Part(values={'use_sigmoid': True}),
        'bbox_head.test_cfg': Settings(('max_per_img',)),
    }


def _mask_queries(head: str, *decoders: str, **preprocessor: Any) -> Table:
    return {
        **_BACKBONE,
        'data_preprocessor': Part(('mmdet.DetDataPreprocessor',), preprocessor),
        'panoptic_head': Part((head,)),
        'panoptic_head.pixel_decoder': Part(decoders),
        'panoptic_fusion_head': Part(('mmdet.MaskFormerFusionHead',)),
        'panoptic_fusion_head.test_cfg': Settings(
            ('panoptic_on', 'instance_on', 'max_per_image', 'object_mask_thr', 'iou_thr', 'filter_low_score'),
            {'semantic_on': False},
        ),
    }


_PIXEL_DECODERS = {
    'Mask2FormerHead': ('mmdet.MSDeformAttnPixelDecoder',),
    'MaskFormerHead': ('mmdet.TransformerEncoderPixelDecoder', 'mmdet.PixelDecoder'),
}
_TWO_STAGE: Table = {
    **_DETECTOR,
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
    **_nms('test_cfg.rpn'),
    **_nms('test_cfg.rcnn'),
}
MODELS: dict[str, Table] = {
    'mmdet.FasterRCNN': _TWO_STAGE,
    'mmdet.MaskRCNN': _TWO_STAGE,
    'mmdet.CascadeRCNN': _TWO_STAGE,
    'mmdet.RetinaNet': _one_stage(_dense_head('bbox_head', 'mmdet.RetinaHead')),
    'mmdet.RTMDet': _one_stage(
        _dense_head('bbox_head', 'mmdet.RTMDetSepBNHead', 'mmdet.MlvlPointGenerator', 'mmdet.DistancePointBBoxCoder')
    ),
    'mmdet.DINO': _box_queries('mmdet.DINOHead'),
    'mmdet.DeformableDETR': _box_queries('mmdet.DeformableDETRHead'),
    'mmdet.Mask2Former': _mask_queries('mmdet.Mask2FormerHead', *_PIXEL_DECODERS['Mask2FormerHead']),
    # Its heads read the padding.
    'mmdet.MaskFormer': _mask_queries('mmdet.MaskFormerHead', *_PIXEL_DECODERS['MaskFormerHead'], pad_size_divisor=1),
    'mmseg.EncoderDecoder': {
        **_BACKBONE,
        'data_preprocessor': Part(('mmseg.SegDataPreProcessor',)),
        'data_preprocessor.test_cfg': Part(values={'size': None}, is_optional=True),
        'test_cfg': Part(values={'mode': 'whole'}),
    },
}
# Heads of mmseg with a `predict` of their own that is supported.
MASK_HEADS: dict[str, Table] = {
    'mmseg.Mask2FormerHead': {'decode_head.pixel_decoder': Part(_PIXEL_DECODERS['Mask2FormerHead'])},
    'mmseg.MaskFormerHead': {
        'decode_head.pixel_decoder': Part(_PIXEL_DECODERS['MaskFormerHead']),
        # It resizes masks to the size without padding, which mmseg then crops again.
        'data_preprocessor.test_cfg': Part(values={'size_divisor': None}, is_optional=True),
    },
}
_LOADING = ('LoadImageFromFile', 'LoadAnnotations', 'LoadPanopticAnnotations')
_OF_LABELS = ('IgnoreMaskValues', 'MapMaskValues')  # of this package: they do nothing to an image
_TRANSFORMS = (*_LOADING, *_OF_LABELS, 'Resize', 'Pad', 'PackDetInputs', 'PackSegInputs')
# Options of transforms with only one supported value, and that value.
_VALUES: dict[str, dict[str, Any]] = {
    'LoadImageFromFile': {'color_type': 'color', 'imdecode_backend': 'cv2'},
    'Resize': {'interpolation': 'bilinear', 'backend': 'cv2'},
    'Pad': {'pad_to_square': False, 'padding_mode': 'constant'},
}


def reasons_against(model: nn.Module) -> Iterator[str]:
    """Yield the reasons why a detector of mmdet or a segmentor of mmseg cannot be exported, one per part."""
    reasons = list(Part(tuple(MODELS)).reasons_against('model', model))
    yield from reasons or _reasons_in_table(model, MODELS[_kind(model)])
    head: Any = getattr(model, 'decode_head', None)
    if reasons or head is None:
        return
    from mmseg.models.decode_heads.decode_head import BaseDecodeHead

    if model.out_channels == 1:
        yield 'model.decode_head has one output for two classes (a binary head); supported: one output per class'
    if _kind(head) in MASK_HEADS:
        yield from _reasons_in_table(model, MASK_HEADS[_kind(head)])
        return
    for method in ('predict', 'predict_by_feat'):
        if getattr(type(head), method, None) is not getattr(BaseDecodeHead, method):
            yield f'model.decode_head is a {type(head).__name__}, which overrides `{method}`'


def _reasons_in_table(model: nn.Module, table: Table) -> Iterator[str]:
    refused: list[str] = []
    for path, row in table.items():
        if any(path.startswith(f'{parent}.') for parent in refused):
            continue  # other types may lack the part
        found = _parts('model', model, path.split('.'))
        reasons = [reason for where, part in found for reason in row.reasons_against(where, part)]
        if not found and not row.is_optional:
            reasons = [f'model has no {path}']
        if reasons:
            refused.append(path)
        yield from dict.fromkeys(reasons)


def _parts(where: str, part: Any, names: Sequence[str]) -> list[tuple[str, Any]]:
    """Return (where, part) at a path below a part; each stage of a cascade counts, and None is no part."""
    if part is None:
        return []
    if isinstance(part, nn.ModuleList):
        return [found for index, stage in enumerate(part) for found in _parts(f'{where}[{index}]', stage, names)]
    if not names:
        return [(where, part)]
    return _parts(f'{where}.{names[0]}', getattr(part, names[0], None), names[1:])


def reasons_against_pipeline(pipeline: Sequence[Mapping[str, Any]]) -> Iterator[str]:
    """Yield the reasons why a test pipeline cannot be reproduced outside its framework."""
    names = [_transform(transform) for transform in pipeline]
    for name, transform in zip(names, pipeline, strict=True):
        if name not in _TRANSFORMS:
            yield f'the test pipeline has {name}; supported: {", ".join(_TRANSFORMS)}'
        for key, value in _VALUES.get(name, {}).items():
            if transform.get(key, value) != value:
                yield f'{name} of the test pipeline has {key}={transform[key]!r}; supported: {value!r}'
    for name in ('Resize', 'Pad'):
        if names.count(name) > 1:
            yield f'the test pipeline has {name} {names.count(name)} times'
    if 'Pad' in names and 'PackSegInputs' in names:
        yield 'the test pipeline of a segmentor has Pad; supported: data_preprocessor.test_cfg.size_divisor'
    if 'Pad' in names and 'Resize' in names[names.index('Pad') :]:
        yield 'the test pipeline has Pad before Resize; supported: after it'


def preparation_of(pipeline: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return the settings of a test pipeline for ``swin_dense.runtime``: ``resize``, ``pad`` and ``to_float32``."""
    steps = {_transform(transform): transform for transform in pipeline}
    load, resize, pad = (steps.get(name) for name in ('LoadImageFromFile', 'Resize', 'Pad'))
    to_float32 = bool((load or {}).get('to_float32', False))
    settings: dict[str, Any] = {'to_float32': to_float32, 'resize': None, 'pad': None}
    if resize is not None:
        scale = resize.get('scale')
        settings['resize'] = {
            'scale': _pair(scale) if scale else None,
            'scale_factor': None if scale else _pair(resize.get('scale_factor')),
            'keep_ratio': bool(resize.get('keep_ratio', False)),
        }
    if pad is not None:
        value = pad.get('pad_val', 0)
        settings['pad'] = {
            'size': pad.get('size'),
            'size_divisor': pad.get('size_divisor'),
            'value': value.get('img', 0) if isinstance(value, Mapping) else value,
        }
    return settings


def _transform(transform: Mapping[str, Any]) -> str:
    kind = transform['type']
    return kind.rpartition('.')[2] if isinstance(kind, str) else kind.__name__


def _pair(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value, value]
