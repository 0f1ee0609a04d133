"""Tables of parameters and FLOPs, as text."""

from __future__ import annotations

from typing import Any

from swin_dense.analysis.complexity import PARTS, backbone_costs, msa_flops, window_msa_flops
from swin_dense.analysis.flop_counter import Count
from swin_dense.archs import arch_letter
from swin_dense.ops.windows import window_grid


def model_summary(result: Count, height: int, width: int, depth: int) -> dict[str, Any]:
    """Return parameters and FLOPs by module, down to ``depth``, as JSON."""
    return {
        'shape': [height, width],
        'parameters': result.parameters[''],
        'flops': result.flops[''],
        'computed_flops': result.computed_flops,
        'modules': {
            name: {'parameters': result.parameters[name], 'flops': result.flops[name]}
            for name in _modules(result, depth)
        },
    }


def model_table(result: Count, height: int, width: int, depth: int) -> str:
    """Return parameters and FLOPs by module, down to ``depth``, for an image of height x width pixels."""
    lines = [f'{"module":48} {"parameters":>14} {"GFLOPs":>10}']
    for name in ['', *_modules(result, depth)]:
        label = '  ' * (name.count('.') + 1) + name.rpartition('.')[2] if name else 'model'
        lines.append(f'{label:48} {result.parameters[name]:14,} {result.flops[name] / 1e9:10,.2f}')
    saved = result.flops[''] - result.computed_flops
    lines.append(f'\nFor one image of {height} x {width} pixels (height x width); a FLOP is one multiply-add.')
    if saved:
        lines.append(
            f'Counted as in published figures, including {saved / 1e9:.2f} GFLOPs for output projections of padding '
            f'tokens, which SwinDense skips:\nit computes {result.computed_flops / 1e9:,.2f} GFLOPs.'
        )
    return '\n'.join(lines)


def _modules(result: Count, depth: int) -> list[str]:
    """Return the names of the modules down to ``depth``, in the order of the model."""
    return [name for name in result.parameters if name and name.count('.') < depth]


def attention_table(height: int, width: int, channels: int, window: tuple[int, int]) -> str:
    """Return a table that compares global and window attention on a map of height x width tokens."""
    everywhere = msa_flops(height, width, channels)
    rows, columns = window_grid(height, width, window)
    padded = (rows * window[0], columns * window[1])
    windowed = window_msa_flops(padded[0], padded[1], channels, window)
    less = everywhere / windowed
    lines = [
        f'attention on a map of {height} x {width} tokens with {channels} channels',
        f'  global:                 {everywhere:20,} FLOPs',
        f'  in windows of {window[0]:2} x {window[1]:2}:   {windowed:20,} FLOPs, {less:.1f} times less',
        f'  saved by the windows:   {everywhere - windowed:20,} FLOPs',
    ]
    if padded != (height, width):
        lines.append(f'  The windows do not divide the map, so it is padded to {padded[0]} x {padded[1]} tokens.')
    return '\n'.join(lines)


def backbone_table(arch: str, size: tuple[int, int], window: tuple[int, int]) -> str:
    """Return the FLOPs of a backbone by stage and part, for an image of ``size``, (height, width) in pixels."""
    letter = arch_letter(arch)
    costs = backbone_costs(letter, *size, window)
    stages = costs.stages
    columns = [*(f'stage {index}' for index in range(len(stages))), 'all']
    lines = [
        f'Swin-{letter.upper()} with windows of {window[0]} x {window[1]} on an image of {size[0]} x {size[1]} pixels, '
        'GFLOPs',
        '',
        f'{"":16}' + ''.join(f'{name:>10}' for name in columns),
        *(_row(part, [stage[part] for stage in stages]) for part in PARTS),
        _row('all', [sum(stage.values()) for stage in stages]),
        '',
        f'{costs.count.parameters[""]:,} parameters',
        f'{costs.global_flops / 1e9:,.2f} GFLOPs if every token attended to all others',
    ]
    return '\n'.join(lines)


def _row(name: str, flops: list[int]) -> str:
    return f'{name:16}' + ''.join(f'{value / 1e9:10.2f}' for value in [*flops, sum(flops)])
