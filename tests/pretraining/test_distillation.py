"""Feature distillation against a textbook in float64: resizing, statistics, heads, loss and gradients; the teacher."""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from swin_dense import FeatureDistillation, SwinBackbone, SwinV2Backbone, Teacher, create_backbone, load_checkpoint
from tests.conftest import TINY, randomize

OPTIONS = {**TINY, 'window_size': 4, 'clamp_window': True, 'drop_path_rate': 0.0}
KINDS = {'swin': SwinBackbone, 'swinv2': SwinV2Backbone}
MEAN, STD = torch.tensor([[0.4, 0.5, 0.6], [0.1, 0.2, 0.3]], dtype=torch.float64)[:, :, None, None]
IMAGENET = torch.tensor([[0.485, 0.456, 0.406], [0.229, 0.224, 0.225]], dtype=torch.float64)[:, :, None, None]


def backbone(kind='swin', seed=1, **options):
    return randomize(KINDS[kind](**{**OPTIONS, **options}), seed)


def vit(patch=14, channels=24):
    """Return a teacher with patches like a ViT's, of its own statistics, which drops what is no whole patch."""
    network = randomize(nn.Sequential(nn.Conv2d(3, channels, patch, patch), nn.Tanh()), 3)
    return Teacher(network, [channels], [patch], mean=0.5, std=0.25, multiple=patch)


def images(height=96, width=128, bands=3, batch=2):
    return torch.randn(batch, bands, height, width, generator=torch.Generator().manual_seed(0))


def model_of(teacher, double=True, **options):
    model = FeatureDistillation(
        backbone(), teacher, mean=MEAN.flatten().tolist(), std=STD.flatten().tolist(), **options
    )
    randomize(model.heads, 5)
    return model.double() if double else model


def covered_mean(x, stride, size, side, counts):
    """Average a map pixel by pixel: each cell of the other grid is cut into strips, each of which has one value."""
    rows, columns = counts
    result = x.new_zeros(*x.shape[:2], rows, columns)
    for row in range(rows):
        for column in range(columns):
            total, area = 0.0, 0.0
            for ours_row in range(x.shape[2]):
                top = max(row * side[0], ours_row * stride)
                bottom = min((row + 1) * side[0], (ours_row + 1) * stride, size[0])
                for ours_column in range(x.shape[3]):
                    left = max(column * side[1], ours_column * stride)
                    right = min((column + 1) * side[1], (ours_column + 1) * stride, size[1])
                    if bottom > top and right > left:
                        common = (bottom - top) * (right - left)
                        total, area = total + common * x[:, :, ours_row, ours_column], area + common
            result[:, :, row, column] = total / area
    return result


def textbook(model, img, targets, hidden=None):
    """Return the loss, from the maps of the backbone and the teacher's maps with their strides and image sizes."""
    token = {} if hidden is None else {'hidden': hidden, 'mask_token': model.mask_token}
    ours = model.backbone(img, **token)
    losses = []
    for (level, target), head in zip(model.levels, model.heads, strict=True):
        theirs, side = targets[target]
        x = covered_mean(ours[level], model.backbone.out_strides[level], img.shape[2:], side, theirs.shape[2:])
        first, norm, _, last = head
        x = F.conv2d(x, first.weight[:, :, None, None], first.bias)
        mean, variance = x.mean(1, keepdim=True), x.var(1, unbiased=False, keepdim=True)
        x = (x - mean) / (variance + 1e-5).sqrt() * norm.weight[:, None, None] + norm.bias[:, None, None]
        x = x * (1 + torch.erf(x / math.sqrt(2))) / 2
        x = F.conv2d(x, last.weight[:, :, None, None], last.bias)
        cosine = (x * theirs).sum(1) / (x.square().sum(1) * theirs.square().sum(1)).sqrt()
        error = (x - theirs).abs()
        smooth = torch.where(error < 1, error.square() / 2, error - 0.5)
        losses.append(0.9 * (1 - cosine.mean()) + 0.1 * smooth.mean())
    return sum(losses) / len(losses)


def standardized(x):
    mean, variance = x.mean((0, 2, 3), keepdim=True), x.var((0, 2, 3), unbiased=False, keepdim=True)
    return (x - mean) / (variance + 1e-6).sqrt()


