"""Regenerate the model zoo under configs/ from the metafiles of mmdet and mmseg.

This writes the metafiles in configs/mmdet and configs/mmseg, complexity.json with the parameters and FLOPs of each
model, and the tables of the READMEs.
"""

from __future__ import annotations

import argparse
import importlib
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import yaml
from markdown_table import markdown_table
from mmengine.config import Config
from update_readme import replace_block

from swin_dense.analysis.flop_counter import count
from swin_dense.archs.arch import published_letter
from swin_dense.workbench.building import build_on_meta, needed_packages, published_shape, run_on_shapes
from swin_dense.workbench.configs.experiment import Experiment, dicts
from swin_dense.workbench.recipes.files import load_recipe
from swin_dense.workbench.recipes.zoo import FOLDERS, FRAMEWORKS, Recipe, framework_configs, read_zoo

REPOSITORY = Path(__file__).resolve().parent.parent
MARKER = 'written by tools/update_zoo.py'


def main() -> None:
    argparse.ArgumentParser(description=__doc__).parse_args()
    update(REPOSITORY)


def update(repository: Path) -> None:
    """Write these files in a copy of the repository."""
    for package in FRAMEWORKS:
        metafile = repository / 'configs' / package / 'metafile.yml'
        metafile.write_text(_HEAD + yaml.safe_dump(framework_metafile(package), sort_keys=False, width=1000))
        print(f'wrote {metafile.relative_to(repository)}')
    counts = {name: count_config(config) for name, config in zoo_configs(repository).items()}
    (repository / 'configs/complexity.json').write_text(json.dumps(counts, indent=2) + '\n')
    for folder in FOLDERS:
        readme = repository / 'configs' / folder / 'README.md'
        readme.write_text(replace_block(readme.read_text(), MARKER, markdown(read_zoo(repository, folder))))
        print(f'wrote {readme.relative_to(repository)}')


def zoo_configs(repository: Path) -> dict[str, str]:
    """Map the config names in the metafiles, sorted, to arguments of :func:`load_recipe`."""
    files = [path for folder in FOLDERS for path in (repository / 'configs' / folder).glob('*.py')]
    own = {str(path.relative_to(repository)): str(path) for path in files}
    return dict(sorted({**own, **{place: name for name, place in framework_configs(repository).items()}}.items()))


def count_config(name: str) -> dict[str, Any] | None:
    """Count parameters and FLOPs of the model of one config, at the image size of published figures.

    Returns:
        None if the model has a text encoder, which needs other packages and downloads.
    """
    config = load_recipe(name)
    if needed_packages(config.model):
        return None
    shape = published_shape(config)
    model = build_on_meta(config)
    try:
        result = count(model, *shape, run_on_shapes)
    except ValueError:
        flops = computed = None
    else:
        flops, computed = result.flops[''], result.computed_flops
    parameters = sum(parameter.numel() for parameter in model.parameters())
    return {'shape': list(shape), 'parameters': parameters, 'flops': flops, 'computed_flops': computed}


_HEAD = """# Written by tools/update_zoo.py. Every figure under Results and every address of weights is copied from the
# framework's metafile given as Source. This project did not measure any of them.
"""
_SOURCES = {
    'mmdet': 'https://github.com/open-mmlab/mmdetection/blob/v{}/configs/',
    'mmseg': 'https://github.com/open-mmlab/mmsegmentation/blob/v{}/configs/',
}
_TASKS = {  # by type of the validation evaluator
    'CocoPanopticMetric': 'panoptic segmentation',
    'YouTubeVISMetric': 'video instance segmentation',
    'IoUMetric': 'semantic segmentation',
}
_DATA = {  # by folder of the data set
    'coco': 'COCO',
    'ADEChallengeData2016': 'ADE20K',
    'cityscapes': 'Cityscapes',
    'objects365v1': 'Objects365',
    'flickr30k_entities': 'Flickr30k',
    'gqa': 'GQA',
    'grit': 'GRIT',
    'grit_processed': 'GRIT',
    'objects365v2': 'Objects365 v2',
    'youtube_vis_2021': 'YouTube-VIS 2021',
    'LEVIRCD': 'LEVIR-CD',
}


