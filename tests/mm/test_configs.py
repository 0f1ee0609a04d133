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
from tests.conftest import TINY, equal_weights, some
from tests.mm.demo import with_tiny_swin

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
for name, place in FRAMEWORKS.items():
    package, _, file = place.partition('::')
    THEIRS[name] = PLACES[package] / file
UPERNETS = [path for path in ZOO if path.parent.name == 'upernet']
ABLATED = [path for path in ZOO if path.parent.name == 'ablations']
BACKBONES = sorted((CONFIGS / '_base_/backbones').glob('*.py'))


@functools.cache
def load(path):
    is_ours = CONFIGS in path.parents
    return Config.fromfile(path, import_custom_modules=is_ours)  # mmdet's ConvNeXt config would import mmpretrain


def leaf(name):
    (path,) = (path for path in ZOO if path.stem == name)
    return load(path)


def flattened(value, name=''):
    """Yield the (name, value) pairs of a config, as in ('a.b[0].c', 3)."""
    if isinstance(value, dict):
        for key, item in value.items():
            # The scopes that ``mmdet::`` and ``mmseg::`` bases add are left out.
            if key not in ('_scope_', 'requires_grad'):
                yield from flattened(item, f'{name}.{key}' if name else key)
    elif isinstance(value, (list, tuple)):
        for index, item in enumerate(value):
            yield from flattened(item, f'{name}[{index}]')
    else:
        yield name, value


def settings(config):
    """Return a config as {'a.b[0].c': value}, with the defaults of mmdet's Swin for options that it omits."""
    parameters = inspect.signature(SwinTransformer).parameters.values()
    defaults = {p.name: p.default for p in parameters if p.default is not p.empty}
    config = config.to_dict()
    config['model']['backbone'] = {**defaults, **config['model']['backbone']}
    return dict(flattened(config))


def differences(ours, theirs, expected=''):
    """Return the settings that differ, as {setting: (ours, theirs)}, but for those that match a pattern.

    None means that a setting is missing or None.
    """
    ours, theirs = settings(ours), settings(theirs)
    found = {}
    for name in ours.keys() | theirs.keys():
        pair = ours.get(name), theirs.get(name)
        if pair[0] != pair[1] and not re.fullmatch(expected, name):
            found[name] = pair
    return found


# Intended differences between the recipes and the frameworks' configs, with reasons.
ON_PURPOSE = '|'.join(
    [
        r'model\.backbone\.type',  # the backbone under test
        r'model\.backbone\.convert_weights',  # SwinDense infers the layout of a checkpoint
        r'model\.backbone\.init_cfg\.checkpoint',  # mmseg's converted copy of the authors' file
        r'custom_imports\..*',  # imports swin_dense, which registers SwinDense
        r'(swin\.|channels|pretrained|scales).*',  # variables of the recipes that other settings use
        r'(pretrained|checkpoint_file|max_epochs|data_preprocessor\.).*',  # variables of the frameworks' configs
    ]
)

MMDET_RECIPES = [
    'mask-rcnn_swin-t-p4-w7_fpn_1x_coco',
    'mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco',
    'mask-rcnn_swin-t-p4-w7_fpn_amp-ms-crop-3x_coco',
    'mask-rcnn_swin-s-p4-w7_fpn_amp-ms-crop-3x_coco',
    'retinanet_swin-t-p4-w7_fpn_1x_coco',
]
CASCADE = 'cascade-mask-rcnn_swin-t-p4-w7_fpn_4conv1fc-giou_amp-ms-crop'
MMSEG_RECIPES = [path.stem for path in (MMSEG / 'swin').glob('*ade20k-512x512.py')]


def test_all_swin_recipes_of_the_frameworks_exist():
    assert sorted(MMDET_RECIPES) == sorted(path.stem for path in (MMDET / 'swin').glob('*.py'))
    assert len(MMSEG_RECIPES) == 8
    assert {*MMDET_RECIPES, *MMSEG_RECIPES} < {path.stem for path in ZOO}


@pytest.mark.parametrize('name', MMDET_RECIPES + MMSEG_RECIPES)
def test_recipe_equals_the_frameworks_config(name):
    own = leaf(name)
    other = load((MMDET if name in MMDET_RECIPES else MMSEG) / f'swin/{name}.py')
    assert not differences(own, other, ON_PURPOSE)
    backbones = [config.model.backbone for config in (own, other)]
    assert [backbone.type for backbone in backbones] == ['SwinDense', 'SwinTransformer']
    ours, theirs = (Path(backbone.init_cfg.checkpoint).stem for backbone in backbones)
    assert re.fullmatch(ours + r'(_\d{8}-[0-9a-f]{8})?', theirs)


