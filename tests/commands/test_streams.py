"""Closed streams and wrong values: an exit status, no traceback, and no line of thousands of bytes."""

import json
import os
import subprocess
import sys

import pytest
import torch
from PIL import Image

from swin_dense.commands._main import NO_READER, main
from tests.conftest import needs, tiny
from tests.processes import environment, python

UNBUFFERED = {'PYTHONUNBUFFERED': '1'}
posix = pytest.mark.skipif(sys.platform == 'win32', reason='needs file descriptors of POSIX')


def without_reader(stream, *words, **variables):
    """Run a command whose stdout or stderr is a pipe that nothing reads; return its status and its other stream."""
    other = {'stdout': 'stderr', 'stderr': 'stdout'}[stream]
    reader, writer = os.pipe()
    os.close(reader)
    streams = {stream: writer, other: subprocess.PIPE}
    command = [sys.executable, '-W', 'ignore', '-m', 'swin_dense', *words]
    done = subprocess.run(command, text=True, env={**environment(), **variables}, **streams)
    os.close(writer)
    return done.returncode, getattr(done, other)


@posix
@pytest.mark.parametrize('variables', [{}, UNBUFFERED], ids=['buffered', 'unbuffered'])
def test_a_reader_that_has_gone(tmp_path, variables):
    assert without_reader('stdout', 'weights', **variables) == (0, '')
    torch.save({'model': tiny().state_dict()}, tmp_path / 'tiny.pth')
    words = ['convert', str(tmp_path / 'tiny.pth'), '--out', str(tmp_path / 'x.pth')]
    status, printed = without_reader('stdout', *words, **variables)
    assert status == NO_READER
    assert 'Traceback' not in printed
    assert without_reader('stderr', 'flops', 'nothing', **variables) == (2, '')


@posix
@pytest.mark.parametrize('stream', [1, 2])
@pytest.mark.parametrize(('words', 'status'), [('weights', 0), ('flops nothing', 2), ('--help', 0)])
def test_a_stream_that_the_shell_closed(stream, words, status):
    command = f'exec "{sys.executable}" -m swin_dense {words} {stream}>&-'
    done = subprocess.run(['sh', '-c', command], capture_output=True, text=True, env=environment())
    assert done.returncode == status
    assert 'Traceback' not in done.stdout + done.stderr
    if (words, stream) == ('weights', 2):
        assert 'swin_t.in1k' in done.stdout


@posix
def test_what_is_printed_does_not_reach_a_file(tmp_path):
    """The first file that is opened gets the number of a closed stream, on which a C library may print."""
    code = f"""
import os
from swin_dense.commands._main import main
main(['weights'])
with open({str(tmp_path / 'file')!r}, 'w') as file:
    os.write(1, b'of a library')
"""
    command = ['sh', '-c', f'exec "{sys.executable}" -c "$CODE" >&-']
    subprocess.run(command, check=True, env={**environment(), 'CODE': code})
    assert (tmp_path / 'file').read_text() == ''


@posix
def test_a_signal_without_stderr():
    code = """
import os, signal
from swin_dense.utils.signals import stop_signals
os.close(2)
with stop_signals() as received:
    signal.raise_signal(signal.SIGTERM)
assert received == [signal.SIGTERM]
"""
    python('-c', code)


def test_a_line_of_the_log_that_cannot_be_written_has_no_traceback():
    code = """
import logging, sys
from swin_dense.commands._main import main
main(['weights'])
class Gone:
    def write(self, text):
        raise BrokenPipeError
    flush = lambda self: None
logging.getLogger('of a framework').addHandler(logging.StreamHandler(Gone()))
logging.getLogger('of a framework').error('a line')
"""
    assert 'Logging error' not in python('-c', code).stderr


@needs('mmdet')
@pytest.mark.parametrize(
    ('setting', 'message'),
    [
        ('model=3', 'model=3 cannot replace a dict; set one of its entries, such as model.type=VALUE, or give a dict'),
        ('model=None', 'model=None cannot replace a dict'),
        ('model=[1]', r'model=[1] cannot replace a dict'),
        ('model.backbone=a', "model.backbone='a' cannot replace a dict"),
        ('test_dataloader=3', 'test_dataloader=3 cannot replace a dict'),
        ('test_dataloader.dataset=[]', 'test_dataloader.dataset=[] cannot replace a dict'),
        ('test_dataloader.dataset.pipeline=3', 'pipeline=3 cannot replace a list of dicts'),
        ('test_dataloader.dataset.pipeline.0=x', "pipeline.0='x' cannot replace a dict"),
        ('custom_imports=3', 'custom_imports=3 cannot replace a dict'),
        ('model.type=3', 'model.type must be a name, got 3'),
        ('default_scope=3', 'default_scope must be a name, got 3'),
        ('optim_wraper.optimizer.lr=1', "got 'optim_wraper'; did you mean 'optim_wrapper'?"),
    ],
)
def test_a_setting_of_another_kind(capsys, setting, message):
    assert main(['config', 'mask-rcnn_swin-demo_fpn', '--set', setting]) == 2
    assert message in capsys.readouterr().err


