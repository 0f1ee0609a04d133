"""The metafiles and their tables are complete and current, name their sources, and agree with the configs."""

import functools
import importlib
import json
import re
import sys
from pathlib import Path

import pytest
import yaml
from mmengine.config import Config

from swin_dense.archs.arch import resolve_arch
from swin_dense.commands._main import main
from swin_dense.workbench.recipes.files import recipe_names
from swin_dense.workbench.recipes.zoo import FOLDERS, FRAMEWORKS, read_zoo
from tests.conftest import ROOT as REPOSITORY
from tests.conftest import some

sys.path.insert(0, str(REPOSITORY / 'tools'))
import update_zoo

CONFIGS = REPOSITORY / 'configs'

MODELS = {
    model['Config']: model
    for folder in FOLDERS
    for model in yaml.safe_load((CONFIGS / folder / 'metafile.yml').read_text())['Models']
}
# Configs of a framework, whose metafiles have the same figures.
OF_FRAMEWORKS = {config: model for config, model in MODELS.items() if '::' in config}
OWN = [config for config in MODELS if config not in OF_FRAMEWORKS]
RECIPES = {str(recipe.config): recipe for folder in FOLDERS for recipe in read_zoo(REPOSITORY, folder)}


def test_every_config_and_every_metafile_is_listed_once():
    listed = list(update_zoo.zoo_configs(REPOSITORY))
    assert sorted(MODELS) == listed == sorted(json.loads((CONFIGS / 'complexity.json').read_text()))
    assert all(Path(config).stem == model['Name'] for config, model in MODELS.items())
    assert {model['Name'] for model in MODELS.values()} == {name for name in recipe_names() if 'demo' not in name}
    index = yaml.safe_load((REPOSITORY / 'model-index.yml').read_text())
    assert index['Import'] == sorted(str(path.relative_to(REPOSITORY)) for path in CONFIGS.glob('*/metafile.yml'))
    not_counted = {config for config, recipe in RECIPES.items() if not recipe.counted}
    assert not_counted == {config for config, model in MODELS.items() if 'Needs' in model['Metadata']}


def figures_in(model):
    results = model.get('Results', [])
    results = results if isinstance(results, list) else [results]
    return [(result['Task'], result['Dataset'], result['Metrics']) for result in results]


@functools.cache
def published_by(package):
    """Return the entries about Swin in the metafiles of a framework: {name of the config: (figures, weights)}."""
    root = Path(importlib.import_module(package).__path__[0], '.mim', 'configs')
    contents = [yaml.safe_load(metafile.read_text()) for metafile in root.glob('*/metafile.y*ml')]
    models = [model for content in contents for model in (content['Models'] if isinstance(content, dict) else content)]
    named = {Path(str(model.get('Config'))).stem: model for model in models}
    return {name: (figures_in(model), model['Weights']) for name, model in named.items() if 'swin' in name}


def test_everything_that_the_frameworks_published_is_listed():
    names = {model['Name'] for model in MODELS.values()}
    for package in FRAMEWORKS:
        assert len(published_by(package)) >= 20
        assert published_by(package).keys() <= names


@pytest.mark.parametrize('config', OF_FRAMEWORKS, ids=lambda config: Path(config).stem)
def test_the_figures_of_a_framework_equal_those_of_its_metafile(config):
    model = OF_FRAMEWORKS[config]
    expected = published_by(config.partition('::')[0]).get(model['Name'], ([], None))
    assert (figures_in(model), model.get('Weights')) == expected


@pytest.mark.slow
@pytest.mark.parametrize('package', FRAMEWORKS)
def test_the_metafile_of_a_framework_is_current(package):
    written = yaml.safe_load((CONFIGS / package / 'metafile.yml').read_text())
    assert update_zoo.framework_metafile(package) == written, 'run python tools/update_zoo.py'


@pytest.mark.parametrize('config', MODELS, ids=lambda config: Path(config).stem)
def test_every_published_figure_has_a_source(config):
    model = MODELS[config]
    results = model.get('Results', [])
    complexity = [model['Published Complexity']] if 'Published Complexity' in model else []
    for figures in [*results, *complexity]:
        assert figures['Source'].startswith(('https://github.com/', 'https://arxiv.org/abs/'))
    assert all(result['Published By'] for result in results)
    assert results or 'published' in model['Note']
    if 'Weights' in model and config in OWN:  # other weights are compared with the frameworks' metafiles
        is_of_mm = 'open-mmlab' in results[0]['Source']
        host = 'download.openmmlab.com' if is_of_mm else 'github.com/SwinTransformer'
        assert model['Weights'].startswith(f'https://{host}/')


