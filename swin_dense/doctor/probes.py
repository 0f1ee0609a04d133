"""The probes of the doctor, run in separate processes: a probe returns its result, or raises any error."""

from __future__ import annotations

import importlib
import io
import json
import logging
import sys
import time
import traceback
from collections.abc import Callable
from importlib.util import find_spec
from pathlib import Path

ROUNDS = 50  # of the comparison of libraries, under a second


def pkg_resources() -> str:
    if find_spec('mmengine') is None:
        return 'not needed without mmengine'
    import pkg_resources

    return f'found in {Path(pkg_resources.__file__).parent.parent}'


def pillow() -> str:
    import PIL
    from PIL import Image

    Image.new('RGB', (8, 8)).save(io.BytesIO(), 'png')
    return f'Pillow {PIL.__version__} writes images'


def numpy_bridge() -> str:
    import numpy as np
    import torch

    torch.from_numpy(np.ones(1)).numpy()
    return 'torch and numpy exchange arrays'


def torchvision() -> str:
    if find_spec('torchvision') is None:
        return 'not installed, and not needed'
    import torchvision

    return f'torchvision {torchvision.__version__} imports'


def mmcv_operators() -> str:
    if find_spec('mmcv') is None:
        return 'not installed'
    import torch
    from mmcv.ops import get_compiler_version, nms

    nms(torch.tensor([[0.0, 0.0, 2.0, 2.0]]), torch.ones(1), 0.5)
    compiler = get_compiler_version()
    return (
        'in PyTorch, of mmcv-lite-ops' if 'mmcv-lite-ops' in compiler else f'compiled for this torch, with {compiler}'
    )


def resume() -> str:
    """Check that torch loads the training state saved by mmengine."""
    if find_spec('mmengine') is None:
        return 'not needed without mmengine'
    import torch
    from mmengine.logging import HistoryBuffer

    import swin_dense

    history = HistoryBuffer()
    history.update(1.0)
    file = io.BytesIO()
    torch.save({'message_hub': {'log_scalars': {'loss': history}}}, file)
    file.seek(0)
    torch.load(file)
    return f'torch loads checkpoints of mmengine, with swin_dense {swin_dense.__version__} imported'


def registry() -> str:
    names = [name for name in ('mmdet', 'mmseg') if find_spec(name)]
    if not names:
        return 'not needed without mmdet and mmseg'
    from swin_dense.mm import SwinDense

    for name in names:
        found = importlib.import_module(f'{name}.registry').MODELS.get('SwinDense')
        if found is not SwinDense:
            raise RuntimeError(f'SwinDense is shadowed in {name} by {found}')
    return f'SwinDense is found from {" and ".join(names)}'


def triton() -> str:
    if find_spec('triton') is None:
        return 'not installed; torch is used instead'
    import triton

    return f'triton {triton.__version__} imports'


def triton_kernel() -> str:
    import torch

    from swin_dense.ops.triton import attention
    from swin_dense.ops.windows import WindowSpec

    x = torch.zeros(1, 7, 7, 32, device='cuda' if torch.cuda.is_available() else 'cpu')
    reason = attention.unsupported_reason(x, WindowSpec(1, (7, 7), (0, 0), 1.0))
    return f'not here: {reason}' if reason else "attn_backend='triton' can run; swin-dense doctor --time compares it"


def allocator() -> str:
    from swin_dense.utils import memory

    if memory.keep_freed():
        return f'kept for the next pass, so that a process stays at its peak; {memory.KEEP_VARIABLE}=0 switches it off'
    return f'not kept after a pass: it is not of glibc, or {memory.KEEP_VARIABLE}=0 is set'


def linear_layers() -> str:
    from swin_dense.ops import linear

    library = 'oneDNN' if linear.IS_FASTER_BY_ONEDNN else "torch's own choice"
    return f'{library}, in float32 on this CPU'


def bfloat16() -> str:
    """Return whether this processor computes in bfloat16: according to OpenVINO, or to torch without it."""
    if find_spec('openvino') is not None:
        from swin_dense.workbench.runtime.sessions import has_bfloat16

        has = has_bfloat16()
        how = 'according to OpenVINO: swin-dense predict --runtime openvino --precision bfloat16'
    else:
        import torch

        if not hasattr(torch.cpu, 'get_capabilities'):
            return 'not known: OpenVINO or a later torch would tell'
        found = torch.cpu.get_capabilities()
        has = any(found.get(name) for name in ('amx_bf16', 'avx512_bf16', 'bf16', 'sve_bf16'))
        how = 'according to torch; predictions with .onnx files need OpenVINO for it'
    return f'in hardware, {how}' if has else 'not in hardware: swin-dense predict refuses --precision bfloat16'


def linear_layers_timed() -> str:
    """Return what oneDNN takes for a linear layer in float32 on this CPU, compared with torch's own choice."""
    import torch
    import torch.nn.functional as F

    from swin_dense.ops import linear

    if not hasattr(torch.ops.mkldnn, '_linear_pointwise'):
        return 'not timed: this build of torch has no oneDNN'
    x, weight = torch.rand(4096, 192), torch.rand(768, 192)
    seconds: dict[Callable[..., object], list[float]] = {linear.by_onednn: [], F.linear: []}
    for _ in range(ROUNDS):
        for function, times in seconds.items():
            start = time.perf_counter()
            function(x, weight, None)
            times.append(time.perf_counter() - start)
    onednn, own = (min(times) for times in seconds.values())
    return f"oneDNN takes {onednn / own:.2f} of the time of torch's own choice"


