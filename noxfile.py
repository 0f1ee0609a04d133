"""Run the core's tests and training on other stacks and as on other processors, and tests with other packages.

    .venv-nox/bin/nox --session oldest -- --parts numbers training
    .venv-nox/bin/nox --session 'processors(avx2)' -- tests/models tests/ops

The sessions ``oldest``, ``newest`` and ``onedl`` pass arguments after ``--`` to benchmarks/stacks.py, which records the
results in benchmarks/results/stacks.json; the others pass them to pytest.
"""

import os
import sys
import tempfile
from pathlib import Path

import nox

sys.path.insert(0, str(Path(__file__).parent / 'tools'))

from set_up import ROOT, mmcv_build

nox.options.default_venv_backend = 'uv'
nox.options.reuse_existing_virtualenvs = True
nox.options.error_on_missing_interpreters = True  # without it, a session that did not run passes
nox.options.sessions = []

TESTS = ['PyYAML==6.0.3', 'rich==15.0.0', 'safetensors==0.8.0', 'pytest==9.2.0', 'tqdm==4.70.1']
BUILD = ['wheel==0.48.0', 'ninja==1.13.2', 'psutil==7.2.2']


@nox.session(python='3.10')
def oldest(session: nox.Session) -> None:
    """The oldest supported stack, for which most prebuilt mmcv wheels are made."""
    mm = ['mmengine==0.10.7', 'mmdet==3.3.0', 'mmsegmentation==1.2.2', 'opencv-python==4.11.0.86']
    files = ['tifffile==2025.5.10', 'imagecodecs==2025.3.30', 'zarr==2.18.3', 'Pillow==12.3.0']
    files += ['pyarrow==21.0.0', 'hypothesis==6.168.5']
    session.install('torch==2.1.2', 'numpy==1.26.4', 'setuptools==69.5.1', *BUILD)
    install_mmcv(session, 'mmcv==2.1.0')
    run(session, *mm, *files, 'pycocotools==2.0.11', 'ftfy==6.3.1', 'regex==2026.9.29')


@nox.session(python='3.13')
def newest(session: nox.Session) -> None:
    """The newest Python and torch, with mmcv's operators in PyTorch."""
    mm = ['mmcv-lite==2.1.0', 'mmengine==0.10.7', 'mmdet==3.3.0', 'mmsegmentation==1.2.2', 'opencv-python==5.0.0.93']
    session.install('torch==2.15.0', 'numpy==2.5.5', 'setuptools==80.10.2')
    # Its version stays when its file changes.
    session.install('--reinstall-package', 'mmcv-lite-ops', './mmcv_lite_ops')
    run(session, *mm, *FILES, 'pycocotools==2.0.11', 'ftfy==6.3.1', 'regex==2026.11.15')


@nox.session(python='3.12')
def onedl(session: nox.Session) -> None:
    """The maintained forks of the OpenMMLab packages."""
    mm = [
        'onedl-mmengine==0.10.12',
        'onedl-mmdetection==3.5.1',
        'onedl-mmsegmentation==1.4.2',
        'opencv-python==4.12.0.88',
    ]
    session.install('torch==2.9.1', 'numpy==2.2.6', 'setuptools==80.10.2', *BUILD)
    install_mmcv(session, 'onedl-mmcv==2.3.6')
    run(session, *mm, *FILES, 'pycocotools==2.0.11', 'ftfy==6.3.1', 'regex==2026.11.15')


@nox.session(python='3.12')
@nox.parametrize('torch', ['2.8.0', '2.10.0'])
def between(session: nox.Session, torch: str) -> None:
    """The first torch that compiles attention as it is without, and the first that exports every format."""
    onnx = ['onnx==1.23.2', 'onnxscript==0.7.2', 'onnxruntime==1.31.1']
    session.install(f'torch=={torch}', 'numpy==2.2.6', *TESTS, *FILES, *onnx)
    tests = ['tests/models/test_compile.py']
    if torch != '2.8.0':
        tests.append('tests/export')
    session.run('python', '-m', 'pytest', '-m', 'not long', *tests, *session.posargs)


@nox.session(venv_backend='none')
def compiled(session: nox.Session) -> None:
    """The packages of `make setup` with a compiled mmcv: tests that use it, some of which compare its operators."""
    environment = ROOT / '.nox/compiled'
    session.run(sys.executable, 'tools/set_up.py', environment, 'requirements/dev.txt', '--mmcv', 'compiled')
    tests = [f'tests/{name}' for name in ('mmcv_lite_ops', 'mm', 'export', 'workbench', 'commands')]
    pytest = ['-m', 'pytest', '-n', '3', '--dist', 'worksteal']
    session.run(environment / 'bin/python', *pytest, *(session.posargs or tests), external=True)


# The instructions that torch and oneDNN use, and the number of threads: each changes the rounding.
PROCESSORS = {
    'default': {'ATEN_CPU_CAPABILITY': 'default'},
    'avx2': {'ATEN_CPU_CAPABILITY': 'avx2'},
    'onednn': {'ONEDNN_MAX_CPU_ISA': 'AVX2'},
    'threads-1': {'OMP_NUM_THREADS': '1'},
    'threads-2': {'OMP_NUM_THREADS': '2'},
    'threads-4': {'OMP_NUM_THREADS': '4'},
}


