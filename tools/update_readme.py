"""Write what pages generate: tables from the raw results under benchmarks/, and lists of pages from mkdocs.yml."""

from __future__ import annotations

import argparse
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
ORIGINALS = ROOT / 'benchmarks/results/originals.json'
sys.path.append(str(ROOT / 'benchmarks'))

from alone import OURS_EAGER  # noqa: E402
from bench_host import PROCESSORS  # noqa: E402
from measurements import Measurement, pivot, read  # noqa: E402
from page_list import decisions_list, index_table, llms_list  # noqa: E402
from photographs_table import chinese_trained_line, photographs_table, trained_line  # noqa: E402

from swin_dense.workbench.recipes.zoo import FOLDERS, read_zoo  # noqa: E402


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in PAGES:
        page = ROOT / name
        page.write_text(with_tables(page.read_text()))


def with_tables(text: str) -> str:
    """Return a page with all that is generated in it."""
    for name, (sources, table) in TABLES.items():
        if f'<!-- {name} -->' in text:
            text = replace_block(text, name, table(*([read(*sources)] if sources else [])))
    return text


def replace_block(text: str, name: str, block: str) -> str:
    """Replace the text between the line ``<!-- name -->`` and the next ``<!-- end -->``.

    Raises:
        ValueError: a marker is missing.
    """
    start, end = f'<!-- {name} -->\n', '<!-- end -->'
    before, found, rest = text.partition(start)
    _, closed, after = rest.partition(end)
    if not found or not closed:
        raise ValueError(f'a page needs the lines {start.strip()} and {end} around this table')
    return before + start + block + end + after


