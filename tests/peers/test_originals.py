"""What fails with timm and transformers fails as recorded, and works here."""

import pytest

from tests.tools.test_originals import ROWS, check_row

from .peer import needed


@pytest.mark.slow
@pytest.mark.parametrize('name', [name for name, of_peers in ROWS.items() if of_peers])
def test_the_original_fails_as_recorded_and_ours_works(name):
    needed('timm')
    check_row(name)
