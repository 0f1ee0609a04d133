"""Models of the frameworks with adapters: trained by the command, resumed after a kill, and predicted from one file."""

import copy
import pickle

import pytest
import torch
from mmengine.config import Config
from mmengine.registry import MODELS

from swin_dense import CheckpointError, SwinBackbone
from swin_dense.__main__ import main
from swin_dense.checkpoint.adapters import BASE_KEY, part_of
from swin_dense.checkpoint.export import export_adapter
from swin_dense.mm.backbone import SwinDense
from swin_dense.workbench.predict import Predictor
from tests.conftest import TINY, randomize
from tests.processes import cli
from tests.workbench.export.whole_models import config_of, train
from tests.workbench.tiny_training import differences, write_config

ADAPTERS = ['mona', 'lora']
KILLED = "custom_hooks = [dict(type='Killed', at=5, where='iteration')]\n"


@pytest.fixture
def base(tmp_path):
    model = randomize(SwinBackbone(**TINY))
    torch.save(model.state_dict(), tmp_path / 'base.pth')
    return model, tmp_path / 'base.pth'


@pytest.mark.slow
@pytest.mark.parametrize('kind', ADAPTERS)
def test_a_killed_training_of_an_adapter_ends_as_if_undisturbed(tmp_path, base, kind):
    def run(config, name, *more, **options):
        settings = [f'model.backbone.adapter.type={kind}', f'model.backbone.init_cfg.checkpoint={base[1]}']
        settings += ['model.backbone.init_cfg.type=Pretrained', *more]
        return cli('train', config, '--work-dir', tmp_path / name, '--set', *settings, **options)

    run(write_config(tmp_path), 'undisturbed')
    assert run(write_config(tmp_path, KILLED), 'killed', check=False).returncode == -9
    resumed = cli(
        *('train', write_config(tmp_path), '--work-dir', tmp_path / 'killed', '--resume'),
        *('--set', f'model.backbone.adapter.type={kind}'),
    )
    assert 'iter_4.pth' in resumed.stdout
    assert differences(tmp_path / 'undisturbed', tmp_path / 'killed') == []
    state = torch.load(tmp_path / 'killed' / 'iter_12.pth', weights_only=True)['state_dict']
    names = {name.removeprefix('backbone.') for name in state if name.startswith('backbone.')}
    for name, before in base[0].state_dict().items():
        if name.startswith('norm'):  # of outputs that the tiny model does not use
            continue
        assert torch.equal(state[f'backbone.{name}'], before) == (part_of(name) == 'base'), name
    assert {part_of(name) for name in names} == {'base', 'norm', 'adapter'}


def test_the_pages_command_adds_an_adapter_to_a_recipe(tmp_path, demo_data, base):
    cli(
        *('config', 'mask-rcnn_swin-t-p4-w7_fpn_1x_coco', '--out', tmp_path / 'adapted.py'),
        *('--data-root', demo_data / 'coco', '--classes', 'disc,ring,square,triangle,star'),
        *('--set', 'model.backbone.adapter.type=mona', f'model.backbone.init_cfg.checkpoint={base[1]}'),
        *(
            f'model.backbone.{name}={value}'.replace('(', '[').replace(')', ']').replace(' ', '')
            for name, value in TINY.items()
        ),
    )
    backbone = MODELS.build(Config.fromfile(tmp_path / 'adapted.py').model.backbone)
    backbone.init_weights()
    assert backbone.adapter_options.kind == 'mona'
    state = backbone.state_dict()
    assert all(torch.equal(tensor, state[name]) for name, tensor in base[0].state_dict().items())


def trained_detector(tmp_path, demo_data, kind):
    """Return the config of a small Mask R-CNN whose backbone has a base and an adapter, and its checkpoint."""
    config = config_of('mask_rcnn', demo_data, kind)
    torch.save(SwinBackbone(**_plain(config)).state_dict(), tmp_path / 'base.pth')
    config.model.backbone.init_cfg = {'type': 'Pretrained', 'checkpoint': str(tmp_path / 'base.pth')}
    return config, train(config, tmp_path / 'whole.pth', 2)


@pytest.mark.slow
@pytest.mark.parametrize('kind', ADAPTERS)
def test_a_detector_is_its_config_and_the_file_without_the_base(tmp_path, demo_data, kind):
    config, whole = trained_detector(tmp_path, demo_data, kind)
    small = tmp_path / 'small.pth'
    assert main(['convert', str(whole), '--out', str(small), '--to', 'adapter']) == 0
    expected = torch.load(whole, weights_only=True)['state_dict']
    kept = torch.load(small, weights_only=True)['state_dict']
    assert expected.keys() - kept.keys() == {
        name for name in expected if name.startswith('backbone.') and part_of(name.removeprefix('backbone.')) == 'base'
    }
    assert kept.keys() - expected.keys() == {f'backbone.{BASE_KEY}'}
    found = Predictor(config, str(small), 'cpu').model.state_dict()
    assert found.keys() == expected.keys()
    assert all(torch.equal(tensor, found[name]) for name, tensor in expected.items())
    of_small, of_whole = evaluate(config, small, tmp_path), evaluate(config, whole, tmp_path)
    assert sum(map(len, of_whole)) > 0
    assert all(torch.equal(one, other) for one, other in zip(of_small, of_whole, strict=True))
    other = copy.deepcopy(config)
    torch.save(randomize(SwinBackbone(**_plain(config)), 7).state_dict(), tmp_path / 'other.pth')
    other.model.backbone.init_cfg.checkpoint = str(tmp_path / 'other.pth')
    with pytest.raises(ValueError, match='has an adapter for a base with the hash'):
        Predictor(other, str(small), 'cpu')


def evaluate(config, checkpoint, tmp_path):
    """Return the scores and boxes that `swin-dense test` finds in each image."""
    config.dump(tmp_path / 'config.py')
    out = tmp_path / f'{checkpoint.stem}.pkl'
    cli('test', tmp_path / 'config.py', checkpoint, '--work-dir', tmp_path / 'test', '--out', out)
    found = [image['pred_instances'] for image in pickle.loads(out.read_bytes())]
    return [one[field] for one in found for field in ('scores', 'bboxes')]


def _plain(config):
    left_out = ('type', 'adapter', 'init_cfg')
    return {name: value for name, value in config.model.backbone.items() if name not in left_out}


def test_an_adapter_needs_its_base_in_a_config_too(base):
    model = SwinDense(**TINY, adapter={'type': 'lora'})
    adapted = SwinDense(**TINY, adapter={'type': 'lora'}, init_cfg={'type': 'Pretrained', 'checkpoint': str(base[1])})
    adapted.init_weights()
    state = export_adapter(adapted.state_dict())
    with pytest.raises(CheckpointError, match='First load the checkpoint from which the adapter was trained'):
        model.load_state_dict(state)
    again = SwinDense(**TINY, adapter={'type': 'lora'}, init_cfg={'type': 'Pretrained', 'checkpoint': str(base[1])})
    again.load_state_dict(state)  # strictly
    assert all(torch.equal(tensor, again.state_dict()[name]) for name, tensor in adapted.state_dict().items())
