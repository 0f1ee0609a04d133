"""Training checkpoints that are written atomically and contain the random state, for exact resumption."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import torch
from mmengine.config import Config, ConfigDict
from mmengine.dist import all_gather_object, barrier, get_rank, get_world_size, is_main_process
from mmengine.hooks import CheckpointHook
from mmengine.registry import HOOKS

from swin_dense.mm.resume import CheckpointError, check_training_checkpoint, training_meta
from swin_dense.utils.addresses import is_address
from swin_dense.utils.atomic import put_in_place, remove

_UNFINISHED = '.unfinished-'
_NUMBERED = re.compile(r'(?:epoch|iter)_\d+\.pth')


@HOOKS.register_module()
class WholeCheckpointHook(CheckpointHook):
    """A ``CheckpointHook`` that writes files atomically, and deletes old checkpoints only after writing the new one.

    mmengine first deletes the oldest checkpoint and then writes the next one under its final name. If training stops in
    between, a partial file is left, and with ``max_keep_ckpts=1`` no other. Accepts the arguments of
    ``CheckpointHook``.

    Checkpoints contain the random state of every process, which a resumed training restores. Validation does not change
    the random state, because a resumed training does not repeat the validation before it.
    """

    _loaded: list[dict[str, Any]] | None = None
    _before_val: dict[str, Any] | None = None

    def after_load_checkpoint(self, runner: Any, checkpoint: dict) -> None:
        """Keep the random states of a checkpoint until training begins."""
        self._loaded = checkpoint.get('meta', {}).get('random_states')

    def before_train(self, runner: Any) -> None:
        """Remove partial files of a killed training, and restore the random state of a loaded checkpoint."""
        super().before_train(runner)
        if not is_address(self.out_dir) and is_main_process():
            for leftover in Path(self.out_dir).glob(f'{_UNFINISHED}*'):
                remove(leftover)
        if runner.iter == 0:
            return
        states = self._loaded or []
        if len(states) != get_world_size():
            runner.logger.warning(
                f'the checkpoint contains the random states of {len(states)} processes, but {get_world_size()} are '
                'training now: the random state is not restored'
            )
            return
        state, loop = states[get_rank()], runner.train_loop
        if hasattr(loop, 'dataloader_iterator'):
            # An iteration-based loop first reads the seen batches again, which draws random numbers if data are loaded
            # in this process, so the state must be set after them.
            loop.dataloader_iterator = _set_random_state_after(loop.dataloader_iterator, runner.iter, state)
        else:
            _set_random_state(state)

    def before_val(self, runner: Any) -> None:
        """Save the random state before a validation."""
        self._before_val = _random_state()

    def after_val(self, runner: Any) -> None:
        """Restore the random state, so that the validation does not affect training."""
        if self._before_val is not None:
            _set_random_state(self._before_val)
            self._before_val = None

    def _save_checkpoint_with_step(self, runner: Any, step: int, meta: dict) -> None:
        with self._removals_deferred():
            super()._save_checkpoint_with_step(self._with_atomic_writes(runner), step, meta)

    def _save_best_checkpoint(self, runner: Any, metrics: dict) -> None:
        with self._removals_deferred():
            super()._save_best_checkpoint(self._with_atomic_writes(runner), metrics)

    def _with_atomic_writes(self, runner: Any) -> Any:
        if isinstance(runner, _AtomicRunner):  # mmengine saves the best checkpoint, and then the last one again
            return runner
        return _AtomicRunner(runner, all_gather_object(self._before_val or _random_state()))

    @contextlib.contextmanager
    def _removals_deferred(self) -> Iterator[None]:
        """Defer the removal of files until the block has finished without an error."""
        backend: Any = self.file_backend
        deferring = _DeferringBackend(backend)
        self.file_backend: Any = deferring
        try:
            yield
        finally:
            self.file_backend = backend
        for removal, path in deferring.removals:
            removal(path)


def _random_state() -> dict[str, Any]:
    """Return the random state of all generators in a form that ``torch.load(weights_only=True)`` accepts."""
    legacy: Any = np.random.get_state(legacy=True)
    name, key, *rest = legacy
    return {
        'python': random.getstate(),
        'numpy': (name, key.tolist(), *rest),
        'torch': torch.get_rng_state(),
        'cuda': torch.cuda.get_rng_state() if torch.cuda.is_available() else None,
    }


def _set_random_state(state: dict[str, Any]) -> None:
    """Restore a random state, whose tensors may be on any device."""
    random.setstate(state['python'])
    np.random.set_state(state['numpy'])
    torch.set_rng_state(state['torch'].cpu())
    if state['cuda'] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state(state['cuda'].cpu())


def _set_random_state_after(batches: Iterator[Any], count: int, state: dict[str, Any]) -> Iterator[Any]:
    """Yield the batches, and set the random state after the first ``count`` of them."""
    yield from islice(batches, count)
    _set_random_state(state)
    yield from batches


def use_whole_checkpoints(config: Config) -> None:
    """Replace mmengine's ``CheckpointHook`` in a config by ``WholeCheckpointHook``; keep any other hook."""
    hooks = config.setdefault('default_hooks', ConfigDict())
    hook = hooks.setdefault('checkpoint', ConfigDict(type='CheckpointHook', interval=1))
    if hook is not None and HOOKS.get(hook.get('type', '')) is CheckpointHook:
        # With the full path, mmengine needs no custom_imports.
        hook.type = 'swin_dense.workbench.checkpoints.WholeCheckpointHook'


