"""The command line ``swin-dense``: run a subcommand, and convert errors to messages and exit statuses."""

from __future__ import annotations

import argparse
import importlib
import logging
import os
import re
import sys
import textwrap
import traceback
import warnings
from collections.abc import Sequence
from importlib.util import find_spec
from pathlib import Path

import swin_dense
from swin_dense.utils import checks, packages
from swin_dense.utils.errors import is_out_of_memory
from swin_dense.utils.lazy import require_core

TRACEBACK = 'SWIN_DENSE_TRACEBACK'  # environment variable
CONVENTIONS = (
    'Inputs are positional arguments; --out names the output. If the output exists, add --force to replace it; '
    '`features` continues in its folder instead. Sizes are HEIGHT WIDTH, or one number for both. Stages, blocks, '
    'heads, pages and bands count from 0. Errors name options as in Python: window_size=7 is --window-size 7.'
)
EXIT_STATUS = (
    'Exit status: 0 success, 1 partly failed, 2 wrong usage, above 128 stopped by a signal. '
    f'Set {TRACEBACK}=1 in the environment to see the traceback of an error.'
)
# Titles of the groups of commands in the help.
GROUPS = {
    'backbones': 'images and backbones',
    'models': 'whole models of mmdet and mmsegmentation',
    'installation': 'this installation',
}
_FOLDER = Path(__file__).parent
# Warnings of mmseg about which a user can do nothing; `export` refuses the heads that it suggests.
_OF_MMSEG = (
    '``build_loss`` would be deprecated',
    'Default ``avg_non_ignore`` is False',
    'For binary segmentation, we suggest',
    '`reduce_zero_label` will be deprecated',
)
NO_READER = 128 + 13  # status of programs that SIGPIPE ends, because the reader of their output has gone
_CORE = ('numpy', 'PIL', 'torch')  # packages that all but the runtime cannot be imported without


def main(arguments: Sequence[str] | None = None) -> int:
    """Run ``swin-dense`` with the arguments of the process, or those given; return the exit status."""
    _replace_closed_streams()
    _disable_telemetry()
    arguments = sys.argv[1:] if arguments is None else arguments
    if not arguments or arguments[0] not in command_names():
        _print_overview(arguments[:1])  # or the version or an error, and exits
    name = arguments[0]
    _print_log()
    args = argparse.Namespace(out=None)
    try:
        parser = parser_of(name)
        args, unknown = parser.parse_known_args(arguments[1:])
        if unknown:
            parser.error(f'unrecognized argument {unknown[0]}{_hint_on_option(unknown[0], parser)}')
        status = args.run(args)
        sys.stdout.flush()
        return status
    except BrokenPipeError:  # the reader has closed the pipe, as in `swin-dense zoo | head`
        _discard_output()
        return 0 if getattr(args, 'out', None) is None else NO_READER  # which may have written a part of its files
    except KeyboardInterrupt:
        print(f'swin-dense {name}: interrupted', file=sys.stderr)
        return 130
    except Exception as error:
        explanation = _explained(error)
        if explanation is None or os.environ.get(TRACEBACK):
            raise
        try:
            print(f'swin-dense {name}: error: {explanation}', file=sys.stderr, flush=True)
        except BrokenPipeError:
            _discard_output()
        return 2


def _disable_telemetry() -> None:
    """Keep ONNX Runtime and OpenVINO from collecting events, and from storing an id for that in the home folder."""
    os.environ.setdefault('ORT_DISABLE_TELEMETRY', '1')
    # OpenVINO does without this package, which it has no other switch for.
    sys.modules.setdefault('openvino_telemetry', None)  # type: ignore[arg-type]


def _replace_closed_streams() -> None:
    """Discard the output to a stream that the shell closed, as in `swin-dense zoo >&-`.

    Otherwise the next opened file would get its number, and the output of libraries.
    """
    for name in ('stdout', 'stderr'):
        if getattr(sys, name) is None:
            setattr(sys, name, os.fdopen(os.open(os.devnull, os.O_WRONLY), 'w', encoding='utf-8'))


def _discard_output() -> None:
    """Let Python discard its buffers of closed pipes, or it would print an error at its end."""
    nowhere = os.open(os.devnull, os.O_WRONLY)
    for stream in (sys.stdout, sys.stderr):
        try:
            stream.flush()
        except BrokenPipeError:
            os.dup2(nowhere, stream.fileno())


