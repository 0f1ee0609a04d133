"""Fuzzed inputs: an invalid input raises the documented error, and any other input works."""

import pytest
from hypothesis import HealthCheck, given, settings

from swin_dense import SwinBackbone
from tests.fuzzing import arrays, checkpoints, commands, network
from tests.fuzzing.common import refused

# Total over all kinds, divided by their shares and the same in each run.
EXAMPLES = 1000
KINDS = network.KINDS | arrays.KINDS | checkpoints.KINDS | commands.KINDS


@pytest.mark.parametrize('name', KINDS)
def test_whatever_is_given_is_refused_or_works(name):
    kind = KINDS[name]
    for package in kind.needs:
        pytest.importorskip(package)

    @settings(
        max_examples=EXAMPLES * kind.share // 100,
        derandomize=True,
        suppress_health_check=[HealthCheck.too_slow],
    )
    @given(kind.strategy)
    def attempt(example):
        assert kind.attempt(example) in ('taken', 'refused')

    attempt()


def test_only_raise_statements_of_this_package_count_as_refused():
    def error_of(function, *arguments):
        with pytest.raises((ValueError, TypeError)) as caught:
            function(*arguments)
        return caught.value

    assert refused(error_of(SwinBackbone, 'no arch')) == 'refused'
    with pytest.raises(ValueError, match='invalid literal'):
        refused(error_of(int, 'x'))
