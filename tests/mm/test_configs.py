"""The recipes equal the frameworks' configs and the authors' settings, and they train and predict."""

import copy
import functools
import inspect
import re
from pathlib import Path

import mmdet
import mmseg
import pytest
import torch
from mmdet.models.backbones import SwinTransformer
from mmdet.testing import demo_mm_inputs
from mmengine.config import Config
from mmengine.hooks import EMAHook
from mmengine.optim import build_optim_wrapper
from mmengine.registry import HOOKS, MODELS, init_default_scope
from mmengine.structures import PixelData
from mmseg.structures import SegDataSample

from swin_dense import SwinDense
from swin_dense.archs.arch import ARCHS, Arch
from swin_dense.commands._main import main
from swin_dense.utils import packages
from swin_dense.workbench.building import build_on_meta
from swin_dense.workbench.recipes.files import load_recipe
from swin_dense.workbench.recipes.zoo import framework_configs
from tests.conftest import TINY, some

CONFIGS = Path(__file__).parents[2] / 'configs'
MMDET = Path(mmdet.__path__[0], '.mim/configs')
MMSEG = Path(mmseg.__path__[0], '.mim/configs')
LEAVES = sorted(
    path for path in CONFIGS.glob('*/*.py') if not path.parent.name.startswith('_') and path.stem != '_base_'
)
ZOO = [path for path in LEAVES if path.parent.name != 'demo']
PLACES = {'mmdet': MMDET, 'mmseg': MMSEG}
FRAMEWORKS = framework_configs(CONFIGS.parent)
THEIRS = {path.stem: path for root in (MMDET, MMSEG) for path in root.rglob('*.py')}
THEIRS.update((name, PLACES[place.partition('::')[0]] / place.partition('::')[2]) for name, place in FRAMEWORKS.items())
BACKBONES = sorted((CONFIGS / '_base_/backbones').glob('*.py'))


@functools.cache
def load(path):
    is_ours = CONFIGS in path.parents
    return Config.fromfile(path, import_custom_modules=is_ours)  # mmdet's ConvNeXt config would import mmpretrain


def leaf(name):
    (path,) = (path for path in ZOO if path.stem == name)
    return load(path)


def settings(config):
    """Return a config as {'a.b[0].c': value}, without the scopes that ``mmdet::`` and ``mmseg::`` bases add.

    Options that the backbone config omits have the defaults of mmdet's Swin.
    """
    config = copy.deepcopy(config.to_dict())
    signature = inspect.signature(SwinTransformer).parameters.values()
    defaults = {p.name: p.default for p in signature if p.default is not inspect.Parameter.empty}
    config['model']['backbone'] = {**copy.deepcopy(defaults), **config['model']['backbone']}
    flat = {}

    def walk(value, name):
        if isinstance(value, dict):
            for key, item in value.items():
                if key not in ('_scope_', 'requires_grad'):
                    walk(item, f'{name}.{key}' if name else key)
        elif isinstance(value, (list, tuple)):
            for index, item in enumerate(value):
                walk(item, f'{name}[{index}]')
        else:
            flat[name] = value

    walk(config, '')
    return flat


def differences(ours, theirs):
    """Return the differing settings as {setting: (ours, theirs)}; None means that a setting is missing or None."""
    ours, theirs = settings(ours), settings(theirs)
    return {
        name: (ours.get(name), theirs.get(name))
        for name in ours.keys() | theirs.keys()
        if ours.get(name) != theirs.get(name)
    }


# Intended differences between the recipes and the frameworks' configs, with reasons.
ON_PURPOSE = {
    r'model\.backbone\.type': 'the backbone under test',
    r'model\.backbone\.convert_weights': 'SwinDense infers the layout of a checkpoint',
    r'model\.backbone\.init_cfg\.checkpoint': "mmseg's converted copy of the authors' file",
    r'custom_imports\..*': 'imports swin_dense, which registers SwinDense',
    r'(swin\.|channels|pretrained|scales).*': 'variables of the recipes that other settings use',
    r'(pretrained|checkpoint_file|max_epochs|data_preprocessor\.).*': "variables of the frameworks' configs, likewise",
}

