"""The command line ``swin-dense``: finds the subcommand, and gives every outcome its exit status."""

from __future__ import annotations

import argparse
import ast
import importlib
import logging
import os
import sys
from collections.abc import Sequence
from pathlib import Path

import swin_dense
from swin_dense.doctor import FORKS, distribution_of, install_command

EXIT_STATUS = 'Exit status: 0 done, 1 some of it failed, 2 wrong usage; above 128 stopped by a signal.'
_COMMANDS_WITH_EXTRAS = ('export', 'features', 'visualize')  # of pyproject.toml, under the same names
_FOLDER = Path(__file__).with_name('commands')


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``swin-dense`` with the arguments of the process, or those given; return the exit status."""
    arguments = sys.argv[1:] if arguments is None else arguments
    # Only the chosen command is imported: what the others need may not be installed.
    name = _overview().parse_args(arguments[:1]).command
    logging.basicConfig(format='%(message)s')
    logging.getLogger('swin_dense.checkpoint').setLevel(logging.INFO)
    try:
        command = importlib.import_module(f'swin_dense.commands.{name}')
        parser = argparse.ArgumentParser(
            prog=f'swin-dense {name}',
            description=command.__doc__,
            epilog=EXIT_STATUS,
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        command.add_arguments(parser)
        status = command.run(parser.parse_args(arguments[1:]))
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # whoever read the output has seen enough, as in `swin-dense zoo | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        explanation = _explained(name, error)
        if explanation is None:
            raise
        print(f'swin-dense {name}: error: {explanation}', file=sys.stderr)
        return 2


def _explained(command: str, error: Exception) -> str | None:
    """Return one line on what is wrong and what to do, None where the error is a defect of ours."""
    if swin_dense._why_no_core is not None:
        return f'{swin_dense._why_no_core}; `swin-dense doctor` says more'
    from swin_dense.memory import is_out_of_memory  # which imports torch

    if is_out_of_memory(error):
        return f'there is not enough memory for these sizes; give smaller ones: {error}'.partition('\n')[0]
    if not isinstance(error, (ValueError, TypeError, OSError, ImportError)):
        return None
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return str(error)
    if error.name == 'pkg_resources':
        return "pkg_resources is missing, which setuptools left out in 81: pip install 'setuptools<81'"
    package = error.name.partition('.')[0]
    return f'this command needs {package}, which is not installed: {_how_to_install(command, package)}'


def _how_to_install(command: str, package: str) -> str:
    if package in ('mmengine', 'mmcv', 'mmdet', 'mmseg') and distribution_of(package) not in FORKS.values():
        return "pip install --no-build-isolation mmcv==2.1.0, then pip install 'swin-dense[mm]'; see docs/install.md"
    if command in _COMMANDS_WITH_EXTRAS:
        return f"pip install 'swin-dense[{command}]'"
    return install_command(package)


def command_names() -> list[str]:
    """Return the names of the subcommands, sorted."""
    return sorted(path.stem for path in _FOLDER.glob('[!_]*.py'))


def _overview() -> argparse.ArgumentParser:
    """Return the parser of the first argument, which knows what every command says of itself."""
    parser = argparse.ArgumentParser(
        prog='swin-dense',
        description=swin_dense.__doc__,
        epilog='`swin-dense COMMAND --help` explains each. ' + EXIT_STATUS,
    )
    parser.add_argument('--version', action='version', version=f'swin-dense {swin_dense.__version__}')
    commands = parser.add_subparsers(dest='command', metavar='COMMAND', required=True)
    for name in command_names():
        explanation = ast.get_docstring(ast.parse((_FOLDER / f'{name}.py').read_text())) or ''
        commands.add_parser(name, help=explanation.partition('\n')[0], add_help=False)
    return parser


if __name__ == '__main__':
    sys.exit(main())
