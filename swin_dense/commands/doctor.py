"""Examine this environment: versions, known traps with their cures, backends, and a try of each framework.

Exit status 1 where something is broken. What is not installed is not broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from swin_dense.doctor import Finding, examine

TITLES = {'version': 'Versions', 'trap': 'Known traps', 'backend': 'Backends', 'check': 'Forward and backward'}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('--json', action='store_true', help='print a list of findings as JSON')


def run(args: argparse.Namespace) -> int:
    findings = examine()
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    else:
        print('\n'.join(report(findings)))
    return int(any(finding.status == 'broken' for finding in findings))


def report(findings: list[Finding]) -> list[str]:
    lines = []
    for topic in dict.fromkeys(finding.topic for finding in findings):
        lines += ['', TITLES[topic]]
        for finding in findings:
            if finding.topic == topic:
                lines.append(f'  {finding.status:7} {finding.name:24} {finding.text}')
                lines += [f'{"":11}{"":24}-> {finding.cure}'] if finding.cure else []
    broken = [finding for finding in findings if finding.status == 'broken']
    if not broken:
        return [*lines[1:], '', 'Nothing is broken.']
    cures = dict.fromkeys(finding.cure for finding in broken if finding.cure)
    return [*lines[1:], '', f'{len(broken)} broken. What helps:', *(f'  {cure}' for cure in cures)]
