"""List the recipes: published accuracy, parameters, FLOPs, and the name for `swin-dense config`.

swin-dense zoo
swin-dense zoo upernet swin-b 22k     # only recipes that match all words
swin-dense zoo --weights              # with the addresses of the published weights
"""

from __future__ import annotations

import argparse

from swin_dense.utils import checks
from swin_dense.workbench.recipes.files import recipe_names, recipe_root
from swin_dense.workbench.recipes.zoo import FOLDERS, matching_recipes, plain, read_zoo

GROUP = 'models'


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('words', nargs='*', metavar='WORD', help='list only recipes that match all words')
    parser.add_argument('--weights', action='store_true', help='also list the addresses of the published weights')


def run(args: argparse.Namespace) -> int:
    root = recipe_root()
    all_recipes = [recipe for folder in FOLDERS for recipe in read_zoo(root, folder)]
    recipes = matching_recipes(all_recipes, args.words)
    if recipes:
        print(plain(recipes, args.weights))
        return 0
    of_demo = [name for name in recipe_names() if all(word.lower() in name for word in args.words)]
    if not of_demo:
        words = ' '.join(args.words)
        similar = checks.closest(words, recipe_names())
        raise ValueError(f'no recipe matches {words!r}{similar} (`swin-dense zoo` lists the recipes)')
    for name in of_demo:
        print(f'{name}\n    of `make demo`; no accuracy published')
    return 0
