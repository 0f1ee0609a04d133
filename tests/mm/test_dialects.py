"""Options of configs for other Swins, as they occur in public repositories, build with one warning that lists all."""

import sys
from unittest import mock

import pytest
import torch
from mmdet.models.backbones import SwinTransformer

from swin_dense import SwinDense, SwinDenseV2
from swin_dense.mm import backbone as module
from tests.conftest import TINY, assert_within, randomize
from tests.processes import python

AUTHORS = {
    'embed_dim': 16,
    'depths': [2, 2, 2, 2],
    'num_heads': [1, 2, 4, 8],
    'window_size': 7,
    'mlp_ratio': 4.0,
    'qkv_bias': True,
    'qk_scale': None,
    'drop_rate': 0.0,
    'attn_drop_rate': 0.0,
    'drop_path_rate': 0.3,
    'ape': False,
    'patch_norm': True,
    'out_indices': (0, 1, 2, 3),
    'use_checkpoint': False,
}
BEVDET = {
    **TINY,
    'pretrain_img_size': 224,
    'patch_size': 4,
    'window_size': 12,
    'mlp_ratio': 4,
    'strides': (4, 2, 2, 2),
    'out_indices': (2, 3),
    'use_abs_pos_embed': False,
    'act_cfg': {'type': 'GELU'},
    'norm_cfg': {'type': 'LN', 'requires_grad': True},
    'pretrain_style': 'official',
}
MMPRETRAIN = {
    'arch': TINY,
    'img_size': 384,
    'stage_cfgs': {'block_cfgs': {'window_size': 12}},
}
# Every default of mmpretrain's Swin, which dumped configs contain.
DUMPED = {
    'arch': TINY,
    'img_size': 224,
    'patch_size': 4,
    'in_channels': 3,
    'window_size': 7,
    'drop_rate': 0.0,
    'drop_path_rate': 0.1,
    'out_indices': (1, 2, 3),
    'out_after_downsample': False,
    'use_abs_pos_embed': False,
    'interpolate_mode': 'bicubic',
    'with_cp': False,
    'frozen_stages': -1,
    'norm_eval': False,
    'pad_small_map': False,
    'norm_cfg': {'type': 'LN'},
    'stage_cfgs': {},
    'patch_cfg': {},
}
LAST = {'out_indices': (3,), 'clamp_window': True}

# The options of a config, the same in the names here, and the words that the warning contains.
CONFIGS = {
    'authors': (
        AUTHORS,
        {**TINY, 'drop_path_rate': 0.3},
        'ape is use_abs_pos_embed\n  embed_dim is embed_dims\n  use_ch',
    ),
    'QueryInst': (
        {**AUTHORS, 'in_chans': 4, 'use_checkpoint': True, 'frozen_stages': 2, 'norm_layer': torch.nn.LayerNorm},
        {**TINY, 'in_channels': 4, 'with_cp': True, 'frozen_stages': 1, 'drop_path_rate': 0.3},
        'frozen_stages=2 becomes 1',
    ),
    'defaults of the authors': ({**TINY, 'ape': False}, {**TINY, 'drop_path_rate': 0.2}, 'the default of the authors'),
    'classifier of the authors': (
        {**TINY, 'img_size': 224, 'in_chans': 3, 'num_classes': 1000, 'fused_window_process': False},
        {**TINY, **LAST},
        'num_classes=1000 is left out: a backbone has no classifier',
    ),
    'BEVDet': (
        {**BEVDET, 'output_missing_index_as_none': False, 'return_stereo_feat': False},
        {**TINY, 'window_size': 12, 'out_indices': (2, 3)},
        "pretrain_style='official' is what is computed here anyway",
    ),
    'mmpretrain': (MMPRETRAIN, {**TINY, **LAST, 'pretrain_img_size': 384, 'window_size': 12}, 'becomes window_size=12'),
    'per stage': (
        {**MMPRETRAIN, 'stage_cfgs': [{'window_size': 12}] * 4},
        {**TINY, **LAST, 'pretrain_img_size': 384, 'window_size': 12},
        'becomes window_size=12',
    ),
    'dumped by mmpretrain': (
        DUMPED,
        {**TINY, 'out_indices': (1, 2, 3), 'clamp_window': True},
        "interpolate_mode='bicubic' is what is computed here anyway",
    ),
    'BEVDet frozen': (
        {**BEVDET, 'frozen_stages': 2},
        {**TINY, 'window_size': 12, 'out_indices': (2, 3), 'frozen_stages': 1},
        'frozen_stages=2 becomes 1: the authors and BEVDet count the patch embedding',
    ),
    'another window in a stage': (
        {**MMPRETRAIN, 'stage_cfgs': [{'window_size': 12}, *[{'block_cfgs': {'window_size': 6}}] * 3]},
        {**TINY, **LAST, 'pretrain_img_size': 384, 'window_size': [12, 6, 6, 6]},
        'becomes window_size=[(12, 12), (6, 6), (6, 6), (6, 6)]',
    ),
    'name of mmpretrain': (
        {'arch': 'tiny', 'frozen_stages': 0, 'drop_path_rate': 0.2},
        {'arch': 't', **LAST, 'frozen_stages': 1, 'drop_path_rate': 0.2},
        "arch='tiny' is mmpretrain's name, so its defaults apply; with 't', mmdet's do",
    ),
    'other meanings in mmpretrain': (
        {'arch': TINY, 'img_size': 224, 'drop_rate': 0.1, 'norm_cfg': {'type': 'LN', 'eps': 1e-6}},
        {**TINY, **LAST, 'drop_rate': 0.1, 'norm_cfg': {'type': 'LN', 'eps': 1e-6}},
        'drop_rate acts in the blocks too, in mmpretrain only behind the patch embedding\n'
        '  img_size is pretrain_img_size\n'
        '  norm_cfg applies to all norms, in mmpretrain only to those of the outputs',
    ),
    'frozen behind the outputs': (
        {**TINY, 'out_indices': (0, 1), 'frozen_stages': 3},
        {**TINY, 'out_indices': (0, 1), 'frozen_stages': 2},
        'frozen_stages=3 becomes 2: the stages behind the last of out_indices are not built',
    ),
    'frozen by mmpretrain': (
        {**DUMPED, 'frozen_stages': 0, 'pad_small_map': True},
        {**TINY, 'out_indices': (1, 2, 3), 'frozen_stages': 1},
        'frozen_stages=0 becomes 1: mmpretrain counts from the first stage',
    ),
}


