"""Count parameters and FLOPs of a whole detector or segmentor, module by module.

The model is built and run on the meta device, which computes only shapes, so the largest model takes a second and no
memory. Parts whose work depends on the image's content get a fixed amount of work: box heads run on 1000 regions and
mask heads on 100, as in mmdet's tool, with which the published figures were counted.
"""

from __future__ import annotations

import copy
import inspect
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from importlib.util import find_spec
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from swin_dense.models.attention import ShiftedWindowAttention, WindowAttention
from swin_dense.ops.windows import window_grid
from swin_dense.utils import checks

BOX_REGIONS = 1000
MASK_REGIONS = 100


@dataclass(frozen=True)
class Count:
    """Parameters and FLOPs by module name, including submodules; '' is the whole model.

    A FLOP is one multiply-add of a matrix product or a convolution. Norms, activations and resampling, well below
    1 % of a model, are not counted.

    Attributes:
        parameters: trainable and frozen parameters.
        flops: FLOPs as in published figures, including the qkv and output projections of padding tokens, which the
            official code computes.
        computed_flops: FLOPs without these projections, which this package skips.
    """

    parameters: Mapping[str, int]
    flops: Mapping[str, int]
    computed_flops: Mapping[str, int]


def build_on_meta(config: Any) -> nn.Module:
    """Build the model of an ``mmengine.Config`` of mmdet or mmseg on the meta device, in evaluation mode.

    Raises:
        ValueError: the config has no model, or one of an unknown type.
        ImportError: the model needs a package that is not installed.
    """
    from mmengine.registry import MODELS, init_default_scope

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
    """Check that the packages that a model needs are installed.

    Raises:
        ImportError: one of them is not installed.
    """
    for package, why in needed_packages(config.get('model') or {}).items():
        if find_spec(package) is None:
            raise ImportError(f'{why} of this model needs {package}: pip install {package}')


def needed_packages(model: Any) -> dict[str, str]:
    """Return {package: part of the model} for the additional packages that a model with a text encoder needs."""
    if not model.get('language_model'):
        return {}
    encoder = model.get('encoder') or {}
    return {'transformers': 'the text encoder', **({'fairscale': 'the encoder'} if encoder.get('num_cp') else {})}


def published_shape(config: Any) -> tuple[int, int]:
    """Return the image size, (height, width), of the published figures for the model of an mmdet or mmseg config.

    For a config of pretraining, it is the size of a crop.
    """
    crop_size = ((config.get('train_dataloader') or {}).get('dataset') or {}).get('crop_size')
    if crop_size is not None:
        return crop_size, crop_size
    if config.get('default_scope') == 'mmseg':
        if 'crop_size' not in config:
            raise ValueError('the config has no crop_size, so the size of the published figures is unknown; give size=')
        height = config.crop_size[0]
        return height, 4 * height
    return 800, 1280


def count(model: nn.Module, height: int, width: int) -> Count:
    """Count parameters and FLOPs of a model for one image.

    Args:
        model: a detector of mmdet, a segmentor of mmseg, or a module that takes an image; on the meta device.
        height: image height in pixels.
        width: image width in pixels.

    Raises:
        ValueError: the model is on another device, has no convolution from which to infer the image channels, or its
            cost depends on values, not only on shapes.
    """
    if not all(parameter.is_meta for parameter in model.parameters()):
        raise ValueError("the model must be on the meta device; build it there, or pass model.to('meta')")
    channels = next((module.in_channels for module in model.modules() if isinstance(module, nn.Conv2d)), None)
    if channels is None:
        raise ValueError(
            'the model has no Conv2d, so the number of image channels is unknown; give a model that takes an image'
        )
    height, width = checks.integer('height', height), checks.integer('width', width)
    meter = _Meter()
    with _reference_attention(model), meter.attached_to(model), torch.no_grad(), torch.device('meta'):
        try:
            _forward(model, torch.zeros(1, channels, height, width))
        except ValueError:
            raise
        except Exception as error:  # an operator without a meta implementation, or a model with another interface
            raise ValueError(f'{_uncounted(model)} ({type(error).__name__}: {error})'.partition('\n')[0]) from error
    parameters: Counter[str] = Counter()
    for name, parameter in model.named_parameters():
        parameters[name.rpartition('.')[0]] += parameter.numel()
    computed = _with_ancestors(meter.flops)
    return Count(_with_ancestors(parameters), computed + _with_ancestors(meter.padding), computed)


