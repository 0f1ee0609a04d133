"""Generate the tables in the README and the documentation from the raw results under benchmarks/."""

from __future__ import annotations

import argparse
import functools
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

from swin_dense.utils.packages import FORKS, MMCVS

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / 'benchmarks'))

import checkpointing  # noqa: E402
import memory_ladder  # noqa: E402
from alone import OURS_EAGER  # noqa: E402
from bench_host import PROCESSORS, kind_of  # noqa: E402
from benchmark import ratio  # noqa: E402

# Maps metric names of mmdet and mmseg to row titles.
DEMO_METRICS = {
    'coco/bbox_mAP': 'Mask R-CNN, box AP',
    'coco/bbox_mAP_50': 'Mask R-CNN, box AP at IoU 0.5',
    'coco/segm_mAP': 'Mask R-CNN, mask AP',
    'coco/segm_mAP_50': 'Mask R-CNN, mask AP at IoU 0.5',
    'mIoU': 'UPerNet, mIoU',
}
# Likewise, for tables that name the model elsewhere.
METRICS = {'coco/bbox_mAP': 'box AP', 'coco/segm_mAP': 'mask AP', 'PQ': 'PQ', 'mIoU': 'mIoU'}
SEED_OF_RATES = 99  # of benchmarks/adapters.py and adapters_boxes.py, with which they chose learning rates


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    for name in PAGES:
        page = ROOT / name
        page.write_text(with_tables(page.read_text(), 'zh-CN' in name))


def with_tables(text: str, in_chinese: bool = False) -> str:
    """Return a page with all its tables regenerated from the raw results."""
    for name, (sources, table) in TABLES.items():
        if f'<!-- {name} -->' not in text:
            continue
        reports = [_read(source) for source in sources]
        block = table(*reports)
        for english, chinese in CHINESE.items() if in_chinese else ():
            block = block.replace(english, chinese)
        text = replace_block(text, name, block)
    return text


def _read(source: str) -> dict[str, Any]:
    """Read a raw result; the name of a file of benchmarks/benchmark.py begins with the kind of processor."""
    report = json.loads((ROOT / 'benchmarks' / source).read_text())
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
    return ''.join('| ' + ' | '.join(map(str, cells)) + ' |\n' for cells in lines)


def demo_table(summary: dict[str, Any]) -> str:
    """Return a table of the results in the summary.json of ``make demo``."""
    rows = [(label, f'{summary[name]:.3f}') for name, label in DEMO_METRICS.items()]
    rows.append(('minutes in all', f'{sum(summary["seconds"].values()) / 60:.1f}'))
    return _table(['validation images', ''], rows)


