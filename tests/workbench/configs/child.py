"""Run cases in child processes with limits of time and memory: pycocotools may crash, or not return."""

import json
import os
import resource
import signal
import tempfile
import traceback
from pathlib import Path

_SECONDS = 60  # of a case
_BYTES = 12 << 30  # beyond what the process has already, which after many tests is more than this


def run_cases(cases, function):
    """Return what a function returns for each case, by name; JSON must be able to store it.

    All cases run in one child process. If it ends in one of them, the others run in another; the result of the case is
    the text 'ended with ...'.
    """
    results = {}
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, 'results')
        while left := {name: case for name, case in cases.items() if name not in results}:
            path.write_text('')
            status = _run(left, function, path)
            lines = [json.loads(line) for line in path.read_text().splitlines()]
            results.update(dict(lines))
            unfinished = [name for name in left if name not in results]
            if unfinished:
                results[unfinished[0]] = f'ended with {status}'
    return results


def _run(cases, function, path):
    child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    try:
        pages = int(Path('/proc/self/statm').read_text().split()[0])
        limit = pages * resource.getpagesize() + _BYTES
        resource.setrlimit(resource.RLIMIT_AS, (limit, limit))
        with path.open('w') as file:
            for name, case in cases.items():
                signal.alarm(_SECONDS)
                try:
                    result = function(case)
                except BaseException:
                    result = traceback.format_exc()
                file.write(json.dumps([name, result]) + '\n')
                file.flush()
    finally:
        os._exit(0)