def parser_of(name: str) -> argparse.ArgumentParser:
    """Return the parser of a command, whose result has ``run``, too; only the module of this command is imported."""
    command = importlib.import_module(f'swin_dense.commands.{name}')
    parser = argparse.ArgumentParser(
        prog=f'swin-dense {name}',
        description=command.__doc__,
        epilog=EXIT_STATUS,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.set_defaults(run=command.run)
    command.add_arguments(parser)
    return parser


def _hint_on_option(given: str, parser: argparse.ArgumentParser) -> str:
    """Return the option that a wrong one may mean: of this command, or of another; '' if there is none."""
    option = given.partition('=')[0]
    commands = [name for name in command_names() if option in _options_of(parser_of(name))]
    if commands:
        return f'; `swin-dense {commands[0]}` has it'
    return checks.closest(option, _options_of(parser))


def _options_of(parser: argparse.ArgumentParser) -> list[str]:
    return re.findall(r'(?<![\w-])--[a-z][a-z-]*', parser.format_usage())


def _print_log() -> None:
    """Print the package's log messages on stderr, but not those of PIL and tifffile about damaged files."""
    logging.basicConfig(format='%(message)s')
    logging.raiseExceptions = False  # a line that cannot be written, as to a closed pipe, has no traceback
    warnings.filterwarnings('ignore', module='PIL')
    for start in _OF_MMSEG:
        warnings.filterwarnings('ignore', re.escape(start), module='mmseg')
    for library in ('PIL', 'tifffile'):
        logging.getLogger(library).propagate = False
    for package in ('checkpoint', 'export', 'workbench.runtime'):
        logging.getLogger(f'swin_dense.{package}').setLevel(logging.INFO)


def _explained(error: Exception) -> str | None:
    """Return a one-line message for an error, or None if the error is a bug of this package."""
    if _is_of_import(error, _CORE):
        try:
            require_core()
        except ImportError as core_error:
            return str(core_error)
    if is_out_of_memory(error):
        return f'there is not enough memory for these sizes; use smaller ones: {error}'.partition('\n')[0]
    if not isinstance(error, (ValueError, TypeError, OSError, ImportError)):
        return None
    if not isinstance(error, ModuleNotFoundError) or error.name is None:
        return str(error)
    package = error.name.partition('.')[0]
    if package != error.name and find_spec(package) is not None:
        cure = (
            packages.cure_for(str(error))
            or f'install another version of {package}; `swin-dense doctor` names those tested'
        )
        return f'this command needs {error.name}, which the installed {package} lacks: {cure}'
    cure = packages.cure_for(f'No module named {package!r}')
    return f'this command needs {package}, which is not installed: {cure}'


def _is_of_import(error: Exception, packages: Sequence[str]) -> bool:
    """Return whether an error was raised because one of the packages is missing, or by its import if it is broken."""
    if isinstance(error, ModuleNotFoundError) and error.name in packages:
        return True
    modules = [frame for frame, _ in traceback.walk_tb(error.__traceback__) if frame.f_code.co_name == '<module>']
    return any(str(frame.f_globals.get('__name__')).partition('.')[0] in packages for frame in modules)


def command_names() -> list[str]:
    """Return the names of the subcommands, sorted."""
    return sorted(path.stem for path in _FOLDER.glob('[!_]*.py'))


def _print_overview(arguments: Sequence[str]) -> None:
    """Parse the first argument, which is no command, and exit; the help lists the commands by their groups."""
    parser = argparse.ArgumentParser(
        prog='swin-dense',
        usage='%(prog)s [-h] [--version] COMMAND ...',
        description=textwrap.fill((swin_dense.__doc__ or '').partition('\n')[0], 100),
        epilog=_commands_by_group(),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument('--version', action='version', version=f'swin-dense {swin_dense.__version__}')
    parser.add_argument('command', nargs='?', help=argparse.SUPPRESS)
    name = parser.parse_args(arguments).command
    wrong = 'give a command' if name is None else f'there is no command {name!r}{checks.closest(name, command_names())}'
    parser.error(f'{wrong} (`swin-dense --help` lists them)')


def _commands_by_group() -> str:
    """Return the end of the help: the first line of the docstring of each command, and the extra that it needs."""
    lines: dict[str, list[str]] = {group: [] for group in GROUPS}
    for name in command_names():
        command = importlib.import_module(f'swin_dense.commands.{name}')
        summary = (command.__doc__ or '').partition('\n')[0]
        extra = f' [{command.EXTRA}]' if hasattr(command, 'EXTRA') else ''
        lines[command.GROUP] += textwrap.wrap(
            summary + extra, 100, initial_indent=f'  {name:10} ', subsequent_indent=' ' * 13
        )
    groups = ['\n'.join([f'{GROUPS[group]}:', *listed]) for group, listed in lines.items()]
    extras = "[NAME]: needs an extra: pip install '.[NAME]' in the clone of swin_dense; [mm-lite] serves as [mm]."
    more = f'Run `swin-dense COMMAND --help` for help on a command. {CONVENTIONS} {EXIT_STATUS}'
    return '\n\n'.join([*groups, extras, textwrap.fill(more, 100)])
