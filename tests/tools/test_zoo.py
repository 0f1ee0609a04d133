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
# Configs of a framework; their figures are compared with its metafiles, not with PUBLISHED.
OF_FRAMEWORKS = {config: model for config, model in MODELS.items() if '::' in config}
OWN = [config for config in MODELS if config not in OF_FRAMEWORKS]
RECIPES = {str(recipe.config): recipe for folder in FOLDERS for recipe in read_zoo(REPOSITORY, folder)}

# Published accuracy, copied from the sources a second time: box and mask AP, or single- and multi-scale mIoU.
PUBLISHED = {
    'mask-rcnn_swin-t-p4-w7_fpn_1x_coco': (42.7, 39.3),
    'mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco': (46.0, 41.6),
    'mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco': (46.0, 41.7),
    'mask-rcnn_swin-s-p4-w7_fpn_amp-ms-crop-3x_coco': (48.2, 43.2),
    'mask-rcnn_swin-t-p4-w7_fpn_official-amp-ms-crop-1x_coco': (43.7, 39.8),
    'mask-rcnn_swin-t-p4-w7_fpn_official-amp-ms-crop-3x_coco': (46.0, 41.6),
    'mask-rcnn_swin-s-p4-w7_fpn_official-amp-ms-crop-3x_coco': (48.5, 43.3),
    'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-1x_coco': (48.1, 41.7),
    'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco': (50.4, 43.7),
    'cascade-mask-rcnn_swin-s-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco': (51.9, 45.0),
    'cascade-mask-rcnn_swin-b-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco': (51.9, 45.0),
    'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512': (44.41, 45.79),
    'swin-small-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512': (47.72, 49.24),
    'swin-base-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512': (47.99, 49.57),
    'swin-base-patch4-window12-in1k-384x384-pre_upernet_8xb2-160k_ade20k-512x512': (48.35, 49.65),
    'swin-base-patch4-window7-in22k-pre_upernet_8xb2-160k_ade20k-512x512': (50.13, 51.9),
    'swin-base-patch4-window12-in22k-384x384-pre_upernet_8xb2-160k_ade20k-512x512': (50.76, 52.4),
    'swin-large-patch4-window7-in22k-pre_upernet_8xb2-160k_ade20k-512x512': (51.17, 52.99),
    'swin-large-patch4-window12-in22k-384x384-pre_upernet_8xb2-160k_ade20k-512x512': (52.25, 54.12),
    'swin-tiny-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512': (44.51, 45.81),
    'swin-small-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512': (47.64, 49.47),
    'swin-base-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512': (48.13, 49.72),
    'swin-base-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640': (50.04, 51.66),
    'swin-large-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640': (52.05, 53.53),
    'swinv2-tiny-patch4-window16-in1k-256x256-pre_upernet_8xb2-160k_ade20k-512x512': (47.0,),
}
# Of Swin-T without a part: box and mask AP of a Cascade Mask R-CNN, and mIoU of a UPerNet.
ABLATIONS = {
    'no-shift': (47.7, 41.5, 43.3),
    'no-position': (49.2, 42.6, 43.8),
    'absolute': (49.0, 42.4, 43.2),
    'absolute-relative': (50.2, 43.4, 44.0),
    'no-appearance': (48.2, 41.9, 44.1),
}
for _part, (_box, _mask, _miou) in ABLATIONS.items():
    PUBLISHED[f'cascade-mask-rcnn_swin-t-p4-w7_{_part}_fpn_4conv1fc-giou_amp-ms-crop-3x_coco'] = (_box, _mask)
    PUBLISHED[f'swin-tiny-patch4-window7_{_part}_upernet_official-8xb2-160k_ade20k-512x512'] = (_miou,)
