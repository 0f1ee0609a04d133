"""What pip is asked: what is installed, what would be, and to install it."""

from __future__ import annotations

import json
import os
import re
import signal
import subprocess
import tempfile
from pathlib import Path
from typing import Any

from kinds import ROOT
from machine import Unfit

LIST = 'import importlib.metadata as m, json; print(json.dumps({d.name: d.version for d in m.distributions()}))'


class Pip:
    """The pip of one environment."""

    def __init__(self, python: Path) -> None:
        self.python = python

    def run(self, *arguments: str | Path, env: dict[str, str] | None = None) -> None:
        """Run a command of pip, whose output is shown.

        Raises:
            Unfit: it failed; pip has said why.
        """
        command = [self.python, '-m', 'pip', '--disable-pip-version-check', *arguments]
        # Its own group, so that compilers end with it. It inherits the lock, in case the set-up alone is killed.
        process = subprocess.Popen(command, env={**os.environ, **(env or {})}, start_new_session=True, close_fds=False)
        try:
            failed = process.wait()
        except BaseException:
            os.killpg(process.pid, signal.SIGTERM)
            process.wait()
            raise
        if failed:
            raise Unfit(
                f'pip {arguments[0]} failed, see above. Without a connection: HTTPS_PROXY names a proxy, PIP_INDEX_URL '
                'another index. The same command goes on where it stopped'
            )

    def installed(self) -> dict[str, str]:
        """Return the versions of what is installed, by normalized name."""
        listed = subprocess.run([self.python, '-c', LIST], capture_output=True, text=True, check=True).stdout
        return {normalized(name): version for name, version in json.loads(listed).items() if name}

    def resolve(self, *arguments: str | Path) -> dict[str, dict[str, Any]]:
        """Return the metadata of what these arguments of ``pip install`` would install, by normalized name.

        Nothing is installed, and of big files only the metadata is downloaded, where the index can serve that.
        """
        with tempfile.TemporaryDirectory() as folder:
            report = Path(folder, 'report.json')
            self.run(
                *('install', '-qq', '--dry-run', '--use-feature=fast-deps', '--report', report),
                *('--build-constraint', ROOT / 'requirements/torch.txt', *arguments),
            )
            entries = json.loads(report.read_text())['install']
        return {normalized(entry['metadata']['name']): entry['metadata'] for entry in entries}

    def triton_for(self, torch: str) -> str | None:
        """Return the triton that the published build of a release of torch requires, as a requirement.

        Args:
            torch: the version, whose local part ('+cpu') is ignored
        """
        # '===' compares the spelling, which leaves out local builds.
        try:
            found = self.resolve('--no-deps', '--ignore-installed', f'torch==={torch.split("+")[0]}')
        except Unfit:
            return None
        return next(filter(is_triton, found['torch'].get('requires_dist', [])), None)


def normalized(name: str) -> str:
    return re.sub(r'[-_.]+', '-', name).lower()


def is_triton(requirement: str) -> bool:
    """Whether a requirement asks for triton under any of the names that builds of torch use."""
    return re.match(r'(pytorch-)?triton(-\w+)?\b', requirement) is not None and 'extra ==' not in requirement


def cuda_of(versions: dict[str, str]) -> str | None:
    """Return the 'major.minor' of the CUDA that torch was built with, None for a build without.

    Args:
        versions: of all packages, by normalized name
    """
    for name, version in versions.items():
        if re.fullmatch(r'nvidia-cuda-runtime(-cu\d+)?', name):
            return '.'.join(version.split('.')[:2])
    return None
