"""Whole models in files that ``export`` wrote, each once in a run of the tests, for all its processes."""

import functools
import os
import re

import pytest
from filelock import FileLock

from tests.conftest import ROOT


@pytest.fixture(scope='session')
def pixels(demo_data):
    """Return a picture of the demo data, (H, W, 3) uint8, BGR."""
    from swin_dense.workbench.runtime import pictures
    from tests.workbench.export.whole_models import picture_of

    return pictures.read(picture_of(demo_data))[:, :, ::-1]


@pytest.fixture(scope='session')
def shared_folder(tmp_path_factory):
    """Return a folder that all processes of this run of the tests share."""
    base = tmp_path_factory.getbasetemp()
    folder = (base.parent if 'PYTEST_XDIST_WORKER' in os.environ else base) / 'exported files'
    folder.mkdir(exist_ok=True)
    return folder


@pytest.fixture(scope='session')
def exported(demo_data, pixels, shared_folder):
    """Return a function that exports a model of ``models``, and returns its config, weights and file."""
    from swin_dense import export_whole
    from tests.workbench.export import models
    from tests.workbench.export.whole_models import picture_of

    @functools.cache
    def make(name):
        config = models.config_of(name, demo_data)
        weights, path = shared_folder / f'{name}.pth', shared_folder / f'{name}.onnx'
        with FileLock(f'{path}.lock'):
            if not path.exists():
                models.make_weights(name, config, pixels, weights)
                assert len(export_whole(config, weights, path, image=picture_of(demo_data)).errors) == 3
        return config, weights, path

    return make


@pytest.fixture(scope='session')
def converted(exported):
    """Return a function that converts such a file by the line of docs/files.md, and returns its path."""
    openvino = pytest.importorskip('openvino')
    line = re.search(r'^openvino\.save_model\(.*\)$', (ROOT / 'docs' / 'files.md').read_text(), re.M)[0]

    @functools.cache
    def make(name):
        *_, path = exported(name)
        out = path.with_suffix('.xml')
        with FileLock(f'{out}.lock'):
            if not out.exists():
                code = line.replace("'model.onnx'", 'path').replace("'model.xml'", 'out')
                exec(code, {'openvino': openvino, 'path': path, 'out': out})
        return out

    return make