@needs('mmengine')
@pytest.mark.parametrize('command', ['flops', 'predict', 'test', 'export'])
def test_each_command_refuses_a_setting_of_another_kind(tmp_path, monkeypatch, capsys, command):
    monkeypatch.chdir(tmp_path)
    (tmp_path / 'weights.pth').write_bytes(b'')
    Image.new('RGB', (40, 30)).save('image.png')
    rest = {
        'predict': ['weights.pth', 'image.png'],
        'test': ['weights.pth'],
        'export': ['weights.pth', '--out', 'x.onnx'],
    }
    words = [command, 'mask-rcnn_swin-demo_fpn', *rest.get(command, [])]
    assert main([*words, '--set', 'model.type=3']) == 2
    assert 'model.type must be a name, got 3' in capsys.readouterr().err


@needs('mmengine')
@pytest.mark.parametrize(
    'setting',
    [
        'model.backbone.init_cfg=None',
        'val_dataloader=None',
        'model.neck=[{"type": "FPN"}]',
        'custom_hooks=[]',
        'model.backbone.out_indices=3',
        'val_evaluator=[{"type": "CocoMetric"}, {"type": "CocoMetric"}]',
        'optim_wrapper.clip_grad={"max_norm": 1}',
        'test_dataloader.dataset.pipeline=[]',
    ],
)
def test_settings_that_configs_of_the_frameworks_allow(setting):
    from mmengine.config import Config

    from swin_dense.workbench.configs.settings import merge_settings, parse_settings

    content = {
        'model': {'backbone': {'out_indices': (0, 1), 'init_cfg': {'type': 'Pretrained'}}, 'neck': {'type': 'FPN'}},
        'val_dataloader': {'dataset': {}},
        'test_dataloader': {'dataset': {'pipeline': [{'type': 'LoadImageFromFile'}]}},
        'custom_hooks': [{'type': 'EMAHook'}],
        'val_evaluator': {'type': 'CocoMetric'},
        'optim_wrapper': {'clip_grad': None},
    }
    config = Config(content)
    ((key, value),) = parse_settings([setting]).items()
    merge_settings(config, [setting])
    found = config
    for part in key.split('.'):
        found = found[part]
    assert found == value


LONG = 'x' * 5000


@needs('mmdet')
def test_an_annotation_is_quoted_in_part(tmp_path, capsys):
    from tests.workbench.configs.data import CLASSES, DETECTOR, make_coco

    root = make_coco(tmp_path / 'fruit')
    path = root / 'annotations' / 'instances_train2017.json'
    content = json.loads(path.read_text())
    content['annotations'][0] |= {'bbox': 'none', 'attributes': {'note': LONG}}
    path.write_text(json.dumps(content))
    assert main(['config', DETECTOR, '--data-root', str(root), '--classes', ','.join(CLASSES)]) == 2
    message = capsys.readouterr().err
    assert 'bbox must be x, y, width and height' in message
    assert len(message) < 1000


@needs('pyarrow')
def test_settings_of_features_are_quoted_in_part(tmp_path):
    from swin_dense.features.folder import FeatureFolder

    FeatureFolder(tmp_path, {'levels': LONG}, [])
    with pytest.raises(ValueError, match='computed with other settings') as raised:
        FeatureFolder(tmp_path, {'levels': [4]}, [])
    assert len(str(raised.value)) < 1000


@pytest.mark.parametrize('line', ['[1]', '3', '{}', '{"name": "a"}', '{"name": "a", "image": "b", "files": 3}', LONG])
def test_a_record_of_another_program_is_quoted_in_part(tmp_path, line):
    from swin_dense.workbench.runtime.folder import RECORD, ResultFolder

    line = json.dumps([LONG]) if line == LONG else line
    (tmp_path / RECORD).write_text(f'{line}\n')
    with pytest.raises(ValueError, match='is damaged, or not of `swin-dense predict`') as raised:
        ResultFolder(tmp_path).named({})
    assert len(str(raised.value)) < 1000


@needs('onnxruntime')
def test_a_damaged_model_is_quoted_in_part(tmp_path):
    from swin_dense import runtime
    from tests.commands.files import SEGMENTOR, write_model

    graph = f"""g (float[1, 3, H, W] img) => (float[1, 3, H, W] labels) {{
        labels = {LONG} (img)
    }}"""
    path = write_model(tmp_path / 'x.onnx', graph, SEGMENTOR)
    with pytest.raises(ValueError, match='cannot load') as raised:
        runtime.load(path)
    assert len(str(raised.value)) < 1000
