"""Measure the time and memory that ``replace_swin`` saves in models of transformers.

    .venv-peers/bin/python benchmarks/replace_swin.py --json benchmarks/replace_swin.json

Each model has the architecture of the published model with Swin-T, and random weights. A process contains the original
model and the one with our stages, which alternate on one random image. Hooks time the Swin in the same passes. A ratio
is that of the medians in one process; several processes run in sequence. Memory is the peak of two passes above the
memory before them (VmHWM of Linux), each in a separate process.
"""

from __future__ import annotations

import argparse
import ctypes
import json
import multiprocessing
import re
import statistics
import sys
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import torch
from bench_host import held_mib, processor
from bench_models import stand_in_for_torchvision_operators
from benchmark import TOLERANCE, machine
from torch import Tensor, nn

stand_in_for_torchvision_operators()
import transformers as tf  # noqa: E402

from swin_dense.integrations.transformers import replace_swin  # noqa: E402

SWIN_T = {'embed_dim': 96, 'depths': [2, 2, 6, 2], 'num_heads': [3, 6, 12, 24], 'window_size': 7, 'image_size': 224}
SMALL = (256, 256)  # size of the warm-up pass; transformers fails if a map is smaller than a window


def swin(first_stage: int = 1) -> tf.SwinConfig:
    return tf.SwinConfig(**SWIN_T, out_features=[f'stage{stage}' for stage in range(first_stage, 5)])


def upernet() -> nn.Module:
    config = tf.UperNetConfig(backbone_config=swin(), hidden_size=512, auxiliary_in_channels=384, num_labels=150)
    return tf.UperNetForSemanticSegmentation(config)


def mask2former() -> nn.Module:
    config = tf.Mask2FormerConfig(backbone_config=swin(), num_queries=100, num_labels=80)
    return tf.Mask2FormerForUniversalSegmentation(config)


def oneformer() -> nn.Module:
    config = tf.OneFormerConfig(backbone_config=swin(), num_queries=150, num_labels=150, is_training=False)
    return tf.OneFormerForUniversalSegmentation(config)


def grounding_dino() -> nn.Module:
    return tf.GroundingDinoForObjectDetection(tf.GroundingDinoConfig(backbone_config=swin(2), num_queries=900))


MODELS: dict[str, Callable[[], nn.Module]] = {
    'SwinModel': lambda: tf.SwinModel(swin()),
    'UperNet': upernet,
    'Mask2Former': mask2former,
    'OneFormer': oneformer,
    'GroundingDINO': grounding_dino,
}
# Further inputs of a model: a task, and the tokens of 'a cat. a dog.' in the vocabulary of BERT.
EXTRA_INPUTS: dict[str, dict[str, Tensor]] = {
    'OneFormer': {'task_inputs': torch.ones(1, 77)},
    'GroundingDINO': {'input_ids': torch.tensor([[101, 1037, 4937, 1012, 1037, 3899, 1012, 102]])},
}
CASES = ('SwinModel@512x512', 'SwinModel@800x1344', 'UperNet@512x512', 'Mask2Former@512x512', 'Mask2Former@800x1344',
         'OneFormer@512x512', 'GroundingDINO@800x1066')  # fmt: skip
WAYS = ('before', 'after')


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('--cases', nargs='+', type=case, default=CASES, metavar='MODEL@HxW')
    parser.add_argument('--rounds', type=int, default=5, help='rounds in each process (default: %(default)s)')
    parser.add_argument('--processes', type=int, default=3, help='number of processes (default: %(default)s)')
    parser.add_argument(
        '--parts', nargs='+', choices=('memory', 'time'), default=('memory', 'time'), help='default: both'
    )
    parser.add_argument('--json', type=Path, help='write the report to this file; parts that are not run stay in it')
    args = parser.parse_args()
    report = json.loads(args.json.read_text()) if args.json and args.json.exists() else {'runs': {}, 'rows': {}}
    for part in args.parts:
        report['runs'][part] = {
            'command': 'python benchmarks/replace_swin.py ' + ' '.join(sys.argv[1:]),
            'machine': {**machine(argparse.Namespace(device='cpu')), 'processor': processor()},
            'transformers': tf.__version__,
        }
        for name in args.cases:
            report['rows'].setdefault(name, {})[part] = []
        for index in range(args.processes if part == 'time' else 1):
            found = in_a_process(all_timed, args.cases, args.rounds) if part == 'time' else all_peaks(args.cases)
            for name, figures in found.items():
                report['rows'][name][part].append(figures)
            print(f'{part}: process {index + 1} is done', flush=True)
    for name, row in report['rows'].items():
        row['figures'] = figures_of(row)
        print(name, json.dumps(row['figures']))
    if args.json:
        args.json.write_text(json.dumps(report, indent=1) + '\n')