def mmcv_operators_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/mmcv_operators.py: time and memory with the compiled operators and in PyTorch."""
    rows = []
    for name, row in report['rows'].items():
        both = [row['compiled'], row['in PyTorch']]
        rows.append([name, *(f'{each["ms"]:,.1f} ms' for each in both), *(f'{each["MiB"]} MiB' for each in both)])
    return _table(['one thread', 'compiled', 'in PyTorch', 'memory, compiled', 'memory, in PyTorch'], rows)


def tile_overlap_table(report: dict[str, Any]) -> str:
    """Return a table of the errors on a photograph measured by benchmarks/tile_overlap.py."""
    errors = report['errors']['photograph']
    strides = list(next(iter(errors.values())))
    rows = [[overlap, *(f'{row[s]:.0e}' if row[s] else '0' for s in strides)] for overlap, row in errors.items()]
    return _table(['overlap', *(f'stride {stride}' for stride in strides)], rows)


def large_scene_table(report: dict[str, Any]) -> str:
    """Return a table of the measurements of benchmarks/large_scene.py."""
    rows = []
    for command in ('features', 'segmentor'):
        row = report[command]
        written = f'{row["written_gib"]} GiB' if 'written_gib' in row else f'{report["size"] ** 2 / 2**30:.2f} GiB'
        rows.append((row['model'], f'{row["minutes"]:.1f}', f'{row["peak_gib"]:.1f} GiB', written))
    return _table(['', 'minutes', 'peak memory', 'written'], rows)


def tiled_detections_table(report: dict[str, Any]) -> str:
    """Return a table of the agreement measured by benchmarks/tiled_detections.py."""
    titles = ['tile, overlap', 'objects up to the overlap: agree', 'all objects: agree', 'found in tiles']
    titles += ['doubles', 'boxes in another one', 'in the whole image']
    rows = []
    for row in report['settings']:
        small = f'{row["up_to_overlap_agree"]} of {row["up_to_overlap"]}'
        everything = f'{row["agree"]} of {row["whole"]}'
        counts = [row[key] for key in ('tiles', 'doubles', 'nested', 'nested_whole')]
        rows.append([f'{row["tile"]}, {row["overlap"]}', small, everything, *counts])
    return _table(titles, rows)


def speed_table(*reports: dict[str, Any]) -> str:
    """Return a table of results of benchmarks/benchmark.py: our time, and the times of others relative to ours."""
    rows = []
    for report in reports:
        ours = f'{report["rows"]["auto"]["median_ms"]:.0f} ms'
        ratios = [ratio(report, name, 'auto') if name in report['rows'] else '' for name in SPEED_COLUMNS]
        rows.append([_case(report), report['processor'], ours, *ratios])
    return _table(['Swin-T, float32', 'processor', 'ours', *SPEED_COLUMNS.values()], rows)


def short_speed_table(*reports: dict[str, Any]) -> str:
    """Return a table of the median time and the memory of others, relative to ours, without ranges."""
    rows = []
    for report in reports:
        case, processor = _case(report), report['processor']
        times = [ratio(report, name, 'auto').partition(' ')[0] for name in PEERS]
        rows.append([f'{case}: time', processor, *times])
        if report['options']['mode'] == 'train':
            peaks = [report['rows'][name]['peak_mib'] / report['rows']['auto']['peak_mib'] for name in PEERS]
            rows.append([f'{case}: memory', processor, *(f'{peak:.2f}' for peak in peaks)])
    return _table(['Swin-T, float32', 'processor', *PEERS], rows)


def _our_ms(report: dict[str, Any], case: str) -> float:
    """Return our median time in a case of benchmarks/alone.py."""
    return 1e3 * statistics.median(report['seconds'][case]['auto'])


def alone_table(*reports: dict[str, Any]) -> str:
    """Return a table of results of benchmarks/alone.py: our time, and the times of others relative to ours."""
    rows = []
    for report in reports:
        if not all(ALONE_PEERS[-1] in own for own in report['ratios'].values()):
            continue
        for case, own in report['ratios'].items():
            ratios = [ratio({'ratios': own}, name, 'auto') for name in ALONE_PEERS]
            rows.append([case, report['processor'], f'{_our_ms(report, case):.0f} ms', *ratios])
    return _table(['Swin-T, float32', 'processor', 'ours', *ALONE_PEERS], rows)


def gpu_attention_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/gpu_attention.py: the kernel and torch's attention, in bfloat16 and float32."""
    key = ('height', 'width', 'channels', 'window', 'dtype')
    by_torch = {tuple(row[name] for name in key): row for row in report['rows'] if row['backend'] == 'sdpa'}
    rows = []
    for row in report['rows']:
        if row['backend'] != 'triton' or row['dtype'] == 'float16':
            continue
        height, width, channels, window, dtype = case = tuple(row[name] for name in key)
        for field, name in (('inference_ms', 'inference'), ('training_ms', 'with gradients')):
            times = row[field], by_torch[case][field]
            cells = [f'{height} x {width}, {channels} channels, {window}', dtype, name]
            rows.append([*cells, *(f'{time:.2f} ms' for time in times), f'{times[1] / times[0]:.1f}'])
    return _table(['map, window', 'dtype', 'pass', 'kernel', 'torch', 'ratio'], rows)


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
                gain = ratio({'ratios': own}, OURS_EAGER, 'auto')
            else:  # a report of an earlier version
                gain = f'{_our_ms(eager[processor], case) / ours:.2f}'
            ratios = [ratio({'ratios': own}, name, 'auto') for name in ALONE_PEERS]
            rows.append([f'{report["form"]}, {case}', processor, f'{ours:.0f} ms', gain, *ratios])
    return _table(['Swin-T', 'processor', 'ours', 'ours, eager in float32', *ALONE_PEERS], rows)