@pytest.mark.parametrize('mask_ratio', [0.0, 0.5])
@pytest.mark.parametrize(('height', 'width'), [(96, 128), (70, 45), (61, 7)])
def test_loss_and_gradients_of_the_textbook_with_one_map(height, width, mask_ratio):
    """All levels learn the one map of a teacher with patches of 14 pixels, whose image is resized to whole patches."""
    model, img = model_of(vit(), mask_ratio=mask_ratio), images(height, width).double()
    patches = [max(1, round(side / 14)) for side in (height, width)]
    whole = img * STD + MEAN
    whole = F.interpolate(whole, [14 * side for side in patches], mode='bilinear', antialias=True)
    maps = model.teacher.network((whole - 0.5) / 0.25).detach()
    side = (height / patches[0], width / patches[1])
    mask, hidden = None, None
    if mask_ratio:
        mask = model.draw_mask(img)
        hidden = mask.repeat_interleave(8, 1).repeat_interleave(8, 2)[:, : -(-height // 4), : -(-width // 4)]
    expected = textbook(model, img, [(standardized(maps), side)], hidden)
    (loss,) = model(img, mask=mask).values()
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)
    parameters = list(model.parameters())
    found, wanted = (torch.autograd.grad(one, parameters) for one in (loss, expected))
    torch.testing.assert_close(found, wanted, atol=1e-12, rtol=1e-9)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('out_indices', [None, (3,)])
def test_loss_of_the_textbook_with_a_swin_as_teacher(kind, out_indices):
    """At an odd size, the last cells of both pyramids reach beyond the image; level by level, or all on one map."""
    teacher = randomize(KINDS[kind](**{**OPTIONS, 'embed_dims': 32, 'out_indices': out_indices}), 2)
    model, img = model_of(teacher), images(70, 45).double()
    assert model.levels == tuple((level, 0 if out_indices else level) for level in range(4))
    whole = img * STD + MEAN
    with torch.no_grad():
        maps = teacher((whole - IMAGENET[0]) / IMAGENET[1])
    targets = [(standardized(one), (stride, stride)) for one, stride in zip(maps, teacher.out_strides, strict=True)]
    (loss,) = model(img).values()
    torch.testing.assert_close(loss, textbook(model, img, targets), atol=1e-12, rtol=1e-12)


def test_targets_are_standardised_over_the_training_so_far_and_not_in_evaluation():
    model = model_of(vit())
    batches = [images().double() + shift for shift in (0, 3, -2)]
    seen = []
    for img in batches:
        seen.append(model.teacher(model._undo(img))[0])
        (target,) = model.targets(img)
        everything = torch.cat(seen)
        mean, variance = everything.mean((0, 2, 3)), everything.var((0, 2, 3), unbiased=False)
        expected = (seen[-1] - mean[:, None, None]) / (variance[:, None, None] + 1e-6).sqrt()
        torch.testing.assert_close(target, expected, atol=1e-9, rtol=1e-9)
    before = copy.deepcopy(model.state_dict())
    assert before['statistics.0.count'] == everything.numel() // 24
    (target,) = model.eval().targets(batches[-1])
    torch.testing.assert_close(target, expected, atol=1e-12, rtol=1e-12)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    resumed = model_of(vit())
    resumed.load_state_dict(before)
    torch.testing.assert_close(resumed.eval().targets(batches[0]), model.targets(batches[0]))


def test_statistics_are_those_of_all_processes(monkeypatch):
    """Another process, whose sums ``all_reduce`` adds, has maps of its own."""
    x, y = (images(channels, 9, bands=4).double() + shift for channels, shift in ((5, 1), (5, -3)))
    mean = torch.cat([x, y]).mean((0, 2, 3))
    of_the_other = iter([y.mean((0, 2, 3)), (y - mean[:, None, None]).square().mean((0, 2, 3))])
    monkeypatch.setattr(torch.distributed, 'is_initialized', lambda: True)
    monkeypatch.setattr(torch.distributed, 'get_world_size', lambda: 2)
    monkeypatch.setattr(torch.distributed, 'all_reduce', lambda values: values.add_(next(of_the_other)))
    model = FeatureDistillation(backbone(), Teacher(nn.Identity(), [4], [1]), mean=None, std=None).double()
    model.statistics[0](x)
    torch.testing.assert_close(model.statistics[0].mean, mean, atol=1e-12, rtol=1e-12)
    variance = torch.cat([x, y]).var((0, 2, 3), unbiased=False)
    torch.testing.assert_close(model.statistics[0].variance, variance, atol=1e-12, rtol=1e-12)


def test_levels_of_the_nearest_stride_or_as_told():
    two = Teacher(lambda x: (F.avg_pool2d(x, 8, ceil_mode=True), F.avg_pool2d(x, 16, ceil_mode=True)), [3, 3], [8, 16])
    assert FeatureDistillation(backbone(), two).levels == ((0, 0), (1, 0), (2, 1), (3, 1))
    model = FeatureDistillation(backbone(out_indices=(1, 3)), two, levels=[[0, 0], [1, 1], [1, 0]])
    assert model.levels == ((0, 0), (1, 1), (1, 0))
    assert len(model.heads) == 3
    model(images())['loss_features'].backward()
    assert all(p.grad is not None for p in model.parameters())


def test_half_precision_trains():
    model = model_of(vit(), double=False, mask_ratio=0.6)
    with torch.autocast('cpu', torch.bfloat16):
        losses = model(images())
    losses['loss_features'].backward()
    assert losses['loss_features'].dtype == torch.float32
    assert losses['loss_features'].isfinite()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize('kind', KINDS)
def test_the_result_loads_in_one_step_without_heads(kind, tmp_path):
    model = FeatureDistillation(backbone(kind), vit(), mask_ratio=0.6)
    torch.save(model.state_dict(), tmp_path / 'distilled.pth')
    more = {'pretrained_window_size': 4, 'window_size': 4} if kind == 'swinv2' else {}
    options = {'num_heads': (1, 2, 4, 8), 'clamp_window': True, **more}
    made = create_backbone(checkpoint=str(tmp_path / 'distilled.pth'), **options)
    assert type(made) is KINDS[kind]
    img = images(128, 128)
    for ours, theirs in zip(made(img), model.backbone.eval()(img), strict=True):
        assert torch.equal(ours, theirs)
    report = load_checkpoint(backbone(kind, 3), str(tmp_path / 'distilled.pth'), log=None)
    assert not report.missing
    assert not report.unexpected


@pytest.mark.parametrize(
    ('make', 'options', 'words'),
    [
        ({}, {'mask_patch': 30}, 'mask_patch must be a multiple of 4'),
        ({}, {'mask_ratio': 1.0}, 'mask_ratio must be at least 0, which hides nothing, and below 1'),
        ({'in_channels': 4}, {'mean': 0.5, 'std': 0.5}, 'images with 3 channels, the backbone with 4'),
        ({}, {'mean': [0.5, 0.5]}, 'mean must be one value per channel'),
        ({}, {'levels': [[0, 0], [1, 4]]}, 'levels must be pairs of indices'),
        ({}, {'levels': [[0, 0], [1, 1]]}, r'maps \[2, 3\] of the backbone.*with out_indices=\(0, 1\)'),
    ],
)
def test_wrong_options_are_refused(make, options, words):
    with pytest.raises(ValueError, match=words):
        FeatureDistillation(SwinBackbone(**{**OPTIONS, **make}), backbone(seed=2), **options)


def test_other_wrong_inputs_are_refused():
    swin = backbone()
    with pytest.raises(ValueError, match='are the same module'):
        FeatureDistillation(swin, swin)
    with pytest.raises(TypeError, match='must be a SwinBackbone'):
        FeatureDistillation(nn.Conv2d(3, 3, 1), swin)
    with pytest.raises(TypeError, match=r'class Conv2d is not known.*Teacher\(network, out_channels'):
        FeatureDistillation(swin, nn.Conv2d(3, 3, 1))
    with pytest.raises(ValueError, match='one entry for each map'):
        Teacher(nn.Identity(), [3, 3], [1])
    with pytest.raises(ValueError, match=r'mask must be \(2, 3, 4\)'):
        FeatureDistillation(swin, vit(), mask_ratio=0.5)(images(), mask=torch.ones(2, 3, 3, dtype=torch.bool))
    wrong = Teacher(nn.Conv2d(3, 8, 16, 16), [8], [16])  # without multiple=16 it leaves out what is no whole patch
    with pytest.raises(ValueError, match=r'gives the shapes \[\(2, 8, 7, 8\)\].* its maps have \[\(2, 8, 6, 8\)\]'):
        wrong(torch.rand(2, 3, 100, 128))
