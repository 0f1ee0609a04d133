"""Write what pages generate: tables from the results under benchmarks/, and lists of pages from mkdocs.yml."""

from __future__ import annotations

import argparse
import functools
import json
import math
import re
import sys
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / 'benchmarks'))

import originals  # noqa: E402
from bench_host import PROCESSORS  # noqa: E402
from markdown_table import markdown_table  # noqa: E402
from measurements import RESULTS, Measurement, read  # noqa: E402
from page_list import decisions_list, index_table, llms_list  # noqa: E402
from photographs_table import chinese_trained_table, medium_table, photographs_table, trained_table  # noqa: E402

from swin_dense.workbench.recipes.zoo import FOLDERS, Recipe, read_zoo  # noqa: E402


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in PAGES:
        page = ROOT / name
        page.write_text(with_tables(page.read_text()))


def with_tables(text: str) -> str:
    """Return a page with all that is generated in it."""
    for name, table in TABLES.items():
        if f'<!-- {name} -->' in text:
            text = replace_block(text, name, table.text() if isinstance(table, Table) else table())
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


def markdown(titles: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """Return a table with the names of sizes and processors as pages write them."""
    return markdown_table(titles, rows).replace(' x ', '×').replace('AMD EPYC, Zen', 'Zen')


def same(*names: str) -> dict[str, str]:
    """Return columns whose titles are what they show."""
    return dict(zip(names, names, strict=True))


# The cells of tables


def number(found: Sequence[Measurement]) -> str:
    """Return a number that was measured on one machine."""
    (one,) = found
    return f'{one.value:{FORMATS.get(one.quantity, ",.0f")}}'


def numbers(found: Sequence[Measurement]) -> str:
    """Return different quantities, separated by slashes."""
    return '/'.join(f'{one.value:,.0f}' for one in found)


def span(found: Sequence[Measurement]) -> str:
    """Return the least and the largest value on several machines, one number if they are equal when rounded."""
    values = sorted(one.value for one in found)
    digits = 0 if values[0] >= 100 else 1 if values[0] >= 10 else 2
    ends = [f'{value:,.{digits}f}' for value in (values[0], values[-1])]
    return ends[0] if ends[0] == ends[1] else ' to '.join(ends)


def wall_and_device(found: Sequence[Measurement]) -> str:
    """Return wall time, and the time of the GPU where that was measured."""
    by_quantity = [[one for one in found if one.quantity == name] for name in ('wall time', 'GPU time')]
    return ' / '.join(span(own) for own in by_quantity if own)


@dataclass(frozen=True)
class Table:
    """A table of measurements: a line for each text that ``lines`` makes of them, a column for each of ``columns``.

    Args:
        sources: files below benchmarks/results.
        lines: title -> template of the cell that a line begins with, filled with the fields of a measurement.
        column: template that tells the column of a measurement.
        columns: text that the template makes -> title; other measurements are not shown.
        where: field -> values of the measurements that are shown.
        names: what the first template makes -> what is shown; lines have this order, then that of their images, the
            largest first. By default, lines are in the order of the measurements.
        last: as ``lines``, of the cells that a line ends with.
        cell: makes the text of a cell.
        of_gpus: show the newest release that measured something on a GPU, and state releases, GPUs and versions.
    """

    sources: Sequence[str]
    lines: Mapping[str, str]
    column: str
    columns: Mapping[str, str]
    where: Mapping[str, Sequence[str]]
    names: Mapping[str, str] | None = None
    last: Mapping[str, str] | None = None
    cell: Callable[[Sequence[Measurement]], str] = number
    of_gpus: bool = False

    def text(self) -> str:
        """Return the table in Markdown."""
        found = [one for one in read(*self.sources) if all(getattr(one, key) in self.where[key] for key in self.where)]
        if self.of_gpus:
            found = newest(found)
        cells: dict[tuple[str, ...], dict[str, list[Measurement]]] = {}
        for one in found:
            fields = one._asdict()
            key = tuple(template.format(**fields) for template in self.lines.values())
            column = self.column.format(**fields)
            if column in self.columns and (self.names is None or key[0] in self.names):
                cells.setdefault(key, {}).setdefault(column, []).append(one)
        rows = []
        for key in self._in_order(cells):
            shown = [self.names[key[0]] if self.names else key[0], *key[1:]]
            shown += [self.cell(cells[key][column]) if column in cells[key] else '' for column in self.columns]
            first = next(iter(cells[key].values()))[0]
            shown += [template.format(**first._asdict()) for template in (self.last or {}).values()]
            rows.append(shown)
        table = markdown([*self.lines, *self.columns.values(), *(self.last or ())], rows)
        used = [one for of_line in cells.values() for of_cell in of_line.values() for one in of_cell]
        return f'{machines(used)}\n\n{table}' if self.of_gpus else table

    def _in_order(self, keys: Iterable[tuple[str, ...]]) -> list[tuple[str, ...]]:
        if self.names is None:
            return [*keys]
        order = list(self.names)
        return sorted(keys, key=lambda key: (order.index(key[0]), *(-pixels(size) for size in key[1:])))


def pixels(size: str) -> int:
    return math.prod(map(int, size.split(' x ')))


def newest(found: Sequence[Measurement]) -> list[Measurement]:
    """Return the measurements on GPUs, of each way to run models those of the newest release that measured it."""
    on_gpus = [one for one in found if one.run['device'] == 'cuda']
    releases: dict[tuple[str, str], str] = {}
    for one in on_gpus:
        releases[one.what, one.way] = max(one.release, releases.get((one.what, one.way), ''))
    return [one for one in on_gpus if one.release == releases[one.what, one.way]]


def machines(found: Sequence[Measurement]) -> str:
    """Return a line with the releases, GPUs and versions behind measurements."""
    described = {}
    for one in found:
        versions = f'torch {one.run["versions"]["torch"]}, Triton {one.run["versions"]["triton"]}'
        described[one.source] = f'Release {one.release}, {one.machine}, {versions}'
    lines = sorted(described.values(), key=lambda line: line.split()[1], reverse=True)
    counted = [f'{line}, {lines.count(line)} machines.' for line in dict.fromkeys(lines)]
    return ' '.join(counted).replace(', 1 machines', '')


# Lines of the READMEs


def speed_line() -> str:
    """Return the lines of the README on speed: GPUs, then CPUs."""
    return SPEED_LINE.format(**_speed_facts()).replace('~', ' to ')


def chinese_speed_line() -> str:
    """Return the lines of the Chinese README on speed."""
    return CHINESE_SPEED_LINE.format(**_speed_facts()).replace('~', ' 至 ')


def _speed_facts() -> dict[str, str]:
    """Return the measurements in the lines on speed; '~' separates the ends of a range."""
    on_cpus = [one.value for one in read(*ALONE) if (one.model, one.quantity) == ('mmdet', RELATIVE)]
    facts = {'cpu': f'{min(on_cpus):.2f}~{max(on_cpus):.2f}'}
    found = [one for one in newest(read(*GPU)) if (one.quantity, one.size) == ('wall time', '2 x 800 x 1344')]
    for kind, what in (('forward', 'inference'), ('step', 'training step')):
        eager = {one.model: one for one in found if (one.what, one.way) == (what, 'eager')}
        peers = [eager[name].value for name in GPU_PEERS]
        facts[kind], facts[f'{kind}_without'] = (f'{eager[name].value:.1f}' for name in ('auto', 'sdpa'))
        facts[f'{kind}_peers'] = f'{min(peers):.1f}~{max(peers):.1f}'
    again = [one for one in found if (one.what, one.way) == ('inference', 'eager, later')]
    return facts | {'device': again[0].machine, 'release': again[0].release, 'again': span(again)}


# Where the originals fail


def originals_table() -> str:
    """Return the README's table of benchmarks/originals.py: what you do, and what the original and we give."""
    cells = [
        (row['user'], f'{row["package"]} ({_link(row)}): {_words(row, SHORT)}', row['ours']['gave'])
        for row in _failures().values()
    ]
    return markdown(['what you do', 'the original', 'here'], cells)


def chinese_originals_table() -> str:
    """Return the table of the Chinese README, with the errors in the originals' own words."""
    cells = [
        (user, f'{row["package"]}（{_link(row)}）：{wrong or _words(row, SHORT)}', ours)
        for row, (user, wrong, ours) in ((row, CHINESE_ROWS[name]) for name, row in _failures().items())
    ]
    return markdown(['你的操作', '原实现', '本项目'], cells)


def originals_in_full() -> str:
    """Return the table of benchmarks/originals.py with versions, threads and names of rows."""
    cells = []
    for name, row in _failures().items():
        packages = ', '.join(f'{package} {version}' for package, version in row['original']['versions'].items())
        cells.append((f'`{name}`', row['user'], packages, _link(row), _words(row), row['ours']['gave']))
    return markdown(['row', 'you', 'packages', 'thread', 'the original', 'here'], cells)


def _failures() -> dict[str, dict[str, Any]]:
    """Return the rows of benchmarks/originals.py.

    Raises:
        ValueError: an original has not failed, or we have.
    """
    rows: dict[str, dict[str, Any]] = json.loads(originals.RESULTS.read_text())
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


# The table of models


def models_table(is_chinese: bool = False) -> str:
    """Return the table of models: accuracy as its authors published it, counted cost, and times of one image."""
    return markdown(list(MODEL_TITLES.values() if is_chinese else MODEL_TITLES), _model_rows())


def _model_rows() -> list[list[str]]:
    on_cpu = {(one.run['settings']['arch'], one.quantity): one for one in read('zen5_models.json')}
    zoo = {recipe.config.stem: (folder, recipe) for folder in FOLDERS for recipe in read_zoo(ROOT, folder)}
    rows = []
    for name, (top_1, arch, *recipes) in MODELS.items():
        costs = ['', '', '']
        if arch is not None:
            parameters, flops, ms = (on_cpu[arch, quantity].value for quantity in ('parameters', 'FLOPs', 'time'))
            costs = [f'{parameters / 1e6:.0f} M', f'{flops / 1e9:.0f} G', f'{ms:,.0f}']
        pretraining = 'ImageNet-22K' if 'in22k' in name else 'ImageNet-1K'
        accuracies = [_accuracy(*zoo[recipe]) if recipe else '' for recipe in recipes]
        rows.append([f'`{name}`', pretraining, str(top_1), *accuracies, *costs])
    return rows


def _accuracy(folder: str, recipe: Recipe) -> str:
    """Return the published metrics of a recipe, and a link to its list."""
    metrics = [str(recipe.metrics[name]) for name in ('box AP', 'mask AP', 'mIoU') if name in recipe.metrics]
    return f'{" / ".join(metrics)}, [{recipe.model["In Collection"]}](configs/{folder}/README.md)'


MASK_RCNN = 'mask-rcnn_swin-{}-p4-w7_fpn_official-amp-ms-crop-3x_coco'
CASCADE = 'cascade-mask-rcnn_swin-b-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco'
DINO = 'dino-5scale_swin-l_8xb2-36e_coco'
UPERNET_1K = 'swin-{}-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512'
UPERNET_22K = 'swin-{}-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640'
UPERNET_384 = 'swin-large-patch4-window12-in22k-384x384-pre_upernet_8xb2-160k_ade20k-512x512'
# Published weights -> top-1 accuracy on ImageNet-1K from the authors' list (MODELHUB.md of
# github.com/microsoft/Swin-Transformer), the arch that was timed with these windows, if any, and recipes for COCO and
# ADE20K that start from the same pretraining; None where none has a published figure.
MODELS: dict[str, tuple[float, str | None, str | None, str | None]] = {
    'swin_t.in1k': (81.2, 'swin_t', MASK_RCNN.format('t'), UPERNET_1K.format('tiny')),
    'swin_s.in1k': (83.2, 'swin_s', MASK_RCNN.format('s'), UPERNET_1K.format('small')),
    'swin_b.in1k': (83.5, 'swin_b', CASCADE, UPERNET_1K.format('base')),
    'swin_b.in22k_in1k': (85.2, 'swin_b', None, UPERNET_22K.format('base')),
    'swin_l.in22k_in1k': (86.3, 'swin_l', None, UPERNET_22K.format('large')),
    'swin_l.in22k_in1k_384': (87.3, None, DINO, UPERNET_384),
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
}
ALONE_PEERS = ('mmdet', 'timm', 'transformers', 'torchvision')
GPU_PEERS = ('timm', 'torchvision', 'mmdet')
GPU_MODELS = {'auto': 'ours', 'sdpa': "ours, torch's attention", **same(*GPU_PEERS)}
RUNTIMES = ('ONNX Runtime', 'OpenVINO')
RELATIVE = 'time relative to ours'
FORMATS = {RELATIVE: '.2f', 'GPU time': '.2f', 'peak memory': '.0f', 'difference from the backbone': '.0e'}
# The way of measurements -> its title
GPU_WAYS_OF_INFERENCE = {
    'eager': 'autocast',
    'eager, bfloat16': 'model and images in bfloat16',
    'use_graphs': '`use_graphs` of 0.5.0, autocast',
    'compiled': '`torch.compile`, autocast',
    'graphs': 'CUDA graph, autocast',
    'sizes': 'autocast, other sizes',
}
GPU_WAYS_OF_TRAINING = {
    'eager': 'autocast',
    'make_graphed_callables': '`make_graphed_callables`, autocast',
    'use_graphs': '`use_graphs` of 0.5.0, autocast',
}
SPEED_LINE = """**Fast on a GPU, with its kernels.** They need compute capability 8.0 or later, and a C compiler.

| Swin-T alone, 2 images of 800 x 1344, bfloat16 by autocast | forward pass | training step |
| --- | --- | --- |
| swin_dense | {forward} ms (measured again in the session: {again} ms) | {step} ms |
| swin_dense without its kernels | {forward_without} ms | {step_without} ms |
| timm, torchvision, mmdet | {forward_peers} ms | {step_peers} ms |

Wall time on an {device}, with release {release}; a training step is a forward and a backward pass. Launching
kernels from Python limits it; the chart also has GPU time and CUDA graphs. **On CPUs**, mmdet takes {cpu} times as
long as swin_dense, by processor and image size ([all measurements](docs/speed.md),
[what to set on a GPU](docs/on-a-gpu.md)).
"""
CHINESE_SPEED_LINE = """**使用自带 kernel 时，GPU 上速度快。** kernel 需要 compute capability 8.0 及以上和 C 编译器。

| 仅 Swin-T，2 张 800 x 1344 图像，autocast bfloat16 | 前向计算 | 单步训练 |
| --- | --- | --- |
| swin_dense | {forward} ms，同一次测量的后段为 {again} ms | {step} ms |
| swin_dense，不用 kernel | {forward_without} ms | {step_without} ms |
| timm、torchvision、mmdet | {forward_peers} ms | {step_peers} ms |

{device} 上的实际耗时，release {release}；单步训练为一次前向与一次反向。
耗时受主机上的 Python 限制；图中另有 GPU 时间与 CUDA graph。
**CPU**：mmdet 的耗时是 swin_dense 的 {cpu} 倍（[全部测量结果](docs/speed.md)，[GPU 上的设置](docs/on-a-gpu.md)）。
"""
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
    'benchmarks/results/exports.md',
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
    return [name for name in names if (RESULTS / name).exists()]


ALONE = _by_processor('alone')
GPU = [f'h200_session_{number}.json' for number in (1, 2, 3)]
PEER_COLUMNS = {f'{name} {RELATIVE}': name for name in ALONE_PEERS}
TIMES = Table(
    GPU,
    lines={'wall / device, ms': '{way}', 'images': '{size}'},
    column='{model}',
    columns={'auto': 'ours', **same(*GPU_PEERS)},
    where={},
    last={'release': '{release}'},
    cell=wall_and_device,
    of_gpus=True,
)
# Maps markers in pages to tables, or to functions that write what stands there.
TABLES: dict[str, Table | Callable[[], str]] = {
    'speed': Table(
        ALONE,
        lines={'Swin-T, float32': '{what}, {size}', 'processor': '{machine}'},
        column='{model} {quantity}',
        columns={'auto time': 'ours, ms', **PEER_COLUMNS},
        where={'way': ('eager',)},
    ),
    'speed forms': Table(
        _by_processor('alone', 'alone_compiled', 'alone_bfloat16'),
        lines={'Swin-T': '{way}, {what}, {size}', 'processor': '{machine}'},
        column='{model} {quantity}',
        columns={'auto time': 'ours, ms', f'auto, eager {RELATIVE}': 'ours, eager in float32', **PEER_COLUMNS},
        where={'way': ('bfloat16', 'compiled')},
    ),
    'memory': Table(
        _by_processor('train_512'),
        lines={'training step, 2 x 512 x 512, MiB': '{machine}'},
        column='{model}',
        columns={'auto': 'ours', 'auto+cp': 'ours, `with_cp=True`', **same('mmdet', 'mmseg', *ALONE_PEERS[1:])},
        where={'quantity': ('peak memory',)},
    ),
    'whole models': Table(
        ['exports_whole.json'],
        lines={'ms/MiB of model, image, processor, threads': '{model}, {size}, {machine}, {run[settings][threads]}'},
        column='{way}',
        columns=same('PyTorch', 'ONNX Runtime', 'ONNX Runtime int8', 'OpenVINO', 'OpenVINO bfloat16'),
        where={'what': ('inference',)},
        cell=numbers,
    ),
    'gpu models': Table(
        GPU,
        lines={'Swin-T, 2 x 800 x 1344': '{model}'},
        column='{what}: {quantity}',
        columns={
            f'{what}: {quantity}': f'{name}: {title}'
            for what, name in (('inference', 'inference'), ('training step', 'training'))
            for quantity, title in (('wall time', 'wall, ms'), ('GPU time', 'device, ms'), ('launches', 'launches'))
        },
        where={'way': ('eager',)},
        names=GPU_MODELS,
        cell=span,
        of_gpus=True,
    ),
    'gpu memory': Table(
        GPU,
        lines={'Swin-T, 2 x 800 x 1344': '{model}'},
        column='{what}',
        columns={'inference': 'inference: peak, MiB', 'training step': 'training: peak, MiB'},
        where={'way': ('memory',)},
        names=GPU_MODELS,
        cell=span,
        of_gpus=True,
    ),
    'gpu inference': replace(
        TIMES, names=GPU_WAYS_OF_INFERENCE, where={'what': ('inference',), 'quantity': ('wall time', 'GPU time')}
    ),
    'gpu training': replace(
        TIMES, names=GPU_WAYS_OF_TRAINING, where={'what': ('training step',), 'quantity': ('wall time', 'GPU time')}
    ),
    'exported files': Table(
        ['exports.json'],
        lines={'file': '`{model}`', 'takes': '{way}'},
        column='{quantity}',
        columns={
            'nodes of the graph': 'nodes',
            'size of the file': 'MiB',
            'difference from the backbone': 'error',
            'processor time': 'CPU seconds to export and check',
        },
        where={'what': ('export',)},
    ),
    'speed of exported files': Table(
        ['exports.json'],
        lines={'image': '{size}', 'threads': '{run[settings][threads]}'},
        column='{way}',
        columns=same('eager', *(f'{name}, {sizes}' for sizes in ('any size', 'fixed') for name in RUNTIMES)),
        where={'what': ('inference',)},
    ),
    'gpu attention': Table(
        ['h200_attention.json'],
        lines={'map, window; times in ms': '{size}', 'dtype': '{way}'},
        column='{model} {what}',
        columns={
            f'{model} attention: {what}': f'{passes}, {title}'
            for what, passes in (('inference', 'inference'), ('training step', 'with gradients'))
            for model, title in (('triton', 'kernel'), ('sdpa', 'torch'))
        },
        where={'quantity': ('GPU time',), 'way': ('bfloat16', 'float32')},
    ),
    'speed in a line': speed_line,
    'speed in a Chinese line': chinese_speed_line,
    'models': models_table,
    'models in Chinese': functools.partial(models_table, is_chinese=True),
    'photographs': photographs_table,
    'longer on photographs': medium_table,
    'trained on photographs': trained_table,
    'trained on photographs in Chinese': chinese_trained_table,
    'originals': originals_table,
    'originals in Chinese': chinese_originals_table,
    'originals in full': originals_in_full,
    'pages': index_table,
    'pages for language models': llms_list,
    'decisions': decisions_list,
}


if __name__ == '__main__':
    main()