def processors_table(*reports: dict[str, Any]) -> str:
    """Return a table of benchmarks/alone.py: the median time of mmdet's Swin relative to ours on each processor."""
    newest = sorted(reports, key=lambda report: report['processor'], reverse=True)
    rows = []
    for case in newest[0]['seconds']:
        cells = [case]
        for report in newest:
            relative = statistics.median(report['ratios'][case]['mmdet'])
            cells.append(f'**{relative:.2f}** ({_our_ms(report, case):,.0f} ms)')
        rows.append(cells)
    return _table(['Swin-T, float32', *(f'{report["processor"]}, {report["date"]}' for report in newest)], rows)


def revisions_table(titles: tuple[str, str], *reports: dict[str, Any]) -> str:
    """Return a table of results of benchmarks/revisions.py for two revisions: medians, and their ratio."""
    rows = []
    for report in reports:
        before, after = report['runs'].values()
        for name in before[0]:
            old = statistics.median(run[name] for run in before)
            new = statistics.median(run[name] for run in after)
            unit = 'MiB' if name == 'peak' else 'ms'
            figures = (f'{old:.0f} {unit}', f'{new:.0f} {unit}', f'{new / old:.2f}')
            rows.append([name, report['processor'], *figures])
    return _table(['', 'processor', *titles, 'ratio'], rows)


def memory_table(*reports: dict[str, Any]) -> str:
    """Return a table of the peak memory of a training step, in MiB above the memory before it."""
    measured = [[name for name, row in report['rows'].items() if row.get('peak_mib')] for report in reports]
    names = [name for name in measured[0] if all(name in others for others in measured)]
    rows = []
    for report in reports:
        peaks = [f'{report["rows"][name]["peak_mib"]:.0f}' for name in names]
        rows.append([report['processor'], *peaks])
    return _table([f'{_case(reports[0])}, MiB', *(MEMORY_NAMES.get(name, name) for name in names)], rows)


def pretraining_table(report: dict[str, Any]) -> str:
    """Return a table of the mean IoU measured by benchmarks/pretraining.py, or distillation.py, with its range."""
    measured = report['mIoU']
    counts = sorted({row['labels'] for row in measured})
    rows = []
    for way in ('fine-tuned', 'linear probe'):
        for name in dict.fromkeys(row['weights'] for row in measured):
            own = [row for row in measured if row['weights'] == name]
            cells = [_spread([row[way] for row in own if row['labels'] == count]) for count in counts]
            rows.append([f'{way}, {name}', *cells])
    return _table(['', *(f'{count} labels' for count in counts)], rows)


def adapters_table(report: dict[str, Any]) -> str:
    """Return a table of the mean IoU measured by benchmarks/adapters.py, with its range over the seeds."""
    bases = list(dict.fromkeys(row['base'] for row in report['rows']))
    rows = []
    for method, own in _rows_by_method(report).items():
        cells = [_spread([row['mIoU'] for row in own if row['base'] == base]) for base in bases]
        rows.append([method, f'{own[0]["trained share"]:.1%}', *cells])
    return _table(['trained', 'share of the backbone', *(f'base: {base}' for base in bases)], rows)


def adapters_boxes_table(report: dict[str, Any]) -> str:
    """Return a table of the AP measured by benchmarks/adapters_boxes.py, with its range over the seeds."""
    rows = []
    for method, own in _rows_by_method(report).items():
        cells = [_spread([row[metric] for row in own]) for metric in ('AP', 'AP50')]
        rows.append([method, f'{own[0]["trained share"]:.1%}', f'{own[0]["rate"]:g}', *cells])
    return _table(['trained', 'share of the backbone', 'learning rate', 'AP', 'AP50'], rows)


