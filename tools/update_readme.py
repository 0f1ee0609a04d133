"""Generate the tables in the README and the documentation from the raw results under benchmarks/."""

from __future__ import annotations

import argparse
import json
import statistics
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.append(str(ROOT / 'benchmarks'))

from alone import OURS_EAGER  # noqa: E402
from bench_host import PROCESSORS, kind_of  # noqa: E402
from benchmark import ratio  # noqa: E402


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
    return ''.join('| ' + ' | '.join(map(str, cells)) + ' |\n' for cells in lines)


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
    """Return a table of h200_attention.json: the kernel and torch's attention, in bfloat16 and float32."""
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
    return _table(['model, image, processor, threads', *ways], rows)


def short_whole_models_table(report: dict[str, Any]) -> str:
    """Return the times of the whole models of benchmarks/exports_whole.py that were run in each way."""
    ways = ('PyTorch', 'ONNX Runtime', 'OpenVINO', 'OpenVINO bfloat16')
    rows = []
    for row in report['rows']:
        if all(way in row for way in ways) and row['threads'] == 2:
            rows.append([_model_case(row), *(f'{row[way]["ms"] / 1e3:.1f} s' for way in ways)])
    return _table(['Swin-T, two cores', *ways], rows)


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


def _case(report: dict[str, Any]) -> str:
    options = report['options']
    kind = {'infer': 'inference', 'train': 'training step'}[options['mode']]
    how = ', compiled' if options['compile'] else ''
    return f'{kind}, {options["batch"]} x {options["size"][0]} x {options["size"][1]}{how}'


PEERS = ('mmdet', 'mmseg', 'timm', 'transformers', 'torchvision')
ALONE_PEERS = tuple(name for name in PEERS if name != 'mmseg')
SPEED_COLUMNS = {**{name: name for name in PEERS}, 'matrix products': 'matrix products alone'}
MEMORY_NAMES = {'auto': 'ours', 'auto+cp': 'ours, `with_cp=True`'}
PAGES = ('README.md', 'README_zh-CN.md', 'docs/deploy.md', 'docs/speed.md')
# Chinese translations of the texts in the tables of the README.
CHINESE = {
    'inference, ': '推理，',
    'training step, ': '训练一步，',
    ': time': '：时间',
    ': memory': '：内存',
    '| processor |': '| 处理器 |',
    ', two cores |': '，双核 |',
}


def _by_processor(*results: str) -> list[str]:
    """Return the files of these results, processor by processor, as far as they were measured on it."""
    names = [f'{kind}_{result}.json' for kind in PROCESSORS for result in results]
    return [name for name in names if (ROOT / 'benchmarks/results' / name).exists()]


CPU_REPORTS = _by_processor('infer_224', 'infer_8x224', 'infer_512', 'infer_800x1344', 'train_512')
ALONE_REPORTS = _by_processor('alone')
FORM_REPORTS = _by_processor('alone', 'alone_compiled', 'alone_bfloat16')
# Maps markers in pages to files below benchmarks/ and the function that formats them as a table.
TABLES: dict[str, tuple[list[str], Callable[..., str]]] = {
    'speed in short': (CPU_REPORTS, short_speed_table),
    'speed': (CPU_REPORTS, speed_table),
    'speed alone': (ALONE_REPORTS, alone_table),
    'speed forms': (FORM_REPORTS, forms_table),
    'gpu attention': (['h200_attention.json'], gpu_attention_table),
    'processors': (ALONE_REPORTS, processors_table),
    'memory': (_by_processor('train_512'), memory_table),
    'files in short': (['exports_whole.json'], short_whole_models_table),
    'whole models': (['exports_whole.json'], whole_models_table),
}


if __name__ == '__main__':
    main()
