import pytest
import torch

from swin_dense.checkpoint import export_state_dict, load_checkpoint
from tests.conftest import randomize

from .peer import IMAGE_SIZE, IMAGES, SHAPE, build, largest_difference, mmpretrain_swin, needed, prepared

backbones = needed('mmpretrain.models.backbones')
ARCH = {'embed_dims': 16, **SHAPE}


@torch.no_grad()
def test_backbone():
    backbone, peer = build(1), prepared(mmpretrain_swin(out_indices=(0, 1, 2, 3)), 2)
    load_checkpoint(backbone, peer.state_dict(), log=None)
    assert largest_difference(backbone(IMAGES), peer(IMAGES)) < 1e-9
    randomize(backbone, 3)
    peer.load_state_dict(export_state_dict(backbone, 'mmpretrain'))
    assert largest_difference(backbone(IMAGES), peer(IMAGES)) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize('final', ['norm3', 'norm'])
def test_classifier(final):
    backbone, peer = build(1), prepared(mmpretrain_swin(), 2)
    state = {f'backbone.{name.replace("norm3.", final + ".")}': tensor for name, tensor in peer.state_dict().items()}
    checkpoint = {'state_dict': {**state, 'head.fc.weight': torch.zeros(2, 128), 'head.fc.bias': torch.zeros(2)}}
    report = load_checkpoint(backbone, checkpoint, final_norm=final == 'norm', log=None)
    assert report.family == 'mmpretrain'
    assert set(report.new) == {f'norm{stage}.{leaf}' for stage in range(3) for leaf in ('weight', 'bias')}
    assert (backbone(IMAGES)[-1] - peer(IMAGES)[-1]).abs().max() < 1e-9


@torch.no_grad()
def test_a_pretraining_by_simmim(tmp_path):
    """A training file of mmpretrain's SimMIM, mask token and decoder included, gives the maps of its backbone."""
    from mmengine.registry import init_default_scope
    from mmpretrain.registry import MODELS

    init_default_scope('mmpretrain')
    window = {'block_cfgs': {'window_size': 2}}
    backbone = {'type': 'SimMIMSwinTransformer', 'arch': ARCH, 'img_size': IMAGE_SIZE, 'stage_cfgs': window}
    loss = {'type': 'PixelReconstructionLoss', 'criterion': 'L1', 'channel': 3}
    pretraining = {
        'type': 'SimMIM',
        'backbone': backbone,
        'neck': {'type': 'SimMIMLinearDecoder', 'in_channels': 128, 'encoder_stride': 32},
        'head': {'type': 'SimMIMHead', 'patch_size': 4, 'loss': loss},
    }
    theirs = prepared(MODELS.build(pretraining), 2)
    file = {
        'meta': {'epoch': 100},
        'state_dict': theirs.state_dict(),
        'message_hub': {},
        'optimizer': {},
    }
    torch.save(file, tmp_path / 'epoch_100.pth')
    ours = build(1)
    report = load_checkpoint(ours, tmp_path / 'epoch_100.pth', log=None)
    assert report.left_out['state_dict.backbone.mask_token'] == 'mask token of the pretraining'
    assert not report.unexpected
    assert set(report.new) == {f'norm{stage}.{leaf}' for stage in range(3) for leaf in ('weight', 'bias')}
    nothing_hidden = torch.zeros(
        len(IMAGES),
        IMAGE_SIZE // 4,
        IMAGE_SIZE // 4,
        dtype=torch.float64,
    )
    (expected,) = theirs.backbone(IMAGES, nothing_hidden)
    assert largest_difference(ours(IMAGES)[-1:], [expected]) < 1e-9


# Options of configs in public repositories: those of the window, and all, as in a dumped config.
WINDOW = {
    'img_size': 96,
    'stage_cfgs': {'block_cfgs': {'window_size': 3}},
    'use_abs_pos_embed': True,
}
DUMPED = {
    'img_size': 96,
    'window_size': 3,
    'out_indices': (1, 3),
    'out_after_downsample': False,
    'interpolate_mode': 'bicubic',
    'norm_eval': True,
    'pad_small_map': True,
    'norm_cfg': {'type': 'LN'},
    'stage_cfgs': {},
    'patch_cfg': {},
    'frozen_stages': 1,
}


