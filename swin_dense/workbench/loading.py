"""Load the weights of whole models: all of them, or an error that counts and names the missing ones."""

from __future__ import annotations

import logging
import re
from collections import OrderedDict
from collections.abc import Mapping
from contextlib import nullcontext
from typing import Any

from mmengine.config import Config
from mmengine.registry import MODELS, init_default_scope
from torch import nn

from swin_dense.checkpoint.load import allow_partial_loading, read_checkpoint
from swin_dense.utils import private
from swin_dense.utils.checks import first_few
from swin_dense.utils.errors import CheckpointError
from swin_dense.workbench.building import model_entry

_logger = logging.getLogger(__package__)
# A line in the error of torch.nn.Module.load_state_dict, which names the parameter.
_MISFIT = re.compile(r'^\s*(?:size mismatch for |[Ww]hile copying the parameter named ")([\w.]+)', re.M)


def build_whole(config: Config, checkpoint: str, allow_partial: bool = False) -> tuple[nn.Module, dict[str, Any]]:
    """Build the model of a config on the CPU and load its weights, from a file or an address.

    Return the model and the content of the checkpoint.

    Raises:
        CheckpointError: the checkpoint cannot be fetched or read, or does not fill the model.
        ValueError: the model cannot be built.
    """
    content, described = read_checkpoint(checkpoint)
    init_default_scope(config.get('default_scope', 'mmengine'))
    try:
        model = MODELS.build(model_entry(config))
    except Exception as error:  # the frameworks raise exceptions of any type
        reason = f'{type(error).__name__}: {error}'.partition('\n')[0]
        raise ValueError(f'the model of the config cannot be built ({reason})') from error
    state = load_whole(model, content, described, allow_partial)
    return model, {**(content if 'state_dict' in content else {}), 'state_dict': state}


def saved_names(content: Mapping[str, Any]) -> dict[str, Any]:
    """Return the description of the data set in a checkpoint, such as its ``classes`` and ``palette``."""
    meta = content.get('meta')
    if not isinstance(meta, Mapping):
        return {}
    saved = meta.get('dataset_meta') or meta  # older versions of the frameworks saved CLASSES in `meta` itself
    if isinstance(saved, (list, tuple)):  # of a ConcatDataset of mmdet, whose parts differ in something
        saved = saved[0]
    return {key.lower(): value for key, value in saved.items()}


def load_whole(
    model: nn.Module, content: Mapping[Any, Any], described: str, allow_partial: bool = False
) -> OrderedDict[str, Any]:
    """Load a checkpoint, or its state dict, into a whole model; ignore other entries, with a warning.

    Return the state dict as torch saves it.

    Raises CheckpointError if it lacks parameters of the model, or has them in another shape. With ``allow_partial``
    this is a warning, and they keep the values of the constructor, which are random.
    """
    weights = content.get('state_dict', content)
    state: OrderedDict[str, Any] = OrderedDict()
    for name, tensor in weights.items():
        state[str(name).removeprefix('module.')] = tensor
    # The versions of modules, by which those of the frameworks know former names of parameters.
    private.copy_metadata(weights, state)
    keys: list[list[str]] = []
    # Parameters of another shape are an error of torch, which does not name those that are missing.
    hook = model.register_load_state_dict_post_hook(lambda _, incompatible: keys.extend(incompatible))
    misfits: list[str] = []
    try:
        with allow_partial_loading() if allow_partial else nullcontext():
            model.load_state_dict(state, strict=False)
    except CheckpointError:  # of the backbone
        raise
    except RuntimeError as error:
        misfits = _MISFIT.findall(str(error))
        if not misfits:
            raise CheckpointError(f'{described} cannot be loaded into the {type(model).__name__}: {error}') from error
    finally:
        hook.remove()
    missing, unexpected = keys
    own = model.state_dict()
    missing = [name for name in missing if own[name].is_floating_point()]  # integers are counters and indices
    if unexpected:
        _logger.warning('%s: not in the model, ignored: %s', described, first_few(unexpected))
    if not missing and not misfits:
        return state
    parts = []
    if missing:
        parts.append(f'{len(missing)} are missing ({first_few(missing)})')
    if misfits:
        parts.append(f'{len(misfits)} are of another shape ({first_few(misfits)})')
    kind = type(model).__name__
    lacks = f'{described} does not fill the {kind} of the config: of its {len(own)} parameters, {" and ".join(parts)}'
    if not allow_partial:
        raise CheckpointError(
            f'{lacks}, which would be random. Give a checkpoint of this model, or the config that it was trained with; '
            'allow_partial=True accepts random values'
        )
    _logger.warning('%s, which are random', lacks)
    return state
