"""Export the weights of a backbone with the parameter names and layouts of another library, and write them."""

from __future__ import annotations

from collections.abc import Mapping
from os import PathLike
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from swin_dense.checkpoint.adapters import BASE_KEY, adapter_options, base_digest, merge_pairs, part_of
from swin_dense.checkpoint.families import COORDINATES, EXPORTED, EXPORTED_V2, MMDET
from swin_dense.checkpoint.find import find, flatten
from swin_dense.checkpoint.fit import Target
from swin_dense.checkpoint.read import file_digest, safetensors_torch
from swin_dense.checkpoint.report import CheckpointError
from swin_dense.checkpoint.resize import offsets
from swin_dense.ops.windows import log_spaced_offsets
from swin_dense.utils import checks
from swin_dense.utils.atomic import check_destination, written_whole
from swin_dense.utils.choices import FAMILIES

# For each family, the key of the state dict in its checkpoint files and the prefix of the backbone's parameter names.
_LOCATIONS = {
    'official': ('model', ''),
    'mmdet': ('state_dict', 'backbone.'),
    'mmseg': ('state_dict', 'backbone.'),
    'mmpretrain': ('state_dict', 'backbone.'),
}


def export_state_dict(backbone: nn.Module, family: str = 'mmdet') -> dict[str, Tensor]:
    """Return a copy of the weights of a backbone with the names and layouts of another library.

    Loading the result with :func:`load_checkpoint` gives bitwise identical weights. LoRA is merged into the weights.

    Args:
        backbone: a SwinBackbone.
        family: 'official' (detection and segmentation), 'mmdet', 'mmseg', 'mmpretrain', 'timm', 'torchvision' or
            'transformers' (``SwinBackbone`` of 5.x). timm, torchvision and ``Swinv2Backbone`` of transformers have no
            output norms: ``norm0`` to ``norm3`` keep their names, so load with ``strict=False`` there. mmdet and
            mmseg have no Swin V2.

    Raises:
        ValueError: the family is unknown, or has no Swin V2.
        TypeError: ``backbone`` is not a SwinBackbone.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> weights = export_state_dict(SwinBackbone('t'), 'timm')
        >>> weights['layers.0.blocks.0.attn.qkv.weight'].shape
        torch.Size([288, 96])
    """
    target = Target.of(backbone)
    own = dict(backbone.named_parameters(remove_duplicate=False))
    parameters = {name: own[key].detach() for name, key in target.names.items()}
    return export_parameters(merge_pairs(parameters), family, target)


def export_parameters(parameters: Mapping[str, Tensor], family: str, target: Target) -> dict[str, Tensor]:
    """Return a copy of some or all parameters of a backbone, by our names, as :func:`export_state_dict` does of all."""
    checks.one_of('family', family, FAMILIES)
    layout = EXPORTED[family]
    if target.version == 2:
        if family not in EXPORTED_V2:
            raise ValueError(f'{family} has no Swin V2; family must be one of {list(EXPORTED_V2)}')
        layout = EXPORTED_V2[family]
    if layout.joined_bias:
        parameters = _join_biases(parameters)
    exported = {}
    window = target.backbone.window_size
    for our_name, parameter in parameters.items():
        name = MMDET.read(our_name)
        if name is None:
            raise ValueError(
                f'{our_name!r} is not a parameter of a Swin Transformer and cannot be exported to another library'
            )
        inner = '' if name.role == 'out_norm' else layout.inner
        tensors = layout.encode(name, parameter, target.backbone.position_grid)
        for key, tensor in zip(layout.write(name), tensors, strict=True):
            exported[inner + key] = tensor.clone(memory_format=torch.contiguous_format)
            if name.role == 'logit_scale' and layout.coordinates:
                trained = target.trained_windows[name.stage or 0]
                grid = (1, *offsets(window), 2)
                exported[key.replace('logit_scale', COORDINATES)] = log_spaced_offsets(window, trained).view(grid)
            if name.role in ('table', 'logit_scale') and layout.index is not None:
                # The row in the table of each pair of tokens, (T, T): the difference of their numbers in its grid.
                rows, columns = (torch.arange(side) for side in window)
                token = rows[:, None] * offsets(window)[1] + columns
                index = token.flatten()[:, None] - token.flatten() + token.max()
                index_key = key.rpartition('.')[0] + '.relative_position_index'
                exported[inner + index_key] = index.flatten() if layout.index == 'flat' else index
    return exported


