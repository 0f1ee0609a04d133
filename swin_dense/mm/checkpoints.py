"""Checkpoints that a training goes on from as if it had not ended: whole, with the state of the random generators."""

from __future__ import annotations

import contextlib
import re
import shutil
import zipfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from mmengine.config import Config, ConfigDict
from mmengine.dist import all_gather_object, barrier, get_rank, get_world_size, is_main_process
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS

from swin_dense.checkpoint import CheckpointError
from swin_dense.checkpoint.unpickler import read_pickle
from swin_dense.mm import randomness
from swin_dense.utils.atomic import put_in_place

_UNFINISHED = '.unfinished-'
_NUMBERED = re.compile(r'(?:epoch|iter)_\d+\.pth')


@HOOKS.register_module()
class WholeCheckpointHook(CheckpointHook):
    """mmengine's ``CheckpointHook``, whose files appear whole, and which deletes old ones after and not before.

    mmengine deletes the oldest checkpoint and then writes the next under its name: what ends the training in between
    leaves half a file, and with ``max_keep_ckpts=1`` nothing else. Takes the arguments of ``CheckpointHook``.

    Its checkpoints hold the state of the random generators of every process, from which a resumed training goes on.
    A validation leaves that state as it was: the resumed training does not run the one before it again.
    """

    _loaded: list[dict[str, Any]] | None = None
    _before_val: dict[str, Any] | None = None

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Keep the states that a checkpoint holds until the training begins."""
        self._loaded = checkpoint.get('meta', {}).get('random_states')

    def before_train(self, runner: Any) -> None:
        """Find out where checkpoints go, remove what a killed training left there, and go on from the state loaded."""
        super().before_train(runner)
        if _is_local(self.out_dir) and is_main_process():
            for leftover in Path(self.out_dir).glob(f'{_UNFINISHED}*'):
                _remove(leftover)
        if runner.iter > 0:
            self._go_on(runner)

    def before_val(self, runner: Any) -> None:
        """Keep the state of the random generators."""
        self._before_val = randomness.get_state()

    def after_val(self, runner: Any) -> None:
        """Go on as if nothing had been drawn for the validation."""
        if self._before_val is not None:
            randomness.set_state(self._before_val)
            self._before_val = None

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict) -> None:
        with self._in_order():
            super()._save_checkpoint_with_step(self._writing_whole(runner), step, meta)

    def _save_best_checkpoint(self, runner: Any, metrics: dict) -> None:
        with self._in_order():
            super()._save_best_checkpoint(self._writing_whole(runner), metrics)

    def _writing_whole(self, runner: Any) -> Any:
        if isinstance(runner, _WritesWhole):  # the best is saved, and then the last once more
            return runner
        return _WritesWhole(runner, all_gather_object(self._before_val or randomness.get_state()))

    def _go_on(self, runner: Any) -> None:
        """Let the random generators of a resumed training go on from where the checkpoint left them."""
        states = self._loaded or []
        if len(states) != get_world_size():
            runner.logger.warning(
                f'the checkpoint holds the random states of {len(states)} processes, and {get_world_size()} train now: '
                'what is random is drawn anew'
            )
            return
        state, loop = states[get_rank()], runner.train_loop
        if hasattr(loop, 'dataloader_iterator'):
            # A loop of iterations first reads again what was seen, in which data drawn in this process use up numbers.
            loop.dataloader_iterator = randomness.set_state_after(loop.dataloader_iterator, runner.iter, state)
        else:
            randomness.set_state(state)

    @contextlib.contextmanager
    def _in_order(self) -> Iterator[None]:
        """Delete what is to be deleted only when the block has ended well."""
        backend: Any = self.file_backend
        self.file_backend: Any = _RemovesLater(backend)
        later = self.file_backend
        try:
            yield
        finally:
            self.file_backend = backend
        for remove, path in later.removals:
            remove(path)


def use_whole_checkpoints(config: Config) -> None:
    """Put ``WholeCheckpointHook`` in the place of mmengine's ``CheckpointHook``; another is left alone."""
    hooks = config.setdefault('default_hooks', ConfigDict())
    hook = hooks.setdefault('checkpoint', ConfigDict(type='CheckpointHook', interval=1))
    if hook is not None and HOOKS.get(hook.get('type', '')) is CheckpointHook:
        hook.type = 'swin_dense.mm.WholeCheckpointHook'  # which mmengine finds without custom_imports too