def _rows_by_method(report: dict[str, Any]) -> dict[str, list[dict[str, Any]]]:
    """Return the rows of each way to fine-tune, without those that chose the learning rate."""
    found: dict[str, list[dict[str, Any]]] = {}
    for row in report['rows']:
        if row['seed'] != SEED_OF_RATES:
            found.setdefault(row['method'], []).append(row)
    return found


def adapters_time_table(report: dict[str, Any]) -> str:
    """Return a table of the median times measured by benchmarks/adapters_time.py."""
    medians = {name: statistics.median(seconds) for name, seconds in report['seconds'].items()}
    first = next(iter(medians.values()))
    case = f'training step of a Swin-T, {report["batch"]} x {report["size"]} x {report["size"]} pixels'
    rows = [(name, f'{seconds:.2f}', f'{seconds / first:.2f}') for name, seconds in medians.items()]
    return _table([f'{case}, {report["threads"]} threads', 'seconds', 'relative'], rows)


def adapter_memory_table(report: dict[str, Any]) -> str:
    """Return the table of benchmarks/memory_ladder.py on the memory of fine-tuning with adapters."""
    return '\n'.join(memory_ladder.table_of_methods(report['methods'])) + '\n'


def _spread(values: list[float]) -> str:
    return f'{sum(values) / len(values):.1f} ({min(values):.1f} to {max(values):.1f})' if values else 'not measured'


def stacks_table(report: dict[str, Any]) -> str:
    """Return a table of the results of benchmarks/stacks.py in each environment."""
    rows = []
    for name, row in report.items():
        found = row['packages']
        frameworks = [_version(found, name, FORKS[name]) for name in ('mmdet', 'mmsegmentation')]
        mm = ', '.join([_version(found, *MMCVS), *frameworks])
        results = row.get('training', {})
        training = [_training(results.get(framework), framework) for framework in ('mmdet', 'mmseg')]
        rows.append([name, row['python'], found['torch'], found['numpy'], mm, _counts(row.get('core')), *training])
    titles = ['stack', 'Python', 'torch', 'numpy', 'mmcv, mmdet, mmseg', 'tests of the core', 'Mask R-CNN', 'UPerNet']
    return _table(titles, rows)


def explore_table(report: dict[str, Any]) -> str:
    """Return tables of the results of benchmarks/explore.py."""
    rows = []
    for name, row in report['pages'].items():
        off = (f'{100 * row["usuallyOff"]:.2f}', f'{100 * row["off"]:.2f}')
        took = (f'{row["seconds"]:.0f}', f'{row["processor_seconds"]:.0f}')
        rows.append([name, f'{row["bytes"] / 1e6:.1f}', *off, *took])
    titles = ['weights', 'page, MB', 'error of 99.9 % of the weights, points', 'of all', 'time, s', 'CPU time, s']
    drawn = [(name, f'{row["median_ms"]:.1f}', f'{row["p95_ms"]:.1f}') for name, row in report['drawing'].items()]
    return _table(titles, rows) + '\n' + _table(['view', 'drawing time, ms (median)', '95th percentile'], drawn)


def smaller_files_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/exports_smaller.py: sizes of files and their metrics in each runtime."""
    runtimes = {'onnxruntime': 'ONNX Runtime', 'openvino': 'OpenVINO'}
    rows = []
    for row in report['files']:
        metrics = [f'{row[key]["coco/bbox_mAP"]:.3f}, {row[key]["coco/segm_mAP"]:.3f}' for key in runtimes]
        rows.append([row['file'], f'{row["bytes"] / 2**20:.1f}', *metrics])
    return _table(['file', 'MiB', *(f'box AP, mask AP in {name}' for name in runtimes.values())], rows)


def whole_models_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/exports_whole.py: time and memory of an image in each way to run a model."""
    names = ('PyTorch', 'ONNX Runtime', 'ONNX Runtime int8', 'OpenVINO', 'OpenVINO bfloat16')
    ways = [name for name in names if any(name in row for row in report['rows'])]
    rows = []
    for row in report['rows']:
        rows.append([f'{_model_case(row)}, {row["threads"]}', *(_figures(row.get(way, {})) for way in ways)])
    return _table(['model, image, processor, threads', *ways], rows)


