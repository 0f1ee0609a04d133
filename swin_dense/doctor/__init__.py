"""Check the installed packages, report which of them work, and suggest fixes.

Checks run in separate processes, because a broken installation can raise any error, hang, or crash. This module imports
only the standard library.
"""

from __future__ import annotations

import json
import platform
import re
import signal
import subprocess
import sys
import textwrap
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from importlib.util import find_spec

from swin_dense.doctor.probes import BACKENDS, CHECKS, TIMED, TOGETHER, TOPIC_OF, TRAPS
from swin_dense.utils.packages import (
    EXTRAS,
    FORKS,
    FRAMEWORKS,
    WITHOUT_COMPILER,
    compile_command,
    distribution_of,
    install_command,
    versions_of,
)

TIMEOUT = 120  # seconds per process; imports from a slow disk take long
# Package: oldest tested version, first version that is too new; None for no limit. mmdet and mmseg restrict the version
# of mmcv; mmcv and mmengine import pkg_resources, which setuptools 81 removed.
VERSIONS = {
    'torch': ('2.1', '2.16'),
    'numpy': ('1.26', '3'),
    'pillow': (None, None),
    'setuptools': (None, '81'),
    'mmengine': ('0.10.7', '0.11'),
    'mmcv': ('2.1.0', '2.2'),
    'mmdet': ('3.3.0', '3.4'),
    'mmsegmentation': ('1.2.2', '1.3'),
    'triton': ('3.6', None),
}
# Pattern of an error message: suggested fix. The first match is used.
CURES = {
    r'pkg_resources': "pip install 'setuptools<81'",
    r'torchvision': 'install the torchvision version that matches this torch, or uninstall torchvision',
    r'MMCV==|mmcv.*incompatible': (
        f'the framework does not support this mmcv: pip uninstall mmcv mmcv-lite; {WITHOUT_COMPILER}'
    ),
    r"No module named 'mmcv._ext'": (
        'this mmcv has no operators: pip install ./mmcv_lite_ops (in the clone of swin_dense), or compile them: '
        '{compile_mmcv}'
    ),
    r'mmcv.*(undefined symbol|_ext)': 'mmcv was compiled for another torch: {compile_mmcv}',
    r'Numpy is not available|_ARRAY_API': "this torch was built for NumPy 1: pip install 'numpy<2'",
    r'Ran out of input|pickle data was truncated': (
        'the cache of yapf is incomplete, after an interrupted or a concurrent write: rm -r ~/.cache/YAPF'
    ),
    r'Weights only|weights_only': 'import swin_dense before loading; in a config, use custom_imports',
    r'shadowed': "write type='swin_dense.SwinDense' in the config, or rename the other class",
}
# Fix for a package that fails with an error that is not in CURES; other packages are reinstalled.
REPAIRS = {
    'torch': 'install torch again, the build for this machine: https://pytorch.org/get-started/locally',
    'mmcv': '{compile_mmcv}',
}


@dataclass(frozen=True)
class Finding:
    """One line of the report: the result of a check, and the suggested fix, '' if none is needed or known."""

    topic: str  # 'version', 'extra', 'trap', 'backend', 'check' or 'time'
    name: str  # of the package, extra, trap, backend, framework or comparison
    status: str  # 'ok', 'broken', or 'note' for an unusual or unavailable item
    text: str
    cure: str = ''


def examine(times: bool = False) -> Iterator[Finding]:
    """Run all checks and yield each finding as soon as it is known, ordered by topic; raises nothing.

    With ``times``, also time linear layers on this CPU and, on a GPU, the Triton kernel, after comparing it.
    """
    yield from versions()
    yield from extras()
    with ThreadPoolExecutor() as pool:
        found = {finding.name: finding for findings in pool.map(probe_all, TOGETHER) for finding in findings}
    core = found['torch alone']
    if core.status == 'broken':  # the others fail for the same reason
        yield core
        return
    yield from (found[name] for topic in (TRAPS, BACKENDS, CHECKS) for name in topic)
    if times:
        for name in TIMED:  # last and one by one, because timing needs an idle machine
            yield from probe(name)


def versions() -> list[Finding]:
    """Compare the installed versions with those that were tested together."""
    is_tested = (3, 10) <= sys.version_info[:2] <= (3, 13)
    state = 'ok' if is_tested else 'note'
    python = Finding('version', 'python', state, platform.python_version())
    return [python, *map(_version, VERSIONS)]