@nox.session(venv_backend='none')
@nox.parametrize('setting', [*PROCESSORS], ids=[*PROCESSORS])
def processors(session: nox.Session, setting: str) -> None:
    """The tests of `make test` in its environment, as on processors with fewer instructions or other cores."""
    pytest = ['-m', 'pytest', '-n', '3', '--dist', 'worksteal', '-m', 'not long']
    session.run('.venv/bin/python', *pytest, *session.posargs, env=PROCESSORS[setting], external=True)


# Folders of a clone after the demo and with the data of others, under the names that configs give them.
FOLDERS = ('work_dirs/demo/data/coco', 'work_dirs/demo/data/ADEChallengeData2016', 'data/coco', 'data/ade')


@nox.session(venv_backend='none')
@nox.parametrize('kind', ['clone', 'service', 'container'], ids=['clone', 'service', 'container'])
def surroundings(session: nox.Session, kind: str) -> None:
    """The tests of `make test` in its environment, which must depend on nothing outside of the suite.

    Each kind takes the time of the whole suite, and therefore combines what does not hide anything of the other.
    """
    python, tests = str(ROOT / '.venv/bin/python'), session.posargs or ['tests']
    pytest = [python, '-m', 'pytest', '-n', '3', '--dist', 'worksteal', '-m', 'not long', '-p', 'no:cacheprovider']
    if kind == 'clone':  # random order, in a clone that is full of data, in a folder and with a home with spaces
        with tempfile.TemporaryDirectory(prefix='a folder ') as folder:
            clone, home, plugin = (Path(folder, name) for name in ('a clone', 'a home', 'plugin'))
            session.run('git', 'clone', '--quiet', ROOT, clone, external=True)
            (clone / '.venv').symlink_to(ROOT / '.venv')
            for name in FOLDERS:
                (clone / name).mkdir(parents=True)
                (clone / name / 'a file of something else.json').write_text('[]')
            home.mkdir()
            install = [python, '-m', 'uv', 'pip', 'install', '--target', plugin, '--no-deps', 'pytest-randomly==5.1.0']
            session.run(*install, external=True)
            session.chdir(clone)
            variables = {'HOME': str(home), 'PYTHONPATH': f'{clone}{os.pathsep}{plugin}'}
            session.run(*pytest, *tests, env=variables, external=True)
        return
    command = [*pytest, '--rootdir', ROOT, *(ROOT / test for test in tests)]
    if kind == 'service':  # as systemd starts one, without a home, and with files for nobody else
        session.chdir('/')
        session.run('sh', '-c', 'umask 077; exec "$@"', 'sh', *command, env={'HOME': None}, external=True)
    else:  # a home below which not even root can write, and no locale, where Python uses UTF-8 by itself
        session.run(*command, env={'HOME': '/dev/null', 'LC_ALL': 'POSIX', 'LANG': None}, external=True)


@nox.session(python='3.11')
def converters(session: nox.Session) -> None:
    """The converters of other compilers, beside the torch of the exported files, of which each requires another."""
    session.install(
        '--requirements', 'requirements/torch.txt', 'pytest==9.2.0', 'PyYAML==6.0.3', 'hypothesis==6.170.15'
    )
    session.install('--excludes', 'requirements/torch.txt', *CONVERTERS)
    session.run('python', '-m', 'pytest', 'tests/converters', *session.posargs)
    benchmark = ['benchmarks/converters.py', '--out', 'benchmarks/results/converters.json']
    session.run('python', *benchmark, env={'PYTHONPATH': str(ROOT)})


@nox.session(python='3.11')
def ray(session: nox.Session) -> None:
    """The example for Ray Data, examples/features_ray.py."""
    session.install('--requirements', 'examples/requirements-ray.txt')
    tests = ['tests/features/test_ray.py', 'tests/features/test_extractor.py']
    session.run('python', '-m', 'pytest', *(session.posargs or tests))


CONVERTERS = ['executorch==1.5.1', 'litert-torch==0.10.0', 'ai-edge-litert==2.3.0', 'coremltools==9.0']
FILES = ['tifffile==2026.3.3', 'imagecodecs==2026.3.6', 'zarr==3.1.6', 'Pillow==13.0.0']
FILES += ['pyarrow==26.0.1', 'hypothesis==6.170.15']


def install_mmcv(session: nox.Session, requirement: str) -> None:
    """Compile mmcv against the torch of the session."""
    torch = session.run('python', '-c', 'import torch; print(torch.__version__)', silent=True).strip()
    options, variables = mmcv_build(torch, cuda=None)
    session.install(*options, requirement, env=variables)


def run(session: nox.Session, *requirements: str) -> None:
    session.install(*TESTS, *requirements)
    session.run('python', 'benchmarks/stacks.py', session.name, *session.posargs)
