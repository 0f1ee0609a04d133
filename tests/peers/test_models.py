"""examples/ultralytics_swin.py: a model of Ultralytics that holds a Swin, with this backbone in its place."""

import types

import pytest
import torch
import yaml

from swin_dense import SwinBackbone
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
