"""``from_pretrained``, ``save_pretrained`` and ``push_to_hub`` of backbones and classifiers.

A saved model is a folder with ``model.safetensors``, ``config.json`` (the class and its options) and ``README.md`` (the
model card). Saving and loading folders needs safetensors; the Hub also needs huggingface_hub.
"""

from __future__ import annotations

import functools
import inspect
import json
import os
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, is_dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch import nn

from swin_dense.utils import packages
from swin_dense.utils.atomic import write_json, write_text, written_whole

Model = TypeVar('Model', bound='HubMixin')

WEIGHTS, CONFIG, CARD = 'model.safetensors', 'config.json', 'README.md'
LIBRARY = 'swin_dense'
CARD_TEXT = """---
library_name: swin_dense
tags:
- swin
- image-feature-extraction
---

# {kind}

```python
from {module} import {kind}

model = {kind}.from_pretrained({name!r})
```

{parameters:,} parameters; options: `{options}`.
"""


@dataclass(frozen=True)
class _Unwritable:
    """Stands for the value of an argument that JSON cannot hold; the value itself may not even be picklable."""

    kind: str


class HubMixin(nn.Module):
    """A module that can be saved together with its options, and rebuilt from them."""

    # The arguments that rebuild the module in its current form, as they are written to CONFIG: by name, and those by
    # position if a subclass takes them with *args.
    _given: Mapping[str, Any] = {}
    _positional: Sequence[Any] = ()

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        if '__init__' in vars(cls):
            cls.__init__ = _recording(cls.__init__)  # type: ignore[method-assign]

    def _change_given(self, **options: Any) -> None:
        """Update the recorded options after the model was changed."""
        changed = {name: _recorded(value) for name, value in options.items()}
        self._given = {**self._given, **changed}

    def _kept_by_other_windows(self) -> dict[str, Any]:
        """Return options that the module needs if it is rebuilt with another ``window_size`` and the same weights."""
        return {}

    def save_pretrained(self, folder: str | os.PathLike[str], *, name: str | None = None) -> Path:
        """Write the weights, the options and a model card.

        Args:
            folder: target folder, created if missing. An existing model card is kept.
            name: name of the model in the card, such as 'me/my-swin'; None uses the folder.

        Raises:
            TypeError: an option cannot be written as JSON.
            ImportError: safetensors is missing.
        """
        save_file = packages.optional('a saved model', 'safetensors.torch').save_file
        kind = type(self)
        arguments = [('*args', value) for value in self._positional]
        for option, value in [*self._given.items(), *arguments]:
            if isinstance(value, _Unwritable):
                raise TypeError(f'the option {option} cannot be written to {CONFIG}: it is a {value.kind}')
        config: dict[str, Any] = {'library': LIBRARY, 'class': kind.__name__, 'options': self._given}
        if self._positional:
            config['arguments'] = self._positional
        if (preset := getattr(self, 'backbone', self).input_preset) is not None:
            config['input_preset'] = preset
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        tensors = {key: tensor.detach().contiguous() for key, tensor in self.state_dict().items()}
        with written_whole(folder / WEIGHTS) as unfinished:
            save_file(tensors, unfinished.path, metadata={'format': 'pt'})
        write_json(folder / CONFIG, config)
        if not (folder / CARD).exists():
            package = kind.__module__.partition('.')[0]
            is_exported = getattr(sys.modules[package], kind.__name__, None) is kind
            card = CARD_TEXT.format(
                kind=kind.__name__,
                module=package if is_exported else kind.__module__,
                name=name or str(folder),
                parameters=sum(parameter.numel() for parameter in self.parameters()),
                options=json.dumps(self._given),
            )
            write_text(folder / CARD, card)
        return folder

    @classmethod
    def from_pretrained(
        cls: type[Model],
        name_or_folder: str | os.PathLike[str],
        *,
        revision: str | None = None,
        token: str | None = None,
        **options: Any,
    ) -> Model:
        """Load a saved model with all of its weights, ready for inference.

        Args:
            name_or_folder: a folder, or a repository on the Hub such as 'me/my-swin'.
            revision: branch, tag or commit of the repository.
            token: token for a private repository; None uses the login of huggingface_hub.
            **options: options that override the saved ones, such as ``frozen_stages=2``.

        Raises:
            FileNotFoundError: a file is missing in the folder.
            ValueError: the folder contains a model of another class, or no model of this package, or ``window_size``
                is changed in a model whose pretraining windows it does not determine.
            TypeError: an option is unknown.
            CheckpointError: a weight is missing or has another shape.
            RuntimeError: the file contains unexpected weights.
        """
        folder = Path(name_or_folder)
        if not folder.is_dir():
            hub = packages.optional('the Hub', 'huggingface_hub')
            files = [WEIGHTS, CONFIG]
            folder = Path(
                hub.snapshot_download(str(name_or_folder), revision=revision, token=token, allow_patterns=files)
            )
        config = json.loads((folder / CONFIG).read_text(encoding='utf-8'))
        if config.get('library') != LIBRARY:
            raise ValueError(
                f'{name_or_folder}: {CONFIG} was not written by swin_dense; load the weights of other libraries with '
                'create_backbone(name, checkpoint)'
            )
        if config['class'] != cls.__name__:
            raise ValueError(f'{name_or_folder} contains a {config["class"]}: call {config["class"]}.from_pretrained')
        saved, arguments = config['options'], config.get('arguments', ())
        if 'window_size' in options and 'pretrained_window_size' not in options:
            with torch.device('meta'):
                saved = {**saved, **cls(*arguments, **saved)._kept_by_other_windows()}
        model = cls(*arguments, **{**saved, **options})
        model.load_state_dict(
            packages.optional('a saved model', 'safetensors.torch').load_file(folder / WEIGHTS), strict=True
        )
        getattr(model, 'backbone', model).input_preset = config.get('input_preset')
        return model.eval()

    def push_to_hub(
        self,
        repo_id: str,
        *,
        private: bool | None = None,
        token: str | None = None,
        revision: str | None = None,
        commit_message: str = 'Upload a model of swin_dense',
    ) -> str:
        """Upload the model to a repository on the Hub, created if missing, and return its URL.

        Args:
            repo_id: repository, such as 'me/my-swin'.
            private: whether a new repository is private; None uses the user's default.
            token: access token; None uses the login of huggingface_hub.
            revision: branch to write to.
            commit_message: message of the commit.

        Raises:
            ImportError: huggingface_hub or safetensors is missing.
        """
        hub = packages.optional('the Hub', 'huggingface_hub').HfApi(token=token)
        with tempfile.TemporaryDirectory() as folder:
            self.save_pretrained(folder, name=repo_id)
            hub.create_repo(repo_id, private=private, exist_ok=True)
            done = hub.upload_folder(
                repo_id=repo_id, folder_path=folder, revision=revision, commit_message=commit_message
            )
        return str(done)