class _RemovesLater:
    """A file backend of mmengine that notes what it shall remove."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.removals: list[tuple[Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        self.removals.append((self._backend.remove, path))

    def rmtree(self, path: str) -> None:
        self.removals.append((self._backend.rmtree, path))


class _WritesWhole:
    """A runner of mmengine whose checkpoints, files or folders with a file per rank, appear under their name whole.

    Each holds the state of the random generators of every rank.
    """

    def __init__(self, runner: Any, random_states: list[dict[str, Any]]) -> None:
        self._runner = runner
        self._random_states = random_states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, meta: dict, **options: Any) -> None:
        """Write a checkpoint under an unfinished name, which all ranks share, and rename it when it is whole."""
        options['meta'] = {**meta, 'random_states': self._random_states}
        if not _is_local(out_dir):  # stores of objects show no half ones
            self._runner.save_checkpoint(out_dir, filename, *args, **options)
            return
        unfinished = Path(out_dir, _UNFINISHED + filename)  # the same in all ranks, which may write into one folder
        try:
            self._runner.save_checkpoint(out_dir, unfinished.name, *args, **options)
            barrier()
            if is_main_process():
                put_in_place(unfinished, Path(out_dir, filename))
            barrier()
        finally:
            if is_main_process():
                _remove(unfinished)


def newest_checkpoint(work_dir: Path) -> tuple[Path | None, list[str]]:
    """Find the checkpoint that a training which was ended goes on from.

    It is what the file ``last_checkpoint`` names. Where that does not help, the others follow, the newest first.

    Args:
        work_dir: of the training.

    Returns:
        The checkpoint, None if there never was one, and messages on what was passed over and why.

    Raises:
        CheckpointError: there are checkpoints, and none is whole.
    """
    passed: list[str] = []
    last = _last_named(work_dir, passed)
    if last is not None and '://' in str(last):
        return last, passed
    found: list[tuple[Any, Path]] = []
    numbered = [path for path in work_dir.glob('*.pth') if _NUMBERED.fullmatch(path.name)]
    candidates = {*numbered, *([] if last is None else [last])}
    for path in candidates:
        if path.is_dir():  # of a sharded model; whether all its ranks are there, the loading of it tells
            found.append(((path == last, '', path.stat().st_mtime), path))
            continue
        try:
            meta = _read_meta(path)
        except CheckpointError as error:
            passed.append(str(error))
        else:
            found.append(((path == last, str(meta.get('time', '')), meta['iter']), path))
    for _, path in sorted(found, reverse=True):
        try:
            check_training_checkpoint(path)
        except CheckpointError as error:
            passed.append(str(error))
        else:
            return path, passed
    if candidates:
        raise CheckpointError(f'no checkpoint in {work_dir} is whole: {"; ".join(passed)}')
    return None, passed


def check_training_checkpoint(path: Path) -> None:
    """Refuse a file that a training cannot go on from.

    Raises:
        CheckpointError: it is damaged, cut short or no checkpoint, or it has weights and no state of a training.
    """
    if path.is_dir():
        return
    _read_meta(path)
    if zipfile.is_zipfile(path):
        with zipfile.ZipFile(path) as archive:
            damaged = archive.testzip()
        if damaged:
            raise CheckpointError(f'{path} is damaged: the checksum of {damaged} in it is wrong')


def seed_of(checkpoint: Path) -> int | None:
    """Return the seed of the training that wrote a checkpoint, None if it is a folder, or does not tell."""
    return None if checkpoint.is_dir() else _read_meta(checkpoint).get('seed')


def _last_named(work_dir: Path, passed: list[str]) -> Path | None:
    note = work_dir / 'last_checkpoint'
    if not note.exists():
        return None
    named = note.read_text(errors='replace').strip()
    if not named:
        passed.append(f'{note} is empty')
        return None
    if '://' in named or Path(named).exists():
        return Path(named)
    beside = work_dir / Path(named).name  # the folder may have been moved
    if beside.exists():
        return beside
    passed.append(f'{note} names {named}, which is not there')
    return None


def _read_meta(path: Path) -> dict[str, Any]:
    """Return what a checkpoint says of the training, without reading its tensors where the format allows it."""
    try:
        checkpoint = read_pickle(path, mmap=True)
    except Exception as error:  # damaged files raise nearly anything
        raise CheckpointError(f'{path} is damaged, cut short or no checkpoint') from error
    meta = checkpoint.get('meta') if isinstance(checkpoint, dict) else None
    if not isinstance(meta, dict) or 'iter' not in meta or 'message_hub' not in checkpoint:
        raise CheckpointError(f'{path} holds no state of a training to resume; to start from its weights use load_from')
    return meta


def _is_local(out_dir: str) -> bool:
    return '://' not in out_dir


def _remove(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
