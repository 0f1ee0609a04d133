"""The lock holds what the requirements pin, all of it with hashes, and names no place to get it from."""

import re

from kinds import KINDS, ROOT

LOCKS = [ROOT / 'requirements' / name for name in ('lock.txt', 'lock-mmcv.txt')]


def test_the_lock_holds_what_is_pinned_with_hashes():
    entries = [
        entry
        for lock in LOCKS
        for entry in re.split(r'^(?=[^\s#])', lock.read_text(), flags=re.MULTILINE)
        if not entry.startswith('#')
    ]
    locked = set()
    for entry in entries:
        found = re.fullmatch(r'(\S+==\S+) \\\n(?: +--hash=sha256:[0-9a-f]{64}(?: \\)?\n)+', entry)
        assert found, entry
        locked.add(found[1].lower())
    missing = {line.lower() for line in KINDS['main'].requirements()} - locked
    assert not missing, 'write the lock anew: python tools/lock.py'
    assert not [lock for lock in LOCKS if '://' in lock.read_text()]