def described(backbone):
    """Return all that an output or a gradient depends on besides the values of parameters."""
    blocks = [block for stage in backbone.stages for block in stage.blocks]
    return (
        {name: (tuple(x.shape), x.requires_grad) for name, x in backbone.named_parameters()},
        {
            name: str(getattr(backbone, name))
            for name in ('out_indices', 'clamp_window', 'position_grid', 'window_size')
        },
        [(str(block.drop_path), block.with_cp, str(block.attn)) for block in blocks],
        [m.eps for m in backbone.modules() if isinstance(m, torch.nn.LayerNorm)],
    )


def test_stages_behind_the_outputs_are_frozen_as_in_mmdet():
    """mmdet builds all stages; the parameters that both have are frozen in both, or in none."""
    options = {**TINY, 'out_indices': (0, 1), 'frozen_stages': 3}
    theirs, ours = SwinTransformer(**options), SwinDense(**options)
    theirs.train()
    frozen = {name: not parameter.requires_grad for name, parameter in theirs.named_parameters()}
    assert all(frozen[name] is not parameter.requires_grad for name, parameter in ours.named_parameters())
    with pytest.raises(ValueError, match='between -1 and 2'):
        SwinDense(**{**options, 'frozen_stages': 5})


@pytest.mark.parametrize(
    ('given', 'ours', 'words'),
    CONFIGS.values(),
    ids=CONFIGS,
)
def test_a_config_for_another_swin_builds_with_one_warning(given, ours, words):
    with torch.device('meta'), mock.patch.object(module, 'print_log') as log:
        found = SwinDense(**given)
        assert log.call_count == 1
        assert words in log.call_args.args[0]
        assert described(found) == described(SwinDense(**ours))
        assert log.call_count == 1


# Options of mmpretrain's Swin V2, and the window, clamping and position grid that they mean.
PADDED = {
    'arch': {**TINY, 'extra_norm_every_n_blocks': 0},
    'pad_small_map': True,
    'use_abs_pos_embed': True,
}
PER_STAGE = ((16, 16), (16, 16), (16, 16), (8, 8))
OF_V2 = [
    ({**PADDED, 'window_size': [8] * 4, 'img_size': 256}, (8, 8), False, (64, 64)),
    (PADDED, (8, 8), False, (64, 64)),
    ({'img_size': 256, 'window_size': [16, 16, 16, 8]}, PER_STAGE, True, (64, 64)),
    ({'img_size': 256, 'window_size': (8, 16)}, (8, 16), True, (64, 64)),  # (height, width) in all stages
    ({'window_size': [16, 16, 16, 8]}, PER_STAGE, True, (64, 64)),  # at 256, mmpretrain's default
]


@pytest.mark.parametrize(('options', 'window', 'clamps', 'grid'), OF_V2)
def test_a_swin_v2_of_mmpretrain(options, window, clamps, grid):
    with torch.device('meta'):
        backbone = SwinDenseV2(**options)
    assert backbone.window_size == window
    assert backbone.out_indices == (3,)
    assert backbone.clamp_window == clamps
    assert backbone.position_grid == grid


def test_windows_per_stage_of_mmpretrain_equal_clamping():
    windows = {'window_size': [16, 16, 16, 8], 'pretrained_window_sizes': [12, 12, 12, 6]}
    with torch.device('meta'):
        backbone = SwinDenseV2(img_size=256, **windows)
    assert backbone.pretrained_window_size == (12, 12, 12, 6)
    last = backbone.stages[3].blocks[1].attn
    assert last.windows_on(8, 8) == ((8, 8), (0, 0))
    with pytest.raises(ValueError, match=r'one of them for each of the 4 stages, got 3: \[16, 16, 8\]'):
        SwinDenseV2(img_size=256, window_size=[16, 16, 8])
    with pytest.raises(ValueError, match='give one'):
        SwinDenseV2(pretrained_window_sizes=[8] * 4, pretrained_window_size=8)


