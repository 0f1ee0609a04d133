"""Teachers by name: a folder of stored maps, a Swin's checkpoint, or a model of transformers, and their licences."""

from __future__ import annotations

import json
import re
from pathlib import Path

import torch

from swin_dense.archs.weights import published
from swin_dense.models.create import create_backbone
from swin_dense.pretraining.teacher_maps import MANIFEST, StoredMaps
from swin_dense.pretraining.teachers import Teacher, teacher_of
from swin_dense.utils import checks, packages

_CHECKPOINTS = ('.pth', '.pt', '.bin', '.pkl', '.ckpt', '.safetensors')
_FRONT_MATTER = re.compile(r'\A---\s*\n(.*?)\n---', re.DOTALL)


def load_teacher(source: str) -> Teacher:
    """Return the teacher that a text names.

    On the meta device, a model of transformers has no weights, and neither has a Swin of published weights: only the
    shapes of the maps are known.

    Args:
        source: a folder that :func:`store_maps` wrote; a checkpoint of a Swin, or the name of published weights, such
            as 'swin_b.in22k'; or else a model for transformers' ``AutoModel``, in a folder or on the Hugging Face hub,
            such as 'facebook/dinov2-small', of a class that :func:`teacher_of` knows.

    Raises:
        OSError: there is no such file, folder or model.
        ImportError: the model needs transformers.
        TypeError: the class of the model is not known.
        CheckpointError: the checkpoint cannot be read, or is no Swin's.
    """
    if not isinstance(source, str) or not source:
        raise TypeError(
            f"{checks.argument('teacher')} must be a text: a folder of maps, a Swin's checkpoint, the name of "
            f"published weights, or a model for transformers, such as 'facebook/dinov2-small'; got {source!r}"
        )
    if (Path(source) / MANIFEST).is_file():
        return StoredMaps(source)
    is_meta = torch.empty(0).is_meta
    if _is_swin(source):
        if is_meta and source in published() and not Path(source).exists():
            return teacher_of(create_backbone(published()[source].arch, clamp_window=True))
        with torch.device('cpu'):
            return teacher_of(create_backbone(checkpoint=source, clamp_window=True))
    packages.require(f'the teacher {source}', 'transformers')
    from transformers import AutoConfig, AutoModel

    name = source.removeprefix('hf://')
    try:
        network = (
            AutoModel.from_config(AutoConfig.from_pretrained(name)) if is_meta else AutoModel.from_pretrained(name)
        )
    except (OSError, ValueError) as error:
        raise OSError(f'the teacher {source} cannot be loaded: {error}') from error
    teacher = teacher_of(network)
    config = _file_of(name, 'preprocessor_config.json')
    found = json.loads(config.read_text(encoding='utf-8')) if config else {}
    if 'image_mean' in found and 'image_std' in found:
        teacher.mean, teacher.std = found['image_mean'], found['image_std']
    return teacher


def licence_of(source: str) -> str | None:
    """Return the licence of a teacher of :func:`load_teacher`, as its publisher gives it; None if it is not known."""
    if (Path(source) / MANIFEST).is_file():
        return StoredMaps(source).licence
    if _is_swin(source):
        return published()[source].licence if source in published() else None
    card = _file_of(source.removeprefix('hf://'), 'README.md')
    front = _FRONT_MATTER.match(card.read_text(encoding='utf-8')) if card else None
    facts = dict(re.findall(r'^(license|license_name):\s*["\']?([^"\'\n]+)', front[1], re.MULTILINE)) if front else {}
    licence = facts.get('license')
    return facts.get('license_name', licence) if licence == 'other' else licence


def _is_swin(source: str) -> bool:
    return source in published() or source.lower().endswith(_CHECKPOINTS)


def _file_of(name: str, file: str) -> Path | None:
    """Return a file of a model in a folder or on the hub; None if it has none, or the hub cannot be reached."""
    if Path(name).is_dir():
        return Path(name) / file if (Path(name) / file).is_file() else None
    try:
        from huggingface_hub import hf_hub_download

        return Path(hf_hub_download(name, file))
    except Exception:  # many, without a connection or without such a file
        return None