def short_whole_models_table(report: dict[str, Any]) -> str:
    """Return the times of the whole models of benchmarks/exports_whole.py that were run in each way."""
    ways = ('PyTorch', 'ONNX Runtime', 'OpenVINO', 'OpenVINO bfloat16')
    rows = []
    for row in report['rows']:
        if all(way in row for way in ways) and row['threads'] == 2:
            rows.append([_model_case(row), *(f'{row[way]["ms"] / 1e3:.1f} s' for way in ways)])
    return _table(['Swin-T, two cores', *ways], rows)


def bfloat16_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/exports_bfloat16.py: metrics in both precisions, and the share that agrees."""
    rows = []
    for row in report['rows']:
        both = [row['metrics'][precision] for precision in ('float32', 'bfloat16')]
        what = 'pixels' if 'mIoU' in both[0] else 'instances'
        same = f'{1 - row["different"]:.2%} of {row["compared"]:,} {what}'
        for key in _metrics_in(both[0]):
            rows.append([row['model'], METRICS[key], *(f'{one[key]:.3f}' for one in both), same])
    return _table(['model', 'metric', 'float32', 'bfloat16', 'the same in both'], rows)


def converters_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/converters.py: versions, size and error of a backbone in other compilers."""
    names = {'executorch': 'ExecuTorch, XNNPACK', 'litert': 'LiteRT', 'coreml': 'Core ML'}
    rows = []
    for row in report['rows']:
        packages = ', '.join(f'{name} {version}' for name, version in row['versions'].items())
        error = f'{row["error"]:.1e}' if 'error' in row else 'not run'
        rows.append((names[row['target']], packages, f'{row["bytes"] / 2**20:.1f}', error))
    packages = f'packages, beside torch {report["versions"]["torch"].partition("+")[0]}'
    return _table(['for', packages, 'file, MiB', 'largest error'], rows)


def first_minutes_table(report: dict[str, Any]) -> str:
    """Return a table of tests/set_up/first_ten_minutes.py: what was typed, the seconds, the last line of the output."""
    rows = []
    for row in report['rows']:
        output = f'`{row["output"].replace("|", " ").strip()}`' if row['output'] else ''
        rows.append((f'`{row["command"]}`', f'{row["seconds"]:.0f}', output))
    rows.append(('in all, minutes', f'{sum(row["seconds"] for row in report["rows"]) / 60:.1f}', ''))
    busy = f'{report["date"]}, {report["processor"]}; load average before, {report["load"]}'
    return _table(['typed', 'seconds', 'last line of the output'], rows) + f'\n{busy}\n'


def _model_case(row: dict[str, Any]) -> str:
    """Return the model, the image and the processor of a measurement of benchmarks/exports_whole.py.

    The processor is named by its kind, or by its own name where its kind has none.
    """
    processor = row['processor']
    kind = kind_of(processor)
    named = processor.partition(' (family')[0].partition(',')[0] if kind is None else PROCESSORS[kind]
    return f'{row["model"]}, {" x ".join(map(str, row["size"]))}, {named}'


def _figures(row: dict[str, float]) -> str:
    units = {'ms': 'ms', 'mib': 'MiB'}
    return ', '.join(f'{row[key]:,.0f} {unit}' for key, unit in units.items() if key in row) or 'not measured'