@pytest.mark.parametrize('name', some(FRAMEWORKS, every=8))
def test_a_recipe_of_a_framework_is_its_config_with_the_type_changed(name):
    """So it has the same parameters and settings of the optimiser: test_drop_in.py compares those of both types."""
    ours, theirs = load_recipe(name), Config.fromfile(THEIRS[name])
    changed = differences(ours, theirs, r'custom_imports\..*')
    assert changed == {'model.backbone.type': ('SwinDense', 'SwinTransformer')}
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
    of_convnext = r'(model\.backbone|optim_wrapper|custom_imports|checkpoint_file|max_epochs)\b.*'
    of_ours = r'(swin|channels|pretrained|scales)\b.*'
    found = differences(leaf(f'{CASCADE}-3x_coco'), other, f'{of_convnext}|{of_ours}')
    assert found == {'param_scheduler[0].end': (500, 1000)}


# Recipes that equal no config of mmdet: drop path, warm-up iterations, epochs, half precision.
COCO_RECIPES = {
    'faster-rcnn_swin-t-p4-w7_fpn_1x_coco': (0.2, 1000, 12, False),
    'mask-rcnn_swin-s-p4-w7_fpn_ms-crop-3x_coco': (0.2, 1000, 36, False),
    'mask-rcnn_swin-t-p4-w7_fpn_official-amp-ms-crop-1x_coco': (0.1, 500, 12, True),
    'mask-rcnn_swin-t-p4-w7_fpn_official-amp-ms-crop-3x_coco': (0.2, 500, 36, True),
    'mask-rcnn_swin-s-p4-w7_fpn_official-amp-ms-crop-3x_coco': (0.2, 500, 36, True),
    f'{CASCADE}-1x_coco': (0.0, 500, 12, True),
    f'{CASCADE}-3x_coco': (0.2, 500, 36, True),
    f'{CASCADE}-3x_coco'.replace('swin-t', 'swin-s'): (0.2, 500, 36, True),
    f'{CASCADE}-3x_coco'.replace('swin-t', 'swin-b'): (0.3, 500, 36, True),
}


def assert_has(config, **expected):
    """Compare some entries of a config."""
    assert {name: config[name] for name in expected} == expected


@pytest.mark.parametrize('name', COCO_RECIPES)
def test_coco_recipe(name):
    drop_path, warm_up, epochs, half_precision = COCO_RECIPES[name]
    config = leaf(name)
    assert config.model.backbone.drop_path_rate == drop_path
    assert config.model.data_preprocessor.pad_size_divisor == 32
    assert config.train_cfg.max_epochs == epochs
    first, second = config.param_scheduler
    assert_has(first, type='LinearLR', begin=0, end=warm_up, by_epoch=False)
    assert_has(second, end=epochs, milestones={12: [8, 11], 36: [27, 33]}[epochs])
    assert config.optim_wrapper.type == ('AmpOptimWrapper' if half_precision else 'OptimWrapper')
    assert_has(config.optim_wrapper.optimizer, type='AdamW', lr=1e-4, weight_decay=0.05)
    has_crops = any(step.type == 'RandomChoice' for step in config.train_dataloader.dataset.pipeline)
    assert has_crops == ('ms-crop' in name)
    assert config.train_dataloader.batch_size == 2


@pytest.mark.parametrize('path', UPERNETS, ids=lambda path: path.stem)
def test_ade20k_recipe(path):
    config = load(path)
    crop = (640, 640) if '640x640' in path.stem else (512, 512)
    assert config.model.backbone.drop_path_rate == 0.3
    assert config.model.data_preprocessor.size == crop
    pipeline = {step.type: step for step in config.train_dataloader.dataset.pipeline}
    assert pipeline['RandomCrop'].crop_size == crop
    assert pipeline['RandomResize'].scale == (4 * crop[0], crop[0])
    assert_has(config.optim_wrapper.optimizer, type='AdamW', lr=6e-5, weight_decay=0.01)
    assert config.train_cfg.max_iters == 160_000
    assert config.train_dataloader.batch_size == 2
    warm_up, decay = config.param_scheduler
    assert_has(warm_up, start_factor=1e-6, end=1500)
    assert_has(
        decay,
        begin=0 if 'official' in path.stem else 1500,
        end=160_000,
        power=1.0,
        eta_min=0.0,
    )
    assert config.model.auxiliary_head.loss_decode.loss_weight == 0.4