class _DeferringBackend:
    """A wrapper of an mmengine file backend that records removals instead of executing them."""

    def __init__(self, backend: Any) -> None:
        self._backend = backend
        self.removals: list[tuple[Any, str]] = []

    def __getattr__(self, name: str) -> Any:
        return getattr(self._backend, name)

    def remove(self, path: str) -> None:
        self.removals.append((self._backend.remove, path))

    def rmtree(self, path: str) -> None:
        self.removals.append((self._backend.rmtree, path))


class _AtomicRunner:
    """A wrapper of an mmengine runner that writes checkpoints, files or folders with a file per rank, atomically.

    Each checkpoint also contains the random states of all ranks.
    """

    def __init__(self, runner: Any, random_states: list[dict[str, Any]]) -> None:
        self._runner = runner
        self._random_states = random_states

    def __getattr__(self, name: str) -> Any:
        return getattr(self._runner, name)

    def save_checkpoint(self, out_dir: str, filename: str, *args: Any, meta: dict, **options: Any) -> None:
        """Write a checkpoint under a temporary name, and rename it when all ranks have finished."""
        options['meta'] = {**meta, 'random_states': self._random_states}
        if is_address(out_dir):  # object stores never expose partial objects
            self._runner.save_checkpoint(out_dir, filename, *args, **options)
            return
        unfinished = Path(out_dir, _UNFINISHED + filename)  # all ranks use the same name, as they may share a folder
        try:
            self._runner.save_checkpoint(out_dir, unfinished.name, *args, **options)
            barrier()
            if is_main_process():
                put_in_place(unfinished, Path(out_dir, filename))
            barrier()
        finally:
            if is_main_process():
                remove(unfinished)


def newest_checkpoint(work_dir: Path) -> tuple[Path | str | None, list[str]]:
    """Find the newest complete checkpoint of a work directory.

    The checkpoint named in the file ``last_checkpoint``, which may be an address, is tried first, then the others from
    newest to oldest. Return None if the directory contains none, and one message for each checkpoint that was skipped.
    """
    skipped: list[str] = []
    last = _last_named(work_dir, skipped)
    if isinstance(last, str):  # an address, whose file is read when training resumes
        return last, skipped
    found: list[tuple[Any, Path]] = []
    numbered = [path for path in work_dir.glob('*.pth') if _NUMBERED.fullmatch(path.name)]
    candidates = {*numbered, *([] if last is None else [last])}
    for path in candidates:
        if path.is_dir():  # of a sharded model; missing ranks are found only when it is loaded
            found.append(((path == last, '', path.stat().st_mtime), path))
            continue
        try:
            meta = training_meta(path)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            found.append(((path == last, str(meta.get('time', '')), meta['iter']), path))
    for _, path in sorted(found, reverse=True):
        try:
            check_training_checkpoint(path)
        except CheckpointError as error:
            skipped.append(str(error))
        else:
            return path, skipped
    if candidates:
        raise CheckpointError(f'no checkpoint in {work_dir} is complete: {"; ".join(skipped)}')
    return None, skipped


def _last_named(work_dir: Path, skipped: list[str]) -> Path | str | None:
    note = work_dir / 'last_checkpoint'
    if not note.exists():
        return None
    named = note.read_text(encoding='utf-8', errors='replace').strip()
    if not named:
        skipped.append(f'{note} is empty')
        return None
    if is_address(named):
        return named
    if Path(named).exists():
        return Path(named)
    beside = work_dir / Path(named).name  # the folder may have been moved
    if beside.exists():
        return beside
    skipped.append(f'{note} names {named}, which does not exist')
    return None
