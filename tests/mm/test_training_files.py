"""mmengine reads the checkpoints of its trainings, with no other calls; no other torch.load is changed."""

import os
import pickle

import numpy as np
import pytest
import torch
from mmengine.logging import HistoryBuffer, MessageHub
from mmengine.runner import CheckpointLoader

import swin_dense  # noqa: F401  registers the reader of such files
from swin_dense.mm.training_files import training_classes
from tests.checkpoint.helpers import Runs
from tests.processes import python

needs_weights_only = pytest.mark.skipif(torch.__version__ < '2.6', reason='this torch.load trusts all files')


def load(path):
    return CheckpointLoader.load_checkpoint(str(path), map_location='cpu')


@pytest.fixture
def run(tmp_path):
    """A training checkpoint with the parts that torch refuses."""
    hub = MessageHub('training')
    for step in range(3):
        hub.update_scalar('loss', np.float32(step))
    hub.update_info('seen', np.int64(7))
    torch.save({'message_hub': hub.state_dict()}, tmp_path / 'run.pth')
    return tmp_path / 'run.pth'


def test_mmengine_reads_a_message_hub(run):
    state = load(run)['message_hub']
    history = state['log_scalars']['loss']
    assert isinstance(history, HistoryBuffer)
    assert history.mean() == 1.0
    assert history.statistics('max') == 2.0
    assert state['runtime_info']['seen'] == 7


@needs_weights_only
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
    before = set(torch.serialization.get_safe_globals())
    with pytest.raises(pickle.UnpicklingError, match=message):
        load('run.pth')
    assert os.listdir(tmp_path) == ['run.pth']
    assert set(torch.serialization.get_safe_globals()) == before


ARRAYS = [np.array(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype('f8'))]  # as the error of torch advises


@needs_weights_only
def test_entries_of_the_user_win_in_the_files_that_they_suffice_for(run, tmp_path):
    """In other files the entries of this package do, and those of the user remain."""
    torch.save(np.arange(3.0), tmp_path / 'array.pth')
    with torch.serialization.safe_globals([*ARRAYS, HistoryBuffer]):
        before = set(torch.serialization.get_safe_globals())
        assert type(load(tmp_path / 'array.pth')) is np.ndarray
        assert load(run)['message_hub']['log_scalars']['loss'].mean() == 1.0
        assert set(torch.serialization.get_safe_globals()) == before


@needs_weights_only
def test_torch_load_reads_after_the_import_what_it_read_before(run, tmp_path):
    code = f"""
import numpy as np, torch
torch.save(np.arange(3.0), {str(tmp_path / 'array.pth')!r})
torch.serialization.add_safe_globals([np.array(0).__reduce__()[0], np.ndarray, np.dtype, type(np.dtype('f8'))])
import mmengine, swin_dense.mm
assert type(torch.load({str(tmp_path / 'array.pth')!r}, weights_only=True)) is np.ndarray
mmengine.runner.CheckpointLoader.load_checkpoint({str(run)!r})
assert type(torch.load({str(tmp_path / 'array.pth')!r}, weights_only=True)) is np.ndarray
"""
    python('-W', 'ignore', '-c', code)


@needs_weights_only
def test_two_threads_may_read_at_once(run):
    """The second to begin is the last to end, whose state of torch is that of before both."""
    from concurrent.futures import ThreadPoolExecutor

    before = set(torch.serialization.get_safe_globals())
    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(load, [run] * 40))
    assert all(one['message_hub']['log_scalars']['loss'].mean() == 1.0 for one in found)
    assert set(torch.serialization.get_safe_globals()) == before


def test_torch_reads_such_files_within_the_context(run):
    with training_classes():
        assert torch.load(run, weights_only=True)['message_hub']['runtime_info']['seen'] == 7
    if torch.__version__ >= '2.6':
        with pytest.raises(pickle.UnpicklingError):
            torch.load(run, weights_only=True)