@torch.no_grad()
@pytest.mark.parametrize('stereo', [True, False])
@pytest.mark.parametrize('nones', [True, False])
@pytest.mark.parametrize('out_indices', [(1, 2, 3), (2,)])
def test_the_outputs_of_bevdet(stereo, nones, out_indices):
    """A map of the first stage without a norm, and None for stages that are not returned, with the values of mmdet."""
    swin = pytest.importorskip('mmdet.models.backbones.swin').SwinTransformer
    theirs = randomize(swin(**TINY)).double()
    theirs.eval()  # returns None
    options = {'return_stereo_feat': stereo, 'output_missing_index_as_none': nones}
    ours = SwinDense(**TINY, **options, pretrain_style='official', out_indices=out_indices).double().eval()
    ours.load_state_dict(theirs.state_dict(), strict=False)
    img = torch.randn(2, 3, 50, 71, dtype=torch.float64)
    without_norm = []
    theirs.stages[0].register_forward_hook(lambda module, args, out: without_norm.append(out[2]))
    maps = theirs(img)
    expected = [maps[stage] if stage in out_indices else None for stage in range(4)]
    if not nones:
        expected = [one for one in expected if one is not None]
    if stereo:
        first = without_norm[0].unflatten(1, maps[0].shape[2:])
        expected.insert(0, first.permute(0, 3, 1, 2))
    found = ours(img)
    assert [one is None for one in found] == [one is None for one in expected]
    pairs = [(one, exact) for one, exact in zip(found, expected, strict=True) if exact is not None]
    for (one, exact), channels, stride in zip(pairs, ours.out_channels, ours.out_strides, strict=True):
        assert_within(one, exact, 1e-9)
        assert one.shape[1] == channels
        assert one.shape[2] == -(-50 // stride)


def test_what_no_swin_here_has_is_refused_with_all_names_at_once():
    with pytest.raises(TypeError) as error:
        SwinDense(
            **{**AUTHORS, 'window_siz': 3},
            pretrained2d=True,
            out_sizes=[384, 768],
            pretrain_style='timm',
            stage_cfgs={'block_cfgs': {'window_size': 7, 'ffn_ratio': 2}},
            out_after_downsample=True,
        )
    message = str(error.value)
    for words in (
        "'window_siz'; did you mean 'window_size'?",
        "'pretrained2d'",
        "'out_sizes'",
        "'pretrain_style': 'timm' is not supported; configs of SwinDense may have 'official' or 'mmcls'",
        "'stage_cfgs': {'block_cfgs': {'window_size': 7, 'ffn_ratio': 2}} is not supported",
        "'out_after_downsample': True is not supported",
    ):
        assert words in message
    assert "embed_dim'" not in message


def test_contradictory_options_are_refused_by_the_name_that_was_given():
    with pytest.raises(ValueError, match=r'embed_dim and embed_dims .*; give one'):
        SwinDense(**TINY, embed_dim=16)
    with pytest.raises(ValueError, match=r'in_channels are the same .*; give one'):
        SwinDense(**TINY, in_chans=3, num_channels=4)
    with pytest.raises(TypeError, match=r"'stage_cfgs': .* is not supported; only one window for all blocks of a"):
        SwinDense(arch=TINY, img_size=96, stage_cfgs=[{'window_size': 12}, {}, {}, {}])


@pytest.mark.parametrize(('scope', 'other'), [('mmdet', 'mmseg'), ('mmseg', 'mmdet')])
@pytest.mark.parametrize('name', ['SwinDense', 'SwinDenseV2'])
def test_the_scope_of_another_framework_before_the_name(scope, other, name):
    registry = pytest.importorskip(f'{scope}.registry')
    mmengine = pytest.importorskip('mmengine.registry')
    with mmengine.DefaultScope.overwrite_default_scope(scope):
        assert type(registry.MODELS.build({'type': f'{other}.{name}', **TINY})).__name__ == name


@pytest.mark.parametrize('scope', ['mmpretrain', 'mmcls'])
def test_the_scope_of_a_package_that_is_not_installed_resolves_without_it(scope):
    root = pytest.importorskip('mmengine.registry')
    mmdet = pytest.importorskip('mmdet.registry')
    for registry in (root.MODELS, mmdet.MODELS):
        assert registry.get(f'{scope}.SwinDense') is SwinDense
        assert registry.get(f'{scope}.SwinDenseV2') is SwinDenseV2
        assert registry.get(f'{scope}.ConvNeXt') is None
    assert scope not in sys.modules


def test_a_scope_before_the_name_resolves_if_mmdet_is_imported_later():
    code = """
import sys
import swin_dense
from mmengine.registry import MODELS
assert 'mmdet' not in sys.modules
assert MODELS.get('mmdet.SwinDense') is swin_dense.SwinDense
assert all(type(module) is not type for module in sys.modules.values())
"""
    python('-W', 'ignore', '-c', code)
