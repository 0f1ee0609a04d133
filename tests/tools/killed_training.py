"""A training that is killed at random moments and resumed until it ends, and how its end differs from another."""

import random
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

import swin_dense  # noqa: F401  its import lets torch.load read the checkpoints of mmengine
from swin_dense.mm.checkpoints import newest_checkpoint
from tests.tools.test_runners import command_of, environment
from tests.tools.tiny_training import EPOCHS, RANDOM

# What is random, how it is read, and in which kind of loop.
CASES = {
    'iterations, read by the process itself': RANDOM,
    'iterations, read by two workers': RANDOM + 'train_dataloader.update(num_workers=2, persistent_workers=True)\n',
    'epochs, read by two workers': RANDOM + EPOCHS + "train_dataloader['num_workers'] = 2\n",
}


def train_until_done(config: Path, run: Path, kills: int, span: float, moments: random.Random) -> dict[str, int]:
    """Start a training, kill it with SIGKILL and resume it until it has been killed so often, and then let it end.

    Args:
        config: of the training.
        run: its work directory.
        kills: how often, at most; a training that is at its end before is not killed any more.
        span: seconds that it takes from its first iteration, from which moments are drawn.
        moments: draws them.

    Returns:
        How many kills there were, how many of them in the midst of a save, and after how many it went on.
    """
    counts = {'kills': 0, 'in a save': 0, 'resumed': 0}
    while True:
        log = run.parent / f'{counts["kills"]}.log'
        with log.open('w') as file:
            command = command_of(config, '--work-dir', run, '--resume')
            process = subprocess.Popen(command, stdout=file, stderr=file, env=environment())
        if counts['kills'] < kills:
            in_a_save = moments.random() < 1 / 3  # else they would be hit too seldom
            while process.poll() is None and 'Checkpoints will be saved' not in log.read_text():
                time.sleep(0.01)
            time.sleep(moments.uniform(0, 2 * span / (kills + 1)))
            while in_a_save and process.poll() is None and not any(run.glob('.unfinished-*')):
                time.sleep(0.0002)
            process.send_signal(signal.SIGKILL)
        process.wait()
        counts['resumed'] += 'going on from' in log.read_text()
        if process.returncode != -signal.SIGKILL:
            assert process.returncode == 0, log.read_text()
            return counts
        counts['kills'] += 1
        counts['in a save'] += any(run.glob('.unfinished-*'))


def span_of(run: Path) -> float:
    """Return the seconds from the first line to the last of the log of a training that ended."""
    (log,) = run.glob('*/*.log')
    first, *_, last = re.findall(r'\d+/\d+ (\d+):(\d+):(\d+) - ', log.read_text())
    first, last = ((int(hours) * 60 + int(minutes)) * 60 + int(seconds) for hours, minutes, seconds in (first, last))
    return (last - first) % (24 * 60 * 60)


def differences(expected: Path, found: Path) -> list[str]:
    """Return where the newest checkpoints of two work directories differ, in weights, optimiser or random states."""
    (theirs, _), (ours, _) = newest_checkpoint(expected), newest_checkpoint(found)
    if theirs.name != ours.name:
        return [f'{theirs.name} and {ours.name}']
    return list(_differences(*(torch.load(path, weights_only=True) for path in (theirs, ours))))


def _differences(expected: dict, found: dict) -> Iterator[str]:
    theirs, ours = (
        dict(_flat([each['state_dict'], each['optimizer'], each['param_schedulers'], each['meta']['random_states']]))
        for each in (expected, found)
    )
    for name in theirs.keys() | ours.keys():
        a, b = theirs.get(name), ours.get(name)
        if not (torch.equal(a, b) if isinstance(a, torch.Tensor) and isinstance(b, torch.Tensor) else a == b):
            yield name


def _flat(value: Any, name: str = '') -> Iterator[tuple[str, Any]]:
    """Yield the leaves of nested dictionaries and lists with their names."""
    if isinstance(value, dict | list | tuple):
        for key, child in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _flat(child, f'{name}.{key}')
    else:
        yield name, value
