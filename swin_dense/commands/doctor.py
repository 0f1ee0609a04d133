"""Check this environment: versions, extras, known problems, attention backends, frameworks.

The report suggests a fix for each problem.

The exit status is 1 if something is broken. A package that is not installed does not count as broken.
"""

from __future__ import annotations

import argparse
import dataclasses
import json

from swin_dense.doctor import Finding, examine

GROUP = 'installation'
TITLES = {
    'version': 'Versions',
    'extra': 'Extras',
    'trap': 'Known problems',
    'backend': 'Backends',
    'check': 'Forward and backward',
    'time': 'Times',
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        '--time', action='store_true', help='also time linear layers and, on a GPU, verify and time the Triton kernel'
    )
    parser.add_argument('--json', action='store_true', help='print the findings as JSON')


def run(args: argparse.Namespace) -> int:
    findings: list[Finding] = []
    for finding in examine(args.time):
        if not args.json:
            if not findings or finding.topic != findings[-1].topic:
                print('\n' * bool(findings) + TITLES[finding.topic])
            gap = ' ' if len(finding.name) <= 24 else f'\n{"":10}'
            print(f'  {finding.status:7} {finding.name:24}{gap}{finding.text}', flush=True)
            if finding.cure:
                print(f'{"":11}{"":24}-> {finding.cure}', flush=True)
        findings.append(finding)
    broken = [finding for finding in findings if finding.status == 'broken']
    if args.json:
        print(json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2))
    elif not broken:
        print('\nNothing is broken.')
    else:
        cures = dict.fromkeys(finding.cure for finding in broken if finding.cure)
        print(f'\n{len(broken)} broken. Suggested fixes:', *(f'  {cure}' for cure in cures), sep='\n')
    return int(bool(broken))
