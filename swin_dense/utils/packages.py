"""Which packages are installed, how to install the others, and how to cure broken ones."""

from __future__ import annotations

import importlib.metadata
import re
from collections.abc import Sequence
from importlib import import_module
from importlib.util import find_spec
from types import ModuleType

# The maintained forks, which install under the same import names.
FORKS = {'mmengine': 'onedl-mmengine', 'mmcv': 'onedl-mmcv', 'mmdet': 'onedl-mmdetection'}
FORKS['mmsegmentation'] = 'onedl-mmsegmentation'
# The distributions that install the package mmcv.
MMCVS = ('mmcv', 'onedl-mmcv', 'mmcv-lite')
IN_THE_CLONE = '(in the clone of swin_dense)'
WITHOUT_COMPILER = f"pip install '.[mm-lite]' ./mmcv_lite_ops {IN_THE_CLONE}"
# The extras of pyproject.toml, but for those of mm packages, and the import names of their packages.
EXTRAS = {
    'checkpoints': {'huggingface_hub', 'safetensors'},
    'features': {'imagecodecs', 'pyarrow', 'safetensors', 'tifffile', 'tqdm'},
    'zarr': {'zarr'},
    'visualize': {'matplotlib'},
    'export': {'cv2', 'onnx', 'onnxruntime', 'onnxscript', 'pycocotools'},
}
FRAMEWORKS = {'mmengine', 'mmcv', 'mmdet', 'mmseg'}
# Import name: what to install, if that is another name.
DISTRIBUTIONS = {'PIL': 'Pillow', 'cv2': 'opencv-python', 'mmseg': 'mmsegmentation', 'yaml': 'PyYAML'}

# Pattern of an error message: suggested fix. The first match is used.
CURES = {
    r'pkg_resources': "pip install 'setuptools<81'",
    r'torchvision': 'install the torchvision version that matches this torch, or uninstall torchvision',
    r'MMCV==|mmcv.*incompatible': (
        f'the framework does not support this mmcv: pip uninstall mmcv mmcv-lite; {WITHOUT_COMPILER}'
    ),
    r"No module named 'mmcv._ext'": (
        'this mmcv has no operators: pip install ./mmcv_lite_ops (in the clone of swin_dense), or compile them: '
        '{compile_mmcv}'
    ),
    r'mmcv.*(undefined symbol|_ext)': 'mmcv was compiled for another torch: {compile_mmcv}',
    r'Numpy is not available|_ARRAY_API': "this torch was built for NumPy 1: pip install 'numpy<2'",
    r'shadowed': "write type='swin_dense.SwinDense' in the config, or rename the other class",
}


def require(user: str, *packages: str) -> None:
    """Raise ImportError, with how to install them, if ``packages`` (import names) that ``user`` needs are missing."""
    missing = [package for package in packages if find_spec(package) is None]
    if missing:
        are = 'is' if len(missing) == 1 else 'are'
        raise ImportError(
            f'{user} needs {", ".join(missing)}, which {are} not installed: {install_command(*missing)}',
            name=missing[0],
        )


def optional(user: str, module: str) -> ModuleType:
    """Import a module of an optional package; an ImportError says how to install it for ``user``."""
    require(user, module.partition('.')[0])
    return import_module(module)


def install_command(*packages: str) -> str:
    """Return the commands that install packages, given their import names: by the extras that have them."""
    if not uses_forks() and not FRAMEWORKS.isdisjoint(packages):
        return f'{WITHOUT_COMPILER}; see docs/install.md'  # a framework needs the others of the extra, too
    extras, others = _extras_of(packages)
    names = [distribution_of(package) for package in others]
    commands = [compile_command(name) for name in names if name == 'onedl-mmcv']
    if extras:
        commands.append(f"pip install '.[{','.join(extras)}]' {IN_THE_CLONE}")
    names = [name for name in names if name != 'onedl-mmcv']
    if names:
        commands.append(f'pip install {" ".join(names)}')
    return '; '.join(commands)


def _extras_of(packages: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the fewest extras that have the packages, and the packages that are in none.

    Without torch no extra serves, because each would install it; ``swin_dense.runtime`` works without.
    """
    extras: list[str] = []
    left = set(packages)
    by_use = sorted(EXTRAS, key=lambda name: -len(EXTRAS[name].intersection(packages)))
    for name in by_use if find_spec('torch') else ():
        if EXTRAS[name] & left:
            extras.append(name)
            left -= EXTRAS[name]
    return extras, [package for package in packages if package in left]


def compile_command(mmcv: str) -> str:
    """Return the command that compiles mmcv, or its fork, for the installed torch."""
    return f'pip install --no-build-isolation {"mmcv==2.1.0" if mmcv == "mmcv" else mmcv}'


def distribution_of(package: str) -> str:
    """Return the distribution of an import name: the maintained fork if another fork is already installed."""
    distribution = DISTRIBUTIONS.get(package, package)
    return FORKS.get(distribution, distribution) if uses_forks() else distribution


def uses_forks() -> bool:
    return any(version_of(fork) for fork in FORKS.values())


def versions_of(package: str) -> dict[str, str]:
    """Return the names and versions of a distribution and of others with its import name, as far as installed."""
    names = MMCVS if package in MMCVS else (package, FORKS.get(package, package))
    versions = {name: version_of(name) for name in names}
    return {name: version for name, version in versions.items() if version}


def version_of(distribution: str) -> str | None:
    """Return the version of an installed distribution, or None."""
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return None


def cure_for(error: str) -> str:
    """Return the suggested fix for an error, '' if none is known."""
    mmcv = distribution_of('mmcv')
    cure = next((cure for pattern, cure in CURES.items() if re.search(pattern, error)), '')
    missing = re.search(r"No module named '(\w+)'", error)
    if not cure and missing:
        return install_command(missing[1])
    return cure.format(compile_mmcv=f'pip uninstall {mmcv} mmcv-lite; {compile_command(mmcv)}')