def kernel_timed() -> str:
    from swin_dense.doctor import kernel

    return kernel.examine()


def core() -> str:
    import torch

    from swin_dense.models.swin import SwinBackbone

    backbone = SwinBackbone({'embed_dims': 16, 'depths': (1, 2, 1, 1), 'num_heads': (1, 2, 4, 8)})
    torch.stack([level.square().mean() for level in backbone(torch.randn(1, 3, 70, 90))]).sum().backward()
    idle = [name for name, parameter in backbone.named_parameters() if parameter.grad is None]
    if idle:
        raise RuntimeError(f'no gradient for {idle[0]}')
    return f'forward and backward with torch {torch.__version__}'


def mmdet() -> str:
    if find_spec('mmdet') is None:
        return 'not installed'
    import torch
    from mmdet.structures import DetDataSample
    from mmengine.structures import InstanceData

    instances = InstanceData(bboxes=torch.tensor([[8.0, 8.0, 40.0, 40.0]]), labels=torch.tensor([0]))
    sample = DetDataSample(metainfo={'img_shape': (64, 64), 'pad_shape': (64, 64), 'batch_input_shape': (64, 64)})
    sample.gt_instances = instances
    return _train_once('retinanet_swin-t-p4-w7_fpn_1x_coco', 'mmdet', [sample])


def mmseg() -> str:
    if find_spec('mmseg') is None:
        return 'not installed'
    import torch
    from mmengine.structures import PixelData
    from mmseg.structures import SegDataSample

    sample = SegDataSample(metainfo={'img_shape': (64, 64)})
    sample.gt_sem_seg = PixelData(data=torch.zeros(1, 64, 64, dtype=torch.long))
    return _train_once('upernet_swin-demo', 'mmseg', [sample] * 2)


def _train_once(recipe: str, framework: str, samples: list) -> str:
    """Run one forward and backward pass of a model with a small SwinDense."""
    import torch
    from mmengine.registry import MODELS, init_default_scope

    import swin_dense  # noqa: F401  registers SwinDense
    from swin_dense.recipes.files import load_recipe

    config = load_recipe(recipe)
    config.model.backbone.depths, config.model.backbone.init_cfg = (1, 1, 1, 1), None
    init_default_scope(framework)
    model = MODELS.build(config.model).train()
    losses = model.loss(torch.randn(len(samples), 3, 64, 64), samples)
    total, _ = model.parse_losses(losses)
    total.backward()
    if model.backbone.patch_embed.projection.weight.grad is None:
        raise RuntimeError('no gradient reaches the backbone')
    return f'forward and backward of {type(model).__name__}'


TRAPS = {
    'pkg_resources': pkg_resources,
    'Pillow': pillow,
    'numpy with torch': numpy_bridge,
    'triton': triton,
    'torchvision': torchvision,
    'operators of mmcv': mmcv_operators,
    'checkpoints of mmengine': resume,
    'name in the registries': registry,
}
CHECKS = {'torch alone': core, 'mmdet': mmdet, 'mmsegmentation': mmseg}
BACKENDS = {
    'Triton kernel': triton_kernel,
    'linear layers': linear_layers,
    'bfloat16 of this CPU': bfloat16,
    'memory of a CPU': allocator,
}
TIMED = {'linear layers, timed': linear_layers_timed, 'Triton kernel, timed': kernel_timed}
PROBES = {**TRAPS, **BACKENDS, **CHECKS, **TIMED}
TOPIC_OF = {
    **dict.fromkeys(TRAPS, 'trap'),
    **dict.fromkeys(BACKENDS, 'backend'),
    **dict.fromkeys(CHECKS, 'check'),
    **dict.fromkeys(TIMED, 'time'),
}
# The probes that share a process, because most of their time is the import of the same packages. The first is one
# without which the others fail, too.
_OF_FRAMEWORKS = ('pkg_resources', 'operators of mmcv', 'checkpoints of mmengine', 'name in the registries')
TOGETHER = (
    ('torch alone', 'numpy with torch', 'Pillow', 'torchvision', 'triton', *BACKENDS),
    ('torch alone', *_OF_FRAMEWORKS, 'mmdet', 'mmsegmentation'),
)


def main(*names: str) -> None:
    """Print the result of each probe as a line of JSON, up to the first error.

    The line of an error has the package that raised it, '' if unknown.
    """
    logging.disable()
    for name in names:
        try:
            answer = {'name': name, 'found': PROBES[name]()}
        except BaseException as error:  # packages can raise any error, even SystemExit
            answer = {'name': name, 'error': ' '.join(f'{type(error).__name__}: {error}'.split())}
            answer['package'] = _package_that_raised(error)
        print(json.dumps(answer), flush=True)
        if 'error' in answer:  # what it has imported by half may break others
            return


def _package_that_raised(error: BaseException) -> str:
    modules = [frame.f_globals.get('__name__', '') for frame, _ in traceback.walk_tb(error.__traceback__)]
    packages = [module.partition('.')[0] for module in modules]
    not_others = {'swin_dense', '__main__', *sys.stdlib_module_names}
    return next((package for package in reversed(packages) if package not in not_others), '')
