"""Measure all figures of a page on this processor, and write the tables of the pages from the results.

    python benchmarks/figures.py speed     # docs/speed.md and the README: about two hours
    python benchmarks/figures.py models    # the table of models in the README
    python benchmarks/figures.py files     # whole models, docs/speed.md: several hours
    python benchmarks/figures.py areas     # the chart of benchmarks/README.md

Run it only on an idle machine, with the environment of the other libraries (``make test`` creates it). The first word
of a file of results is the kind of processor, see ``bench_host.PROCESSORS``. Tables have a row or a column for each
kind that was measured; the newest run of a kind replaces the one before.
"""

from __future__ import annotations

import argparse
import shlex
import subprocess
import sys
from pathlib import Path

from bench_host import kind_of_processor

ROOT = Path(__file__).resolve().parent.parent
OTHERS = '--packages .venv-peers/lib/python3.11/site-packages'
V1, V2 = [f'swin_{size}' for size in 'tsbl'], [f'swinv2_{size}' for size in 'tsbl']
TRAIN = '--models auto+cp mmdet mmseg timm transformers torchvision --cases "training step, 2 x 512 x 512"'
MODEL = '--models auto --cases "inference, 1 x 512 x 512" --processes 1'
SIDES = (224, 320, 448, 640, 896, 1280, 2048)
AREAS = ' '.join(f'"inference, 1 x {side} x {side}"' for side in SIDES)
# The commands of each page, in which {kind} stands for the processor.
PAGES = {
    'speed': (
        f'alone.py {OTHERS} --json benchmarks/results/{{kind}}_alone.json',
        f'alone.py --form compiled {OTHERS} --json benchmarks/results/{{kind}}_alone_compiled.json',
        f'alone.py --form bfloat16 {OTHERS} --json benchmarks/results/{{kind}}_alone_bfloat16.json',
        f'alone.py {TRAIN} --processes 3 --turns 2 {OTHERS} --json benchmarks/results/{{kind}}_train_512.json',
    ),
    # With the windows of the published weights.
    'models': tuple(
        f'alone.py --arch {arch} --window {7 if arch in V1 else 16} {MODEL} '
        '--json benchmarks/results/{kind}_models.json'
        for arch in [*V1, *V2]
    ),
    'files': ('exports_whole.py --out benchmarks/results/exports_whole.json',),
    'areas': (
        f'alone.py --models mmdet --cases {AREAS} --turns 3 --json benchmarks/results/cpu_sweep.json',
        'charts.py areas',
    ),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('page', choices=PAGES)
    parser.add_argument('--dry-run', action='store_true', help='print the commands, and run none')
    args = parser.parse_args()
    kind = kind_of_processor()
    commands = [f'benchmarks/{command.format(kind=kind)}' for command in PAGES[args.page]]
    for command in [*commands, 'tools/update_readme.py']:
        print('python', command, flush=True)
        if not args.dry_run:
            subprocess.run([sys.executable, *shlex.split(command)], cwd=ROOT, check=True)


if __name__ == '__main__':
    main()