def _version(package: str) -> Finding:
    found = versions_of(package)
    if len(found) > 1:
        text = f'{" and ".join(map(" ".join, found.items()))} install the same files'
        return Finding('version', package, 'broken', text, f'pip uninstall {" ".join(found)}, and install one again')
    if not found:
        return Finding('version', package, 'note', 'not installed')
    ((name, version),) = found.items()
    text = version if name == package else f'{name} {version}'
    if name in FORKS.values():
        return Finding('version', package, 'note', text, 'recipes: write them with swin-dense config')
    oldest, too_new = VERSIONS[package]
    number = _numbers(version)
    if (oldest is None or number >= _numbers(oldest)) and (too_new is None or number < _numbers(too_new)):
        return Finding('version', package, 'ok', text)
    tested = ', '.join(filter(None, (oldest and f'>= {oldest}', too_new and f'< {too_new}')))
    return Finding('version', package, 'note', text, f'tested: {tested}')


def extras() -> list[Finding]:
    """Return one finding per extra of swin-dense, with the missing packages by their import names."""
    findings = []
    for name, packages in {**EXTRAS, 'mm-lite': FRAMEWORKS}.items():
        missing = sorted(package for package in packages if find_spec(package) is None)
        finding = Finding('extra', name, 'ok', f'has {", ".join(sorted(packages))}')
        if missing:
            finding = Finding('extra', name, 'note', f'missing: {", ".join(missing)}', install_command(*missing))
        findings.append(finding)
    return findings


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(map(int, re.findall(r'\d+', version.partition('+')[0])))


def probe(*names: str) -> list[Finding]:
    """Run checks in one separate process, and return the findings up to the first that is broken."""
    # Pass on this sys.path: otherwise a folder named mmcv in the current directory would shadow the package.
    code = f'import sys; sys.path[:] = {sys.path!r}; from swin_dense.doctor.probes import main; main(*{names!r})'
    command = [sys.executable, '-W', 'ignore', '-c', code]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=TIMEOUT, errors='replace')
    except subprocess.TimeoutExpired:
        if len(names) > 1:
            return probe(names[0])
        text = f'did not answer within {TIMEOUT} seconds'
    else:
        findings = [finding for line in done.stdout.splitlines() if (finding := _finding(line, names)) is not None]
        if findings:
            return findings
        # The process crashed or exited.
        ended = signal.Signals(-done.returncode).name if done.returncode < 0 else f'status {done.returncode}'
        complaint = done.stderr.strip().rpartition('\n')[2]
        text = f'ended with {ended}. {complaint}'.rstrip('. ')
    name = names[0]
    by_hand = f'"from swin_dense.doctor.probes import main; main({name!r})"'
    return [Finding(TOPIC_OF[name], name, 'broken', text, f'to debug: {sys.executable} -X faulthandler -c {by_hand}')]


def probe_all(names: Sequence[str]) -> list[Finding]:
    """Run checks in a separate process, and in a new one after each that is broken; none after the first of all."""
    findings = probe(*names)
    while findings[0].status != 'broken' and len(findings) < len(names):
        findings += probe(*names[len(findings) :])
    return findings


def _finding(line: str, names: Sequence[str]) -> Finding | None:
    """Return the finding in a line that one of the probes printed, None if a package printed it."""
    try:
        answer = json.loads(line)
    except ValueError:
        return None
    if not isinstance(answer, dict) or answer.get('name') not in names:
        return None
    name = answer['name']
    if 'error' in answer:
        text = textwrap.shorten(answer['error'], 300, placeholder=' ...')
        return Finding(TOPIC_OF[name], name, 'broken', text, cure_for(answer['error'], answer['package']))
    state = 'note' if answer['found'].startswith('not ') else 'ok'
    return Finding(TOPIC_OF[name], name, state, answer['found'])


def cure_for(error: str, package: str = '') -> str:
    """Return the suggested fix for an error in one line, raised by this package ('' if unknown); '' without a fix."""
    cure = next((cure for pattern, cure in CURES.items() if re.search(pattern, error)), None)
    missing = re.search(r"No module named '(\w+)'", error)
    if cure is None and missing:
        return install_command(missing[1])
    if cure is None:
        cure = REPAIRS.get(package)
    if cure is not None:
        mmcv = distribution_of('mmcv')
        wheel = mmcv.replace('-', '_')  # as in pip's cache
        compile_mmcv = f'pip uninstall {mmcv} mmcv-lite; pip cache remove {wheel}; {compile_command(mmcv)}'
        return cure.format(compile_mmcv=compile_mmcv)
    return f'pip install --force-reinstall --no-deps {distribution_of(package)}' if package else ''
