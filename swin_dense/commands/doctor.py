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
    for topic, title in TITLES.items():
        lines += ['', title]
        for finding in findings:
            if finding.topic == topic:
                lines.append(f'  {finding.status:7} {finding.name:24} {finding.text}')
                lines += [f'{"":11}{"":24}-> {finding.cure}'] if finding.cure else []
    broken = sum(finding.status == 'broken' for finding in findings)
    return [*lines[1:], '', f'{broken} broken' if broken else 'Nothing is broken.']
