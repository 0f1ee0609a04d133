"""List the recipes: published accuracy, parameters, FLOPs, and the name by which `config` writes them.

swin-dense zoo
swin-dense zoo upernet swin-b 22k     # those that all words stand in
swin-dense zoo --task panoptic --data coco --arch t
swin-dense zoo --markdown
"""

from __future__ import annotations

import argparse

from swin_dense.recipes.files import recipe_root
from swin_dense.recipes.zoo import FOLDERS, chosen, markdown, plain, read_zoo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('words', nargs='*', metavar='WORD', help='list only recipes that all words stand in')
    parser.add_argument('--task', default='', help='list only those for this task, or a part of it, such as panoptic')
    parser.add_argument('--data', default='', help='list only those for this data set, such as coco or ade20k')
    parser.add_argument(
        '--arch', default='', choices=('t', 's', 'b', 'l'), help='list only those with a Swin of this size'
    )
    parser.add_argument('--markdown', action='store_true', help='print Markdown, with the addresses of the weights')


def run(args: argparse.Namespace) -> int:
    root = recipe_root()
    found = {folder: chosen(read_zoo(root, folder), args.words, args.task, args.data, args.arch) for folder in FOLDERS}
    recipes = [recipe for folder in FOLDERS for recipe in found[folder]]
    if not recipes:
        asked = [
            *map(repr, args.words),
            *(f'--{name} {vars(args)[name]}' for name in ('task', 'data', 'arch') if vars(args)[name]),
        ]
        raise ValueError(f'no recipe has {" and ".join(asked)} in it; without words and options all are listed')
    if args.markdown:
        print('\n'.join(markdown(found[folder]) for folder in FOLDERS if found[folder]), end='')
    else:
        print(plain(recipes))
    return 0
