"""Write what pages generate: tables from the raw results under benchmarks/, and lists of pages from mkdocs.yml."""

from __future__ import annotations

import argparse
import json
import re
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / 'benchmarks'))

from alone import OURS_EAGER  # noqa: E402
from bench_host import PROCESSORS, kind_of  # noqa: E402
from page_list import decisions_list, index_table, llms_list  # noqa: E402

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
            text = replace_block(text, name, table(*map(_read, sources)))
    return text


def _read(source: str) -> dict[str, Any]:
    """Read a raw result; the name of a file of benchmarks/benchmark.py begins with the kind of processor."""
    report = json.loads((ROOT / 'benchmarks/results' / source).read_text())
    processor = PROCESSORS.get(source.partition('_')[0])
    return {'processor': processor, **report} if processor else report


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


def _our_ms(report: dict[str, Any], case: str) -> float:
    """Return our median time in a case of benchmarks/alone.py."""
    return 1e3 * statistics.median(report['seconds'][case]['auto'])


def speed_table(*reports: dict[str, Any]) -> str:
    """Return a table of our time, and of the times of others relative to it, from reports of benchmarks/alone.py."""
    rows = []
    for report in reports:
        for case, ratios in report['ratios'].items():
            medians = [f'{statistics.median(ratios[name]):.2f}' for name in ALONE_PEERS]
            rows.append([case, report['processor'], f'{_our_ms(report, case):,.0f}', *medians])
    return _table(['Swin-T, float32', 'processor', 'ours, ms', *ALONE_PEERS], rows)


def speed_line(*reports: dict[str, Any]) -> str:
    """Return the lines of the README on speed: GPUs, then CPUs.

    Args:
        reports: those of :func:`gpu_models_table`, then those of :func:`speed_table`.
    """
    sessions = reports[: len(GPU_REPORTS)]
    device, inference, training = _gpu_ratios(sessions, 'wall_ms')
    _, inference_on_device, training_on_device = _gpu_ratios(sessions, 'device_ms')
    eager, graphed = _graphed_step(sessions)
    least, most = _range_of_mmdet(reports[len(GPU_REPORTS) :])
    return (
        f'**On a GPU** ({device}, 2 images of 800 x 1344, bfloat16 by autocast), our Swin-T is {inference} times as '
        f'fast as those of timm, torchvision and mmdet in a forward pass, and {training} times as fast in a training '
        f'step. The host is the limit there: the kernels alone are {inference_on_device} and {training_on_device} '
        f'times as fast. A CUDA graph removes that limit: a training step then takes {graphed} ms instead of {eager}. '
        f"**On CPUs**, it is {least} to {most} times as fast as mmdet's. "
        '[All measurements](docs/speed.md) and [what to set on a GPU](docs/on-a-gpu.md).\n'
    )


def chinese_speed_line(*reports: dict[str, Any]) -> str:
    """Return the lines of the Chinese README on speed, from the reports of :func:`speed_line`."""
    sessions = reports[: len(GPU_REPORTS)]
    ratios = [*_gpu_ratios(sessions, 'wall_ms'), *_gpu_ratios(sessions, 'device_ms')]
    device, inference, training, _, inference_on_device, training_on_device = [
        ratio.replace(' to ', ' 至 ') for ratio in ratios
    ]
    eager, graphed = _graphed_step(sessions)
    least, most = _range_of_mmdet(reports[len(GPU_REPORTS) :])
    return (
        f'**GPU**（{device}，2 张 800 x 1344 图像，autocast bfloat16）：'
        '本实现的 Swin-T 与 timm、torchvision、mmdet 相比，'
        f'推理速度是它们的 {inference} 倍，训练一步是 {training} 倍。'
        f'此时瓶颈在主机：仅就内核而言，分别是 {inference_on_device} 倍和 {training_on_device} 倍。'
        f'使用 CUDA graph 可消除这一瓶颈：训练一步从 {eager} ms 降至 {graphed} ms。'
        f'**CPU**：速度是 mmdet 的 {least} 至 {most} 倍。'
        '[全部测量结果](docs/speed.md)，[GPU 上的设置](docs/on-a-gpu.md)。\n'
    )


