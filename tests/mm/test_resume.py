"""What torch.load reads with weights_only once swin_dense is imported, and what it still refuses."""

import os
import pickle

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub

import swin_dense  # noqa: F401  its import allows the classes


class Asks:
    """Unpickles to the call of a function."""

    def __init__(self, function, *args):
        self.call = function, args

    def __reduce__(self):
        return self.call


def test_a_message_hub_of_mmengine_comes_back(tmp_path):
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
    ('call', 'said'),
    [
        (Asks(getattr, HistoryBuffer, '__init__'), 'the attribute'),
        (Asks(getattr, np.ndarray, 'tofile'), 'the attribute'),
        (Asks(np.ndarray, (1 << 40,)), 'numpy.ndarray may not be called'),
        (Asks(np._core.multiarray._reconstruct, np.matrix, (0,), b'b'), 'matrix'),
        (Asks(os.mkdir, 'made-by-a-checkpoint'), 'mkdir'),
        (Asks(eval, "open('made-by-a-checkpoint', 'w')"), 'eval'),
    ],
    ids=['history', 'method', 'array', 'matrix', 'mkdir', 'eval'],
)
def test_nothing_else_is_allowed(call, said, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    torch.save({'weights': call}, 'run.pth')
    with pytest.raises(pickle.UnpicklingError, match=said):
        torch.load('run.pth', weights_only=True)
    assert os.listdir(tmp_path) == ['run.pth']
