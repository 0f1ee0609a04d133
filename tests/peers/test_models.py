"""Models that hold a Swin, with this backbone in its place: BiRefNet as on docs/elsewhere.md, and an example."""

import os
import re
import sys
import types
from pathlib import Path

import pytest
import torch
import yaml

from swin_dense import SwinBackbone, create_backbone
from tests.conftest import assert_near, randomize
from tests.examples import load_example

from .detection import train
from .peer import needed


@pytest.mark.slow
def test_ultralytics(tmp_path, monkeypatch):
    monkeypatch.setenv('YOLO_OFFLINE', 'true')
    monkeypatch.setenv('YOLO_CONFIG_DIR', str(tmp_path))
    tasks = needed('ultralytics.nn.tasks')
    torch.save(SwinBackbone('t').state_dict(), tmp_path / 'swin_t.pth')
    monkeypatch.chdir(tmp_path)
    example = load_example('ultralytics_swin')
    config = yaml.safe_load(example.CONFIG.replace('CHECKPOINT', 'swin_t.pth'))
    monkeypatch.setattr(tasks, 'TorchVision', example.Swin)
    model = tasks.DetectionModel(config, ch=3, nc=3, verbose=False)
    assert model.stride.tolist() == [8, 16, 32]
    assert isinstance(model.model[0].backbone, SwinBackbone)
    model.args = types.SimpleNamespace(box=7.5, cls=0.5, dfl=1.5)
    batch = {
        'img': torch.rand(2, 3, 96, 128),
        'batch_idx': torch.tensor([0.0, 1.0]),
        'cls': torch.tensor([[0.0], [1.0]]),
        'bboxes': torch.tensor([[0.5, 0.5, 0.4, 0.4], [0.4, 0.6, 0.3, 0.3]]),
    }
    model.train()
    losses = train(model, lambda: {'loss': model(batch)[0].sum()}, steps=8, lr=1e-4)
    assert losses[-1] < 0.8 * losses[0]
    assert all(parameter.grad is not None for parameter in model.model[0].parameters())
    with torch.no_grad():
        assert model.eval()(torch.rand(1, 3, 96, 128))[0].shape == (1, 7, 12 * 16 + 6 * 8 + 3 * 4)


@pytest.fixture
def birefnet(monkeypatch):
    """BiRefNet's original code with a Swin-T, from the clone that the environment variable BIREFNET names."""
    if 'BIREFNET' not in os.environ:
        pytest.skip('needs a clone of BiRefNet, in the environment variable BIREFNET')
    clone = Path(os.environ['BIREFNET'])
    monkeypatch.syspath_prepend(str(clone))
    # Only its training uses these.
    monkeypatch.setitem(sys.modules, 'kornia', types.ModuleType('kornia'))
    monkeypatch.setitem(sys.modules, 'kornia.filters', types.SimpleNamespace(laplacian=None))
    monkeypatch.setitem(sys.modules, 'dataset', types.SimpleNamespace(class_labels_TR_sorted=['a']))
    config, text = types.ModuleType('config'), (clone / 'config.py').read_text()
    text = re.sub(r'os\.listdir\(os\.path\.join\(self\.data_root_dir, self\.task\)\)', '[]', text)
    text = re.sub(r"('dino_v3_s',\s*\])\[\d+\]", r'\1[6]', text)  # Swin-T
    text = text.replace("'ASPPDeformable'][2]", "'ASPPDeformable'][1]")  # ASPP
    exec(text, vars(config))
    monkeypatch.setitem(sys.modules, 'config', config)
    from models.birefnet import BiRefNet

    model = BiRefNet(bb_pretrained=False).eval()
    assert model.config.bb == 'swin_v1_t'
    return model


@pytest.mark.slow
@torch.no_grad()
def test_birefnet(birefnet):
    theirs = randomize(birefnet.bb)
    images = [torch.rand(1, 3, *size) for size in ((256, 256), (224, 320))]
    expected = [birefnet(img)[-1] for img in images]
    birefnet.bb = create_backbone(None, theirs.state_dict())
    for img, mask in zip(images, expected, strict=True):
        assert mask.std() > 1e-3
        torch.testing.assert_close(birefnet(img)[-1], mask, rtol=1e-4, atol=1e-5)
    img = torch.rand(2, 3, 250, 330)
    assert_near(birefnet.bb(img), theirs(img), 1e-4)