MMDET_RECIPES = [
    'mask-rcnn_swin-t-p4-w7_fpn_1x_coco',
    'mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco',
    'mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco',
    'mask-rcnn_swin-s-p4-w7_fpn_amp-ms-crop-3x_coco',
    'retinanet_swin-t-p4-w7_fpn_1x_coco',
]
MMSEG_RECIPES = [path.stem for path in (MMSEG / 'swin').glob('*ade20k-512x512.py')]


def test_all_swin_recipes_of_the_frameworks_exist():
    assert sorted(MMDET_RECIPES) == sorted(path.stem for path in (MMDET / 'swin').glob('*.py'))
    assert len(MMSEG_RECIPES) == 8
    assert {*MMDET_RECIPES, *MMSEG_RECIPES} < {path.stem for path in ZOO}


@pytest.mark.parametrize('name', MMDET_RECIPES + MMSEG_RECIPES)
def test_recipe_equals_the_frameworks_config(name):
    own = leaf(name)
    other = load((MMDET if name in MMDET_RECIPES else MMSEG) / f'swin/{name}.py')
    found = differences(own, other)
    unexpected = {key: pair for key, pair in found.items() if not any(re.fullmatch(p, key) for p in ON_PURPOSE)}
    assert not unexpected
    assert found['model.backbone.type'] == ('SwinDense', 'SwinTransformer')
    weights = [Path(config.model.backbone.init_cfg.checkpoint).stem for config in (own, other)]
    assert re.fullmatch(weights[0] + r'(_\d{8}-[0-9a-f]{8})?', weights[1])


@pytest.mark.parametrize('name', some(FRAMEWORKS, every=8))
def test_a_recipe_of_a_framework_is_its_config_with_the_type_changed(name):
    """So it has the same parameters and settings of the optimiser: test_drop_in.py compares those of both types."""
    ours, theirs = load_recipe(name), Config.fromfile(THEIRS[name])
    changed = {key.partition('[')[0]: pair for key, pair in differences(ours, theirs).items()}
    assert changed.pop('model.backbone.type') == ('SwinDense', 'SwinTransformer')
    assert changed.keys() <= {'custom_imports.imports', 'custom_imports.allow_failed_imports'}
    imported = theirs.get('custom_imports', {}).get('imports', [])  # a list, or one name as in some of mmseg's
    assert ours.custom_imports.imports == ['swin_dense', *([imported] if isinstance(imported, str) else imported)]


@pytest.mark.parametrize('command', ['flops', 'train'])
def test_a_missing_package_of_the_text_encoder_is_a_one_line_error(command, monkeypatch, capsys, tmp_path):
    monkeypatch.chdir(tmp_path)
    found = packages.find_spec
    monkeypatch.setattr(packages, 'find_spec', lambda name: None if name == 'transformers' else found(name))
    name = next(name for name in FRAMEWORKS if name.startswith('glip'))
    assert main([command, name]) == 2
    error = capsys.readouterr().err.strip().splitlines()[-1]
    assert error.endswith('needs transformers, which is not installed: pip install transformers')


def test_cascade_heads_equal_those_of_convnext_in_mmdet():
    """mmdet's ConvNeXt config has the cascade of Swin's authors: the same heads, data and schedule."""
    other = load(MMDET / 'convnext/cascade-mask-rcnn_convnext-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco.py')
    found = differences(leaf('cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco'), other)
    of_convnext = r'(model\.backbone|optim_wrapper|custom_imports|checkpoint_file|max_epochs)\b.*'
    of_ours = r'(swin|channels|pretrained|scales)\b.*'
    unexpected = {key: pair for key, pair in found.items() if not re.fullmatch(f'{of_convnext}|{of_ours}', key)}
    assert unexpected == {'param_scheduler[0].end': (500, 1000)}


# Recipes that equal no config of mmdet: drop path, warm-up iterations, epochs, half precision, multi-scale crops.
COCO_RECIPES = {
    'faster-rcnn_swin-t-p4-w7_fpn_1x_coco': (0.2, 1000, 12, False, False),
    'mask-rcnn_swin-s-p4-w7_fpn_ms-crop-3x_coco': (0.2, 1000, 36, False, True),
    'mask-rcnn_swin-t-p4-w7_fpn_official-amp-ms-crop-1x_coco': (0.1, 500, 12, True, True),
    'mask-rcnn_swin-t-p4-w7_fpn_official-amp-ms-crop-3x_coco': (0.2, 500, 36, True, True),
    'mask-rcnn_swin-s-p4-w7_fpn_official-amp-ms-crop-3x_coco': (0.2, 500, 36, True, True),
    'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-1x_coco': (0.0, 500, 12, True, True),
    'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco': (0.2, 500, 36, True, True),
    'cascade-mask-rcnn_swin-s-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco': (0.2, 500, 36, True, True),
    'cascade-mask-rcnn_swin-b-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco': (0.3, 500, 36, True, True),
}


