"""Small models with queries, and RTMDet, with random weights that give varied classes and saturated masks."""

import copy
import importlib
from pathlib import Path

import torch
from mmengine.config import Config, ConfigDict
from mmengine.registry import MODELS, init_default_scope

from swin_dense.workbench.export import agreement
from tests.mm.demo import demo_config
from tests.workbench.export.whole_models import BACKBONES, CHANNELS

FILES = {
    'dino': 'mmdet dino/dino-4scale_r50_8xb2-12e_coco.py',
    'dino_5_scales': 'mmdet dino/dino-5scale_swin-l_8xb2-12e_coco.py',
    'deformable_detr': 'mmdet deformable_detr/deformable-detr_r50_16xb2-50e_coco.py',
    'deformable_detr_refine': 'mmdet deformable_detr/deformable-detr-refine_r50_16xb2-50e_coco.py',
    'deformable_detr_two_stage': 'mmdet deformable_detr/deformable-detr-refine-twostage_r50_16xb2-50e_coco.py',
    'mask2former': 'mmdet mask2former/mask2former_r50_8xb2-lsj-50e_coco.py',
    'mask2former_panoptic': 'mmdet mask2former/mask2former_r50_8xb2-lsj-50e_coco-panoptic.py',
    'maskformer': 'mmdet maskformer/maskformer_r50_ms-16xb1-75e_coco.py',
    'rtmdet': 'mmdet rtmdet/rtmdet_tiny_8xb32-300e_coco.py',
    'mmseg_mask2former': 'mmseg mask2former/mask2former_r50_8xb2-160k_ade20k-512x512.py',
    'mmseg_maskformer': 'mmseg maskformer/maskformer_r50-d32_8xb2-160k_ade20k-512x512.py',
}
QUERIES = 60
THINGS = 5
BACKGROUNDS = ('wall', 'sky', 'sea')
# DINO and the two-stage Deformable DETR of mmdet need 256 channels.
WIDE = ('dino', 'dino_5_scales', 'deformable_detr_two_stage')


def config_of(name, data):
    """Return the published config of a model with few channels and layers, for the demo data set in ``data``.

    Args:
        name: the model, with a Swin; 'dino on resnet' has a ResNet, which is exported in a fraction of the time.
        data: folder of the demo data set.
    """
    name, _, backbone = name.partition(' on ')
    framework, file = FILES[name].split()
    config = demo_config(framework, data)
    init_default_scope(framework)
    folder = Path(importlib.import_module(framework).__file__).parent / '.mim' / 'configs'
    published = Config.fromfile(folder / file)
    config.model = published.model
    _shrink(config.model, 256 if name in WIDE else 32)
    config.model.backbone = ConfigDict(BACKBONES[backbone or 'swin'])
    if name == 'rtmdet':
        return _rtmdet(config, published)
    if 'num_queries' in config.model:
        config.model.num_queries = QUERIES
        config.model.bbox_head.update(num_classes=THINGS, embed_dims=256 if name in WIDE else 32)
        config.model.test_cfg = ConfigDict(max_per_img=100)
        levels = range(4) if name == 'dino_5_scales' else range(1, 4)
        config.model.backbone.out_indices = tuple(levels)
        config.model.neck.in_channels = [CHANNELS[level] for level in levels]
        with_mask = False
    else:
        head = config.model.get('panoptic_head') or config.model.decode_head
        head.update(num_queries=QUERIES, in_channels=CHANNELS)
        stuff = len(BACKGROUNDS) if name in ('mask2former_panoptic', 'maskformer') else 0
        count = THINGS + max(stuff, framework == 'mmseg')
        if framework == 'mmseg':
            head.num_classes = count
        else:
            for part in (head, config.model.panoptic_fusion_head):
                part.update(num_things_classes=THINGS, num_stuff_classes=stuff)
            config.model.data_preprocessor.pop('batch_augments', None)
            config.model.test_cfg.update(object_mask_thr=0.1, iou_thr=0.1)
            if stuff:
                for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
                    meta = loader.dataset.metainfo
                    meta.classes = (*meta.classes[:THINGS], *BACKGROUNDS)
                    meta.palette = [
                        *meta.palette[:THINGS],
                        (90, 90, 90),
                        (60, 60, 120),
                        (120, 60, 60),
                    ]
        head.loss_cls.class_weight = [1.0] * count + [0.1]
        with_mask = True
    if framework == 'mmdet':
        config.val_evaluator.metric = config.test_evaluator.metric = ['bbox', 'segm'] if with_mask else 'bbox'
        for loader in (config.train_dataloader, config.val_dataloader, config.test_dataloader):
            for transform in loader.dataset.pipeline:
                if 'with_mask' in transform:
                    transform.with_mask = with_mask
    return config


