"""The options of the backbones: their types, their checks, and suggestions for unknown options."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from swin_dense.archs.arch import Arch, resolve_arch
from swin_dense.ops.windows import Size
from swin_dense.utils import checks


class OptionsOfBoth(TypedDict, total=False):
    """The options that ``SwinBackbone`` and ``SwinV2Backbone`` share, for type checkers and editors."""

    embed_dims: int | None
    depths: Sequence[int] | None
    num_heads: Sequence[int] | None
    pretrain_img_size: int | Sequence[int]
    in_channels: int
    patch_size: int
    mlp_ratio: float
    strides: Sequence[int] | None
    out_indices: Sequence[int] | None
    qkv_bias: bool
    patch_norm: bool
    drop_rate: float
    attn_drop_rate: float
    drop_path_rate: float
    use_abs_pos_embed: bool
    use_shift: bool
    act_cfg: Any
    norm_cfg: Any
    with_cp: bool | str | Sequence[bool | str]
    frozen_stages: int
    attn_backend: str
    clamp_window: bool


class BackboneOptions(OptionsOfBoth, total=False):
    """The options of ``create_backbone``."""

    window_size: int | Sequence[int]
    # The first two are options of V1, the last of V2.
    qk_scale: float | None
    use_rel_pos_bias: bool
    pretrained_window_size: int | Sequence[int]


def resolved_arch(
    arch: str | Mapping[str, Any] | Arch,
    network: str,
    embed_dims: int | None,
    depths: Sequence[int] | None,
    num_heads: Sequence[int] | None,
) -> Arch:
    """Return the architecture, in which options that are given replace its own."""
    base = resolve_arch(arch, network)
    return Arch(
        base.embed_dims if embed_dims is None else embed_dims,
        base.depths if depths is None else checks.integers('depths', depths),
        base.num_heads if num_heads is None else checks.integers('num_heads', num_heads),
    )


def frozen_count(frozen_stages: int, built: int) -> int:
    """Return the number of frozen stages, or -1, of a model that builds this number of stages."""
    frozen = checks.integer('frozen_stages', frozen_stages, minimum=-1)
    if frozen > built:
        raise ValueError(f'frozen_stages must be between -1 and {built}, the number of stages built, got {frozen}')
    return frozen


def mlp_channels(mlp_ratio: float, channels: int) -> int:
    """Return the hidden channels of the MLPs of a stage."""
    hidden = int(checks.number('mlp_ratio', mlp_ratio) * channels)
    if hidden < 1:
        raise ValueError(f'mlp_ratio={mlp_ratio} gives no hidden channels for {channels} channels; 4 is usual')
    return hidden


def strides_of_stages(strides: Sequence[int] | None, patch_size: int, stages: int) -> tuple[int, ...]:
    """Return the stride of the patch embedding and of each patch merging."""
    if strides is None:
        return (patch_size,) + (2,) * (stages - 1)
    checked = checks.integers('strides', strides, stages)
    if checked[0] != patch_size:
        raise checks.OptionError(
            f'strides[0] must equal patch_size, because patches do not overlap; got {checked[0]} and {patch_size}'
        )
    return checked


def output_stages(out_indices: Sequence[int] | None, stages: int) -> tuple[int, ...]:
    """Return the indices of the output stages in ascending order."""
    if out_indices is None:
        return tuple(range(stages))
    checked = checks.integers('out_indices', out_indices, minimum=0)
    if len(set(checked)) < len(checked) or max(checked) >= stages:
        raise ValueError(f'out_indices must be different stages from 0 to {stages - 1}, got {out_indices!r}')
    return tuple(sorted(checked))


def checkpointing_per_stage(with_cp: bool | str | Sequence[bool | str], stages: int) -> tuple[bool | str, ...]:
    """Return what each stage recomputes in the backward pass, given one value for all stages or one for each."""
    values = [with_cp] * stages if isinstance(with_cp, (bool, str)) else with_cp
    if not isinstance(values, Sequence):
        raise TypeError(f"with_cp must be True, False, 'mlp' or a list with one of them per stage, got {with_cp!r}")
    if len(values) != stages:
        raise ValueError(f'with_cp must have one entry for each of the {stages} stages, got {len(values)}: {with_cp!r}')
    for value in values:
        if not isinstance(value, bool) and value != 'mlp':
            raise ValueError(
                f"with_cp must be True (recompute blocks), 'mlp' (only their MLPs) or False, got {value!r}"
            )
    return tuple(values)


def grid_of_positions(pretrain_img_size: int | Sequence[int], patch_size: int) -> Size:
    """Return the (height, width) in tokens of the absolute position embedding."""
    height, width = checks.pair('pretrain_img_size', pretrain_img_size, minimum=patch_size)
    return height // patch_size, width // patch_size


def window_per_stage(window_size: Any, stages: int) -> tuple[Size, ...]:
    """Return the (height, width) of the windows of each stage, given one window for all stages or one for each."""
    is_list = isinstance(window_size, Sequence) and not isinstance(window_size, (str, bytes))
    given = list(window_size) if is_list else [window_size]
    if len(given) <= 2 and not any(isinstance(window, (list, tuple)) for window in given):
        return (checks.pair('window_size', window_size),) * stages
    if len(given) != stages:
        raise checks.OptionError(
            'window_size must be one integer, a (height, width) pair, or a list with one of them for each of the '
            f'{stages} stages, got {len(given)}: {window_size!r}'
        )
    return tuple(checks.pair(f'window_size[{stage}]', window) for stage, window in enumerate(given))


def window_shift(use_shift: bool, window: Size) -> Size:
    """Return the (height, width) in tokens by which every second block shifts its windows."""
    if not checks.boolean('use_shift', use_shift):
        return 0, 0
    return window[0] // 2, window[1] // 2


def why_unknown(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Return the advice in the error about an unknown option: the option that its user probably meant."""
    if name == 'img_size':
        return (
            ': images of any size work; the size for which an absolute position embedding was trained is '
            "'pretrain_img_size'"
        )
    if name in ('pretrained', 'init_cfg', 'convert_weights'):
        return (
            ' is an option of SwinDense in mmengine configs; for SwinBackbone use load_checkpoint or '
            'create_backbone(..., checkpoint=...)'
        )
    if name == 'pretrained_window_size' and name not in allowed:
        return ' is an option of Swin V2: use SwinV2Backbone, or SwinDenseV2 in a config'
    return checks.closest(name, allowed)


def reject_unknown(
    unknown: Mapping[str, Any],
    allowed: Sequence[str],
    why: Callable[[str, Any, Sequence[str]], str] = why_unknown,
) -> None:
    """Raise TypeError if options are unknown: for each, the name or the place that the user probably meant."""
    reasons = [f'{name!r}{why(name, value, allowed)}' for name, value in unknown.items()]
    if len(reasons) == 1:
        end = '' if reasons[0].endswith('?') else '.'
        raise TypeError(f'unknown option {reasons[0]}{end} The options are {", ".join(allowed)}')
    if reasons:
        listed = '\n  '.join(reasons)
        raise TypeError(f'unknown options:\n  {listed}\nThe options are {", ".join(allowed)}')


def drop_path_by_block(last: float, depths: Sequence[int]) -> list[list[float]]:
    """Return the rates of the blocks of each stage, rising linearly from 0 to ``last`` over all blocks."""
    steps = max(sum(depths) - 1, 1)
    rates = iter([last * block / steps for block in range(sum(depths))])
    return [list(itertools.islice(rates, depth)) for depth in depths]
