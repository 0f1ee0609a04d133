"""Check whether a detector or segmentor can be exported whole. All unsupported parts are named."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn

_TRANSFORMS = ('LoadImageFromFile', 'Resize', 'LoadAnnotations', 'PackDetInputs', 'PackSegInputs')
_TWO_STAGE = ('FasterRCNN', 'MaskRCNN', 'CascadeRCNN')
_ONE_STAGE = ('RetinaNet',)
_BOX_HEADS = ('Shared2FCBBoxHead', 'Shared4Conv1FCBBoxHead', 'ConvFCBBoxHead')


def reasons_against_detector(detector: nn.Module) -> Iterator[str]:
    """Yield the reasons why a detector of mmdet cannot be exported, one per part."""
    model: Any = detector
    yield from _unsupported('model', model, 'mmdet', *_TWO_STAGE, *_ONE_STAGE)
    if _name(model) not in (*_TWO_STAGE, *_ONE_STAGE):
        return
    yield from _against_backbone(model.backbone)
    yield from _unsupported('model.data_preprocessor', model.data_preprocessor, 'mmdet', 'DetDataPreprocessor')
    if _name(model) in _ONE_STAGE:
        yield from _against_dense_head('model.bbox_head', model.bbox_head, 'RetinaHead')
        yield from _against_settings(
            'model.test_cfg', model.bbox_head.test_cfg, 'score_thr', 'nms_pre', 'nms', 'max_per_img', 'min_bbox_size'
        )
        return
    yield from _against_dense_head('model.rpn_head', model.rpn_head, 'RPNHead')
    yield from _against_settings(
        'model.test_cfg.rpn', model.rpn_head.test_cfg, 'nms_pre', 'nms', 'max_per_img', 'min_bbox_size'
    )
    yield from _against_roi_head(model.roi_head)


def reasons_against_segmentor(segmentor: nn.Module) -> Iterator[str]:
    """Yield the reasons why a segmentor of mmseg cannot be exported, one per part."""
    from mmseg.models.decode_heads.decode_head import BaseDecodeHead

    model: Any = segmentor
    yield from _unsupported('model', model, 'mmseg', 'EncoderDecoder')
    if _name(model) != 'EncoderDecoder':
        return
    yield from _against_backbone(model.backbone)
    yield from _unsupported('model.data_preprocessor', model.data_preprocessor, 'mmseg', 'SegDataPreProcessor')
    if getattr(model.data_preprocessor, 'test_cfg', None):
        yield f'model.data_preprocessor.test_cfg is {dict(model.data_preprocessor.test_cfg)}; padding is not supported'
    mode = model.test_cfg.get('mode', 'whole')
    if mode != 'whole':
        yield f"model.test_cfg.mode is {mode!r}; supported: 'whole'"
    head = model.decode_head
    if model.out_channels == 1:
        yield 'model.decode_head has one output for two classes (a binary head); supported: one output per class'
    for method in ('predict', 'predict_by_feat'):
        if getattr(type(head), method, None) is not getattr(BaseDecodeHead, method):
            yield f'model.decode_head is a {_name(head)}, which overrides `{method}`'


def reasons_against_pipeline(config: Any) -> Iterator[str]:
    """Yield the reasons why the test pipeline of a config cannot be reproduced outside its framework."""
    resizes = 0
    for transform in config.test_dataloader.dataset.pipeline:
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


def resize_of(config: Any) -> dict[str, Any] | None:
    """Return the settings of ``Resize`` in the test pipeline for ``swin_dense.runtime``, or None if it has none."""
    for transform in config.test_dataloader.dataset.pipeline:
        if _transform(transform) == 'Resize':
            scale, factor = transform.get('scale'), transform.get('scale_factor')
            return {
                'scale': _pair(scale) if scale else None,
                'scale_factor': None if scale else _pair(factor),
                'keep_ratio': bool(transform.get('keep_ratio', False)),
            }
    return None


def _against_backbone(backbone: Any) -> Iterator[str]:
    if getattr(backbone, 'clamp_window', False):
        yield 'model.backbone has clamp_window=True, so windows depend on the image size; build it with False'


def _against_dense_head(where: str, head: Any, known: str) -> Iterator[str]:
    yield from _unsupported(where, head, 'mmdet', known)
    yield from _unsupported(f'{where}.prior_generator', head.prior_generator, 'mmdet', 'AnchorGenerator')
    yield from _unsupported(f'{where}.bbox_coder', head.bbox_coder, 'mmdet', 'DeltaXYWHBBoxCoder')
    if not head.use_sigmoid_cls or getattr(head.loss_cls, 'custom_cls_channels', False):
        yield f'{where}.loss_cls is a {_name(head.loss_cls)} without a sigmoid; supported: use_sigmoid=True'


def _against_roi_head(roi_head: Any) -> Iterator[str]:
    yield from _unsupported('model.roi_head', roi_head, 'mmdet', 'StandardRoIHead', 'CascadeRoIHead')
    if roi_head.with_shared_head:
        yield f'model.roi_head.shared_head is a {_name(roi_head.shared_head)}; shared heads are not supported'
    parts = ['bbox_roi_extractor', *(['mask_roi_extractor'] if roi_head.with_mask else [])]
    for where, extractor in _stages(roi_head, parts):
        yield from _unsupported(where, extractor, 'mmdet', 'SingleRoIExtractor')
        layer = extractor.roi_layers[0]
        yield from _unsupported(f'{where}.roi_layer', layer, 'mmcv', 'RoIAlign')
        if getattr(layer, 'pool_mode', 'avg') != 'avg' or getattr(layer, 'use_torchvision', False):
            yield (
                f'{where}.roi_layer pools with {layer.pool_mode!r}, use_torchvision={layer.use_torchvision}; '
                "supported: 'avg', False"
            )
    for where, head in _stages(roi_head, ['bbox_head']):
        yield from _unsupported(where, head, 'mmdet', *_BOX_HEADS)
        yield from _unsupported(f'{where}.bbox_coder', head.bbox_coder, 'mmdet', 'DeltaXYWHBBoxCoder')
        if not (head.with_cls and head.with_reg):
            yield f'{where} has with_cls={head.with_cls}, with_reg={head.with_reg}; both must be True'
        if head.custom_cls_channels or head.custom_activation:
            yield f'{where}.loss_cls is a {_name(head.loss_cls)} with a custom activation; supported: softmax'
    keys = ['score_thr', 'nms', 'max_per_img']
    if roi_head.with_mask:
        keys.append('mask_thr_binary')
        for where, head in _stages(roi_head, ['mask_head']):
            yield from _unsupported(where, head, 'mmdet', 'FCNMaskHead')
        if roi_head.test_cfg.get('mask_thr_binary', 0) < 0:
            yield 'model.test_cfg.rcnn.mask_thr_binary is below 0, which selects probabilities; supported: 0 and above'
    yield from _against_settings('model.test_cfg.rcnn', roi_head.test_cfg, *keys)


def _against_settings(where: str, settings: Mapping[str, Any], *known: str) -> Iterator[str]:
    for key in settings:
        if key not in known:
            yield f'{where} has {key}={settings[key]!r}; supported: {", ".join(known)}'
    for key in ('nms_pre', 'max_per_img'):
        if key in known and settings.get(key, -1) <= 0:
            yield f'{where} must have {key} above 0, got {settings.get(key)}'
    nms = settings.get('nms', {})
    kind = nms.get('type', 'nms')
    if kind != 'nms':
        yield f"{where}.nms is {kind!r}; supported: 'nms'"
    for key in nms:
        if kind == 'nms' and key not in ('type', 'iou_threshold', 'split_thr'):
            yield f'{where}.nms has {key}={nms[key]!r}; supported: iou_threshold'


def _stages(parent: Any, names: Sequence[str]) -> Iterator[tuple[str, Any]]:
    for name in names:
        part = getattr(parent, name)
        if isinstance(part, nn.ModuleList):
            yield from ((f'model.roi_head.{name}[{index}]', one) for index, one in enumerate(part))
        else:
            yield f'model.roi_head.{name}', part


def _unsupported(where: str, part: Any, package: str, *known: str) -> Iterator[str]:
    if type(part).__module__.partition('.')[0] != package or _name(part) not in known:
        yield f'{where} is a {_name(part)} of {type(part).__module__}; supported from {package}: {", ".join(known)}'


def _name(part: Any) -> str:
    return type(part).__name__


def _transform(transform: Mapping[str, Any]) -> str:
    kind = transform['type']
    return kind.rpartition('.')[2] if isinstance(kind, str) else kind.__name__


def _unsupported_values(name: str, given: Mapping[str, Any], known: Mapping[str, Any]) -> Iterator[str]:
    for key, value in known.items():
        if given.get(key, value) != value:
            yield f'{name} of the test pipeline has {key}={given[key]!r}; supported: {value!r}'


def _pair(value: Any) -> list[Any]:
    return list(value) if isinstance(value, Sequence) else [value, value]
