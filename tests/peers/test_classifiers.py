"""SwinClassifier gives the logits of other libraries' classifiers."""

import pytest
import torch

from swin_dense import SwinClassifier, load_checkpoint
from tests.conftest import randomize

from .peer import SHAPE, mmpretrain_swin, needed, prepared, timm_swin, torchvision_swin, transformers_swin

# At 224 pixels the last map is as large as the window. A clamped window then has no shift; only classifiers clamp.
OURS = {'embed_dims': 16, **SHAPE}


def images(size):
    return torch.randn(
        1,
        3,
        size,
        size,
        dtype=torch.float64,
        generator=torch.Generator().manual_seed(0),
    )


def mmpretrain_classifier(version, img_size, window_size):
    needed('mmpretrain')
    from mmpretrain.models import ImageClassifier

    backbone = mmpretrain_swin(version, img_size=img_size, window_size=window_size)
    head = {'type': 'LinearClsHead', 'num_classes': 5, 'in_channels': 128}
    return ImageClassifier(backbone, neck={'type': 'GlobalAveragePooling'}, head=head)


def transformers_classifier(version, img_size, window_size):
    sizes = {'image_size': img_size, 'window_size': window_size, 'num_labels': 5}
    return transformers_swin(version, 'ForImageClassification', **sizes)


def timm_classifier(version, img_size, window_size):
    return timm_swin(version, img_size=img_size, window_size=window_size, num_classes=5)


def torchvision_classifier(version, img_size, window_size):
    return torchvision_swin(version, window_size, num_classes=5)


PEERS = {
    'timm': timm_classifier,
    'torchvision': torchvision_classifier,
    'transformers': transformers_classifier,
    'mmpretrain': mmpretrain_classifier,
}


def build(name, window, seed=2, **options):
    classifier = SwinClassifier(name, 5, **OURS, window_size=window, **options)
    return randomize(classifier.double().eval(), seed)


def logits(family, peer, img):
    if family == 'mmpretrain':
        return peer.head(peer.extract_feat(img))
    return peer(img).logits if family == 'transformers' else peer(img)


@torch.no_grad()
@pytest.mark.parametrize('family', PEERS)
@pytest.mark.parametrize(('size', 'window'), [(224, 7), (384, 12)])
def test_v1(family, size, window):
    img = images(size)
    peer = prepared(PEERS[family](1, size, window), 1)
    expected = logits(family, peer, img)
    classifier = build('swin_t', window)
    report = load_checkpoint(classifier, peer.state_dict(), log=None)
    assert (report.family, report.missing, report.unexpected) == (family, [], [])
    assert (classifier(img) - expected).abs().max() < 1e-9
    dense = build('swin_t', window, clamp_window=False)
    load_checkpoint(dense, peer.state_dict(), log=None)
    assert (dense(img) - expected).abs().max() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize('family', PEERS)
@pytest.mark.parametrize('window', [8, 16])
def test_v2(family, window):
    # torchvision does not shrink a window that is larger than the map, as the authors do; at 512 pixels no window is.
    size = 512 if family == 'torchvision' and window == 16 else 256
    theirs = window
    if family == 'mmpretrain':
        theirs = [window, window, window, 8]
    img = images(size)
    peer = prepared(PEERS[family](2, size, theirs), 1)
    classifier = build('swinv2_t', window)
    report = load_checkpoint(classifier, peer.state_dict(), log=None)
    assert (report.family, report.version, report.missing, report.unexpected) == (family, 2, [], [])
    assert (classifier(img) - logits(family, peer, img)).abs().max() < 1e-9
