"""List the recipes: published accuracy, parameters, FLOPs, and the name by which `config` writes them.

swin-dense zoo
swin-dense zoo upernet swin-b 22k     # those that all words stand in
swin-dense zoo --markdown
"""

from __future__ import annotations

import argparse

from swin_dense.recipes.files import recipe_root
from swin_dense.recipes.zoo import FOLDERS, markdown, plain, read_zoo, with_words


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument('words', nargs='*', metavar='WORD', help='list only recipes that all words stand in')
    parser.add_argument('--markdown', action='store_true', help='print Markdown, with the addresses of the weights')


def run(args: argparse.Namespace) -> int:
    root = recipe_root()
    found = {folder: with_words(read_zoo(root, folder), args.words) for folder in FOLDERS}
    recipes = [recipe for folder in FOLDERS for recipe in found[folder]]
    if not recipes:
        raise ValueError(f'no recipe has {" and ".join(map(repr, args.words))} in it; without words all are listed')
    if args.markdown:
        print('\n'.join(markdown(found[folder]) for folder in FOLDERS if found[folder]), end='')
    else:
        print(plain(recipes))
    return 0