@pytest.mark.parametrize('config', OWN, ids=lambda config: Path(config).stem)
def test_metafile_agrees_with_the_config(config):
    model, metadata = MODELS[config], MODELS[config]['Metadata']
    resolved = Config.fromfile(REPOSITORY / config)
    backbone = resolved.model.backbone
    network, _, letter = metadata['Backbone'].lower().partition('-')
    assert backbone.type == {'swin': 'SwinDense', 'swinv2': 'SwinDenseV2'}[network]
    arch = resolve_arch(letter)
    assert backbone.embed_dims == arch.embed_dims
    assert tuple(backbone.depths) == arch.depths
    assert tuple(backbone.num_heads) == arch.num_heads
    assert backbone.window_size == metadata['Window']
    if 'ablations' in config:
        assert metadata['Pretraining'] == 'none released'
        assert metadata['Setting']
    else:
        pretrained = backbone.init_cfg.checkpoint
        assert ('_22k' in pretrained) == ('ImageNet-22K' in metadata['Pretraining'])
        assert re.search(r'_(224|256|384)', pretrained)[1] in metadata['Pretraining']
    processes = int(metadata['Training Resources'].split()[0])  # '8 GPUs' or '1 CPU'
    assert resolved.train_dataloader.batch_size * processes == metadata['Batch Size']
    assert (metadata['Recipe'] == 'official') == ('official' in config or 'cascade' in config)
    if 'Published Complexity' in model:
        assert model['Published Complexity']['Image Size'] == '{}x{}'.format(*RECIPES[config].counted['shape'])
    if model['In Collection'] == 'UPerNet':
        assert resolved.train_cfg.max_iters == metadata['Iterations']
        assert metadata['Crop Size'] == '{}x{}'.format(*resolved.crop_size)
        return
    schedule = metadata['Schedule']
    assert resolved.train_cfg.max_epochs == metadata['Epochs']
    assert schedule.startswith(f'{metadata["Epochs"] // 12}x')
    assert ('AMP' in schedule) == (resolved.optim_wrapper.type == 'AmpOptimWrapper')
    assert ('multi-scale crop' in schedule) == ('RandomChoice' in str(resolved.train_pipeline))


# One recipe per model; the others differ only in data and schedule.
DISTINCT = list({json.dumps(recipe.counted): config for config, recipe in RECIPES.items() if recipe.counted}.values())


@pytest.mark.parametrize(
    'config',
    some(DISTINCT, every=16),
    ids=lambda config: Path(config).stem,
)
def test_counted_figures_are_current(config):
    assert update_zoo.count_config(Path(config).stem) == RECIPES[config].counted


@pytest.mark.parametrize('folder', FOLDERS)
def test_readme_tables_are_current(folder):
    text = (CONFIGS / folder / 'README.md').read_text()
    table = update_zoo.markdown(read_zoo(REPOSITORY, folder))
    assert update_zoo.replace_block(text, update_zoo.MARKER, table) == text, 'run python tools/update_zoo.py'


def listed(printed):
    """Return what `swin-dense zoo` prints of each recipe, by its name."""
    return dict(re.findall(r'^(\S+)\n((?:    .*\n)+)', printed, re.M))


def test_recipes_are_listed_by_name_in_100_columns_and_filtered_by_words(capsys):
    assert main(['zoo']) == 0
    printed = capsys.readouterr().out
    assert list(listed(printed)) == [Path(config).stem for config in RECIPES]
    assert max(map(len, printed.splitlines())) <= 100
    assert '43.7 box AP, 39.8 mask AP' in listed(printed)[Path(list(RECIPES)[5]).stem]
    assert main(['zoo', 'UPerNet', 'swin-b', '22k', 'official']) == 0
    (name,) = listed(capsys.readouterr().out)
    assert name == 'swin-base-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640'
    assert main(['zoo', 'resnet']) == 2
    assert "no recipe matches 'resnet'" in capsys.readouterr().err
    assert main(['zoo', 'upernet', 'swin-t', 'mmseg', '--weights']) == 0
    assert re.search(r'^    https://\S+\.pth$', capsys.readouterr().out, re.M)
