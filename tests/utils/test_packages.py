"""Errors of missing packages give a command that installs all of them."""

import re

import pytest

from swin_dense.utils import packages
from swin_dense.utils.packages import EXTRAS, MMCVS, install_command
from tests.conftest import ROOT


def test_the_extras_are_those_of_the_package():
    tomllib = pytest.importorskip('tomllib', reason='needs Python 3.11')
    declared = tomllib.loads((ROOT / 'pyproject.toml').read_text())['project']['optional-dependencies']
    everything = declared.pop('all')
    without_mm = {
        name: {re.split('[=<>]', requirement)[0] for requirement in requirements}
        for name, requirements in declared.items()
        if name not in ('mm', 'mm-lite')
    }
    without_mm['export'] = {'cv2' if one == 'opencv-python' else one for one in without_mm['export']}
    assert without_mm == EXTRAS
    assert {*re.findall(r'[\w-]+(?=[],])', ' '.join(everything))} == {*EXTRAS, 'mm-lite'}
    assert any(requirement.startswith(MMCVS) for requirement in declared['mm-lite'])


@pytest.mark.parametrize(
    ('missing', 'command'),
    [
        (['tqdm', 'pyarrow'], "pip install '.[features]' (in the clone of swin_dense)"),
        (['tqdm', 'safetensors'], "pip install '.[features]' (in the clone of swin_dense)"),
        (['safetensors'], "pip install '.[checkpoints]' (in the clone of swin_dense)"),
        (['zarr', 'tqdm'], "pip install '.[features,zarr]' (in the clone of swin_dense)"),
        (['openvino', 'onnx'], "pip install '.[export]' (in the clone of swin_dense); pip install openvino"),
        (['cv2', 'timm'], "pip install '.[export]' (in the clone of swin_dense); pip install timm"),
    ],
)
def test_the_fewest_extras_that_have_the_packages(missing, command):
    assert install_command(*missing) == command


def test_without_torch_packages_are_named_themselves(monkeypatch):
    """Each extra would install torch, which swin_dense.runtime does without."""
    monkeypatch.setattr(packages, 'find_spec', lambda name: None)
    assert install_command('onnxruntime', 'PIL') == 'pip install onnxruntime Pillow'
