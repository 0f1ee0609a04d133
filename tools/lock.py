"""Update uv.lock from pyproject.toml, without the addresses of the package index.

    .venv/bin/python tools/lock.py [--check] [options of uv lock, such as --upgrade-package NAME]

uv writes the package index of this machine into every entry. An installation only needs names, versions and hashes, so
the index is replaced by a placeholder.
"""

import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).parents[1]
LOCK = ROOT / 'uv.lock'
NO_INDEX = 'https://index.invalid'
UV = Path(sys.executable).with_name('uv')


def without_index(text: str) -> str:
    text = re.sub(r'registry = "https?://[^"]+"', f'registry = "{NO_INDEX}/simple"', text)
    return re.sub(r'url = "https?://[^"]+/([^"/]+)"', rf'url = "{NO_INDEX}/\1"', text)


def index_of_this_machine() -> str:
    """Return the package index that uv uses on this machine."""
    with tempfile.TemporaryDirectory() as folder:
        project = '[project]\nname = "a"\nversion = "0"\nrequires-python = ">=3.11"\ndependencies = ["wheel"]\n'
        Path(folder, 'pyproject.toml').write_text(project)
        subprocess.run([UV, 'lock', '--quiet', '--project', folder, '--python', sys.executable], check=True)
        return re.findall(r'registry = "([^"]+)"', Path(folder, 'uv.lock').read_text())[0]


def main() -> int:
    committed = LOCK.read_text()
    # uv keeps the locked versions only if the index in the file is the one that it uses.
    LOCK.write_text(committed.replace(f'{NO_INDEX}/simple', index_of_this_machine()))
    command = [str(UV), 'lock', '--project', str(ROOT), '--python', sys.executable, *sys.argv[1:]]
    try:
        status = subprocess.run(command, check=False).returncode
    finally:
        is_kept = '--check' in sys.argv or not LOCK.exists()
        LOCK.write_text(committed if is_kept else without_index(LOCK.read_text()))
    return status


if __name__ == '__main__':
    sys.exit(main())
