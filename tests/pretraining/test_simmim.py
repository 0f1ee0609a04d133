"""SimMIM: masks, loss, target and teacher against a textbook, and what it leaves on the backbone: nothing."""

import math

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image

from swin_dense import SimMIM, SwinBackbone, SwinV2Backbone, create_backbone, load_checkpoint
from tests.conftest import ROOT, TINY, needs, randomize
from tests.processes import python

OPTIONS = {**TINY, 'window_size': 4, 'clamp_window': True, 'drop_path_rate': 0.0}
KINDS = {'swin': SwinBackbone, 'swinv2': SwinV2Backbone}


def backbone(kind='swin', **options):
    return randomize(KINDS[kind](**{**OPTIONS, 'out_indices': (3,), **options}), 1)


def images(height=96, width=128, bands=3, batch=2):
    return torch.randn(batch, bands, height, width, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize(('height', 'width', 'hidden'), [(192, 192, 22), (96, 128, 8), (101, 33, 5), (7, 5, 1)])
def test_every_image_has_its_own_mask_with_the_authors_share_of_hidden_cells(height, width, hidden):
    model, img = SimMIM(backbone()), images(height, width, batch=50)
    mask = model.draw_mask(img, torch.Generator().manual_seed(0))
    assert mask.shape == (50, math.ceil(height / 32), math.ceil(width / 32))
    assert mask.flatten(1).sum(1).tolist() == [hidden] * 50
    assert len({tuple(one.flatten().tolist()) for one in mask}) > 20 or mask[0].numel() == 1
    assert torch.equal(mask, model.draw_mask(img, torch.Generator().manual_seed(0)))
    hiding = mask.float().mean(0)  # no cell is preferred
    assert (hiding - hiding.mean()).abs().max() < 0.3


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(('height', 'width', 'bands'), [(96, 128, 3), (101, 75, 5), (9, 130, 1)])
def test_hidden_pixels_have_no_influence(kind, height, width, bands):
    model = SimMIM(backbone(kind, in_channels=bands), mask_patch=8).eval()
    img = images(height, width, bands)
    mask = model.draw_mask(img)
    hidden = model.hidden_pixels(img, mask)
    assert hidden.shape == (2, 1, height, width)
    for row, column in ((0, 0), (height - 1, width - 1)):
        assert torch.equal(hidden[:, 0, row, column], mask[:, row // 8, column // 8])
    expected = model.reconstruct(img, mask)
    assert expected.shape == img.shape
    changed = img.where(~hidden, torch.randn_like(img))
    assert torch.equal(model.reconstruct(changed, mask), expected)
    img.requires_grad_()
    (gradient,) = torch.autograd.grad(model.reconstruct(img, mask).square().sum(), img)
    assert (gradient[hidden.expand_as(gradient)] == 0).all()
    assert gradient.abs().max() > 0


def authors_target(img, side):
    """Normalise each pixel by the unbiased statistics of its neighbourhood, cut at the border."""
    target = torch.empty_like(img)
    for row in range(img.shape[2]):
        for column in range(img.shape[3]):
            top, left = max(0, row - side // 2), max(0, column - side // 2)
            part = img[:, :, top : row + side // 2 + 1, left : column + side // 2 + 1].flatten(2)
            target[:, :, row, column] = (img[:, :, row, column] - part.mean(2)) / (part.var(2) + 1e-6).sqrt()
    return target


@pytest.mark.parametrize('norm_target', [None, 5, 47])
def test_loss_of_the_textbook(norm_target):
    """At an odd size: the embedding, the token, the stages, the norm, a linear layer per cell, the mean over hidden."""
    model = SimMIM(backbone().double(), norm_target=norm_target).double()
    img = images(70, 45).double()
    mask = torch.tensor([[[1, 0], [0, 1], [1, 1]], [[0, 1], [1, 0], [0, 1]]], dtype=torch.bool)
    swin = model.backbone
    tokens = swin.patch_embed(img)
    for b, row, column in mask.nonzero().tolist():
        tokens[b, 8 * row : 8 * row + 8, 8 * column : 8 * column + 8] = model.mask_token
    for stage in swin.stages:
        out, tokens = stage(tokens)
    cells = model.decoder(swin.norm3(out).permute(0, 3, 1, 2))  # (B, 3 * 32 * 32, rows, columns)
    pixels = cells.unflatten(1, (3, 32, 32)).permute(0, 1, 4, 2, 5, 3).reshape(2, 3, 96, 64)[:, :, :70, :45]
    target = img if norm_target is None else authors_target(img, norm_target)
    hidden = F.interpolate(mask[:, None].double(), scale_factor=32)[:, :, :70, :45].expand_as(img) == 1
    expected = (pixels - target)[hidden].abs().mean()
    (loss,) = model(img, mask).values()
    torch.testing.assert_close(loss, expected, atol=1e-12, rtol=1e-12)


@pytest.mark.parametrize('size', [None, 64])
def test_the_teachers_loss_is_the_cosine_before_the_last_stage(size):
    student, teacher = backbone().double(), randomize(SwinBackbone(**OPTIONS), 2).double()
    model = SimMIM(student, teacher=teacher, teacher_size=size, teacher_weight=2.0).double()
    img = images().double()
    mask = model.draw_mask(img)

    def pooled(swin, tokens):
        for stage in swin.stages[:-1]:
            _, tokens = stage(tokens)
        return tokens.mean((1, 2))

    tokens = student.patch_embed(img)
    hidden = mask.repeat_interleave(8, 1).repeat_interleave(8, 2)
    tokens[hidden] = model.mask_token
    whole = img if size is None else F.interpolate(img, (size, size), mode='bilinear', align_corners=True)
    ours, theirs = model.projection(pooled(student, tokens)), pooled(teacher, teacher.patch_embed(whole))
    expected = -2 * (F.normalize(ours) * F.normalize(theirs)).sum(1).mean()
    losses = model(img, mask)
    torch.testing.assert_close(losses['loss_teacher'], expected, atol=1e-12, rtol=1e-12)
    assert losses['loss_pixels'].item() == SimMIM.pixel_loss(model, img, model.reconstruct(img, mask), mask).item()


@pytest.mark.parametrize('kind', [pytest.param('swin', marks=needs('scipy')), 'swinv2'])
def test_the_result_loads_in_one_step(kind, tmp_path):
    model = SimMIM(backbone(kind), teacher=backbone(kind, out_indices=None))
    torch.save(model.state_dict(), tmp_path / 'simmim.pth')
    more = {'pretrained_window_size': 4} if kind == 'swinv2' else {}
    window = {'window_size': 4} if kind == 'swinv2' else {}  # no weight of a V2 has the size of the window
    options = {'num_heads': (1, 2, 4, 8), 'clamp_window': True, **more, **window}
    made = create_backbone(checkpoint=str(tmp_path / 'simmim.pth'), **options)
    assert type(made) is KINDS[kind]
    img = images(128, 128)  # at which every window has its full size, as the pretrained one of a V2 must say
    assert torch.equal(made(img)[-1], model.backbone.eval()(img)[0])
    larger = KINDS[kind](**{**OPTIONS, 'window_size': 7, 'clamp_window': False, **more})
    resize = {} if kind == 'swinv2' else {'table_resize': 'geometric'}
    report = load_checkpoint(larger, str(tmp_path / 'simmim.pth'), log=None, **resize)
    assert len(report.resized) == (8 if kind == 'swin' else 0)
    for name, value in model.backbone.stages.state_dict().items():
        assert 'table' in name or torch.equal(larger.stages.state_dict()[name], value)


def test_half_precision_trains():
    model = SimMIM(backbone(), teacher=backbone(out_indices=None), norm_target=47)
    with torch.autocast('cpu', torch.bfloat16):
        losses = model(images())
    sum(losses.values()).backward()
    assert all(loss.dtype == torch.float32 and loss.isfinite() for loss in losses.values())


@pytest.mark.slow
@pytest.mark.long
def test_compiled_it_takes_images_of_several_sizes():
    torch.compiler.reset()
    model = SimMIM(backbone(depths=(1,), num_heads=(1,), out_indices=(0,)), mask_patch=16)
    compiled = torch.compile(model, backend='aot_eager')
    for img in (images(32, 48), images(64, 80)):
        losses = []
        for run in (compiled, model):
            torch.manual_seed(0)
            losses.append(run(img)['loss_pixels'])
        torch.testing.assert_close(*losses)


@pytest.mark.parametrize(
    ('make', 'options', 'words'),
    [
        ({'clamp_window': False}, {}, 'the backbone with clamp_window=True'),
        ({'out_indices': (2, 3)}, {}, r'with out_indices=\(3,\), got \(2, 3\)'),
        ({'out_indices': (2,)}, {}, r'the backbone with out_indices=\(3,\)'),
        ({}, {'mask_patch': 30}, 'mask_patch must be a multiple of 4'),
        ({}, {'mask_ratio': 1.0}, 'mask_ratio must be above 0 and below 1'),
        ({}, {'norm_target': 46}, 'norm_target must be an odd number'),
        ({}, {'teacher': {'in_channels': 4}}, r'has 4 .*\(in_channels\), the backbone 3'),
        ({}, {'teacher': {'embed_dims': 32}}, 'teacher has 256 .*, the backbone 128'),
        ({}, {'teacher': {'clamp_window': False}}, 'build the teacher with clamp_window=True'),
        ({}, {'teacher': {'out_indices': (1,)}}, 'teacher has 2 stages and the backbone 4'),
    ],
)
def test_what_is_not_the_published_method_is_refused(make, options, words):
    if 'teacher' in options:
        options = {'teacher': backbone(out_indices=None).__class__(**{**OPTIONS, **options['teacher']})}
    with pytest.raises(ValueError, match=words):
        SimMIM(SwinBackbone(**{**OPTIONS, 'out_indices': (3,), **make}), **options)


def test_other_wrong_inputs_are_refused():
    swin = backbone()
    with pytest.raises(ValueError, match='are the same module'):
        SimMIM(swin, teacher=swin)
    with pytest.raises(TypeError, match='must be a SwinBackbone'):
        SimMIM(torch.nn.Conv2d(3, 3, 1))
    with pytest.raises(ValueError, match=r'mask must be \(2, 3, 4\)'):
        SimMIM(swin)(images(), torch.ones(2, 3, 3, dtype=torch.bool))


@pytest.mark.slow
@pytest.mark.long
def test_the_example_trains_and_its_result_loads(tmp_path):
    for index in range(2):
        pixels = np.random.default_rng(index).integers(0, 255, (200, 240, 3), dtype=np.uint8)
        Image.fromarray(pixels).save(tmp_path / f'{index}.png')
    options = ['--out', tmp_path / 'swin.pth', '--epochs', '2', '--batch-size', '2']
    done = python(ROOT / 'examples/simmim.py', tmp_path, *options)
    assert done.stdout.count('loss') == 2
    assert create_backbone(checkpoint=str(tmp_path / 'swin.pth')).window_size == (6, 6)