@pytest.mark.parametrize('path', BACKBONES, ids=lambda path: path.stem)
def test_backbone_file_matches_its_name(path):
    config = load(path)
    swin = config.swin
    family, size = path.stem.split('_')[:2]
    arch = ARCHS[size[0]]
    assert Arch(swin.embed_dims, swin.depths, swin.num_heads) == arch
    assert tuple(config.channels) == arch.channels
    if family == 'swinv2':  # pretrained with a different window
        assert_has(swin, type='SwinDenseV2', window_size=16, pretrained_window_size=8)
        trained = 'window8_256'
    else:
        window, image = (12, 384) if 'w12' in path.stem else (7, 224)
        assert_has(swin, type='SwinDense', window_size=window)
        assert swin.get('pretrain_img_size', 224) == image
        trained = f'window{window}_{image}'
    suffix = '_22k' if '22k' in path.stem else ''
    address, _, digest = config.pretrained.partition('#')
    assert Path(address).name == f'{family}_{size}_patch4_{trained}{suffix}.pth'
    assert re.fullmatch(r'sha384=[0-9a-f]{96}' if path.stem == 'swin_tiny' else '', digest)
    assert swin.init_cfg == {'type': 'Pretrained', 'checkpoint': config.pretrained}


@pytest.mark.parametrize('path', LEAVES, ids=lambda path: path.stem)
def test_every_config_builds_its_whole_model(path):
    config = load(path)
    model = build_on_meta(config)
    assert isinstance(model.backbone, SwinDense)
    assert all(parameter.is_meta for parameter in model.parameters())
    if path.parent.name == 'demo':
        return
    window = re.search(r'(?:window|-w)(\d+)', path.stem)[1]
    assert model.backbone.window_size == (int(window), int(window))
    # For an ablation there are no published weights, or none are wanted.
    weights = config.model.backbone.init_cfg
    assert (weights is None) == (path.parent.name == 'ablations')
    assert weights is None or weights.checkpoint == config.pretrained


@pytest.mark.parametrize(
    ('name', 'variable', 'root'),
    [
        ('mask-rcnn_swin-t-p4-w7_fpn_ms-crop-3x_coco', 'COCO_ROOT', '/some where/'),
        ('retinanet_swin-t-p4-w7_fpn_1x_coco', 'COCO_ROOT', '/some where/'),
        ('swin-base-patch4-window7-in22k-pre_upernet_official-8xb2-160k_ade20k-640x640', 'ADE20K_ROOT', '/some where'),
    ],
)
def test_an_environment_variable_sets_the_data_root(name, variable, root, monkeypatch):
    path = leaf(name).filename  # kept for other tests, and therefore read without the variable
    monkeypatch.setenv(variable, '/some where')
    config = Config.fromfile(path)
    for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
        assert loader.dataset.data_root == root
    if variable == 'COCO_ROOT':
        annotations = '/some where/annotations/instances_val2017.json'
        assert config.val_evaluator.ann_file == config.test_evaluator.ann_file == annotations


MASK_RCNN = 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco'
UPERNET = 'swin-tiny-patch4-window7-in1k-pre_upernet_8xb2-160k_ade20k-512x512'
ONE_OF_EACH = [
    MASK_RCNN,
    UPERNET,
    f'{CASCADE}-1x_coco',
    'faster-rcnn_swin-t-p4-w7_fpn_1x_coco',
    'retinanet_swin-t-p4-w7_fpn_1x_coco',
]
SMALLER = {
    256: 16,
    512: 32,
    1000: 20,
    1024: 32,
    2000: 20,
}


def shrink(model):
    """Make the heads of a model narrow, and let them look at few proposals."""
    for key, value in model.items():
        if isinstance(value, int):
            model[key] = SMALLER.get(value, value)
        for part in value if isinstance(value, list) else [value]:
            if isinstance(part, dict):
                shrink(part)