@pytest.mark.parametrize('name', COCO_RECIPES)
def test_coco_recipe(name):
    drop_path, warm_up, epochs, half_precision, crops = COCO_RECIPES[name]
    config = leaf(name)
    assert config.model.backbone.drop_path_rate == drop_path
    assert config.train_cfg.max_epochs == epochs
    first, second = config.param_scheduler
    assert (first.type, first.begin, first.end, first.by_epoch) == ('LinearLR', 0, warm_up, False)
    assert (second.end, second.milestones) == (epochs, {12: [8, 11], 36: [27, 33]}[epochs])
    assert config.optim_wrapper.type == ('AmpOptimWrapper' if half_precision else 'OptimWrapper')
    optimizer = config.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 1e-4, 0.05)
    pipeline = config.train_dataloader.dataset.pipeline
    assert [step.type for step in pipeline if step.type == 'RandomChoice'] == ['RandomChoice'] * crops
    assert config.train_dataloader.batch_size == 2
    assert config.model.data_preprocessor.pad_size_divisor == 32


@pytest.mark.parametrize('path', [path for path in ZOO if path.parent.name == 'upernet'], ids=lambda path: path.stem)
def test_ade20k_recipe(path):
    config = load(path)
    crop = (640, 640) if '640x640' in path.stem else (512, 512)
    assert config.model.backbone.drop_path_rate == 0.3
    assert config.model.data_preprocessor.size == crop
    pipeline = {step.type: step for step in config.train_dataloader.dataset.pipeline}
    assert pipeline['RandomCrop'].crop_size == crop
    assert pipeline['RandomResize'].scale == (4 * crop[0], crop[0])
    optimizer = config.optim_wrapper.optimizer
    assert (optimizer.type, optimizer.lr, optimizer.weight_decay) == ('AdamW', 6e-5, 0.01)
    assert config.train_cfg.max_iters == 160_000
    assert config.train_dataloader.batch_size == 2
    warm_up, decay = config.param_scheduler
    assert (warm_up.start_factor, warm_up.end) == (1e-6, 1500)
    assert (decay.power, decay.eta_min, decay.end) == (1.0, 0.0, 160_000)
    assert decay.begin == (0 if 'official' in path.stem else 1500)
    assert config.model.auxiliary_head.loss_decode.loss_weight == 0.4


@pytest.mark.parametrize('path', BACKBONES, ids=lambda path: path.stem)
def test_backbone_file_matches_its_name(path):
    config = load(path)
    family, size = path.stem.split('_')[:2]
    window = 12 if 'w12' in path.stem else 7
    pretrain_size = {7: 224, 12: 384}[window]
    if family == 'swinv2':  # pretrained with a different window
        assert (config.swin.type, config.swin.window_size) == ('SwinDenseV2', 16)
        window, pretrain_size = config.swin.pretrained_window_size, 256
        assert window == 8
    else:
        assert (config.swin.type, config.swin.window_size) == ('SwinDense', window)
        assert config.swin.get('pretrain_img_size', 224) == pretrain_size
    arch = ARCHS[size[0]]
    assert Arch(config.swin.embed_dims, config.swin.depths, config.swin.num_heads) == arch
    assert tuple(config.channels) == arch.channels
    suffix = '_22k' if '22k' in path.stem else ''
    weights = f'{family}_{size}_patch4_window{window}_{pretrain_size}{suffix}.pth'
    address, _, digest = config.pretrained.partition('#')
    assert Path(address).name == weights
    assert re.fullmatch(r'sha384=[0-9a-f]{96}' if path.stem == 'swin_tiny' else '', digest)
    assert config.swin.init_cfg == {'type': 'Pretrained', 'checkpoint': config.pretrained}