class _Meter:
    """Count the FLOPs of a model's operations and attribute them to the innermost running module, with forward hooks.

    Attributes:
        flops: multiply-adds by module name, without submodules.
        padding: multiply-adds of the skipped projections of padding tokens, by module name.
    """

    def __init__(self) -> None:
        self.flops: Counter[str] = Counter()
        self.padding: Counter[str] = Counter()
        self._counter = FlopCounterMode(display=False)
        self._charged = 0
        self._running = ['']

    @contextmanager
    def attached_to(self, model: nn.Module) -> Iterator[None]:
        with ExitStack() as stack:
            for name, module in model.named_modules():
                stack.callback(module.register_forward_pre_hook(self._enter(name)).remove)
                stack.callback(module.register_forward_hook(self._leave(name)).remove)
            stack.enter_context(self._counter)
            yield
            self._charge()

    def _charge(self) -> None:
        total = self._counter.get_total_flops() // 2  # torch counts a multiply-add as two
        self.flops[self._running[-1]] += total - self._charged
        self._charged = total

    def _enter(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor]) -> None:
            self._charge()
            self._running.append(name)

        return hook

    def _leave(self, name: str) -> Callable[..., None]:
        def hook(module: nn.Module, args: tuple[Tensor], output: Any) -> None:
            self._charge()
            self._running.pop()
            if isinstance(module, ShiftedWindowAttention):
                batch, height, width, channels = args[0].shape
                window, _ = module.windows_on(height, width)
                rows, columns = window_grid(height, width, window)
                tokens = batch * (rows * window[0] * columns * window[1] - height * width)
                self.padding[f'{name}.w_msa.qkv'] += 3 * tokens * channels**2
                # The hooks make the layer project padding tokens, which it skips without them.
                self.flops[f'{name}.w_msa.qkv'] -= 3 * tokens * channels**2
                self.padding[f'{name}.w_msa.proj'] += tokens * channels**2

        return hook


@contextmanager
def _reference_attention(model: nn.Module) -> Iterator[None]:
    """Switch all attention modules to plain operations, because Triton does not run on the meta device."""
    attentions = [module for module in model.modules() if isinstance(module, WindowAttention)]
    backends = [module.backend for module in attentions]
    try:
        for module in attentions:
            module.backend = 'reference'
        yield
    finally:
        for module, backend in zip(attentions, backends, strict=True):
            module.backend = backend


def _forward(model: Any, image: Tensor) -> None:
    """Run the parts of a model whose cost depends only on the size of the image."""
    if not hasattr(model, 'extract_feat'):
        model(image)
        return
    if _depends_on_values(model):
        raise ValueError(_uncounted(model))
    maps = model.extract_feat(image)
    if hasattr(model, 'decode_head'):
        model.decode_head(maps)
    elif hasattr(model, 'roi_head'):
        model.rpn_head(maps)
        head = model.roi_head
        _run_on_regions(head.bbox_head, head.bbox_roi_extractor, BOX_REGIONS)
        if head.with_mask:
            _run_on_regions(head.mask_head, head.mask_roi_extractor, MASK_REGIONS)
    else:
        model.bbox_head(maps)


def _depends_on_values(model: Any) -> bool:
    """Return whether the cost depends on values, as for query-based heads, or the model needs more than an image."""
    decode_head = getattr(model, 'decode_head', None)
    if decode_head is not None and 'batch_data_samples' in inspect.signature(decode_head.forward).parameters:
        return True
    return any(
        hasattr(model, part)
        for part in ('panoptic_head', 'decoder', 'language_model', 'track_head', 'backbone_inchannels')
    )


def _uncounted(model: nn.Module) -> str:
    return (
        f'the FLOPs of a {type(model).__name__} cannot be counted from shapes only; count those of its backbone: '
        '`swin-dense flops --arch`'
    )


def _run_on_regions(heads: Any, extractors: Any, regions: int) -> None:
    if not isinstance(heads, nn.ModuleList):
        heads, extractors = [heads], [extractors]
    for head, extractor in zip(heads, extractors, strict=True):
        head(torch.zeros(regions, extractor.out_channels, *extractor.roi_layers[0].output_size))


def _with_ancestors(own: Mapping[str, int]) -> Counter[str]:
    """Add the value of each module to all modules that contain it."""
    inclusive: Counter[str] = Counter()
    for name, value in own.items():
        for module in (*reversed(_ancestors(name)), name):
            inclusive[module] += value
    return inclusive


def _ancestors(name: str) -> list[str]:
    """Return the names of the modules that contain ``name``, innermost first and '' last."""
    parts = name.split('.') if name else []
    return ['.'.join(parts[:length]) for length in reversed(range(len(parts)))]
