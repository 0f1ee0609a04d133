"""Inputs of all kinds: what is wrong is refused as documented, and what is taken works."""

import pytest
from hypothesis import HealthCheck, given, settings

from tests.fuzzing import KINDS

# In all, of every kind its share, and the same each time; benchmarks/fuzz.py tries more, and others.
EXAMPLES = 1500


@pytest.mark.parametrize('name', KINDS)
def test_whatever_is_given_is_refused_or_works(name):
    kind = KINDS[name]
    for package in kind.needs:
        pytest.importorskip(package)

    @settings(max_examples=EXAMPLES * kind.share // 100, derandomize=True, suppress_health_check=[HealthCheck.too_slow])
    @given(kind.strategy)
    def attempt(example):
        assert kind.attempt(example) in ('taken', 'refused')

    attempt()