# mmdet 3.3.0 cannot build this config: it passes an unknown option to FPN.
_BROKEN = ('fcos_swinb_fpn_8x4_sample1e-3_mstrain_v3det_2x',)
# Weights converted from the authors' files: the config contains the evaluation data, the metafile the training data.
_PRETRAINED_ELSEWHERE = ('glip', 'grounding_dino')


def framework_metafile(package: str) -> dict[str, list]:
    """Return a metafile with all configs of a framework that train a Swin and have no counterpart in configs/."""
    module = importlib.import_module(package)
    root = Path(module.__path__[0], '.mim', 'configs')
    source = _SOURCES[package].format(module.__version__)
    entries, collections = _published(root)
    own = {path.stem for path in (REPOSITORY / 'configs').glob('*/*.py')}
    models, trained = [], set()
    for path in sorted(root.rglob('*.py'), key=lambda path: (path.parent, path.stem not in entries, path.name)):
        if '_base_' in path.parts or 'swin' not in path.stem or path.stem in {*own, *_BROKEN}:
            continue
        config = Config.fromfile(path)
        backbone = config.get('model', {}).get('backbone', {})
        # Skip configs that only evaluate a model of another config: their training settings are the same.
        model = {key: value for key, value in config.get('model', {}).items() if key != 'test_cfg'}
        training = [config.get(key) for key in ('train_dataloader', 'optim_wrapper', 'train_cfg', 'load_from')]
        what = str([model, *training])
        if not str(backbone.get('type')).endswith('SwinTransformer') or (path.stem not in entries and what in trained):
            continue
        trained.add(what)
        place = path.relative_to(root)
        entry = entries.get(path.stem, {})
        model = {
            'Name': path.stem,
            'In Collection': entry.get('In Collection') or collections.get(place.parts[0], _named(config)),
            'Config': f'{package}::{place}',
            'Source': f'{source}{place}',
            'Metadata': _metadata(config, package, entry.get('trained_on', '')),
        }
        results = entry.get('Results') or []
        published_by = {
            'Published By': f'{package} {module.__version__}',
            'Source': f'{source}{entry.get("metafile")}',
        }
        if results:
            model['Results'] = [
                {**result, **published_by} for result in ([results] if isinstance(results, dict) else results)
            ]
            model['Weights'] = entry['Weights']
        else:
            model['Note'] = f'The metafiles of {package} {module.__version__} have no published figure for this config.'
        models.append(model)
    named = {model['In Collection'] for model in models}
    return {'Collections': [{'Name': name} for name in sorted(named)], 'Models': models}


def _published(root: Path) -> tuple[dict[str, dict], dict[str, str]]:
    """Return the entry of each config in the metafiles of a framework by name, and the collection of each folder."""
    entries, collections = {}, {}
    for metafile in sorted(root.glob('*/metafile.y*ml')):
        content = yaml.safe_load(metafile.read_text())
        for model in content['Models'] if isinstance(content, dict) else content:
            stem = Path(str(model.get('Config'))).stem
            entries[stem] = {**model, 'metafile': metafile.relative_to(root)}
            if 'pretrain' in stem and metafile.parent.name in _PRETRAINED_ELSEWHERE:
                (collection,) = content['Collections']
                entries[stem]['trained_on'] = collection['Metadata']['Training Data']
            collections[metafile.parent.name] = model['In Collection']
    return entries, collections


def _named(config: Config) -> str:
    """Return the type of a model with spaces between words, such as 'Cascade RCNN'."""
    return re.sub(r'(?<=[a-z])(?=[A-Z])', ' ', config.model.type)


def _metadata(config: Config, package: str, trained_on: str) -> dict[str, Any]:
    backbone, loop = config.model.backbone, config.train_cfg
    stages = len(backbone.depths)
    options = {key: tuple(value[:4]) if isinstance(value, list) else value for key, value in backbone.items()}
    arch = f'Swin-{str(published_letter(options)).upper()}' + (f', {stages} stages' if stages != 4 else '')
    by_epoch = 'max_epochs' in loop
    scale = config.get('auto_scale_lr', {}).get('base_batch_size')
    return {
        'Task': _task(config),
        'Training Data': trained_on
        or ', '.join(dict.fromkeys(_data(data.entry) for data in Experiment(config).datasets_of(['train']))),
        **({'Batch Size': scale} if scale else {}),
        **({'Epochs': loop.max_epochs} if by_epoch else {'Iterations': loop.max_iters}),
        'Backbone': arch,
        'Window': backbone.window_size,
        'Pretraining': _pretraining(config),
        'Schedule': f'{loop.max_epochs} epochs' if by_epoch else f'{loop.max_iters / 1000:.0f}k iterations',
        'Recipe': package,
        **({'Needs': ', '.join(packages)} if (packages := needed_packages(config.model)) else {}),
    }


