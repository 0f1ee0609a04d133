"""Options of configs that were written for other Swins: the authors', mmdet 2.x's and mmpretrain's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from swin_dense.archs.arch import arch_letter, resolve_arch
from swin_dense.models import options as core_options

# Option names of other Swin implementations, and the names here.
FOREIGN_OPTIONS = {
    'embed_dim': 'embed_dims',
    'in_chans': 'in_channels',
    'num_channels': 'in_channels',
    'img_size': 'pretrain_img_size',
    'ape': 'use_abs_pos_embed',
    'use_checkpoint': 'with_cp',
    'norm_layer': 'norm_cfg',
    'act_layer': 'act_cfg',
    'stochastic_depth_prob': 'drop_path_rate',
}
# Options of other Swin implementations that are not options here, and the values with which they change nothing. With
# these values they are left out.
IMPLIED_OPTIONS: dict[str, tuple[Any, ...]] = {
    'out_after_downsample': (False,),
    'interpolate_mode': ('bicubic',),
    'norm_eval': (False, True),  # acts on batch norms only
    'patch_cfg': ({}, None),
    'stage_cfgs': ({}, None),
    'pretrain_style': ('official', 'mmcls'),
    'fused_window_process': (False,),
}
# Names that only the authors' code has, which mmdet 2.x and its forks took over.
_AUTHORS = {'embed_dim', 'in_chans', 'ape', 'use_checkpoint', 'norm_layer'}
# Names that only the classifiers have: mmpretrain's, and for img_size also the authors'.
_CLASSIFIERS = {'img_size', 'stage_cfgs', 'patch_cfg', 'pad_small_map', 'out_after_downsample', 'interpolate_mode'}
# The names of architectures in mmpretrain's configs; those here are 't', 's', 'b' and 'l'.
_NAMES_OF_CLASSIFIERS = ('tiny', 'small', 'base', 'large')
_LAYER_NORMS = ({'type': 'LN'}, {'type': 'LN', 'requires_grad': True})


def translated(options: Mapping[str, Any], network: str) -> tuple[dict[str, Any], list[str]]:
    """Translate the options of a config to those of :class:`SwinDense`, with the meaning that they have in its code.

    Options that no 2-D Swin has, and values that cannot be expressed here, are left as they are. Return the options,
    which contain ``arch``, and a line for each change. An option that is given under two names raises ValueError.
    """
    is_classifier = _is_classifier(options)
    is_authors = not _AUTHORS.isdisjoint(options)
    counts_embedding = is_authors or 'pretrain_style' in options  # an option of BEVDet
    new, notes = dict(options), []
    for name in IMPLIED_OPTIONS.keys() & options.keys():
        if options[name] in IMPLIED_OPTIONS[name]:
            notes.append(f'{name}={new.pop(name)!r} is what is computed here anyway')
    if 'num_classes' in options:
        notes.append(f'num_classes={new.pop("num_classes")!r} is left out: a backbone has no classifier')
    if is_classifier:
        _of_classifier(new, notes, network)
    if _is_name_of_classifier(options.get('arch')):
        ours = arch_letter(options['arch'])
        notes.append(f"arch={options['arch']!r} is mmpretrain's name, so its defaults apply; with {ours!r}, mmdet's do")
    for name in FOREIGN_OPTIONS.keys() & new.keys():
        ours = FOREIGN_OPTIONS[name]
        if ours in new:
            raise ValueError(f'{name} and {ours} are the same option; give one')
        new[ours] = new.pop(name)
        notes.append(f'{name} is {ours}')
    frozen = new.get('frozen_stages', -1)
    if counts_embedding and frozen > 0:
        new['frozen_stages'] = frozen - 1
        notes.append(
            f'frozen_stages={frozen} becomes {frozen - 1}: the authors and BEVDet count the patch embedding as the '
            'first; the output norms of frozen stages are frozen too'
        )
    if is_authors and not is_classifier and 'drop_path_rate' not in new:
        new['drop_path_rate'] = 0.2
        notes.append('drop_path_rate=0.2, the default of the authors')
    if is_classifier and not is_authors:
        _of_mmpretrain(new, notes, network)
    _clamp_frozen_stages(new, notes, network)
    return new, sorted(notes)


def _is_classifier(options: Mapping[str, Any]) -> bool:
    """Return whether the options, or the architecture, are those of a config for a classifier."""
    arch = options.get('arch')
    has_extra_norms = isinstance(arch, Mapping) and 'extra_norm_every_n_blocks' in arch
    return has_extra_norms or _is_name_of_classifier(arch) or not _CLASSIFIERS.isdisjoint(options)


def _is_name_of_classifier(arch: Any) -> bool:
    return isinstance(arch, str) and arch.lower() in _NAMES_OF_CLASSIFIERS


def _of_classifier(new: dict[str, Any], notes: list[str], network: str) -> None:
    """Translate the options of a classifier in place: its outputs, windows and architecture."""
    windows = _windows_of(new.get('stage_cfgs'))
    if windows is not None:
        notes.append(f'stage_cfgs={new.pop("stage_cfgs")!r} becomes window_size={windows}')
        new['window_size'] = windows
    arch = new.get('arch')
    if isinstance(arch, Mapping) and arch.get('extra_norm_every_n_blocks') == 0:
        new['arch'] = {key: value for key, value in arch.items() if key != 'extra_norm_every_n_blocks'}
    if network == 'swinv2' and new.keys().isdisjoint(('img_size', 'pretrain_img_size')):
        new['pretrain_img_size'] = 256  # mmpretrain's default
    depths = new.get('depths') or resolve_arch(new['arch'], network).depths
    defaults = {'out_indices': (len(depths) - 1,), 'clamp_window': not new.pop('pad_small_map', False)}
    for name in defaults.keys() - new.keys():
        new[name] = defaults[name]
        notes.append(f'{name}={defaults[name]}, as in classifiers')


def _of_mmpretrain(new: dict[str, Any], notes: list[str], network: str) -> None:
    """Translate in place the options that mean something else in mmpretrain than in all other Swins."""
    frozen = new.get('frozen_stages', -1)
    if frozen >= 0:
        new['frozen_stages'] = frozen + 1
        merging = '; the patch merging behind the last of them is frozen too' if network == 'swinv2' else ''
        notes.append(f'frozen_stages={frozen} becomes {frozen + 1}: mmpretrain counts from the first stage{merging}')
    if new.get('drop_rate'):
        notes.append('drop_rate acts in the blocks too, in mmpretrain only behind the patch embedding')
    if new.get('norm_cfg', _LAYER_NORMS[0]) not in _LAYER_NORMS:
        notes.append('norm_cfg applies to all norms, in mmpretrain only to those of the outputs')


def _clamp_frozen_stages(new: dict[str, Any], notes: list[str], network: str) -> None:
    """Freeze in place the stages that are built, where mmdet freezes those behind the last output, too."""
    frozen, indices = new.get('frozen_stages', -1), new.get('out_indices')
    if not isinstance(frozen, int) or not isinstance(indices, Sequence) or not indices:
        return
    stages = len(new.get('depths') or resolve_arch(new['arch'], network).depths)
    built = max(indices) + 1
    if 0 < built < frozen <= stages:
        new['frozen_stages'] = built
        notes.append(f'frozen_stages={frozen} becomes {built}: the stages behind the last of out_indices are not built')


def _windows_of(stage_cfgs: Any) -> int | list[Any] | None:
    """Return the window, or a list of one per stage, if ``stage_cfgs`` gives nothing else, otherwise None."""
    stages = stage_cfgs if isinstance(stage_cfgs, Sequence) else [stage_cfgs]
    windows = []
    for stage in stages:
        if not isinstance(stage, Mapping) or not isinstance(stage.get('block_cfgs', {}), Mapping):
            return None
        settings = {**stage, **stage.get('block_cfgs', {})}
        settings.pop('block_cfgs', None)
        windows.append(settings.pop('window_size', None))
        if settings:
            return None
    if None in windows:
        return None
    return windows[0] if len(set(windows)) == 1 else [(side, side) for side in windows]


def why_unknown(name: str, value: Any, allowed: Sequence[str]) -> str:
    """Return the advice in the error about an unknown option; see ``reject_unknown`` in ``models.options``."""
    if name == 'stage_cfgs':
        return f': {value!r} is not supported; only one window for all blocks of a stage is, window_size'
    if name in IMPLIED_OPTIONS:
        values = ' or '.join(map(repr, IMPLIED_OPTIONS[name]))
        return f': {value!r} is not supported; configs of SwinDense may have {values}, which changes nothing'
    return core_options.why_unknown(name, value, allowed)
