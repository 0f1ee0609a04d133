"""The reports of tools/gpu_check.sh, and the README's table of them."""

import json
import subprocess
import sys

import pytest

from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'tools'))
sys.path.insert(0, str(ROOT / 'benchmarks'))

import gpu_check
import update_readme

TIMES = {'auto': 2.0, 'timm': 5.0, 'mmdet': 7.0, 'sdpa': 3.0}


@pytest.fixture
def reports(tmp_path):
    """Reports of two comparisons, one of which was cut off while its second case was timed."""
    models = {name: {'median_ms': ms, 'peak_mib': 10.0, 'milliseconds': [ms]} for name, ms in TIMES.items()}
    case = {'batch': 1, 'train': False, 'size': [800, 1344], 'left_out': {'torchvision': 'absent'}, 'models': models}
    cut_off = {**case, 'batch': 2, 'train': True, 'models': {'auto': {'peak_mib': 1.0, 'milliseconds': [1.0]}}}
    for name in ('t-eager', 't-compiled-infer-1'):
        report = gpu_check.Report(tmp_path / f'{name}.json', is_rehearsal=False)
        report.write(cases=[case, cut_off])
    gpu_check.Report(tmp_path / 'profile.json', is_rehearsal=False).write(profile={})
    return tmp_path


def test_the_table_shows_the_medians(reports):
    collected = gpu_check.collect(reports)
    assert [(case['way'], case['batch'], set(case['models'])) for case in collected['cases']] == [
        (way, batch, models) for way in ('eager', 'compiled') for batch, models in ((1, set(TIMES)), (2, set()))
    ]
    head, _, *rows = update_readme.gpu_table(collected).splitlines()
    assert head.endswith('| ours | mmdet | timm | ours, `sdpa` |')
    assert rows == [
        f'| Swin-T, inference, 1 x 800 x 1344, {way} | 2.00 ms | 3.50 | 2.50 | 1.50 |' for way in ('eager', 'compiled')
    ]


def test_a_rehearsal_makes_no_table(reports):
    with pytest.raises(ValueError, match='rehearsal'):
        update_readme.gpu_table({**gpu_check.collect(reports), 'is_rehearsal': True})


def test_kernels_and_tests_come_first_and_compiled_peers_are_compared():
    pieces = list(gpu_check.PIECES)
    assert pieces[:2] == ['kernels', 'tests']
    assert {f't-compiled-{case}' for case in ('infer-1', 'infer-8', 'train-2')} < set(pieces)
    assert {'timm', 'mmdet'} < set(gpu_check.MODELS)


@pytest.mark.slow
@pytest.mark.long
def test_a_rehearsal_without_a_gpu(tmp_path):
    command = ['tools/gpu_check.sh', 'kernels', 't-eager']
    environment = {'REHEARSE': '1', 'OUT': str(tmp_path), 'PYTHON': sys.executable, 'PATH': '/usr/bin:/bin'}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    (finding,) = json.loads((tmp_path / 'kernels.json').read_text())['findings']
    assert finding['text'] == 'not checked: torch sees no GPU'
    collected = json.loads((tmp_path / 'gpu.json').read_text())
    assert collected['is_rehearsal']
    assert {'auto', 'sdpa'} <= set(collected['cases'][0]['models'])