@pytest.mark.parametrize('path', LEAVES, ids=lambda path: path.stem)
def test_every_config_builds_its_whole_model(path):
    config = load(path)
    model = build_on_meta(config)
    assert isinstance(model.backbone, SwinDense)
    assert all(parameter.is_meta for parameter in model.parameters())
    if path.parent.name != 'demo':
        assert set(re.findall(r'window(\d+)|-w(\d+)_', path.stem)[0]) - {''} == {str(model.backbone.window_size[0])}
        if path.parent.name == 'ablations':
            assert config.model.backbone.init_cfg is None  # there are no published weights, or none are wanted
        else:
            assert config.model.backbone.init_cfg.checkpoint == config.pretrained


@pytest.mark.parametrize(
    ('name', 'variable', 'suffix'),
    [
        ('mask-rcnn_swin-t-p4-w7_fpn_1x_coco', 'COCO_ROOT', '/'),
        ('mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco', 'COCO_ROOT', '/'),
        ('retinanet_swin-t-p4-w7_fpn_1x_coco', 'COCO_ROOT', '/'),
        ('swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512', 'ADE20K_ROOT', ''),
        ('swin-base-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640', 'ADE20K_ROOT', ''),
    ],
)
def test_an_environment_variable_sets_the_data_root(name, variable, suffix, monkeypatch):
    monkeypatch.setenv(variable, '/somewhere else/data')
    config = Config.fromfile(leaf(name).filename)
    for split in ('train', 'val', 'test'):
        assert config[f'{split}_dataloader'].dataset.data_root == '/somewhere else/data' + suffix
    if variable == 'COCO_ROOT':
        annotations = '/somewhere else/data/annotations/instances_val2017.json'
        assert config.val_evaluator.ann_file == config.test_evaluator.ann_file == annotations


SMALL = {
    'mask_rcnn': 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco',
    'cascade_mask_rcnn': 'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-1x_coco',
    'faster_rcnn': 'faster-rcnn_swin-t-p4-w7_fpn_1x_coco',
    'retinanet': 'retinanet_swin-t-p4-w7_fpn_1x_coco',
    'upernet': 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512',
}


def small(family):
    """Return the recipe of a family with fewer channels everywhere, in float32 because float16 needs a GPU."""
    config = copy.deepcopy(leaf(SMALL[family]))
    model = config.model
    model.backbone.update(TINY, init_cfg=None)
    channels = [16 * 2**stage for stage in model.backbone.get('out_indices', range(4))]
    config.optim_wrapper.type = 'OptimWrapper'
    if family == 'upernet':
        model.data_preprocessor.size = (64, 96)
        model.decode_head.update(in_channels=channels, channels=16)
        model.auxiliary_head.update(in_channels=channels[2], channels=16)
        return config
    model.neck.update(in_channels=channels, out_channels=16)
    if family == 'retinanet':
        model.bbox_head.update(in_channels=16, feat_channels=16)
        return config
    model.rpn_head.update(in_channels=16, feat_channels=16)
    heads = model.roi_head
    has_masks = family != 'faster_rcnn'
    for extractor in (heads.bbox_roi_extractor, *([heads.mask_roi_extractor] if has_masks else [])):
        extractor.out_channels = 16
    for head in [heads.bbox_head] if isinstance(heads.bbox_head, dict) else heads.bbox_head:
        head.update(in_channels=16, fc_out_channels=32)
        if 'conv_out_channels' in head:
            head.conv_out_channels = 16
    if has_masks:
        heads.mask_head.update(in_channels=16, conv_out_channels=16)
    stages = model.train_cfg.rcnn
    for stage in [stages] if isinstance(stages, dict) else stages:
        stage.sampler.num = 32
    model.test_cfg.rcnn.max_per_img = 10
    return config


def batch(family):
    if family != 'upernet':
        return demo_mm_inputs(2, [(3, 64, 96), (3, 60, 80)], num_items=[2, 1], num_classes=80, with_mask=True)
    shape = {'img_shape': (64, 96), 'ori_shape': (64, 96)}
    labels = [PixelData(data=torch.randint(150, (1, 64, 96))) for _ in range(2)]
    samples = [SegDataSample(gt_sem_seg=label, metainfo=shape) for label in labels]
    return {'inputs': [torch.randint(255, (3, 64, 96), dtype=torch.uint8) for _ in samples], 'data_samples': samples}


