"""One extraction from its start to its end: alone in its folder, shared among ranks, with an index and what failed."""

from __future__ import annotations

import contextlib
import hashlib
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from swin_dense.features.extraction import Extraction, extract_files
from swin_dense.features.storage import (
    FeatureFolder,
    check_settings,
    collect_failures,
    prune,
    readable,
    write_index,
)


@dataclass
class Outcome:
    """What an extraction has done.

    Attributes:
        finished: how many of the images are in the folder; known to the first rank.
        failures: by path, why an image failed: those of all ranks in the first, in others their own.
        pruned: how many feature files of other images were removed.
        is_deserted: another rank ended before its share was done.
    """

    finished: int = 0
    failures: dict[str, str] = field(default_factory=dict)
    pruned: int = 0
    is_deserted: bool = False


def run_extraction(
    backbone: Any,
    paths: Sequence[str],
    folder: FeatureFolder,
    extraction: Extraction,
    settings: Mapping[str, Any],
    *,
    rank: int = 0,
    world_size: int = 1,
    skipped: Mapping[str, str] | None = None,
    prune_others: bool = False,
    on_start: Callable[[int, int], None] = lambda images, finished: None,
    on_image: Callable[[str, str | None], None] = lambda path, error: None,
    should_stop: Callable[[], bool] = lambda: False,
) -> Outcome:
    """Bring a folder of features up to date with images; the arguments that are not explained go to ``extract_files``.

    Args:
        backbone: what makes the features.
        paths: all images, the same in every rank.
        folder: where the features go.
        extraction: how they are made.
        settings: what the features depend on, which must be as recorded in the folder.
        rank: of this process. With several, ``torch.distributed`` must be initialised.
        world_size: number of processes.
        skipped: by path, why a source could not be looked through; counts as failed.
        prune_others: remove the features of all other images.

    Raises:
        ValueError: another extraction is writing into the folder, or it holds features made in another way.
        OSError: the folder cannot be written. What has been written stays.
    """
    outcome = Outcome()
    with contextlib.ExitStack() as stack:
        if rank == 0:
            stack.enter_context(folder.alone())
            check_settings(folder, settings)
            collect_failures(folder)  # of runs that were killed
            folder.remove_leftovers()
        if not _meet(world_size):  # the first rank was refused the folder, or has died
            outcome.is_deserted = True
            return outcome
        outcome.failures = extract_files(
            backbone, paths, folder, extraction, rank, world_size, on_start, on_image, should_stop
        )
        if not should_stop():  # after a signal, nobody waits for the last image of another rank
            outcome.is_deserted = not _meet(world_size)
        ends_early = should_stop() or outcome.is_deserted
        if rank == 0:
            if prune_others and not ends_early:
                outcome.pruned = prune(folder, paths)
            all_failures = collect_failures(folder, skipped or {})
            outcome.failures = {
                path: all_failures[readable(path)]
                for path in (*paths, *(skipped or {}))
                if readable(path) in all_failures
            }
            outcome.finished = write_index(folder, paths)
            if world_size == 1 or not ends_early:
                folder.remove_leftovers()
        if not ends_early:  # torchrun ends all ranks as soon as one leaves with a status that is not 0
            _meet(world_size)
    return outcome


def _meet(world_size: int) -> bool:
    """Wait for the other ranks, and return whether they came; one that a signal has ended does not."""
    if world_size == 1:
        return True
    try:
        dist.barrier()
    except RuntimeError:
        return False
    return True


def weights_digest(module: nn.Module) -> str:
    """Return a short hash of all weights, to tell whether two runs used the same."""
    digest = hashlib.sha256()
    for name, value in sorted(module.state_dict().items()):
        digest.update(name.encode())
        digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy())
    return digest.hexdigest()[:16]


@contextmanager
def stop_signals() -> Iterator[list[int]]:
    """Within the block, the first SIGINT or SIGTERM only appends its number to the list; the next acts as outside."""
    received: list[int] = []
    previous = {number: signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM)}

    def restore() -> None:
        for number, handler in previous.items():
            signal.signal(number, handler)

    def receive(number: int, frame: Any) -> None:
        received.append(number)
        restore()

    for number in previous:
        signal.signal(number, receive)
    try:
        yield received
    finally:
        restore()
