"""List the recipes: published accuracy, parameters, FLOPs, and the name for `swin-dense config`.

swin-dense zoo
swin-dense zoo upernet swin-b 22k     # only recipes that match all words
swin-dense zoo --task panoptic --data coco --arch t
swin-dense zoo --markdown
"""

from __future__ import annotations

import argparse

from swin_dense.recipes.files import recipe_root
from swin_dense.recipes.zoo import FOLDERS, chosen, markdown, plain, read_zoo


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('words', nargs='*', metavar='WORD', help='list only recipes that match all words')
    parser.add_argument('--task', default='', help='list only recipes for this task, such as panoptic')
    parser.add_argument('--data', default='', help='list only recipes for this data set, such as coco or ade20k')
    parser.add_argument(
        '--arch', default='', choices=('t', 's', 'b', 'l'), help='list only recipes with a Swin of this size'
    )
    parser.add_argument('--markdown', action='store_true', help='print Markdown, with the URLs of the weights')


def run(args: argparse.Namespace) -> int:
    root = recipe_root()
    found = {folder: chosen(read_zoo(root, folder), args.words, args.task, args.data, args.arch) for folder in FOLDERS}
    recipes = [recipe for folder in FOLDERS for recipe in found[folder]]
    if not recipes:
        asked = [
            *map(repr, args.words),
            *(f'--{name} {vars(args)[name]}' for name in ('task', 'data', 'arch') if vars(args)[name]),
        ]
        raise ValueError(f'no recipe matches {" and ".join(asked)}; run `swin-dense zoo` to list all recipes')
    if args.markdown:
        print('\n'.join(markdown(found[folder]) for folder in FOLDERS if found[folder]), end='')
    else:
        print(plain(recipes))
    return 0
