"""The teacher of SimMIM and of feature distillation: it is frozen, not saved, and goes where the model goes."""

import copy

import pytest
import torch

from swin_dense import FeatureDistillation, SimMIM, SwinBackbone, SwinV2Backbone
from tests.conftest import TINY, equal_weights, randomize

OPTIONS = {**TINY, 'window_size': 4, 'clamp_window': True, 'drop_path_rate': 0.0}
KINDS = [SwinBackbone, SwinV2Backbone]
MODELS = [SimMIM, FeatureDistillation]


def model_of(model, kind, teacher):
    if model is SimMIM:
        return SimMIM(kind(**OPTIONS, out_indices=(3,)), teacher=teacher)
    return FeatureDistillation(kind(**OPTIONS), teacher, mask_ratio=0.6)


def images():
    return torch.randn(2, 3, 96, 128, generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize('model', MODELS)
@pytest.mark.parametrize('kind', KINDS)
def test_all_parameters_train_except_those_of_the_teacher(kind, model):
    teacher = randomize(kind(**OPTIONS), 2)
    before = copy.deepcopy(teacher.state_dict())
    model = model_of(model, kind, teacher)
    randomize(model.backbone, 1)
    assert not any('teacher' in name for name in model.state_dict())
    assert not {id(p) for p in model.parameters()} & {id(p) for p in teacher.parameters()}
    model.train()
    assert not teacher.training
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    sum(model(images()).values()).backward()
    assert all(p.grad is not None and p.grad.abs().max() > 0 for p in model.parameters())
    assert all(p.grad is None for p in teacher.parameters())
    optimizer.step()
    assert equal_weights(teacher, before)
    model.double()  # as `to(device)` does, the teacher goes along
    assert {p.dtype for p in teacher.parameters()} == {torch.float64}
    model(images().double())
    copied = copy.deepcopy(model)
    assert copied.teacher is not model.teacher
    assert not {id(p) for p in copied.teacher.parameters()} & {id(p) for p in teacher.parameters()}
    copied.load_state_dict(model.state_dict())


@pytest.mark.parametrize('model', MODELS)
def test_to_empty_leaves_the_teacher(model):
    teacher = randomize(SwinBackbone(**OPTIONS), 2)
    before = copy.deepcopy(teacher.state_dict())
    with torch.device('meta'):
        model = model_of(model, SwinBackbone, teacher)
    model.to_empty(device='cpu')
    assert not any(p.is_meta for p in model.parameters())
    assert equal_weights(teacher, before)