def case(text: str) -> str:
    """Return ``text`` if it has the form 'MODEL@HxW', as a type for argparse."""
    match = re.fullmatch(r'(\w+)@\d+x\d+', text)
    if match is None or match[1] not in MODELS:
        raise argparse.ArgumentTypeError(f'must be MODEL@HxW, where MODEL is one of {", ".join(MODELS)}; got {text!r}')
    return text


def parsed(text: str) -> tuple[str, tuple[int, int]]:
    """Return the model and (height, width) of 'MODEL@HxW'."""
    name, height, width = re.split('[@x]', text)
    return name, (int(height), int(width))


def all_timed(cases: list[str], rounds: int) -> dict[str, Any]:
    return {text: timed(*parsed(text), rounds) for text in cases}


def all_peaks(cases: list[str]) -> dict[str, Any]:
    return {text: {way: in_a_process(peak, *parsed(text), way) for way in WAYS} for text in cases}


def in_a_process(function: Callable[..., Any], *args: Any) -> Any:
    with ProcessPoolExecutor(1, multiprocessing.get_context('spawn')) as pool:
        return pool.submit(function, *args).result()


def build(name: str, way: str) -> tuple[nn.Module, nn.Module]:
    """Return a model and its Swin."""
    torch.manual_seed(0)
    model = MODELS[name]().eval()
    swins = {path: module for path, module in model.named_modules() if type(module) is tf.SwinModel}
    ((path, _),) = swins.items()
    if way == 'after':
        replace_swin(model, SMALL)
    return model, model.get_submodule(path)


def run(name: str, model: nn.Module, size: tuple[int, int]) -> None:
    image = torch.randn(1, 3, *size, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        model(pixel_values=image, **EXTRA_INPUTS.get(name, {}))


def timed(name: str, size: tuple[int, int], rounds: int) -> dict[str, Any]:
    """Return the times in seconds of a model and of its Swin in each round, before and after the replacement.

    Raises:
        RuntimeError: the outputs of the Swins differ.
    """
    seconds: dict[str, dict[str, list[float]]] = {way: {'model': [], 'swin': []} for way in WAYS}
    models, found = {}, {}
    for way in WAYS:
        models[way], inside = build(name, way)
        watch(inside, seconds[way]['swin'], lambda output, way=way: found.update({way: output.last_hidden_state}))
    for index in range(rounds + 1):
        for way, model in models.items():
            started = time.perf_counter()
            run(name, model, size)
            seconds[way]['model'].append(time.perf_counter() - started)
        if index == 0:
            difference = ((found['after'] - found['before']).abs().max() / found['before'].abs().max()).item()
            if not difference < TOLERANCE['float32']:
                raise RuntimeError(f'{name}: the outputs differ by {difference:.2g}, so times cannot be compared')
    warm = {way: {part: times[1:] for part, times in parts.items()} for way, parts in seconds.items()}
    return {'difference': difference, 'seconds': warm}


def watch(module: nn.Module, seconds: list[float], take: Callable[[Any], None]) -> None:
    """Register hooks that append the time of each call to ``seconds`` and pass its output to ``take``."""
    started = [0.0]

    def before(module: nn.Module, args: Any) -> None:
        started[0] = time.perf_counter()

    def after(module: nn.Module, args: Any, output: Any) -> None:
        seconds.append(time.perf_counter() - started[0])
        take(output)

    module.register_forward_pre_hook(before)
    module.register_forward_hook(after)


def peak(name: str, size: tuple[int, int], way: str) -> dict[str, float]:
    """Return the peak memory in MiB of two passes of the model, and of its Swin, above the memory before them."""
    model, inside = build(name, way)
    found = {}
    for part, module in (('swin', inside), ('model', model)):
        run(name if part == 'model' else '', module, SMALL)
        ctypes.CDLL(None).malloc_trim(0)
        Path('/proc/self/clear_refs').write_text('5')  # resets VmHWM
        before = held_mib()
        for _ in range(2):
            run(name if part == 'model' else '', module, size)
        found[part] = held_mib('VmHWM') - before
    return found


def figures_of(row: dict[str, Any]) -> dict[str, Any]:
    """Return the values for a table: medians over processes of times in ms and of their ratio, and memory in MiB."""
    figures: dict[str, Any] = {}
    for part in ('swin', 'model'):
        medians = [
            {way: 1e3 * statistics.median(process['seconds'][way][part]) for way in WAYS}
            for process in row.get('time', ())
        ]
        if medians:
            ratios = [process['after'] / process['before'] for process in medians]
            figures[part] = {way: statistics.median(process[way] for process in medians) for way in WAYS}
            figures[part] |= {'ratio': statistics.median(ratios), 'least': min(ratios), 'most': max(ratios)}
        for found in row.get('memory', ()):
            figures[f'{part}_mib'] = {way: found[way][part] for way in WAYS}
    return figures


if __name__ == '__main__':
    main()
