"""Receptive fields of tokens against the gradients of the network."""

import pytest
import torch

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.explore.receptive_field import token_receptive_fields
from swin_dense.models.block import SwinBlock
from tests.conftest import TINY, randomize

# The attention mask adds -100 to a score, so masked tokens keep weights of about e^-100.
NEGLIGIBLE = 1e-30


@pytest.mark.parametrize(
    ('kind', 'size', 'options'),
    [
        (SwinBackbone, (61, 98), {'window_size': 3}),
        (
            SwinBackbone,
            (50, 37),
            {'window_size': (4, 2), 'patch_size': 2, 'strides': (2, 2, 3, 1)},
        ),
        (SwinBackbone, (40, 75), {'window_size': 4, 'clamp_window': True}),
        (SwinV2Backbone, (33, 64), {'window_size': 4, 'use_shift': False}),
    ],
)
def test_against_gradients(kind, size, options):
    backbone = randomize(kind(**TINY, **options)).double().eval()
    img = torch.randn(
        1,
        3,
        *size,
        dtype=torch.float64,
        requires_grad=True,
    )
    outputs = []
    for module in backbone.modules():
        if isinstance(module, SwinBlock):
            module.register_forward_hook(lambda module, args, output: outputs.append(output[0]))
    backbone(img)
    fields = [field for stage in token_receptive_fields(backbone, size) for field in stage]
    for output, field in zip(outputs, fields, strict=True):
        for _ in range(4):
            row, column = (int(torch.randint(side, ())) for side in output.shape[:2])
            (gradient,) = torch.autograd.grad(output[row, column].square().sum(), img, retain_graph=True)
            expected = torch.zeros(size, dtype=torch.bool)
            expected[slice(*field.rows[row]), slice(*field.columns[column])] = True
            assert torch.equal(gradient[0].abs().amax(0) > NEGLIGIBLE, expected)