def exported_models_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/exports_whole.py: time and memory of the exports, and the files."""
    rows = []
    for row in report['exports']:
        took = (f'{row["export_s"] / 60:.1f}', f'{row["export_mib"] / 1024:.1f}')
        file = (f'{row["nodes"]:,}', f'{row["file_mib"]:,.0f}', f'{row["int8_mib"]:,.0f}')
        rows.append([row['model'], *took, *file])
    return _table(['model', 'minutes', 'peak memory, GiB', 'nodes', 'file, MiB', 'in int8, MiB'], rows)


def trained_models_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/exports_trained.py: metrics of trained models and of their files."""
    ways = [name for name, value in next(iter(report.values())).items() if isinstance(value, dict)]
    rows = []
    for name, row in report.items():
        for key in _metrics_in(row[ways[0]]):
            rows.append([name, METRICS[key], *(f'{row[way][key]:.3f}' for way in ways)])
    return _table(['model', 'metric', *ways], rows)


def quantized_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/quantize.py: metrics of each way to run a file, and agreement with float32."""
    trained = {name: row for name, row in report.items() if 'metrics' in row}
    ways = [way for way in next(iter(trained.values()))['metrics'] if way != 'framework']
    rows = []
    for name, row in trained.items():
        first = name
        for key in _metrics_in(row['metrics'][ways[0]]):
            unit = 100 if key == 'mIoU' else 1  # mmseg counts in percent
            figures = [f'{row["metrics"][way][key] / unit:.3f}' for way in ways]
            rows.append([first, METRICS[key], *figures])
            first = ''
        same = [f'{row["agreement"][way]:.2%}' if way in row['agreement'] else '' for way in ways]
        rows.append(['', 'as in float32', *same])
    return _table(['model', '', *ways], rows)


def _metrics_in(row: dict[str, float]) -> list[str]:
    return [name for name in METRICS if name in row]


def quantized_speed_table(report: dict[str, Any]) -> str:
    """Return a table of benchmarks/quantize.py: sizes, and the time of an image in each way to run the files."""
    timed = {name: row for name, row in report.items() if 'speed' in row}
    ways = list(next(iter(timed.values()))['speed'])
    rows = []
    for name, row in timed.items():
        times = [f'{row["speed"][way]:,.0f} ms' for way in ways]
        rows.append([name, f'{row["float_mib"]:.1f}, {row["int8_mib"]:.1f}', *times])
    return _table(['model', 'MiB, in int8', *ways], rows)


def _counts(outcome: dict[str, Any] | None) -> str:
    if outcome is None:
        return 'not run'
    return ', '.join(f'{outcome[what]} {what}' for what in ('passed', 'failed', 'skipped'))


def _version(found: dict[str, str], package: str, *others: str) -> str:
    return found.get(package) or next((f'{name} {found[name]}' for name in others if name in found), '-')


def _training(result: dict[str, Any] | None, framework: str) -> str:
    if result is None:
        return 'not run'
    without_bases = '' if result.get('bases', 'resolve') == 'resolve' else f'; `{framework}::` bases do not resolve'
    if 'error' in result:
        return 'not run: ' + result['error'] + without_bases
    return f'{result["steps"]} steps, loss {result["first_loss"]} to {result["last_loss"]}{without_bases}'


def _case(report: dict[str, Any]) -> str:
    options = report['options']
    kind = {'infer': 'inference', 'train': 'training step'}[options['mode']]
    how = ', compiled' if options['compile'] else ''
    return f'{kind}, {options["batch"]} x {options["size"][0]} x {options["size"][1]}{how}'


PEERS = ('mmdet', 'mmseg', 'timm', 'transformers', 'torchvision')
ALONE_PEERS = tuple(name for name in PEERS if name != 'mmseg')
SPEED_COLUMNS = {**{name: name for name in PEERS}, 'matrix products': 'matrix products alone'}
MEMORY_NAMES = {'auto': 'ours', 'auto+cp': 'ours, `with_cp=True`'}
PAGES = (
    'CONTRIBUTING.md',
    'README.md',
    'README_zh-CN.md',
    'docs/decisions/one-block.md',
    'docs/adapters.md',
    'docs/decisions/operators-in-pytorch.md',
    'docs/deploy.md',
    'docs/distillation.md',
    'docs/explore.md',
    'docs/export.md',
    'docs/features.md',
    'docs/first-ten-minutes.md',
    'docs/geotiff.md',
    'docs/install.md',
    'docs/predictions.md',
    'docs/pretraining.md',
    'docs/quantization.md',
    'docs/speed.md',
)
# Chinese translations of the texts in the tables of the README.
CHINESE = {
    'inference, ': '推理，',
    'training step, ': '训练一步，',
    ': time': '：时间',
    ': memory': '：内存',
    '| processor |': '| 处理器 |',
    '| stack |': '| 环境 |',
    ', two cores |': '，双核 |',
    'tests of the core': '核心测试',
    ' steps, loss ': ' 步，损失 ',
    'not run: ': '未运行：',
    'not run': '未运行',
    ' bases do not resolve': ' 基础配置找不到',
    ' failed': ' 失败',
    ' passed': ' 通过',
    ' skipped': ' 跳过',
}


def _by_processor(*results: str) -> list[str]:
    """Return the files of these results, processor by processor, as far as they were measured on it."""
    names = [f'{kind}_{result}.json' for kind in PROCESSORS for result in results]
    return [name for name in names if (ROOT / 'benchmarks' / name).exists()]


CPU_REPORTS = _by_processor('infer_224', 'infer_8x224', 'infer_512', 'infer_800x1344', 'train_512')
ALONE_REPORTS = _by_processor('alone')
FORM_REPORTS = _by_processor('alone', 'alone_compiled', 'alone_bfloat16')
# Maps markers in pages to files below benchmarks/ and the function that formats them as a table.
TABLES: dict[str, tuple[list[str], Callable[..., str]]] = {
    'mmcv operators': (['mmcv_operators.json'], mmcv_operators_table),
    'tile overlap': (['tile_overlap.json'], tile_overlap_table),
    'large scene': (['large_scene.json'], large_scene_table),
    'tiled detections': (['tiled_detections.json'], tiled_detections_table),
    'speed in short': (CPU_REPORTS, short_speed_table),
    'speed': (CPU_REPORTS, speed_table),
    'speed alone': (ALONE_REPORTS, alone_table),
    'speed forms': (FORM_REPORTS, forms_table),
    'gpu attention': (['h200_attention.json'], gpu_attention_table),
    'processors': (ALONE_REPORTS, processors_table),
    'checkpointing': (_by_processor('checkpointing'), checkpointing.table),
    'revisions small core': (
        _by_processor('revisions_small_core'),
        functools.partial(revisions_table, ('0.3.0', 'small core')),
    ),
    'memory': (_by_processor('train_512'), memory_table),
    'demo': (['demo.json'], demo_table),
    'stacks': (['stacks.json'], stacks_table),
    'explore': (['explore.json'], explore_table),
    'smaller files': (['exports_smaller.json'], smaller_files_table),
    'pretraining': (['pretraining.json'], pretraining_table),
    'adapters': (['adapters.json'], adapters_table),
    'adapters boxes': (['adapters_boxes.json'], adapters_boxes_table),
    'adapters time': (['adapters_time.json'], adapters_time_table),
    'adapters memory': (['memory_ladder.json'], adapter_memory_table),
    'distillation': (['distillation.json'], pretraining_table),
    'files in short': (['exports_whole.json'], short_whole_models_table),
    'first minutes': (['first_ten_minutes.json'], first_minutes_table),
    'bfloat16': (['exports_bfloat16.json'], bfloat16_table),
    'converters': (['converters.json'], converters_table),
    'whole models': (['exports_whole.json'], whole_models_table),
    'exported models': (['exports_whole.json'], exported_models_table),
    'trained models': (['exports_trained.json'], trained_models_table),
    'quantised': (['quantize.json'], quantized_table),
    'quantised speed': (['quantize.json'], quantized_speed_table),
}


if __name__ == '__main__':
    main()