def batch(is_detector):
    if is_detector:
        return demo_mm_inputs(
            2,
            [(3, 64, 96), (3, 60, 80)],
            num_items=[2, 1],
            num_classes=80,
            with_mask=True,
        )
    images, samples = [], []
    shape = {'img_shape': (64, 96), 'ori_shape': (64, 96)}
    for _ in range(2):
        label = PixelData(data=torch.randint(150, (1, 64, 96)))
        samples.append(SegDataSample(gt_sem_seg=label, metainfo=shape))
        images.append(
            torch.randint(
                255,
                (3, 64, 96),
                dtype=torch.uint8,
            )
        )
    return {'inputs': images, 'data_samples': samples}


@pytest.mark.parametrize('name', ONE_OF_EACH)
def test_every_family_trains_a_step_and_predicts(name):
    config = copy.deepcopy(leaf(name))
    shrink(config.model)
    with_tiny_swin(config.model)
    config.optim_wrapper.type = 'OptimWrapper'  # float16 needs a GPU
    is_detector = config.default_scope == 'mmdet'
    if not is_detector:
        config.model.data_preprocessor.size = (64, 96)
    init_default_scope(config.default_scope)
    model = MODELS.build(config.model)
    optim_wrapper = build_optim_wrapper(model, config.optim_wrapper)
    before = copy.deepcopy(model.backbone)

    data = model.data_preprocessor(batch(is_detector), training=True)
    loss, logs = model.parse_losses(model.train()(**data, mode='loss'))
    loss.backward()
    assert all(torch.isfinite(value).all() for value in logs.values())
    assert [name for name, parameter in model.named_parameters() if parameter.grad is None] == []
    optim_wrapper.step()
    assert not equal_weights(before, model.backbone)

    with torch.no_grad():
        results = model.eval().test_step(batch(is_detector))
    assert len(results) == 2
    if is_detector:
        assert results[0].pred_instances.bboxes.shape[1] == 4
        assert ('masks' in results[0].pred_instances) == ('mask' in name)
    else:
        assert results[0].pred_sem_seg.data.shape == (1, 64, 96)


class OnlyBackbone(torch.nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.backbone = MODELS.build({'type': kind, **TINY, 'use_abs_pos_embed': True})
        self.head = torch.nn.Linear(2, 2)


def setting_of(wrapper, key):
    """Return a setting of the optimiser by the identity of each parameter."""
    settings = {}
    for group in wrapper.param_groups:
        settings |= dict.fromkeys(map(id, group['params']), group[key])
    return settings


V2_RECIPES = [path.stem for path in ZOO if 'swinv2' in path.stem]
EXEMPT = ('norm', 'absolute_pos_embed', 'relative_position_bias_table', 'cpb_mlp', 'logit_scale')


@pytest.mark.parametrize('name', [MASK_RCNN, UPERNET, f'{CASCADE}-1x_coco', *V2_RECIPES])
def test_norms_and_positions_are_not_decayed(name):
    config = copy.deepcopy(leaf(name))
    assert config.model.backbone.type == ('SwinDenseV2' if name in V2_RECIPES else 'SwinDense')
    config.optim_wrapper.type = 'OptimWrapper'
    model = OnlyBackbone(config.model.backbone.type)
    wrapper = build_optim_wrapper(model, config.optim_wrapper)
    decay, rate = setting_of(wrapper, 'weight_decay'), setting_of(wrapper, 'lr')
    optimizer = config.optim_wrapper.optimizer
    has_layer_decay = 'layer-decay' in name
    for name, parameter in model.named_parameters():
        is_exempt = any(key in name for key in EXEMPT) or (has_layer_decay and parameter.ndim == 1)
        assert decay[id(parameter)] == (0 if is_exempt else optimizer.weight_decay), name
    assert rate[id(model.head.weight)] == optimizer.lr
    # TINY has 8 blocks, so the patch embedding is 9 layers below the head.
    factor = 0.95**9 if has_layer_decay else 1
    assert rate[id(model.backbone.patch_embed.projection.weight)] == pytest.approx(optimizer.lr * factor)
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


@pytest.mark.parametrize('path', ABLATED, ids=lambda path: path.stem)
def test_an_ablation_changes_only_its_options(path):
    of_cascade = path.stem.startswith('cascade')
    row = path.stem.split('_')[2 if of_cascade else 1]
    of_upernet = 'swin-tiny-patch4-window7-in1k-pre_upernet_official-8xb2-160k_ade20k-512x512'
    full = leaf(f'{CASCADE}-3x_coco' if of_cascade else of_upernet)
    expected = copy.deepcopy(full.to_dict())
    expected['model']['backbone'].update(ABLATIONS[row], init_cfg=None)
    assert load(path).to_dict() == expected