@torch.no_grad()
@pytest.mark.parametrize(
    ('name', 'ours', 'options', 'size'),
    [
        ('SwinTransformer', 'SwinDense', WINDOW, (96, 96)),
        ('SwinTransformer', 'SwinDense', DUMPED, (70, 90)),
        ('SwinTransformer', 'SwinDense', {'stage_cfgs': [{'window_size': 2}] * 4, 'out_indices': (3,)}, (128, 150)),
        ('SwinTransformerV2', 'SwinDenseV2', {**DUMPED, 'pretrained_window_sizes': [2] * 4}, (70, 90)),
        # One window per stage: larger images than those for which the list is the clamped one, and any lists.
        ('SwinTransformerV2', 'SwinDenseV2', {'img_size': 128, 'window_size': [8, 8, 8, 4]}, (256, 288)),
        ('SwinTransformerV2', 'SwinDenseV2', {'window_size': [3, 7, 2, 5], 'out_indices': (0, 1, 2, 3)}, (256, 320)),
        ('SwinTransformerV2', 'SwinDenseV2', {'window_size': [3, 7, 2, 5], 'pad_small_map': True}, (70, 90)),
        ('SwinTransformer', 'SwinDense', {'stage_cfgs': [{'window_size': side} for side in (3, 7, 2, 4)]}, (128, 150)),
    ],
)
def test_options_of_mmpretrain_mean_the_same(name, ours, options, size):
    mm = pytest.importorskip('swin_dense.mm')
    version = {'extra_norm_every_n_blocks': 0} if name.endswith('V2') else {}
    if version:  # has no such option, and counts a patch merging to the stage behind it
        options = {key: x for key, x in options.items() if key not in ('out_after_downsample', 'frozen_stages')}
    theirs = randomize(getattr(backbones, name)(arch={**ARCH, **version}, **options).double(), 1)
    mine = getattr(mm, ours)(arch={**ARCH, **version}, **options).double()
    mine.load_state_dict(theirs.state_dict())
    theirs.train()  # freezes
    frozen = [{key for key, x in model.named_parameters() if not x.requires_grad} for model in (mine, theirs)]
    assert frozen[0] == frozen[1]
    theirs.eval()
    mine.eval()
    image = torch.randn(1, 3, *size, dtype=torch.float64)
    outputs = mine(image), theirs(image)
    assert largest_difference(*outputs) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize(
    ('name', 'ours', 'size'), [('SwinTransformer', 'SwinDense', 224), ('SwinTransformerV2', 'SwinDenseV2', 256)]
)
def test_a_config_with_nothing_but_the_name_of_an_architecture_means_the_same(name, ours, size):
    mm = pytest.importorskip('swin_dense.mm')
    options = {'arch': 'tiny', 'use_abs_pos_embed': True}
    theirs = randomize(getattr(backbones, name)(**options), 1)
    mine = getattr(mm, ours)(**options)
    mine.load_state_dict(theirs.state_dict())
    theirs.eval()
    mine.eval()
    image = torch.randn(1, 3, size, size)
    outputs = mine(image), theirs(image)
    assert [len(maps) for maps in outputs] == [1, 1]
    assert largest_difference(*outputs) < 1e-4


@pytest.mark.parametrize(
    ('config', 'ours', 'more'),
    [
        ('_base_/models/swin_transformer/tiny_224', 'SwinDense', {}),
        ('_base_/models/swin_transformer_v2/tiny_256', 'SwinDenseV2', {'extra_norm_every_n_blocks': 0}),
        # Windows per stage, and windows of the pretraining.
        (
            'swin_transformer_v2/swinv2-base-w16_in21k-pre_16xb64_in1k-256px',
            'SwinDenseV2',
            {'extra_norm_every_n_blocks': 0},
        ),
    ],
)
def test_a_config_of_mmpretrain_builds_and_trains_with_the_type_changed(config, ours, more):
    from pathlib import Path

    import mmpretrain
    from mmengine.config import Config
    from mmengine.registry import init_default_scope
    from mmpretrain.registry import MODELS
    from mmpretrain.structures import DataSample

    init_default_scope('mmpretrain')
    model = Config.fromfile(Path(mmpretrain.__path__[0], f'.mim/configs/{config}.py')).model
    model.head.update(in_channels=128, num_classes=3)
    model.train_cfg = None
    model.backbone.arch = {
        **ARCH,
        'depths': (2, 2, 2, 2),
        **more,
    }
    size = model.backbone.img_size
    theirs = randomize(MODELS.build(model).double(), 1)
    model.backbone.type = ours
    mine = randomize(MODELS.build(model).double(), 2)
    assert type(mine.backbone).__name__ == ours
    theirs.eval()
    mine.eval()
    mine.load_state_dict(theirs.state_dict(), strict=False)
    mine.head.load_state_dict(theirs.head.state_dict())
    images = torch.randn(2, 3, size, size, dtype=torch.float64)
    with torch.no_grad():
        assert (mine(images) - theirs(images)).abs().max() < 1e-9

    mine.train()
    samples = [DataSample().set_gt_label(label) for label in (0, 2)]
    loss = mine(images, samples, mode='loss')['loss']
    loss.backward()
    assert all(parameter.grad is not None for parameter in mine.parameters())
