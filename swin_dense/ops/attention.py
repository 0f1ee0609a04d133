"""Choose the implementation of window attention."""

from __future__ import annotations

from types import MethodType
from typing import Any

from torch import Tensor, nn

from swin_dense.ops import context, reference, sdpa
from swin_dense.ops.reference import Projection
from swin_dense.ops.windows import WindowSpec
from swin_dense.utils.private import hooks_of

BACKENDS = ('auto', 'sdpa', 'reference', 'triton')

# Any other, of a subclass, of a module, or set by a library for all modules, must be called.
_DROPOUTS_FORWARD = context.torchs_forward(nn.modules.dropout, 'Dropout')


def window_attention(
    x: Tensor,
    project: Projection,
    table: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
    backend: str = 'auto',
) -> Tensor:
    """Compute attention within shifted windows; input and output are in raster order.

    The map is padded with zeros to a multiple of the window, rolled by minus the shift and cut into windows. Attention
    is computed within each window and region, and the windows are put back. Padding tokens are projected and attended
    to, as in the official code.

    Args:
        x: (B, H, W, C), any H and W.
        project: maps tokens, (..., C), to queries, keys and values, (..., 3C). It is called on the tokens in their
            windows, because they are reordered before: three times less memory is moved then.
        table: (P, A) position bias added to the scores, by the offset of the query from the key in the order of the
            official table, P = (2 * window height - 1) * (2 * window width - 1); or None.
        spec: heads, window, shift and scale.
        attn_drop: maps the attention weights, (B * N, A, T, T). An ``nn.Dropout`` without hooks, and with its own
            ``forward``, is not called, because torch's attention drops weights itself and never stores them.
        backend: one of ``BACKENDS``. 'auto' is 'triton' on a CUDA device where a trial shows that the kernel works
            (:mod:`swin_dense.ops.triton.choice`), and 'sdpa' elsewhere. 'sdpa' is torch's attention; on a CPU, products
            and a softmax if ``table`` needs a gradient. 'triton' is a kernel for NVIDIA GPUs.
            'reference' consists of plain operations; all others are replaced by it while a graph is exported and where
            ``attn_drop`` must see the weights, and all but 'triton' within torch.func, in forward-mode differentiation
            and, on a CPU, in torch's modes, such as a FLOP counter.

    Returns:
        (B, H, W, C).

    Raises:
        ValueError: the backend is unknown.
        RuntimeError: the Triton kernel cannot run here.

    Examples:
        >>> spec = WindowSpec(num_heads=3, window=(7, 7), shift=(3, 3), scale=32**-0.5)
        >>> window_attention(torch.rand(1, 20, 30, 96), torch.nn.Linear(96, 288), None, spec, torch.nn.Dropout(0)).shape
        torch.Size([1, 20, 30, 96])
    """
    if backend not in BACKENDS:
        raise ValueError(f'backend must be one of {", ".join(BACKENDS)}, got {backend!r}')
    is_tracing = context.is_tracing()  # asked once: on a GPU, a question costs the host as much as an operation
    # The kernel is an operator of its own, which torch.compile records.
    needs_reference = context.is_exporting() if backend == 'triton' else context.needs_reference(x, is_tracing)
    forward = attn_drop.forward  # torch.compile follows these questions in every version, and sees a new `forward`
    is_torchs = isinstance(forward, MethodType) and forward.__func__ is _DROPOUTS_FORWARD
    sees_weights = not is_torchs or any(hooks_of(attn_drop))
    if backend == 'reference' or needs_reference or sees_weights:
        return reference.attend_by_plain_operations(x, project, table, spec, attn_drop)
    if backend == 'triton' or (x.is_cuda and backend == 'auto'):
        return _attend_on_gpu(x, project, table, spec, attn_drop, backend, is_tracing)
    return sdpa.attend_by_torch(x, project, table, spec, attn_drop, is_tracing)


def _attend_on_gpu(
    x: Tensor,
    project: Projection,
    table: Tensor | None,
    spec: WindowSpec,
    attn_drop: nn.Module,
    backend: str,
    is_tracing: bool,
) -> Tensor:
    """Attend by the kernel, or by torch's attention if 'auto' finds no kernel that works."""
    # Triton is imported where a kernel may be used: the import takes seconds, and may start the driver of the GPU.
    import swin_dense.ops.triton.attention as kernel
    import swin_dense.ops.triton.choice as choice

    dropout: Any = attn_drop.p if attn_drop.training else 0.0
    if backend == 'triton':
        kernel.check_supported(x, spec, dropout)
    elif not choice.is_kernel(x, table, spec, dropout, is_tracing):
        return sdpa.attend_by_torch(x, project, table, spec, attn_drop, is_tracing)
    return kernel.attend_by_kernel(x, project, table, spec, is_tracing)