def export_adapter(
    state_dict: Mapping[str, Any], described: str = 'the given dict', prefix: str | None = None
) -> dict[str, Tensor]:
    """Return the entries of a model's state dict without those of its backbone's base, and the hash of that base.

    Args:
        state_dict: of a backbone with an adapter, or of a whole model with one, whose other parts are kept.
        described: the name of the state dict in messages.
        prefix: of the backbone's names, if the state dict contains several.

    Raises:
        CheckpointError: there is no backbone with an adapter.
    """
    values = {key: value for key, value in flatten(state_dict).items() if isinstance(value, Tensor)}
    found = find(values, described, prefix)
    if found.base is not None:
        raise CheckpointError(f'{described} is already an adapter without its base')
    if adapter_options(found.shapes) is None:
        raise CheckpointError(
            f'{described} has no adapter; train a backbone with one, such as '
            "model.backbone.adapter=dict(type='mona', dim=64)"
        )
    of_base = {name for name in found.parameters if part_of(name) == 'base'}
    left_out = {key for name in of_base for key in found.keys[name]}
    # The prefix as the state dict spells it, with the names of wrappers.
    first = next(iter(found.keys[min(of_base)]))
    start = first.removesuffix(min(of_base))
    kept = {key: value for key, value in values.items() if key not in left_out}
    return {**kept, f'{start}{BASE_KEY}': base_digest({name: found.parameters[name] for name in of_base})}


def save_adapter(model: nn.Module, path: str | PathLike[str], force: bool = False) -> Path:
    """Write the adapter of a backbone, its norms, and the hash of its base: a few per cent of the size of the whole.

    ``create_backbone(checkpoint=base, adapter_checkpoint=path)`` builds the backbone again, and
    ``load_checkpoint(backbone, path)`` gives another adapter of the same kind to a backbone with the same base.

    Args:
        model: a SwinBackbone with the option ``adapter``, or a model that contains one, whose other parts are kept.
        path: file to write, with the suffix .safetensors, or any other for ``torch.save``.
        force: replace an existing file.

    Returns:
        The path of the file.

    Raises:
        CheckpointError: the model has no backbone with an adapter.
        FileExistsError: the file exists, and ``force`` is False.

    Examples:
        >>> from swin_dense import SwinBackbone
        >>> save_adapter(SwinBackbone('t', adapter={'type': 'lora'}), 'mine.safetensors')  # doctest: +SKIP
    """
    return write_file(Path(path), export_adapter(model.state_dict(), f'the {type(model).__name__}'), force)


def as_checkpoint(state_dict: Mapping[str, Tensor], family: str, flat: bool) -> dict[str, Any]:
    """Return a state dict of a family with the prefix and, unless ``flat``, the nesting that its loader expects."""
    key, prefix = _LOCATIONS.get(family, (None, ''))
    prefixed = {prefix + name: tensor for name, tensor in state_dict.items()}
    return prefixed if flat or key is None else {key: prefixed}


def write_file(path: Path, checkpoint: Mapping[str, Any], force: bool = False, add_hash: bool = False) -> Path:
    """Write a checkpoint atomically, for the suffix .safetensors a flat dict of tensors, and return its path.

    Args:
        path: the destination.
        checkpoint: the data to write.
        force: overwrite an existing file.
        add_hash: insert the first 8 digits of the file's SHA-256 into its name, which loading then verifies; more, if
            none of them is a letter.
    """
    check_destination(path, force)
    with written_whole(path) as unfinished:
        if path.suffix == '.safetensors':
            safetensors_torch().save_file(checkpoint, unfinished.path)
        else:
            with unfinished.path.open('wb') as file:  # given a path, torch stores that temporary name in the file
                torch.save(checkpoint, file)
        if add_hash:
            digest = file_digest(unfinished.path, 'sha256')
            decimal = len(digest) - len(digest.lstrip('0123456789'))  # which loading takes for a date or a number
            unfinished.destination = path.with_name(f'{path.stem}-{digest[: max(8, decimal + 1)]}{path.suffix}')
            check_destination(unfinished.destination, force)
    return unfinished.destination


def _join_biases(parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Join the query and value biases of V2 into one qkv bias, with a key bias of zeros."""
    joined = {name: tensor for name, tensor in parameters.items() if not name.endswith(('.q_bias', '.v_bias'))}
    for name, q_bias in parameters.items():
        if name.endswith('.q_bias'):
            stem = name.removesuffix('q_bias')
            joined[f'{stem}qkv.bias'] = torch.cat([q_bias, torch.zeros_like(q_bias), parameters[f'{stem}v_bias']])
    return joined