def _task(config: Config) -> str:
    evaluators = list(dicts(config.get('val_evaluator')))
    for evaluator in evaluators:
        if evaluator.get('type') in _TASKS:
            return _TASKS[evaluator.type]
    metrics = [evaluator.get('metric') for evaluator in evaluators]
    return 'instance segmentation' if any('segm' in str(metric) for metric in metrics) else 'detection'


def _data(dataset: Any) -> str:
    images = Path(dataset.get('data_root') or dataset.ann_file).name
    labels = f'{dataset.type} {dataset.get("ann_file")}'.lower()
    other = next((name for word, name in {'lvis': 'LVIS', 'refcoco': 'RefCOCO'}.items() if word in labels), None)
    return other or _DATA.get(images, images)


def _pretraining(config: Config) -> str:
    if config.get('load_from'):
        return Path(config.load_from).name
    parts = (
        config.model.backbone.get('init_cfg'),
        {'checkpoint': config.model.get('pretrained')},
        config.model.get('init_cfg'),
    )
    weights = next((part['checkpoint'] for part in parts if part and part.get('checkpoint')), '')
    size = re.search(r'_(224|384)', weights)
    return (
        f'ImageNet-{"22K" if "22k" in weights else "1K"}, {size[1]}x{size[1]}'
        if size
        else Path(weights).name or 'none named'
    )


def markdown(recipes: list[Recipe]) -> str:
    """Return the table for the README of a folder."""
    columns = _framework_columns() if recipes and '::' in str(recipes[0].config) else _columns(recipes)
    return markdown_table(list(columns), ([cell(recipe) for cell in columns.values()] for recipe in recipes))


_Columns = dict[str, Callable[[Recipe], str]]


def _columns(recipes: list[Recipe]) -> _Columns:
    def metric(name: str) -> Callable[[Recipe], str]:
        def cell(recipe: Recipe) -> str:
            value = str(recipe.metrics.get(name, '' if recipe.metrics else 'none published'))
            is_of_another = 'Note' in recipe.model and recipe.metadata['Recipe'] == 'swin_dense'
            return f'{value} with another config' if name in recipe.metrics and is_of_another else value

        return cell

    return {
        **_TRAINING,
        'Recipe': lambda recipe: recipe.metadata['Recipe'],
        **{name: metric(name) for recipe in recipes for name in recipe.metrics},
        'Published': _published_complexity,
        **_COST_AND_FILES,
    }


def _framework_columns() -> _Columns:
    return {
        'Name': _TRAINING['Name'],
        'Model': lambda recipe: recipe.model['In Collection'],
        'Task': lambda recipe: recipe.metadata['Task'],
        'Data': lambda recipe: recipe.metadata['Training Data'],
        **_TRAINING,
        'Accuracy': lambda recipe: recipe.accuracy,
        **_COST_AND_FILES,
    }


def _published_complexity(recipe: Recipe) -> str:
    found = recipe.model.get('Published Complexity', {})
    return ', '.join(found[key] for key in ('Parameters', 'FLOPs') if key in found)


def _files(recipe: Recipe) -> str:
    link = recipe.model.get('Source', recipe.config.name)
    return f'[config]({link})' + (f', [weights]({recipe.weights})' if recipe.weights else '')


_TRAINING: _Columns = {
    'Name': lambda recipe: f'`{recipe.config.stem}`',
    'Backbone': lambda recipe: recipe.backbone,
    'Window': lambda recipe: str(recipe.metadata['Window']),
    'Pretraining': lambda recipe: recipe.metadata['Pretraining'],
    'Schedule': lambda recipe: recipe.metadata['Schedule'],
}
_COST_AND_FILES: _Columns = {
    'Counted': lambda recipe: recipe.cost,
    'Files': _files,
}


if __name__ == '__main__':
    main()