def _gpu_ratios(sessions: Sequence[dict[str, Any]], field: str) -> tuple[str, str, str]:
    """Return the GPU, and the ranges of other libraries' times in inference and training, relative to ours.

    Times are compared within a session, because the hosts of two machines differ.
    """
    ranges = []
    for is_training in (False, True):
        ratios = []
        rows = _gpu_rows(sessions, 'eager', is_training)
        for machine in _machines_of(rows):
            times = {row['model']: row[field] for row in rows if row['machine'] is machine}
            ratios += [times[name] / times['auto'] for name in GPU_PEERS if name in times]
        ranges.append(f'{min(ratios):.2f} to {max(ratios):.2f}')
    return machine['device'], *ranges


def _graphed_step(sessions: Sequence[dict[str, Any]]) -> tuple[str, str]:
    """Return the milliseconds of a training step in eager mode, and as a graph by make_graphed_callables."""
    largest = _gpu_rows(sessions, 'eager', is_training=True)[0]['size']
    found = _gpu_rows(sessions, 'use_graphs', is_training=True)
    times = {row['model']: f'{row["wall_ms"]:.1f}' for row in found if row['size'] == largest}
    return times['eager'], times['make_graphed_callables']


def _range_of_mmdet(reports: Iterable[dict[str, Any]]) -> tuple[str, str]:
    """Return the least and the largest median time of mmdet's Swin relative to ours."""
    cases = [ratios for report in reports for ratios in report['ratios'].values()]
    medians = [statistics.median(ratios['mmdet']) for ratios in cases]
    return f'{min(medians):.2f}', f'{max(medians):.2f}'


def originals_table(rows: dict[str, Any]) -> str:
    """Return the README's table of benchmarks/originals.py: what you do, and what the original and we give."""
    cells = [
        (row['user'], f'[{row["package"]}]({_thread(row)}): {_words(row, SHORT)}', row['ours']['gave'])
        for row in _failures(rows)
    ]
    return _table(['what you do', 'the original', 'here'], cells)


def chinese_originals_table(rows: dict[str, Any]) -> str:
    """Return the table of the Chinese README, with the errors in the originals' own words."""
    cells = []
    for name, row in rows.items():
        user, wrong, ours = CHINESE_ROWS[name]
        cells.append((user, f'[{row["package"]}]({_thread(row)})：{wrong or _words(row, SHORT)}', ours))
    return _table(['你的操作', '原实现', '本项目'], cells)


def originals_in_full(rows: dict[str, Any]) -> str:
    """Return the table of benchmarks/originals.py with versions, threads and names of rows."""
    cells = []
    for name, row in rows.items():
        packages = ', '.join(f'{package} {version}' for package, version in row['original']['versions'].items())
        repository, _, number = row['thread'].partition('#')
        thread = f'[{repository.partition("/")[2]} {number}]({_thread(row)})'
        cells.append((f'`{name}`', row['user'], packages, thread, _words(row), row['ours']['gave']))
    return _table(['row', 'you', 'packages', 'thread', 'the original', 'here'], cells)


