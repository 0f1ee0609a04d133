"""Two backbones of two blocks with different weights."""

import pytest

from swin_dense import SwinBackbone
from tests.checkpoint.helpers import SMALL


@pytest.fixture
def source():
    return SwinBackbone(**SMALL)


@pytest.fixture
def backbone():
    return SwinBackbone(**SMALL)
