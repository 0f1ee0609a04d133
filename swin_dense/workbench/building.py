"""Build the model of a config on the meta device, and run the parts whose work depends only on the image size."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import torch
from mmengine.registry import MODELS, init_default_scope
from torch import Tensor, nn

from swin_dense.utils import packages

BOX_REGIONS = 1000
MASK_REGIONS = 100


def model_entry(config: Any) -> Any:
    """Return a copy of the model's entry in a config, which building may modify, as mmengine's runner builds it.

    That is the model inside the one of test-time augmentation, completed with a ``data_preprocessor`` that the config
    states outside of its model, and without ``pretrained``, the address of weights.
    """
    entry = copy.deepcopy(config.model.get('module') or config.model)
    entry.pop('pretrained', None)
    if config.get('data_preprocessor'):
        entry.setdefault('data_preprocessor', copy.deepcopy(config.data_preprocessor))
    return entry


def build_on_meta(config: Any) -> nn.Module:
    """Build the model of an ``mmengine.Config`` of mmdet or mmseg on the meta device, in evaluation mode."""
    if not isinstance(config.get('model'), dict):
        raise ValueError(f'the config has no model = dict(type=...), got {config.get("model")!r}')
    check_packages(config)
    init_default_scope(config.get('default_scope', 'mmengine'))
    try:
        try:
            with torch.device('meta'):
                model = MODELS.build(copy.deepcopy(config.model))  # a copy, because some models modify their config
        except RuntimeError:  # the constructors of some models, such as mmdet's Swin, read values of tensors
            model = MODELS.build(copy.deepcopy(config.model)).to('meta')
    except KeyError as error:  # raised by the registry for an unknown type
        raise ValueError(f'the model cannot be built: {error.args[0]}') from error
    model.eval()
    return model


def check_packages(config: Any) -> None:
    """Raise ImportError if a package that a model needs is not installed."""
    for package, why in needed_packages(config.get('model') or {}).items():
        packages.require(f'{why} of this model', package)


def needed_packages(model: Any) -> dict[str, str]:
    """Return {package: part of the model} for the additional packages that a model with a text encoder needs."""
    if not model.get('language_model'):
        return {}
    encoder = model.get('encoder') or {}
    needed = {'transformers': 'the text encoder'}
    if encoder.get('num_cp'):
        needed['fairscale'] = 'the encoder'
    return needed


def published_shape(config: Any) -> tuple[int, int]:
    """Return the image size, (height, width), of the published figures for the model of an mmdet or mmseg config."""
    if config.get('default_scope') == 'mmseg':
        if 'crop_size' not in config:
            raise ValueError('the config has no crop_size, so the size of the published figures is unknown; give size=')
        height = config.crop_size[0]
        return height, 4 * height
    return 800, 1280


def run_on_shapes(model: Any, image: Tensor) -> None:
    """Run the parts of a model whose cost depends only on the size of the image, (1, C, H, W).

    Box heads run on 1000 regions and mask heads on 100, as in mmdet's tool, with which the published figures were
    counted.
    """
    if not hasattr(model, 'extract_feat'):
        model(image)
        return
    # Heads with queries, and models that need more than an image.
    decode_head = getattr(model, 'decode_head', None)
    needs_samples = decode_head and 'batch_data_samples' in inspect.signature(decode_head.forward).parameters
    parts = ('panoptic_head', 'decoder', 'language_model', 'track_head', 'backbone_inchannels')
    if needs_samples or any(hasattr(model, part) for part in parts):
        raise NotImplementedError('its work depends on the content of the image')
    maps = model.extract_feat(image)
    if decode_head is not None:
        decode_head(maps)
    elif hasattr(model, 'roi_head'):
        model.rpn_head(maps)
        head = model.roi_head
        _run_on_regions(head.bbox_head, head.bbox_roi_extractor, BOX_REGIONS)
        if head.with_mask:
            _run_on_regions(head.mask_head, head.mask_roi_extractor, MASK_REGIONS)
    else:
        model.bbox_head(maps)


def _run_on_regions(heads: Any, extractors: Any, regions: int) -> None:
    if not isinstance(heads, nn.ModuleList):
        heads, extractors = [heads], [extractors]
    for head, extractor in zip(heads, extractors, strict=True):
        head(torch.zeros(regions, extractor.out_channels, *extractor.roi_layers[0].output_size))
