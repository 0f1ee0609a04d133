"""SwinClassifier gives the logits of other libraries' classifiers."""

import pytest
import torch

from swin_dense import SwinClassifier, load_checkpoint
from tests.conftest import randomize

from .peer import SHAPE, mmpretrain_swin, needed, prepared, timm_swin, torchvision_swin, transformers_swin

# At 224 pixels the last map is as large as the window. A clamped window then has no shift; only classifiers clamp.
OURS = {'embed_dims': 16, **SHAPE}


def images(size):
    return torch.randn(1, 3, size, size, dtype=torch.float64, generator=torch.Generator().manual_seed(0))


def mmpretrain_classifier(version, img_size, window_size):
    needed('mmpretrain')
    from mmpretrain.models import ImageClassifier

    backbone = mmpretrain_swin(version, img_size=img_size, window_size=window_size)
    head = {'type': 'LinearClsHead', 'num_classes': 5, 'in_channels': 128}
    return ImageClassifier(backbone, neck={'type': 'GlobalAveragePooling'}, head=head)


PEERS = {
    'timm': lambda version, size, window: timm_swin(version, img_size=size, window_size=window, num_classes=5),
    'torchvision': lambda version, size, window: torchvision_swin(version, window, num_classes=5),
    'transformers': lambda version, size, window: transformers_swin(
        version, 'ForImageClassification', image_size=size, window_size=window, num_labels=5
    ),
    'mmpretrain': mmpretrain_classifier,
}


def logits(family, peer, img):
    if family == 'mmpretrain':
        return peer.head(peer.extract_feat(img))
    return peer(img).logits if family == 'transformers' else peer(img)


@torch.no_grad()
@pytest.mark.parametrize('family', PEERS)
@pytest.mark.parametrize(('size', 'window'), [(224, 7), (384, 12)])
def test_v1(family, size, window):
    peer = prepared(PEERS[family](1, size, window), 1)
    classifier = randomize(SwinClassifier(OURS, 5, window_size=window).double().eval(), 2)
    report = load_checkpoint(classifier, peer.state_dict(), log=None)
    assert (report.family, report.missing, report.unexpected) == (family, [], [])
    expected = logits(family, peer, images(size))
    assert (classifier(images(size)) - expected).abs().max() < 1e-9
    dense = randomize(SwinClassifier(OURS, 5, window_size=window, clamp_window=False).double().eval(), 2)
    load_checkpoint(dense, peer.state_dict(), log=None)
    assert (dense(images(size)) - expected).abs().max() > 1e-6


@torch.no_grad()
@pytest.mark.parametrize('family', PEERS)
@pytest.mark.parametrize('window', [8, 16])
def test_v2(family, window):
    # torchvision does not shrink a window that is larger than the map, as the authors do; at 512 pixels no window is.
    size = 512 if family == 'torchvision' and window == 16 else 256
    windows = [8, 8, 8, 8] if window == 8 else [16, 16, 16, 8]
    peer = prepared(PEERS[family](2, size, windows if family == 'mmpretrain' else window), 1)
    classifier = SwinClassifier('swinv2_t', 5, **OURS, window_size=window)
    classifier = randomize(classifier.double().eval(), 2)
    report = load_checkpoint(classifier, peer.state_dict(), log=None)
    assert (report.family, report.version, report.missing, report.unexpected) == (family, 2, [], [])
    assert (classifier(images(size)) - logits(family, peer, images(size))).abs().max() < 1e-9