def _table(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table in Markdown, with a line of titles."""
    lines = [titles, ['---'] * len(titles), *rows]
    table = ''.join('| ' + ' | '.join(map(str, cells)) + ' |\n' for cells in lines)
    return table.replace(' x ', '×').replace('AMD EPYC, Zen', 'Zen')


def _number(values: Sequence[float], column: tuple[str, str]) -> str:
    """Return the cell of a quantity that was measured once."""
    (value,) = values
    return f'{value:.2f}' if column[1] == 'times ours' or column[1] in PASSES else f'{value:,.0f}'


def _span(values: Iterable[float], _: object = None) -> str:
    """Return the least and the largest value of several machines, one number if they are equal when rounded."""
    values = sorted(values)
    digits = 0 if values[0] >= 100 else 1 if values[0] >= 10 else 2
    ends = [f'{value:,.{digits}f}' for value in (values[0], values[-1])]
    return ends[0] if ends[0] == ends[1] else ' to '.join(ends)


def _model_and_quantity(one: Measurement) -> tuple[str, str]:
    return one.model, one.quantity


def _relative_to_ours(*models: str) -> list[tuple[str, str]]:
    return [('auto', 'ms'), *((name, 'times ours') for name in models)]


def speed_table(found: Sequence[Measurement]) -> str:
    """Return a table of our time, and of the times of others relative to it."""
    columns = _relative_to_ours(*ALONE_PEERS)
    rows = pivot(found, lambda one: (f'{one.what}, {one.size}', one.machine), _model_and_quantity, columns, _number)
    return _table(['Swin-T, float32', 'processor', 'ours, ms', *ALONE_PEERS], rows)


def forms_table(found: Sequence[Measurement]) -> str:
    """Return a table of models that are compiled, or run in bfloat16."""
    forms = [one for one in found if one.way != 'eager']
    columns = _relative_to_ours(OURS_EAGER, *ALONE_PEERS)

    def line(one: Measurement) -> tuple[str, str]:
        return f'{one.way}, {one.what}, {one.size}', one.machine

    rows = pivot(forms, line, _model_and_quantity, columns, _number)
    return _table(['Swin-T', 'processor', 'ours, ms', 'ours, eager in float32', *ALONE_PEERS], rows)


def memory_table(found: Sequence[Measurement]) -> str:
    """Return a table of the peak memory of a training step, in MiB above the memory before it."""
    peaks = [one for one in found if one.quantity == 'peak_mib']
    machines = {one.machine for one in peaks}
    models = dict.fromkeys(one.model for one in peaks)
    names = [name for name in models if {one.machine for one in peaks if one.model == name} == machines]
    columns = [(name, 'peak_mib') for name in names]
    rows = pivot(peaks, lambda one: (one.machine,), _model_and_quantity, columns, lambda x, _: f'{x[0]:.0f}')
    titles = [f'{peaks[0].what}, {peaks[0].size}, MiB', *(MEMORY_NAMES.get(name, name) for name in names)]
    return _table(titles, rows)


def whole_models_table(found: Sequence[Measurement]) -> str:
    """Return a table of time and memory of an image in each way to run a whole model."""
    ways = [way for way in WAYS_OF_WHOLE_MODELS if any(one.way == way for one in found)]
    # Milliseconds and MiB of a way come one after the other.
    rows = pivot(
        found,
        lambda one: (f'{one.what}, {one.size}, {one.machine}',),
        lambda one: one.way,
        ways,
        lambda figures, _: '/'.join(f'{figure:,.0f}' for figure in figures),
    )
    return _table(['ms/MiB of model, image, processor, threads', *ways], rows)


def gpu_attention_table(found: Sequence[Measurement]) -> str:
    """Return a table of the kernel and of torch's attention, in bfloat16 and float32."""
    columns = [(backend, key) for key in PASSES for backend in ('triton', 'sdpa')]
    shown = [one for one in found if one.way != 'float16']
    rows = pivot(shown, lambda one: (one.size, one.way), _model_and_quantity, columns, _number)
    rows = [row for row in rows if row[2]]  # of the kernel
    passes = ['inference, kernel', 'inference, torch', 'with gradients, kernel', 'with gradients, torch']
    return _table(['map, window; times in ms', 'dtype', *passes], rows)


def speed_line(found: Sequence[Measurement]) -> str:
    """Return the lines of the README on speed: GPUs, then CPUs."""
    return SPEED_LINE.format(**_speed_facts(found)).replace('~', ' to ')


def chinese_speed_line(found: Sequence[Measurement]) -> str:
    """Return the lines of the Chinese README on speed."""
    return CHINESE_SPEED_LINE.format(**_speed_facts(found)).replace('~', ' 至 ')


def _speed_facts(found: Sequence[Measurement]) -> dict[str, str]:
    """Return the measurements in the lines on speed; '~' separates the ends of a range."""
    facts = {'cpu': '~'.join(_range_of_mmdet(found))}
    for kind, what in (('forward', 'inference'), ('step', 'training step')):
        newest = [one for one in _newest(found, what, 'eager') if one.quantity == 'wall_ms']
        times = {one.model: one.value for one in newest}
        peers = [times[name] for name in GPU_PEERS]
        facts[kind], facts[f'{kind}_without'] = f'{times["auto"]:.1f}', f'{times["sdpa"]:.1f}'
        facts[f'{kind}_peers'] = f'{min(peers):.1f}~{max(peers):.1f}'
    steps = _newest(found, 'inference', 'use_graphs')
    again = [one.value for one in steps if (one.model, one.quantity, one.size) == ('eager', 'wall_ms', newest[0].size)]
    return facts | {'device': newest[0].machine, 'release': newest[0].release, 'again': _span(again)}


def _range_of_mmdet(found: Iterable[Measurement]) -> tuple[str, str]:
    """Return the least and the largest median time of mmdet's Swin relative to ours, on CPUs."""
    medians = [one.value for one in found if (one.model, one.quantity) == ('mmdet', 'times ours')]
    return f'{min(medians):.2f}', f'{max(medians):.2f}'


def _newest(found: Iterable[Measurement], what: str, way: str) -> list[Measurement]:
    """Return the measurements on a GPU from the newest release that measured this way to run models."""
    rows = [one for one in found if (one.what, one.way) == (what, way) and one.release]
    newest = max((one.release for one in rows), default=None)
    return [one for one in rows if one.release == newest]


def gpu_models_table(found: Sequence[Measurement]) -> str:
    """Return a table of whole models under autocast, by inference and training."""
    return _gpu_models(found, 'eager', GPU_FIELDS)


def gpu_memory_table(found: Sequence[Measurement]) -> str:
    """Return a table of the memory of whole models above their weights, by inference and training."""
    return _gpu_models(found, 'memory', {'peak_mib': 'peak, MiB'})


def _gpu_models(found: Sequence[Measurement], way: str, quantities: dict[str, str]) -> str:
    """Return a table with a row for each model, and the quantities for inference and for training."""
    passes = {name: _newest(found, what, way) for name, what in WHAT.items()}
    titles = [f'{name}: {title}' for name in passes for title in quantities.values()]
    columns = [(what, quantity) for what in WHAT.values() for quantity in quantities]
    of_models = [one for rows in passes.values() for one in rows if one.model in GPU_MODELS]
    rows = pivot(of_models, lambda one: (one.model,), lambda one: (one.what, one.quantity), columns, _span)
    rows.sort(key=lambda row: list(GPU_MODELS).index(row[0]))
    cells = [[GPU_MODELS[name], *values] for name, *values in rows]
    return _machines_line(passes['inference']) + _table(['Swin-T, 2 x 800 x 1344', *titles], cells)


def gpu_inference_table(found: Sequence[Measurement]) -> str:
    """Return a table of wall / device time of inference in each way to run a model."""
    return _gpu_times(found, GPU_WAYS_OF_INFERENCE, 'inference')


def gpu_training_table(found: Sequence[Measurement]) -> str:
    """Return a table of wall / device time of a training step in each way to run a model."""
    return _gpu_times(found, GPU_WAYS_OF_TRAINING, 'training step')


def _gpu_times(found: Sequence[Measurement], ways: dict[str, tuple[str, str]], what: str) -> str:
    """Return a table with a row for each way and size.

    Args:
        ways: title of a way -> the way of the measurements, and the name of our model.
    """
    rows, used = [], []
    for title, (way, our_name) in ways.items():
        newest = [one for one in _newest(found, what, way) if one.quantity in ('wall_ms', 'device_ms')]
        used += newest
        columns = [(name, key) for name in (our_name, *GPU_PEERS) for key in ('wall_ms', 'device_ms')]
        lines = pivot(newest, lambda one: (one.size,), _model_and_quantity, columns, _span)
        for size, *times in sorted(lines, key=lambda line: _pixels(line[0]), reverse=True):
            pairs = zip(times[::2], times[1::2], strict=True)
            cells = [wall + (f' / {device}' if device else '') for wall, device in pairs]
            if any(cells):
                rows.append([title, size, *cells, newest[0].release])
    return _machines_line(used) + _table(['wall / device, ms', 'images', 'ours', *GPU_PEERS, 'release'], rows)


def _pixels(size: str) -> int:
    return math.prod(map(int, size.split(' x ')))


def _machines_line(rows: Sequence[Measurement]) -> str:
    """Return a line with the releases, GPUs and versions behind rows, and an empty line."""
    described = {}
    for source in dict.fromkeys(one.source for one in rows):
        machine = json.loads((ROOT / 'benchmarks/results' / source).read_text())['machine']
        versions = f'torch {machine["torch"]}, Triton {machine["triton"]}'
        described[source] = f'Release {machine["release"]}, {machine["device"]}, {versions}'
    lines = sorted(described.values(), key=lambda line: line.split()[1], reverse=True)
    counted = [f'{line}, {lines.count(line)} machines.' for line in dict.fromkeys(lines)]
    return ' '.join(counted).replace(', 1 machines', '') + '\n\n'


def originals_table() -> str:
    """Return the README's table of benchmarks/originals.py: what you do, and what the original and we give."""
    cells = [
        (row['user'], f'{row["package"]} ({_link(row)}): {_words(row, SHORT)}', row['ours']['gave'])
        for row in _failures().values()
    ]
    return _table(['what you do', 'the original', 'here'], cells)


def chinese_originals_table() -> str:
    """Return the table of the Chinese README, with the errors in the originals' own words."""
    cells = []
    for name, row in _failures().items():
        user, wrong, ours = CHINESE_ROWS[name]
        cells.append((user, f'{row["package"]}（{_link(row)}）：{wrong or _words(row, SHORT)}', ours))
    return _table(['你的操作', '原实现', '本项目'], cells)


def originals_in_full() -> str:
    """Return the table of benchmarks/originals.py with versions, threads and names of rows."""
    cells = []
    for name, row in _failures().items():
        packages = ', '.join(f'{package} {version}' for package, version in row['original']['versions'].items())
        cells.append((f'`{name}`', row['user'], packages, _link(row), _words(row), row['ours']['gave']))
    return _table(['row', 'you', 'packages', 'thread', 'the original', 'here'], cells)


def _failures() -> dict[str, dict[str, Any]]:
    """Return the rows of benchmarks/originals.py.

    Raises:
        ValueError: an original has not failed, or we have.
    """
    rows: dict[str, dict[str, Any]] = json.loads(ORIGINALS.read_text())
    for name, row in rows.items():
        if not row['original']['failed'] or row['ours']['failed']:
            raise ValueError(f'{name} shows no failure of the original alone: take it out of benchmarks/originals.py')
    return rows


def _link(row: dict[str, Any]) -> str:
    """Return a link to the thread of a row, with the name of its repository."""
    repository, _, number = row['thread'].partition('#')
    return f'[{repository.partition("/")[2]} {number}](https://github.com/{repository}/issues/{number})'


def _words(row: dict[str, Any], longest: int = 1000) -> str:
    """Return what an original gave: its error as code, in at most so many characters, or a wrong result."""
    gave = row['original']['gave']
    if not re.match(r'\w+: ', gave):
        return gave
    if len(gave) > longest:
        gave = gave[:longest].rpartition(' ')[0] + ' ...'
    return f'`{gave}`'


def models_table(found: Sequence[Measurement]) -> str:
    """Return the table of models: accuracy as its authors published it, counted cost, and times of one image."""
    return _table([*MODEL_TITLES], _model_rows(found))


def chinese_models_table(found: Sequence[Measurement]) -> str:
    """Return the same table with Chinese titles."""
    return _table([*MODEL_TITLES.values()], _model_rows(found))


def _model_rows(found: Sequence[Measurement]) -> list[list[str]]:
    on_cpu = {(one.model, one.quantity): one for one in found if not one.release}
    size = next(iter(on_cpu.values())).size
    on_gpu = [one for one in _newest(found, 'inference', 'sizes') if (one.model, one.size) == ('auto', size)]
    # Swin-T is the only model of these sessions.
    gpu_times = {'swin_t': _span(one.value for one in on_gpu if one.quantity == 'wall_ms')}
    zoo = {recipe.config.stem: (folder, recipe) for folder in FOLDERS for recipe in read_zoo(ROOT, folder)}
    rows = []
    for name, (top_1, measured, *recipe_names) in MODELS.items():
        accuracies = []
        for recipe_name in recipe_names:
            if recipe_name is None:
                accuracies.append('')
                continue
            folder, recipe = zoo[recipe_name]
            metrics = [recipe.metrics[metric] for metric in ('box AP', 'mask AP', 'mIoU') if metric in recipe.metrics]
            head = recipe.model['In Collection']
            accuracies.append(f'{" / ".join(map(str, metrics))}, [{head}](configs/{folder}/README.md)')
        costs = ['', '', '', '']
        if measured is not None:
            parameters, flops, ms = (on_cpu[measured, quantity].value for quantity in ('parameters', 'flops', 'ms'))
            costs = [f'{parameters / 1e6:.0f} M', f'{flops / 1e9:.0f} G', f'{ms:,.0f}', gpu_times.get(measured, '')]
        pretraining = 'ImageNet-22K' if 'in22k' in name else 'ImageNet-1K'
        rows.append([f'`{name}`', pretraining, str(top_1), *accuracies, *costs])
    return rows


# Published weights -> top-1 accuracy on ImageNet-1K from the authors' list (MODELHUB.md of
# github.com/microsoft/Swin-Transformer), the row of benchmarks/models.py with these windows, if any, and recipes for
# COCO and ADE20K that start from the same pretraining; None where none has a published figure.
MODELS: dict[str, tuple[float, str | None, str | None, str | None]] = {
    'swin_t.in1k': (
        81.2,
        'swin_t',
        'mask-rcnn_swin-t-p4-w7_fpn_official-amp-ms-crop-3x_coco',
        'swin-tiny-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512',
    ),
    'swin_s.in1k': (
        83.2,
        'swin_s',
        'mask-rcnn_swin-s-p4-w7_fpn_official-amp-ms-crop-3x_coco',
        'swin-small-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512',
    ),
    'swin_b.in1k': (
        83.5,
        'swin_b',
        'cascade-mask-rcnn_swin-b-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco',
        'swin-base-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512',
    ),
    'swin_b.in22k_in1k': (
        85.2,
        'swin_b',
        None,
        'swin-base-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640',
    ),
    'swin_l.in22k_in1k': (
        86.3,
        'swin_l',
        None,
        'swin-large-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640',
    ),
    'swin_l.in22k_in1k_384': (
        87.3,
        None,
        'dino-5scale_swin-l_8xb2-36e_coco',
        'swin-large-patch4-window12-in22k-384x384-pre_upernet_8xb2-160k_ade20k-512x512',
    ),
    'swinv2_t.in1k_w16': (82.8, 'swinv2_t', None, None),
    'swinv2_s.in1k_w16': (84.1, 'swinv2_s', None, None),
    'swinv2_b.in1k_w16': (84.6, 'swinv2_b', None, None),
    'swinv2_l.in22k_in1k_w16': (86.9, 'swinv2_l', None, None),
}
# The titles of the table of models, in English and in Chinese.
MODEL_TITLES = {
    'weights': '权重',
    'pretraining': '预训练',
    'ImageNet-1K top-1': 'ImageNet-1K top-1',
    'COCO, box / mask AP': 'COCO，box / mask AP',
    'ADE20K, mIoU': 'ADE20K，mIoU',
    'parameters': '参数量',
    'FLOPs': 'FLOPs',
    'CPU, ms': 'CPU，ms',
    'GPU, ms': 'GPU，ms',
}
ALONE_PEERS = ('mmdet', 'timm', 'transformers', 'torchvision')
GPU_PEERS = ('timm', 'torchvision', 'mmdet')
GPU_MODELS = {
    'auto': 'ours',
    'sdpa': "ours, torch's attention",
    'timm': 'timm',
    'torchvision': 'torchvision',
    'mmdet': 'mmdet',
}
GPU_FIELDS = {'wall_ms': 'wall, ms', 'device_ms': 'device, ms', 'launches': 'launches'}
WHAT = {'inference': 'inference', 'training': 'training step'}
PASSES = ('inference_ms', 'training_ms')
WAYS_OF_WHOLE_MODELS = ('PyTorch', 'ONNX Runtime', 'ONNX Runtime int8', 'OpenVINO', 'OpenVINO bfloat16')
# The title of a way to run a model -> the way of its measurements, and the name of our model
GPU_WAYS_OF_INFERENCE = {
    'autocast': ('eager', 'auto'),
    'model and images in bfloat16': ('eager, bfloat16', 'auto'),
    '`use_graphs` of 0.5.0, autocast': ('use_graphs', 'use_graphs'),
    '`torch.compile`, autocast': ('compiled', 'auto'),
    'CUDA graph, autocast': ('graphs', 'auto'),
    'autocast, other sizes': ('sizes', 'auto'),
}
GPU_WAYS_OF_TRAINING = {
    'autocast': ('eager', 'auto'),
    '`make_graphed_callables`, autocast': ('use_graphs', 'make_graphed_callables'),
    '`use_graphs` of 0.5.0, autocast': ('use_graphs', 'use_graphs'),
}
MEMORY_NAMES = {'auto': 'ours', 'auto+cp': 'ours, `with_cp=True`'}
SPEED_LINE = (
    '**On a GPU** ({device}, release {release}, Swin-T alone, 2 images of 800 x 1344, bfloat16 by autocast), a forward '
    'pass takes {forward} ms, and {again} ms later in the same session; those of timm, torchvision and mmdet take '
    '{forward_peers} ms. A training step, which is a forward and a backward pass, takes {step} ms, and theirs '
    '{step_peers} ms. Wall time is limited by Python on the host; the chart also shows GPU time alone and CUDA graphs. '
    '**This needs our kernels**: compute capability 8.0 or later, and a C compiler. Without them, ours takes '
    '{forward_without} and {step_without} ms. **On CPUs**, mmdet takes {cpu} times as long as ours. '
    '[All measurements](docs/speed.md) and [what to set on a GPU](docs/on-a-gpu.md).\n'
)
CHINESE_SPEED_LINE = (
    '**GPU**（{device}，release {release}，仅 Swin-T，2 张 800 x 1344 图像，autocast bfloat16）：'
    '前向计算需 {forward} ms，同一次测量的后段为 {again} ms；timm、torchvision、mmdet 需 {forward_peers} ms。'
    '单步训练（一次前向与一次反向）需 {step} ms，其余需 {step_peers} ms。'
    '实际耗时受主机上的 Python 限制；图中另有仅计 GPU 的时间与 CUDA graph。'
    '**以上需要本项目的 kernel**：compute capability 8.0 及以上和 C 编译器。'
    '没有 kernel 时，本实现分别需 {forward_without} ms 和 {step_without} ms。'
    '**CPU**：mmdet 的耗时是本实现的 {cpu} 倍。'
    '[全部测量结果](docs/speed.md)，[GPU 上的设置](docs/on-a-gpu.md)。\n'
)
SHORT = 75  # characters of an error in the README
# Rows of benchmarks/originals.py in Chinese: what you do, what goes wrong without an error, and what we give.
CHINESE_ROWS = {
    'frozen_stages': ('冻结部分阶段，并用 DDP 训练，不设 `find_unused_parameters=True`', '', '正常训练'),
    'bfloat16': ('将整个模型转换为 bfloat16', '', '4 张 bfloat16 特征图'),
    'authors_weights': ('从作者发布的 ImageNet 权重开始训练，不经转换', '一个权重也没有加载，且没有警告', '全部加载'),
    'other_window': ('将窗口 7 的权重加载到窗口 12', '', '调整位置表的大小'),
    'absolute_positions': ('在另一图像尺寸上使用绝对位置编码', '', '调整其大小'),
    'onnx_batch': ('导出为 ONNX，并对两张图像运行', '数值错误，偏差达最大值的 10 %', '与 PyTorch 数值相同'),
    'onnx_size': ('导出为 ONNX，并以另一尺寸运行', '', '与 PyTorch 数值相同'),
    'resume': ('在 torch 2.6 及以后版本上恢复训练', '', '继续训练'),
    'opposite_edges': ('在 480 x 640 上提取特征', '右边缘的像素泄漏到左边缘', '没有泄漏'),
    'any_size': ('输入任意尺寸的图像，例如 97 x 133', '', '4 张特征图'),
    'absolute_positions_of_v2': ('在 Swin V2 中使用绝对位置编码', '', '正常相加'),
    'float16_of_v2': ('在 224 x 224 上以 float16 计算 Swin V2', '输出含 NaN', '全部为有限值'),
}
PAGES = (
    'README.md',
    'README_zh-CN.md',
    'benchmarks/README.md',
    'docs/README.md',
    'docs/decisions/README.md',
    'docs/llms.txt',
    'docs/on-a-gpu.md',
    'docs/on-photographs.md',
    'docs/speed.md',
)


def _by_processor(*results: str) -> list[str]:
    """Return the files of these results, processor by processor, as far as they were measured on it."""
    names = [f'{kind}_{result}.json' for kind in PROCESSORS for result in results]
    return [name for name in names if (ROOT / 'benchmarks/results' / name).exists()]


ALONE_REPORTS = _by_processor('alone')
FORM_REPORTS = _by_processor('alone', 'alone_compiled', 'alone_bfloat16')
GPU_REPORTS = ['h200_session_1.json', 'h200_session_2.json', 'h200_session_3.json']
# Maps markers in pages to files below benchmarks/results and the function that formats them.
TABLES: dict[str, tuple[list[str], Callable[..., str]]] = {
    'speed': (ALONE_REPORTS, speed_table),
    'speed in a line': ([*GPU_REPORTS, *ALONE_REPORTS], speed_line),
    'speed in a Chinese line': ([*GPU_REPORTS, *ALONE_REPORTS], chinese_speed_line),
    'models': (['zen5_models.json', *GPU_REPORTS], models_table),
    'models in Chinese': (['zen5_models.json', *GPU_REPORTS], chinese_models_table),
    'speed forms': (FORM_REPORTS, forms_table),
    'gpu models': (GPU_REPORTS, gpu_models_table),
    'gpu memory': (GPU_REPORTS, gpu_memory_table),
    'gpu inference': (GPU_REPORTS, gpu_inference_table),
    'gpu training': (GPU_REPORTS, gpu_training_table),
    'photographs': ([], photographs_table),
    'trained on photographs': ([], trained_line),
    'trained on photographs in Chinese': ([], chinese_trained_line),
    'originals': ([], originals_table),
    'originals in Chinese': ([], chinese_originals_table),
    'originals in full': ([], originals_in_full),
    'gpu attention': (['h200_attention.json'], gpu_attention_table),
    'memory': (_by_processor('train_512'), memory_table),
    'whole models': (['exports_whole.json'], whole_models_table),
    'pages': ([], index_table),
    'pages for language models': ([], llms_list),
    'decisions': ([], decisions_list),
}


if __name__ == '__main__':
    main()
