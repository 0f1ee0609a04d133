"""A training is resumed with other frozen stages than before, as by SwinDense after mmdet's SwinTransformer."""

import mmdet.models.backbones  # noqa: F401  registers SwinTransformer
import pytest
import torch
from mmengine.runner import CheckpointLoader

from tests.processes import cli
from tests.workbench.tiny_training import write_config

DECAY = "optim_wrapper['optimizer']['weight_decay'] = 0.05\n"
BY_PARAMETER = DECAY + "optim_wrapper['paramwise_cfg'] = dict(custom_keys={'norm': dict(decay_mult=0.0)})\n"
COSINE = "param_scheduler = [dict(type='CosineAnnealingLR', by_epoch=False, T_max=20, end=20, eta_min=1e-5)]\n"
LAYER_DECAY = (
    DECAY + "optim_wrapper.update(constructor='SwinLayerDecayConstructor', paramwise_cfg=dict(decay_rate=0.7))\n"
)
UNUSED = ('backbone.norm0', 'backbone.norm1', 'backbone.norm2')  # the model of the test takes the last map


def train(folder, kind, frozen, steps, *words, extra=BY_PARAMETER, check=True):
    """Train up to a step in a folder, and return the checkpoint or the error."""
    lines = [
        f"model['backbone'].update(type='{kind}', frozen_stages={frozen})",
        f"train_cfg['max_iters'] = {steps}",
        "custom_imports['imports'] += ['swin_dense', 'mmdet.models.backbones']",
    ]
    folder.mkdir(exist_ok=True)
    config = write_config(folder, '\n'.join([*lines, extra]))
    done = cli('train', config, '--work-dir', folder / 'run', *words, check=check)
    if done.returncode:
        return done.stderr
    return load(folder / 'run' / f'iter_{steps}.pth')


def load(path):
    return CheckpointLoader.load_checkpoint(str(path), map_location='cpu')


def momentum(checkpoint, names):
    """Return the momentum of Adam by the names of its parameters, in the order of the optimiser."""
    optimizer = checkpoint['optimizer']
    indices = [index for group in optimizer['param_groups'] for index in group['params']]
    assert len(indices) == len(names)
    return {name: optimizer['state'].get(index) for index, name in zip(indices, names, strict=True)}


def parameters(checkpoint, frozen):
    """Return the names of the parameters of an optimiser that has none of a number of stages."""
    starts = ['patch_embed'] if frozen >= 0 else []
    starts += [f'{part}{stage}.' for stage in range(frozen) for part in ('stages.', 'norm')]
    names = [name for name in checkpoint['state_dict'] if not name.endswith('relative_position_index')]
    return [name for name in names if not name.startswith(tuple(f'backbone.{start}' for start in starts))]


def assert_close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize('extra', [BY_PARAMETER, BY_PARAMETER + COSINE], ids=['linear', 'cosine'])
def test_swin_dense_goes_on_as_swin_transformer_would(tmp_path, extra):
    """The oracle is the same run, resumed as SwinTransformer by mmengine.

    Weights are not compared: Adam scales the rounding of gradients that are 0, as of the bias of keys, to whole steps.
    """
    theirs = 'mmdet.SwinTransformer'
    train(tmp_path / 'theirs', theirs, 1, 4, extra=extra)
    resume = ['--resume', tmp_path / 'theirs' / 'run' / 'iter_4.pth']
    expected = train(tmp_path / 'theirs', theirs, 1, 6, *resume, extra=extra)
    found = train(tmp_path / 'ours', 'SwinDense', 1, 6, *resume, extra=extra)
    everything = momentum(expected, parameters(expected, -1))
    kept = momentum(found, parameters(found, 1))
    assert len(kept) < len(everything)
    assert all(everything[name] is None for name in everything.keys() - kept.keys())
    for name, state in kept.items():
        if name.startswith(UNUSED):
            continue
        assert state['step'] == 6
        assert_close(state['exp_avg'], everything[name]['exp_avg'])
        assert_close(state['exp_avg_sq'], everything[name]['exp_avg_sq'])
    last = [group['lr'] for group in expected['optimizer']['param_groups']]
    assert {group['lr'] for group in found['optimizer']['param_groups']} == set(last)


@pytest.mark.slow
@pytest.mark.parametrize('extra', [BY_PARAMETER + COSINE, LAYER_DECAY], ids=['by parameter', 'by layer'])
@pytest.mark.parametrize(('before', 'after'), [(1, 2), (2, -1)])
def test_other_frozen_stages_keep_the_momentum_of_what_both_runs_train(tmp_path, before, after, extra):
    first = train(tmp_path / 'first', 'SwinDense', before, 4, extra=extra)
    resume = ['--resume', tmp_path / 'first' / 'run' / 'iter_4.pth']
    second = train(tmp_path / 'second', 'SwinDense', after, 6, *resume, extra=extra)
    third = train(tmp_path / 'first', 'SwinDense', before, 6, '--resume', extra=extra)
    both = [{name for name in parameters(first, frozen) if not name.startswith(UNUSED)} for frozen in (before, after)]
    steps = {}
    for group in second['optimizer']['param_groups']:
        names = group.get('param_names') or [parameters(second, after)[index] for index in group['params']]
        for name, index in zip(names, group['params'], strict=True):
            if not name.startswith(UNUSED):
                steps[name] = int(second['optimizer']['state'][index]['step'])
    assert {name for name, step in steps.items() if step == 6} == both[0] & both[1]
    assert {name for name, step in steps.items() if step == 2} == both[1] - both[0]
    rates = [{group['lr'] for group in one['optimizer']['param_groups']} for one in (second, third)]
    if extra != LAYER_DECAY:  # where each layer has another rate
        assert rates[0] == rates[1]


@pytest.mark.slow
def test_another_model_is_one_error_that_says_what_to_do_instead(tmp_path):
    train(tmp_path / 'first', 'SwinDense', 1, 2)
    resume = ['--resume', tmp_path / 'first' / 'run' / 'iter_2.pth']
    window = BY_PARAMETER + "model['backbone']['window_size'] = 12\n"
    said = train(tmp_path / 'second', 'SwinDense', 1, 4, *resume, extra=window, check=False)
    assert 'has a momentum of the shape (169, 1) for backbone.stages.0' not in said  # frozen, so without momentum
    assert 'has a momentum of the shape (169, 2) for backbone.stages.1.blocks.0.attn.w_msa.rel' in said
    assert 'which has (529, 2) in the model of the config' in said
    assert '--set load_from=CHECKPOINT' in said
    assert 'Traceback' not in said
    path = resume[1]
    checkpoint = load(path)
    del checkpoint['optimizer']['param_groups'][-3:]
    torch.save(checkpoint, path)
    said = train(tmp_path / 'second', 'SwinDense', 2, 4, *resume, check=False)
    assert 'which no other frozen_stages explains' in said
    assert '--set load_from=CHECKPOINT' in said
    assert 'Traceback' not in said


@pytest.mark.slow
def test_one_group_of_all_parameters_takes_the_momentum_of_many(tmp_path):
    train(tmp_path / 'first', 'SwinDense', 1, 4)
    resume = ['--resume', tmp_path / 'first' / 'run' / 'iter_4.pth']
    second = train(tmp_path / 'second', 'SwinDense', 1, 6, *resume, extra=DECAY)
    states = momentum(second, parameters(second, -1))
    steps = {name: int(state['step']) for name, state in states.items() if state}
    assert steps.keys() == {name for name in parameters(second, 1) if not name.startswith(UNUSED)}
    assert set(steps.values()) == {6}