@pytest.mark.parametrize('family', SMALL)
def test_every_family_trains_a_step_and_predicts(family):
    config = small(family)
    init_default_scope(config.default_scope)
    model = MODELS.build(config.model)
    optim_wrapper = build_optim_wrapper(model, config.optim_wrapper)
    before = {name: parameter.clone() for name, parameter in model.backbone.named_parameters()}

    data = model.data_preprocessor(batch(family), training=True)
    loss, logs = model.parse_losses(model.train()(**data, mode='loss'))
    loss.backward()
    assert all(torch.isfinite(value).all() for value in logs.values())
    missing = [name for name, parameter in model.named_parameters() if parameter.grad is None]
    assert not missing
    optim_wrapper.step()
    assert any(not torch.equal(before[name], parameter) for name, parameter in model.backbone.named_parameters())

    with torch.no_grad():
        results = model.eval().test_step(batch(family))
    assert len(results) == 2
    if family == 'upernet':
        assert results[0].pred_sem_seg.data.shape == (1, 64, 96)
    else:
        assert results[0].pred_instances.bboxes.shape[1] == 4
        assert ('masks' in results[0].pred_instances) == (family in ('mask_rcnn', 'cascade_mask_rcnn'))


@pytest.mark.parametrize(
    ('family', 'weight_decay'), [('mask_rcnn', 0.05), ('cascade_mask_rcnn', 0.05), ('upernet', 0.01)]
)
def test_norms_and_position_biases_are_not_decayed(family, weight_decay):
    config = small(family)
    init_default_scope(config.default_scope)
    model = MODELS.build(config.model)
    groups = build_optim_wrapper(model, config.optim_wrapper).optimizer.param_groups
    decay = {id(parameter): group['weight_decay'] for group in groups for parameter in group['params']}
    for name, parameter in model.backbone.named_parameters():
        exempt = 'norm' in name or 'relative_position_bias_table' in name
        assert decay[id(parameter)] == (0 if exempt else weight_decay), name


class OnlyBackbone(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.backbone = MODELS.build({'type': kind, **TINY, 'use_abs_pos_embed': True})
        self.head = torch.nn.Linear(2, 2)


@pytest.mark.parametrize('path', [path for path in ZOO if 'swinv2' in path.stem], ids=lambda path: path.stem)
def test_exempt_parameters_of_swin_v2_are_not_decayed(path):
    config = copy.deepcopy(load(path))
    assert config.model.backbone.type == 'SwinDenseV2'
    config.optim_wrapper.type = 'OptimWrapper'
    model = OnlyBackbone('SwinDenseV2')
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    decay, rate = (
        {id(p): group[key] for group in wrapper.param_groups for p in group['params']} for key in ('weight_decay', 'lr')
    )
    has_layer_decay = 'layer-decay' in path.stem
    for name, parameter in model.named_parameters():
        exempt = any(key in name for key in ('norm', 'absolute_pos_embed', 'cpb_mlp', 'logit_scale'))
        exempt |= has_layer_decay and parameter.ndim == 1
        assert decay[id(parameter)] == (0 if exempt else config.optim_wrapper.optimizer.weight_decay), name
    rates = [rate[id(p)] for p in (model.backbone.patch_embed.projection.weight, model.head.weight)]
    # TINY has 8 blocks, so the patch embedding is 9 layers below the head.
    assert rates[0] == pytest.approx(rates[1] * (0.95**9 if has_layer_decay else 1))
    assert rates[1] == config.optim_wrapper.optimizer.lr
    if has_layer_decay:
        (hook,) = config.custom_hooks
        assert isinstance(HOOKS.build(hook), EMAHook)
        assert wrapper._accumulative_counts == 2


# The rows of the paper's table 4: options that differ from the full recipe.
ABLATIONS = {
    'no-shift': {'use_shift': False},
    'no-position': {'use_rel_pos_bias': False},
    'absolute': {'use_rel_pos_bias': False, 'use_abs_pos_embed': True},
    'absolute-relative': {'use_abs_pos_embed': True},
    'no-appearance': {'qk_scale': 0.0},
}


@pytest.mark.parametrize('path', [path for path in ZOO if path.parent.name == 'ablations'], ids=lambda path: path.stem)
def test_an_ablation_changes_only_its_options(path):
    row = path.stem.split('_')[2 if path.stem.startswith('cascade') else 1]
    full = leaf(
        'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop-3x_coco'
        if path.stem.startswith('cascade')
        else 'swin-tiny-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512'
    )
    expected = copy.deepcopy(full.to_dict())
    expected['model']['backbone'].update(ABLATIONS[row], init_cfg=None)
    assert load(path).to_dict() == expected
