"""Importing swin_dense lets torch.load read mmengine's checkpoints with weights_only, and allows no other calls."""

import os
import pickle

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub

import swin_dense  # noqa: F401  registers the safe globals
from tests.checkpoint.helpers import Runs


def test_a_message_hub_of_mmengine_loads_with_weights_only(tmp_path):
    hub = MessageHub('training')
    for step in range(3):
        hub.update_scalar('loss', np.float32(step))
    hub.update_info('seen', np.int64(7))
    torch.save({'message_hub': hub.state_dict()}, tmp_path / 'run.pth')
    state = torch.load(tmp_path / 'run.pth', weights_only=True)['message_hub']
    history = state['log_scalars']['loss']
    assert isinstance(history, HistoryBuffer)
    assert history.mean() == 1.0
    assert history.statistics('max') == 2.0
    assert state['runtime_info']['seen'] == 7


@pytest.mark.parametrize(
    ('call', 'message'),
    [
        (Runs(getattr, HistoryBuffer, '__init__'), 'the attribute'),
        (Runs(getattr, np.ndarray, 'tofile'), 'the attribute'),
        (Runs(np.zeros(1).__reduce__()[0], np.matrix, (0,), b'b'), 'matrix'),
        (Runs(os.mkdir, 'made-by-a-checkpoint'), 'mkdir'),
        (Runs(eval, "open('made-by-a-checkpoint', 'w')"), 'eval'),
    ],
    ids=['history', 'method', 'matrix', 'mkdir', 'eval'],
)
def test_other_calls_are_refused(call, message, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'weights': call}, 'run.pth')
    with pytest.raises(pickle.UnpicklingError, match=message):
        torch.load('run.pth', weights_only=True)
    assert os.listdir(tmp_path) == ['run.pth']
