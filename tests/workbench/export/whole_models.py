"""Small detectors and segmentors, trained for some steps on the demo data so that they detect something."""

import copy
import itertools
from pathlib import Path

import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope
from mmengine.runner import Runner, set_random_seed

from tests.mm.demo import demo_config

CHANNELS = [16, 32, 64, 128]
SWIN = {
    'type': 'SwinDense',
    'embed_dims': 16,
    'depths': (1, 1, 2, 1),
    'num_heads': (1, 2, 4, 8),
    'drop_path_rate': 0.0,
}
BACKBONES = {
    'swin': SWIN,
    'v2': {**SWIN, 'type': 'SwinDenseV2', 'window_size': 8},
    'resnet': {
        'type': 'ResNet',
        'depth': 18,
        'base_channels': 16,
        'norm_cfg': {'type': 'BN'},
    },
}
HEADS = {
    'mask_rcnn': 'mask-rcnn_r50_fpn',
    'faster_rcnn': 'faster-rcnn_r50_fpn',
    'cascade_mask_rcnn': 'cascade-mask-rcnn_r50_fpn',
    'cascade_rcnn': 'cascade-rcnn_r50_fpn',
    'retinanet': 'retinanet_r50_fpn',
}
WIDTH = 32  # of necks and heads


def picture_of(data):
    return data / 'coco' / 'train2017' / '000000000001.jpg'


def config_of(name, data, backbone='swin'):
    """Return a small config of a detector or of 'upernet', for the demo data set in ``data``."""
    config = demo_config('mmseg' if name == 'upernet' else 'mmdet', data)
    if name == 'upernet':
        config.model.decode_head.channels = config.model.auxiliary_head.channels = WIDTH
        config.model.decode_head.in_channels = CHANNELS
        config.model.auxiliary_head.in_channels = CHANNELS[2]
    else:
        init_default_scope('mmdet')
        config.model = Config.fromfile(_mmdet_config(HEADS[name])).model
        _make_small(config.model)
        if 'mask' not in name:
            for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
                for transform in loader.dataset.pipeline:
                    transform.pop('with_mask', None)
    config.model.backbone = ConfigDict(BACKBONES[backbone])
    config.model.pop('pretrained', None)
    return config


def train(config, path, steps, rate=2e-3):
    """Train the model of a config for some steps and save its weights; return ``path``."""
    init_default_scope(config.default_scope)
    set_random_seed(0)  # also of numpy, whose numbers flip the images
    model = MODELS.build(copy.deepcopy(config.model))  # DINO changes its config
    model.init_weights()
    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=rate)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, rate, total_steps=steps)
    for batch in itertools.islice(itertools.cycle(Runner.build_dataloader(config.train_dataloader, seed=0)), steps):
        data = model.data_preprocessor(batch, training=True)
        loss, _ = model.parse_losses(model(**data, mode='loss'))
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 10.0)
        optimizer.step()
        schedule.step()
    torch.save({'state_dict': model.state_dict(), 'meta': {}}, path)
    return path


def _mmdet_config(name):
    import mmdet

    return Path(mmdet.__file__).parent / '.mim' / 'configs' / '_base_' / 'models' / f'{name}.py'


def _make_small(model):
    model.neck.update(in_channels=CHANNELS, out_channels=WIDTH)
    if 'roi_head' not in model:
        model.neck.start_level = 1
        model.bbox_head.update(
            in_channels=WIDTH,
            feat_channels=WIDTH,
            stacked_convs=1,
            num_classes=5,
        )
        model.bbox_head.anchor_generator.octave_base_scale = 2
        return
    model.rpn_head.update(in_channels=WIDTH, feat_channels=WIDTH)
    model.rpn_head.anchor_generator.scales = [4]
    model.train_cfg.rpn_proposal.update(nms_pre=300, max_per_img=100)
    model.test_cfg.rpn.update(nms_pre=300, max_per_img=100)
    if model.type == 'CascadeRCNN':  # which learns slowly
        model.test_cfg.rcnn.score_thr = 0.02
    heads = model.roi_head
    for head in _each(heads.bbox_head):
        head.update(in_channels=WIDTH, fc_out_channels=64, num_classes=5)
    heads.bbox_roi_extractor.out_channels = WIDTH
    if heads.get('mask_head'):
        heads.mask_roi_extractor.out_channels = WIDTH
        for head in _each(heads.mask_head):
            head.update(in_channels=WIDTH, conv_out_channels=WIDTH, num_convs=1, num_classes=5)


def _each(part):
    return part if isinstance(part, list) else [part]