NOTHING_PUBLISHED = {
    'mask-rcnn_swin-s-p4-w7_fpn_ms-crop-3x_coco',
    'faster-rcnn_swin-t-p4-w7_fpn_1x_coco',
    'retinanet_swin-t-p4-w7_fpn_1x_coco',
    'mask-rcnn_swinv2-t-p4-w16_fpn_amp-ms-crop-3x_coco',
    'mask-rcnn_swinv2-s-p4-w16_fpn_amp-ms-crop-3x_coco',
    'mask-rcnn_swinv2-b-p4-w16_fpn_amp-ms-crop-3x_coco',
    'mask-rcnn_swinv2-t-p4-w16_fpn_layer-decay-ema_amp-ms-crop-3x_coco',
    'swinv2-small-patch4-window16-in1k-256x256-pre_upernet_8xb2-160k_ade20k-512x512',
    'swinv2-base-patch4-window16-in1k-256x256-pre_upernet_8xb2-160k_ade20k-512x512',
    'swinv2-tiny-patch4-window16-in1k-256x256-pre_upernet_layer-decay-ema_8xb2-160k_ade20k-512x512',
}


def test_every_config_is_listed_once_and_every_entry_has_its_config():
    listed = list(update_zoo.zoo_configs(REPOSITORY))
    assert sorted(MODELS) == listed == sorted(json.loads((CONFIGS / 'complexity.json').read_text()))
    assert all(Path(config).stem == model['Name'] for config, model in MODELS.items())
    assert {model['Name'] for model in MODELS.values()} == {name for name in recipe_names() if 'demo' not in name}


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


def test_published_accuracy():
    found = {Path(config).stem: tuple(RECIPES[config].metrics.values()) for config in OWN}
    assert {name: values for name, values in found.items() if values} == PUBLISHED
    assert {name for name, values in found.items() if not values} == NOTHING_PUBLISHED


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
    assert resolved.train_dataloader.batch_size * 8 == metadata['Batch Size']
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


# One recipe per model; the others differ in data and schedule alone.
DISTINCT = list({json.dumps(recipe.counted): config for config, recipe in RECIPES.items() if recipe.counted}.values())


@pytest.mark.parametrize(
    'config',
    some(DISTINCT, every=16),
    ids=lambda config: Path(config).stem,
)
def test_counted_figures_are_current(config):
    assert update_zoo.count_config(Path(config).stem) == RECIPES[config].counted


def test_configs_that_are_not_counted_need_other_packages():
    not_counted = {config for config, recipe in RECIPES.items() if not recipe.counted}
    assert not_counted == {config for config, model in MODELS.items() if 'Needs' in model['Metadata']}


@pytest.mark.parametrize('folder', FOLDERS)
def test_readme_tables_are_current(folder):
    text = (CONFIGS / folder / 'README.md').read_text()
    table = update_zoo.markdown(read_zoo(REPOSITORY, folder))
    assert update_zoo.replace_block(text, update_zoo.MARKER, table) == text, 'run python tools/update_zoo.py'


def listed(printed):
    """Return what `swin-dense zoo` prints of each recipe, by its name."""
    return dict(re.findall(r'^(\S+)\n((?:    .*\n)+)', printed, re.M))


def test_each_recipe_is_listed_by_name_in_100_columns(capsys):
    assert main(['zoo']) == 0
    printed = capsys.readouterr().out
    assert list(listed(printed)) == [Path(config).stem for config in RECIPES]
    assert max(map(len, printed.splitlines())) <= 100
    assert '43.7 box AP, 39.8 mask AP' in listed(printed)[Path(list(RECIPES)[5]).stem]


def test_addresses_of_weights(capsys):
    assert main(['zoo', 'upernet', 'swin-t', 'mmseg', '--weights']) == 0
    assert re.search(r'^    https://\S+\.pth$', capsys.readouterr().out, re.M)


def test_words_filter_the_list(capsys):
    assert main(['zoo', 'UPerNet', 'swin-b', '22k', 'official']) == 0
    (name,) = listed(capsys.readouterr().out)
    assert name == 'swin-base-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640'
    assert main(['zoo', 'resnet']) == 2
    assert "no recipe matches 'resnet'" in capsys.readouterr().err


def test_the_index_names_every_metafile():
    index = yaml.safe_load((REPOSITORY / 'model-index.yml').read_text())
    assert index['Import'] == sorted(str(path.relative_to(REPOSITORY)) for path in CONFIGS.glob('*/metafile.yml'))
