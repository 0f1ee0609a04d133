"""The command line ``swin-dense``: run a subcommand, and convert errors to messages and exit statuses."""

from __future__ import annotations

import argparse
import ast
import importlib
import logging
import os
import re
import sys
import traceback
import warnings
from collections.abc import Sequence
from pathlib import Path

import swin_dense
from swin_dense.utils.memory import is_out_of_memory
from swin_dense.utils.packages import how_to_install

TRACEBACK = 'SWIN_DENSE_TRACEBACK'  # environment variable
CONVENTIONS = (
    'Inputs are positional arguments; --out names the output. If the output exists, add --force to replace it; '
    '`features` continues in its folder instead. Sizes are HEIGHT WIDTH, or one number for both. Stages, blocks, '
    'heads, pages and bands count from 0.'
)
EXIT_STATUS = (
    'Exit status: 0 success, 1 partly failed, 2 wrong usage, above 128 stopped by a signal. '
    f'Set {TRACEBACK}=1 in the environment to see the traceback of an error.'
)
_WITHOUT_TORCH = ('doctor', 'predict', 'zoo')  # or which import it only where they need it
_CORE = ('numpy', 'PIL', 'torch')  # packages that swin_dense cannot be imported without
_FOLDER = Path(__file__).with_name('commands')
# A value as Python writes it, or nothing: a word, or a part of a path, is not one.
_VALUE = r"""=('[^']*'|"[^"]*"|\([^()]*\)|\[[^][]*\]|\.\.\.|True|False|None|-?\d+(?:\.\d+)?|)(?!\.?[\w/\\])"""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``swin-dense`` with the arguments of the process, or those given; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] not in command_names():
        _overview().parse_args(arguments[:1])  # prints the help, the version or an error, and exits
    name = arguments[0]
    parser = argparse.ArgumentParser(
        prog=f'swin-dense {name}', epilog=EXIT_STATUS, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    _print_log()
    try:
        # Import only the chosen command: the dependencies of the others may not be installed.
        command = importlib.import_module(f'swin_dense.commands.{name}')
        parser.description = command.__doc__
        command.add_arguments(parser)
        args = parser.parse_args(arguments[1:])
        if name not in _WITHOUT_TORCH:
            importlib.import_module('swin_dense._public')  # registers SwinDense
        status = command.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has closed the pipe, as in `swin-dense zoo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        return _print_error(error, parser)


def _print_error(error: Exception, parser: argparse.ArgumentParser) -> int:
    """Print an error and return the exit status, or raise it again if it is a bug of this package."""
    explanation = _explained(error)
    if explanation is None or os.environ.get(TRACEBACK):
        raise error
    print(f'{parser.prog}: error: {in_options(explanation, parser)}', file=sys.stderr)
    return 2


def in_options(text: str, parser: argparse.ArgumentParser) -> str:
    """Replace Python arguments in a message by the command's options: arch='swin_t' becomes --arch swin_t."""
    options = _options_of(parser)
    names = '|'.join(options)
    # A bare name is replaced only at the start of a message: the 'set' in 'a data set must ...' is not --set.
    text = re.sub(rf'(?:^|(?<=every entry of ))({names})(?= must )', lambda match: options[match[1]], text)
    return re.sub(rf'(?<![-\w./\\\'"])({names}){_VALUE}', lambda match: _option(options[match[1]], match[2]), text)


def _option(name: str, value: str | None) -> str:
    """Return an option with a value written in Python, if there is one: --arch swin_t for 'swin_t'."""
    if value in ('True', 'False'):
        return name if value == 'True' else f'--no-{name[2:]}'
    return f'{name} {re.sub("[^ .A-Za-z0-9_/-]", "", value)}' if value else name


def _options_of(parser: argparse.ArgumentParser) -> dict[str, str]:
    """Return {Python name: option} for a parser and its subparsers."""
    found = {action.dest: action.option_strings[0] for action in reversed(parser._actions) if action.option_strings}
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for inner in action.choices.values():
                found = {**_options_of(inner), **found}
    return found


def _print_log() -> None:
    """Print the package's log messages on stderr, but not what PIL and tifffile say about damaged files."""
    logging.basicConfig(format='%(message)s')
    warnings.filterwarnings('ignore', module='PIL')
    for library in ('PIL', 'tifffile'):
        logging.getLogger(library).propagate = False
    for package in ('checkpoint', 'doctor', 'export'):
        logging.getLogger(f'swin_dense.{package}').setLevel(logging.INFO)


def _explained(error: Exception) -> str | None:
    """Return a one-line message for an error, or None if the error is a bug of this package."""
    if _is_of_import(error, _CORE):
        from swin_dense._public import why_no_core

        if why_no_core is not None:
            return f'{why_no_core}; run `swin-dense doctor` for details'
    if is_out_of_memory(error):
        return f'there is not enough memory for these sizes; use smaller ones: {error}'.partition('\n')[0]
    if hasattr(error, 'without_python'):  # a CheckpointError, whose module imports torch
        return error.without_python
    if not isinstance(error, (ValueError, TypeError, OSError, ImportError)):
        return None
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return str(error)
    if error.name == 'pkg_resources':
        return "pkg_resources is missing, which setuptools 81 removed: pip install 'setuptools<81'"
    package = error.name.partition('.')[0]
    return f'this command needs {package}, which is not installed: {how_to_install(package)}'


def _is_of_import(error: Exception, packages: Sequence[str]) -> bool:
    """Return whether an error was raised because one of the packages is missing, or by its import if it is broken."""
    if isinstance(error, ModuleNotFoundError) and error.name in packages:
        return True
    modules = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == '<module>']
    return any(str(frame.f_globals.get('__name__')).partition('.')[0] in packages for frame in modules)


def command_names() -> list[str]:
    """Return the names of the subcommands, sorted."""
    return sorted(path.stem for path in _FOLDER.glob('[!_]*.py'))


def _overview() -> argparse.ArgumentParser:
    """Return the parser of the first argument; its help lists every command with the first line of its docstring."""
    parser = argparse.ArgumentParser(
        prog='swin-dense',
        description=swin_dense.__doc__,
        epilog=f'Run `swin-dense COMMAND --help` for help on a command. {CONVENTIONS} {EXIT_STATUS}',
    )
    parser.add_argument('--version', action='version', version=f'swin-dense {swin_dense.__version__}')
    commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)
    for name in command_names():
        explanation = ast.get_docstring(ast.parse((_FOLDER / f'{name}.py').read_text(encoding='utf-8'))) or ''
        commands.add_parser(name, help=explanation.partition('\n')[0], add_help=False)
    return parser


if __name__ == '__main__':
    sys.exit(main())