def _recording(init: Callable[..., None]) -> Callable[..., None]:
    """Wrap ``__init__`` to record its arguments for ``save_pretrained``, as they were passed to the outermost class."""
    parameters = inspect.signature(init).parameters.values()
    by_position = [p.name for p in parameters if p.kind is p.POSITIONAL_OR_KEYWORD][1:]
    takes_any = any(p.kind is p.VAR_POSITIONAL for p in parameters)

    @functools.wraps(init)
    def record(self: HubMixin, *args: Any, **kwargs: Any) -> None:
        if len(args) > len(by_position) and not takes_any:
            names = ' and '.join(by_position) or 'no option'
            raise TypeError(
                f'{type(self).__name__} takes only {names} by position, got {args!r}; give options by '
                'name, as in window_size=7: other Swins have them in another order'
            )
        if '_given' not in vars(self):
            # Arguments that have no name can be given again only behind those that have one.
            named = dict(zip(by_position, args, strict=False)) | kwargs
            if len(args) > len(by_position):
                self._positional = [_recorded(value) for value in args]
                named = kwargs
            self._given = {name: _recorded(value) for name, value in named.items()}
        init(self, *args, **kwargs)

    return record


def _recorded(value: Any) -> Any:
    """Return a copy of the value of an argument in the types of JSON, or what stands for it."""
    try:
        return json.loads(json.dumps(value, default=_plain))
    except TypeError as error:
        return _Unwritable(str(error))


def _plain(value: Any) -> Any:
    """Return a value that JSON has no type for in one that it has; raise TypeError, with its kind, if there is none."""
    if is_dataclass(value) and not isinstance(value, type):
        return asdict(value)
    if isinstance(value, Mapping):
        return dict(value)
    if isinstance(value, range):
        return list(value)
    raise TypeError('function' if callable(value) else type(value).__name__)
