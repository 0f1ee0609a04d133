"""SwinClassifier gives the logits of other libraries' classifiers."""

from functools import partial

import pytest
import torch

from swin_dense import SwinClassifier, load_checkpoint
from swin_dense.models.classifier import create_classifier
from tests.conftest import randomize

from .peer import needed

# At 224 pixels the last map is as large as the window. A clamped window then has no shift; only classifiers clamp.
SHAPE = {'depths': (2, 2, 2, 2), 'num_heads': (1, 2, 4, 8)}
OURS = {'embed_dims': 16, **SHAPE}


def images(size):
    return torch.randn(1, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def timm_model(name, size, window):
    timm = needed('timm')
    return timm.create_model(name, img_size=size, window_size=window, embed_dim=16, num_classes=5, **SHAPE)


def torchvision_model(parts, size, window):
    swin = needed('torchvision.models.swin_transformer')
    kinds = {key: getattr(swin, kind) for key, kind in parts.items()}
    depths, heads = list(SHAPE['depths']), list(SHAPE['num_heads'])
    return swin.SwinTransformer([4, 4], 16, depths, heads, [window] * 2, num_classes=5, **kinds)


def transformers_model(kind, size, window):
    transformers = needed('transformers')
    config = getattr(transformers, f'{kind}Config')(
        embed_dim=16,
        depths=list(SHAPE['depths']),
        num_heads=list(SHAPE['num_heads']),
        window_size=window,
        image_size=size,
        num_labels=5,
    )
    return getattr(transformers, f'{kind}ForImageClassification')(config)


def mmpretrain_model(kind, more, size, window):
    needed('mmpretrain')
    from mmpretrain.models import ImageClassifier

    backbone = {'type': kind, 'arch': {'embed_dims': 16, **SHAPE, **more}, 'img_size': size, 'window_size': window}
    head = {'type': 'LinearClsHead', 'num_classes': 5, 'in_channels': 128}
    return ImageClassifier(backbone, neck={'type': 'GlobalAveragePooling'}, head=head)


V1 = {
    'timm': partial(timm_model, 'swin_tiny_patch4_window7_224'),
    'torchvision': partial(torchvision_model, {}),
    'transformers': partial(transformers_model, 'Swin'),
    'mmpretrain': partial(mmpretrain_model, 'SwinTransformer', {}),
}
PARTS = {'block': 'SwinTransformerBlockV2', 'downsample_layer': 'PatchMergingV2'}
V2 = {
    'timm': partial(timm_model, 'swinv2_tiny_window8_256'),
    'torchvision': partial(torchvision_model, PARTS),
    'transformers': partial(transformers_model, 'Swinv2'),
    'mmpretrain': partial(mmpretrain_model, 'SwinTransformerV2', {'extra_norm_every_n_blocks': 0}),
}


def logits(family, peer, img):
    if family == 'mmpretrain':
        return peer.head(peer.extract_feat(img))
    return peer(img).logits if family == 'transformers' else peer(img)


@torch.no_grad()
@pytest.mark.parametrize('family', V1)
@pytest.mark.parametrize(('size', 'window'), [(224, 7), (384, 12)])
def test_v1(family, size, window):
    peer = randomize(V1[family](size, window).double(), 1)
    peer.eval()
    classifier = randomize(SwinClassifier(OURS, 5, window_size=window).double().eval(), 2)
    report = load_checkpoint(classifier, peer.state_dict(), log=None)
    assert (report.family, report.missing, report.unexpected) == (family, [], [])
    expected = logits(family, peer, images(size))
    assert (classifier(images(size)) - expected).abs().max() < 1e-9
    dense = randomize(SwinClassifier(OURS, 5, window_size=window, clamp_window=False).double().eval(), 2)
    load_checkpoint(dense, peer.state_dict(), log=None)
    assert (dense(images(size)) - expected).abs().max() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize('family', V2)
@pytest.mark.parametrize('window', [8, 16])
def test_v2(family, window):
    # torchvision does not shrink a window that is larger than the map, as the authors do; at 512 pixels no window is.
    size = 512 if family == 'torchvision' and window == 16 else 256
    windows = [8, 8, 8, 8] if window == 8 else [16, 16, 16, 8]
    peer = V2[family](size, windows if family == 'mmpretrain' else window)
    peer = randomize(peer.double(), 1)
    peer.eval()
    classifier = SwinClassifier('swinv2_t', 5, **OURS, window_size=window)
    classifier = randomize(classifier.double().eval(), 2)
    report = load_checkpoint(classifier, peer.state_dict(), log=None)
    assert (report.family, report.version, report.missing, report.unexpected) == (family, 2, [], [])
    assert (classifier(images(size)) - logits(family, peer, images(size))).abs().max() < 1e-9


@torch.no_grad()
def test_create_classifier_infers_the_options_from_the_checkpoint():
    peer = V1['torchvision'](224, 4).eval()
    classifier = create_classifier(peer.state_dict())
    assert (classifier.backbone.window_size, classifier.head.out_features) == ((4, 4), 5)
    torch.testing.assert_close(classifier(images(128).float()), peer(images(128).float()))