def random_model(config, pixels, seed=0):
    """Return a model with random weights that predicts several classes in an image, with saturated masks."""
    init_default_scope(config.default_scope)
    torch.manual_seed(seed)
    model = MODELS.build(copy.deepcopy(config.model))  # DINO changes its config
    model.init_weights()
    for name, parameter in model.named_parameters():
        if name.endswith('.bias'):
            torch.nn.init.normal_(parameter, std=0.3)
        elif 'quer' in name or 'level_embed' in name:  # different queries predict different classes
            torch.nn.init.normal_(parameter, std=3.0)
        elif any(part in name for part in ('sampling_offsets', 'attention_weights', 'reg_branches')):
            torch.nn.init.normal_(parameter, std=0.1)
        elif any(
            part in name for part in ('cls_branches', 'cls_embed', 'cls_convs', 'reg_convs', 'rtm_cls', 'rtm_reg')
        ):
            torch.nn.init.normal_(
                parameter, std=(1 if 'rtm' in name or 'convs' in name else 4) / parameter[0].numel() ** 0.5
            )
        elif 'mask_embed.4' in name:
            parameter.data *= 30
    model.eval()
    for name, layer in model.named_modules():
        if name.endswith(('mask_feature', 'decode_head.conv_seg')):
            _centre(model, layer, pixels, config.default_scope)
    for name, layer in model.named_modules():
        if name.endswith(('cls_embed', 'mask_embed.0')):
            _spread(model, layer, pixels, config.default_scope)
    return model


@torch.no_grad()
def _centre(model, layer, pixels, framework):
    """Subtract the mean of a convolution's outputs over an image, so that masks are neither empty nor full."""
    layer.bias -= _last_call(model, layer, pixels, framework)[1].mean((0, 2, 3))


@torch.no_grad()
def _spread(model, layer, pixels, framework):
    """Normalise the inputs of a linear layer over the queries of an image, which are almost equal in a random model."""
    x = _last_call(model, layer, pixels, framework)[0].flatten(0, -2)[-QUERIES:]
    layer.weight /= x.std(0) + 1e-3
    layer.bias.copy_(torch.randn(len(layer.bias)) - layer.weight @ x.mean(0))


def _last_call(model, layer, pixels, framework):
    """Return the input and the output of a layer in its last call during a prediction."""
    found = []
    with layer.register_forward_hook(lambda _, args, out: found.append((args[0], out))):
        if framework == 'mmseg':
            agreement.classes_of_framework(model, pixels, pixels.shape[:2])
        else:
            agreement.predicted(model, pixels)
    return found[-1]


def _rtmdet(config, published):
    config.model.backbone.out_indices = (1, 2, 3)
    config.model.neck.update(
        in_channels=CHANNELS[1:],
        out_channels=32,
        num_csp_blocks=1,
        norm_cfg={'type': 'BN'},
    )
    config.model.bbox_head.update(
        num_classes=THINGS,
        in_channels=32,
        feat_channels=32,
        norm_cfg={'type': 'BN'},
    )
    pipeline = published.test_dataloader.dataset.pipeline
    for transform in pipeline:
        if transform.type in ('Resize', 'Pad'):
            transform['scale' if transform.type == 'Resize' else 'size'] = (320, 320)
    for loader in (config.val_dataloader, config.test_dataloader):
        loader.dataset.pipeline = pipeline
    return config


def _shrink(node, width):
    """Reduce channels, heads and layers of a published model config in place."""
    sizes = {
        'embed_dims': width,
        'feat_channels': width,
        'out_channels': width,
        'num_feats': width // 2,
        'feedforward_channels': 64,
        'num_heads': 4,
        'num_layers': 2,
        'num_groups': 4,
    }
    if isinstance(node, dict):
        for key, value in node.items():
            if key in sizes and isinstance(value, int):
                node[key] = sizes[key]
            _shrink(value, width)
        node.pop('init_cfg', None) if isinstance(node.get('init_cfg'), dict) else None
    elif isinstance(node, (list, tuple)):
        for value in node:
            _shrink(value, width)