def _failures(rows: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the rows.

    Raises:
        ValueError: an original has not failed, or we have.
    """
    for name, row in rows.items():
        if not row['original']['failed'] or row['ours']['failed']:
            raise ValueError(f'{name} shows no failure of the original alone: take it out of benchmarks/originals.py')
    return list(rows.values())


def _thread(row: dict[str, Any]) -> str:
    repository, _, number = row['thread'].partition('#')
    return f'https://github.com/{repository}/issues/{number}'


def _words(row: dict[str, Any], longest: int = 1000) -> str:
    """Return what an original gave: its error as code, in at most so many characters, or a wrong result."""
    gave = row['original']['gave']
    if not re.match(r'\w+: ', gave):
        return gave
    if len(gave) > longest:
        gave = gave[:longest].rpartition(' ')[0] + ' ...'
    return f'`{gave}`'


def models_table(report: dict[str, Any], *sessions: dict[str, Any]) -> str:
    """Return the table of models: accuracy as its authors published it, counted cost, and times of one image.

    Args:
        report: that of benchmarks/models.py.
        sessions: those of :func:`gpu_models_table`.
    """
    return _table(MODEL_TITLES, _model_rows(report, sessions))


def chinese_models_table(report: dict[str, Any], *sessions: dict[str, Any]) -> str:
    """Return the same table with Chinese titles."""
    return _table(CHINESE_MODEL_TITLES, _model_rows(report, sessions))


def _model_rows(report: dict[str, Any], sessions: Sequence[dict[str, Any]]) -> list[list[str]]:
    on_gpu = [row for row in _gpu_rows(sessions, 'sizes', is_training=False) if row['model'] == 'auto']
    one_image = [row for row in on_gpu if (row['batch'], row['size']) == (1, report['size'])]
    gpu_times = {'swin_t': _span(one_image, 'wall_ms')}  # the only model of these sessions
    zoo = {recipe.config.stem: (folder, recipe) for folder in FOLDERS for recipe in read_zoo(ROOT, folder)}
    rows = []
    for name, (top_1, *recipe_names) in MODELS.items():
        accuracies = []
        for recipe_name in recipe_names:
            if recipe_name is None:
                accuracies.append('')
                continue
            folder, recipe = zoo[recipe_name]
            metrics = [recipe.metrics[metric] for metric in ('box AP', 'mask AP', 'mIoU') if metric in recipe.metrics]
            head = recipe.model['In Collection']
            accuracies.append(f'{" / ".join(map(str, metrics))}, [{head}](configs/{folder}/README.md)')
        row = report['rows'][name]
        costs = [f'{row["parameters"] / 1e6:.0f} M', f'{row["flops"] / 1e9:.0f} G', f'{row["ms"]:,.0f}']
        rows.append([f'`{name}`', str(top_1), *accuracies, *costs, gpu_times.get(name, '')])
    return rows


def gpu_attention_table(report: dict[str, Any]) -> str:
    """Return a table of h200_attention.json: the kernel and torch's attention, in bfloat16 and float32."""
    key = ('height', 'width', 'channels', 'window', 'dtype')
    by_torch = {tuple(row[name] for name in key): row for row in report['rows'] if row['backend'] == 'sdpa'}
    rows = []
    for row in report['rows']:
        if row['backend'] == 'triton' and row['dtype'] != 'float16':
            height, width, channels, window, dtype = case = tuple(row[name] for name in key)
            cells = [f'{height} x {width}, {channels} channels, {window}', dtype]
            for field in ('inference_ms', 'training_ms'):
                cells += [f'{times[field]:.2f}' for times in (row, by_torch[case])]
            rows.append(cells)
    passes = ['inference, kernel', 'inference, torch', 'with gradients, kernel', 'with gradients, torch']
    return _table(['map, window; times in ms', 'dtype', *passes], rows)


def gpu_models_table(*sessions: dict[str, Any]) -> str:
    """Return a table of benchmarks/gpu_session.py: whole models under autocast, by inference and training."""
    return _gpu_models(sessions, 'eager', GPU_FIELDS)


def gpu_memory_table(*sessions: dict[str, Any]) -> str:
    """Return a table of the memory of whole models above their weights, by inference and training."""
    return _gpu_models(sessions, 'memory', {'peak_mib': 'peak, MiB'})


def _gpu_models(sessions: Sequence[dict[str, Any]], step: str, fields: dict[str, str]) -> str:
    """Return a table with a row for each model, and the fields of a step for inference and for training."""
    passes = {'inference': _gpu_rows(sessions, step, False), 'training': _gpu_rows(sessions, step, True)}
    titles = [f'{name}: {title}' for name in passes for title in fields.values()]
    rows = []
    for name, model in GPU_MODELS.items():
        cells = []
        for found in passes.values():
            own = [row for row in found if row['model'] == name]
            cells += [_span(own, field) for field in fields]
        rows.append([model, *cells])
    return _machines_line(passes['inference']) + _table(['Swin-T, 2 x 800 x 1344', *titles], rows)


def gpu_inference_table(*sessions: dict[str, Any]) -> str:
    """Return a table of wall / device time of inference in each way to run a model."""
    return _gpu_times(sessions, GPU_WAYS_OF_INFERENCE, is_training=False)


def gpu_training_table(*sessions: dict[str, Any]) -> str:
    """Return a table of wall / device time of a training step in each way to run a model."""
    return _gpu_times(sessions, GPU_WAYS_OF_TRAINING, is_training=True)


def _gpu_times(sessions: Sequence[dict[str, Any]], ways: dict[str, tuple[str, bool, str]], is_training: bool) -> str:
    """Return a table with a row for each way and size.

    Args:
        ways: title of a way -> step of the session, whether the model is in bfloat16, and the name of our model.
    """
    rows, used = [], []
    for title, (step, is_pure, our_name) in ways.items():
        found = _gpu_rows(sessions, step, is_training, is_pure)
        used += found
        for batch, size in sorted({(row['batch'], tuple(row['size'])) for row in found}, key=_pixels, reverse=True):
            same_images = [row for row in found if (row['batch'], tuple(row['size'])) == (batch, size)]
            cells = []
            for name in (our_name, *GPU_PEERS):
                own = [row for row in same_images if row['model'] == name]
                device = _span(own, 'device_ms')
                cells.append(_span(own, 'wall_ms') + (f' / {device}' if device else ''))
            rows.append([title, ' x '.join(map(str, (batch, *size))), *cells, found[0]['machine']['release']])
    return _machines_line(used) + _table(['wall / device, ms', 'images', 'ours', *GPU_PEERS, 'release'], rows)


def _pixels(images: tuple[int, tuple[int, int]]) -> int:
    batch, (height, width) = images
    return batch * height * width


def _gpu_rows(
    sessions: Iterable[dict[str, Any]], step: str, is_training: bool, is_pure: bool = False
) -> list[dict[str, Any]]:
    """Return the rows of a step, of models under autocast or in bfloat16, from the newest release that measured it.

    Each row has the description of its machine as ``machine``.
    """
    form = is_training, is_pure
    found = []
    for session in sessions:
        for row in session['steps'].get(step, {'rows': []})['rows']:
            is_measured = 'wall_ms' in row or 'peak_mib' in row
            if is_measured and (row.get('training', False), row.get('pure_bfloat16', False)) == form:
                found.append({**row, 'machine': session['machine']})
    newest = max((row['machine']['release'] for row in found), default=None)
    return [row for row in found if row['machine']['release'] == newest]


def _machines_of(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the descriptions of the machines of rows, each once, newest releases first."""
    machines = {id(row['machine']): row['machine'] for row in rows}
    return sorted(machines.values(), key=lambda machine: machine['release'], reverse=True)


def _span(rows: Iterable[dict[str, Any]], field: str) -> str:
    """Return the least and the largest value of several machines, one number if they are equal when rounded."""
    values = sorted(row[field] for row in rows if row.get(field))
    if not values:
        return ''
    digits = 0 if values[0] >= 100 else 1 if values[0] >= 10 else 2
    ends = [f'{value:,.{digits}f}' for value in (values[0], values[-1])]
    return ends[0] if ends[0] == ends[1] else ' to '.join(ends)


def _machines_line(rows: Iterable[dict[str, Any]]) -> str:
    """Return a line with the releases, GPUs and versions behind rows, and an empty line."""
    described = []
    for machine in _machines_of(rows):
        versions = f'torch {machine["torch"]}, Triton {machine["triton"]}'
        described.append(f'Release {machine["release"]}, {machine["device"]}, {versions}')
    counted = [f'{line}, {described.count(line)} machines.' for line in dict.fromkeys(described)]
    return ' '.join(counted).replace(', 1 machines', '') + '\n\n'


def forms_table(*reports: dict[str, Any]) -> str:
    """Return a table of benchmarks/alone.py for models that are compiled, or run in bfloat16.

    Args:
        reports: those of eager mode, and those of the other forms.
    """
    eager = {report['processor']: report for report in reports if report['form'] == 'eager'}
    rows = []
    for report in reports:
        if report['form'] == 'eager':
            continue
        for case, own in report['ratios'].items():
            processor, ours = report['processor'], _our_ms(report, case)
            if OURS_EAGER in own:
                gain = f'{statistics.median(own[OURS_EAGER]):.2f}'
            else:  # a report of an earlier version
                gain = f'{_our_ms(eager[processor], case) / ours:.2f}'
            ratios = [f'{statistics.median(own[name]):.2f}' for name in ALONE_PEERS]
            rows.append([f'{report["form"]}, {case}', processor, f'{ours:,.0f}', gain, *ratios])
    return _table(['Swin-T', 'processor', 'ours, ms', 'ours, eager in float32', *ALONE_PEERS], rows)


def memory_table(*reports: dict[str, Any]) -> str:
    """Return a table of the peak memory of a training step, in MiB above the memory before it."""
    measured = [[name for name, row in report['rows'].items() if row.get('peak_mib')] for report in reports]
    names = [name for name in measured[0] if all(name in others for others in measured)]
    rows = []
    for report in reports:
        peaks = [f'{report["rows"][name]["peak_mib"]:.0f}' for name in names]
        rows.append([report['processor'], *peaks])
    return _table([f'{_case(reports[0])}, MiB', *(MEMORY_NAMES.get(name, name) for name in names)], rows)


def whole_models_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/exports_whole.py: time and memory of an image in each way to run a model."""
    names = ('PyTorch', 'ONNX Runtime', 'ONNX Runtime int8', 'OpenVINO', 'OpenVINO bfloat16')
    ways = [name for name in names if any(name in row for row in report['rows'])]
    rows = []
    for row in report['rows']:
        rows.append([f'{_model_case(row)}, {row["threads"]}', *(_figures(row.get(way, {})) for way in ways)])
    return _table(['ms/MiB of model, image, processor, threads', *ways], rows)


def _model_case(row: dict[str, Any]) -> str:
    """Return the model, the image and the processor of a measurement of benchmarks/exports_whole.py.

    The processor is named by its kind, or by its own name where its kind has none.
    """
    processor = row['processor']
    kind = kind_of(processor)
    named = processor.partition(' (family')[0].partition(',')[0] if kind is None else PROCESSORS[kind]
    return f'{row["model"]}, {" x ".join(map(str, row["size"]))}, {named}'


def _figures(row: dict[str, float]) -> str:
    return '/'.join(f'{row[key]:,.0f}' for key in ('ms', 'mib') if key in row)


def _case(report: dict[str, Any]) -> str:
    options = report['options']
    kind = {'infer': 'inference', 'train': 'training step'}[options['mode']]
    how = ', compiled' if options['compile'] else ''
    return f'{kind}, {options["batch"]} x {options["size"][0]} x {options["size"][1]}{how}'


# Top-1 accuracy on ImageNet-1K from the authors' list (MODELHUB.md of github.com/microsoft/Swin-Transformer), at
# 224 pixels (V2: 256); T, S and V2's T, S and B trained on ImageNet-1K, the others on ImageNet-22K first. Then recipes
# for COCO and ADE20K; None where no recipe has a published figure.
_CASCADE = 'cascade-mask-rcnn_swin-b-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco'
MODELS: dict[str, tuple[float, str | None, str | None]] = {
    'swin_t': (
        81.2,
        'mask-rcnn_swin-t-p4-w7_fpn_official-amp-ms-crop-3x_coco',
        'swin-tiny-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512',
    ),
    'swin_s': (
        83.2,
        'mask-rcnn_swin-s-p4-w7_fpn_official-amp-ms-crop-3x_coco',
        'swin-small-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512',
    ),
    'swin_b': (85.2, _CASCADE, 'swin-base-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640'),
    'swin_l': (
        86.3,
        'dino-5scale_swin-l_8xb2-36e_coco',
        'swin-large-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640',
    ),
    'swinv2_t': (82.8, None, 'swinv2-tiny-patch4-window16-in1k-256x256-pre_upernet_8xb2-160k_ade20k-512x512'),
    'swinv2_s': (84.1, None, None),
    'swinv2_b': (84.6, None, None),
    'swinv2_l': (86.9, None, None),
}
MODEL_TITLES = (
    'model',
    'ImageNet-1K top-1',
    'COCO, box / mask AP',
    'ADE20K, mIoU',
    'parameters',
    'FLOPs',
    'CPU, ms',
    'GPU, ms',
)
CHINESE_MODEL_TITLES = (
    '模型',
    'ImageNet-1K top-1',
    'COCO，box / mask AP',
    'ADE20K，mIoU',
    '参数量',
    'FLOPs',
    'CPU，ms',
)
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
# The title of a way to run a model -> step of a session, whether the model is in bfloat16, and the name of our model
GPU_WAYS_OF_INFERENCE = {
    'autocast': ('eager', False, 'auto'),
    'model and images in bfloat16': ('eager', True, 'auto'),
    '`use_graphs` of 0.5.0, autocast': ('use_graphs', False, 'use_graphs'),
    '`torch.compile`, autocast': ('compiled', False, 'auto'),
    'CUDA graph, autocast': ('graphs', False, 'auto'),
    'autocast, other sizes': ('sizes', False, 'auto'),
}
GPU_WAYS_OF_TRAINING = {
    'autocast': ('eager', False, 'auto'),
    '`make_graphed_callables`, autocast': ('use_graphs', False, 'make_graphed_callables'),
    '`use_graphs` of 0.5.0, autocast': ('use_graphs', False, 'use_graphs'),
}
MEMORY_NAMES = {'auto': 'ours', 'auto+cp': 'ours, `with_cp=True`'}
SHORT = 75  # characters of an error in the README
# Rows of benchmarks/originals.py in Chinese: what you do, what goes wrong without an error, and what we give.
CHINESE_ROWS = {
    'frozen_stages': ('冻结部分阶段，并在多块 GPU 上训练（DDP）', '', '正常训练'),
    'bfloat16': ('以 bfloat16 或 float16 计算', '', '4 张 bfloat16 特征图'),
    'authors_weights': ('从作者发布的 ImageNet 权重开始训练，不经转换', '一个权重也没有加载，且没有警告', '全部加载'),
    'other_window': ('将窗口 7 的权重加载到窗口 12', '', '调整位置表的大小'),
    'absolute_positions': ('在另一图像尺寸上使用绝对位置编码', '', '调整其大小'),
    'onnx_batch': ('导出为 ONNX，并对两张图像运行', '数值错误', '与 PyTorch 数值相同'),
    'onnx_size': ('导出为 ONNX，并以另一尺寸运行', '', '与 PyTorch 数值相同'),
    'resume': ('在 torch 2.6 及以后版本上恢复训练', '', '继续训练'),
    'opposite_edges': ('在 480 x 640 上提取特征', '右边缘改变左边缘的特征', '左边缘不变'),
    'any_size': ('输入事先未设定尺寸的图像', '', '4 张特征图'),
    'absolute_positions_of_v2': ('在 Swin V2 中使用绝对位置编码', '', '正常相加'),
    'float16_of_v2': ('在 224 x 224 上以 float16 计算 Swin V2', '输出含 NaN', '数值有限'),
}
PAGES = (
    'README.md',
    'README_zh-CN.md',
    'benchmarks/README.md',
    'docs/README.md',
    'docs/decisions/README.md',
    'docs/llms.txt',
    'docs/on-a-gpu.md',
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
    'originals': (['originals.json'], originals_table),
    'originals in Chinese': (['originals.json'], chinese_originals_table),
    'originals in full': (['originals.json'], originals_in_full),
    'gpu attention': (['h200_attention.json'], gpu_attention_table),
    'memory': (_by_processor('train_512'), memory_table),
    'whole models': (['exports_whole.json'], whole_models_table),
    'pages': ([], index_table),
    'pages for language models': ([], llms_list),
    'decisions': ([], decisions_list),
}


if __name__ == '__main__':
    main()
