"""Files of our own models, by the savers and loaders of timm, PEFT, accelerate, huggingface_hub and transformers."""

import pytest
import torch
from torch import nn

from swin_dense import SwinBackbone, SwinV2Backbone, export_state_dict, load_checkpoint
from tests.conftest import equal_weights, randomize

from .peer import needed

TINY = {'embed_dims': 32, 'depths': (2, 2), 'num_heads': (4, 8), 'window_size': 4, 'drop_path_rate': 0.0}
KINDS = [SwinBackbone, SwinV2Backbone]
IMAGE = torch.rand(2, 3, 64, 80)


def make(kind, seed):
    return randomize(kind(**TINY), seed).eval()


@torch.no_grad()
def assert_same_maps(ours, theirs):
    torch.testing.assert_close(ours(IMAGE), theirs(IMAGE), rtol=0, atol=0)


@pytest.fixture(scope='module', params=['swin_dense_t', 'swinv2_dense_t'])
def saved_by_timm(request, tmp_path_factory):
    """A classifier of five classes, as timm saves it for the hub, and as a checkpoint of a training."""
    timm = needed('timm')
    needed('swin_dense.integrations.timm')
    folder = tmp_path_factory.mktemp(request.param)
    options = {'depths': (1, 1, 1, 1), 'embed_dim': 24}
    model = randomize(timm.create_model(request.param, num_classes=5, **options), 1).eval()
    timm.models.save_for_hf(model, folder, model_args=options)
    torch.save({'state_dict': model.state_dict(), 'epoch': 3, 'version': 2}, folder / 'training.pth')
    return model, folder, options


STARTS = {
    'same': {},
    'other classes': {'num_classes': 3},
    'no classes': {'num_classes': 0},
    'features': {'features_only': True},
    'grey images': {'in_chans': 1},
    'other images and classes': {'in_chans': 4, 'num_classes': 3},
}


@pytest.mark.parametrize('change', STARTS.values(), ids=STARTS)
@pytest.mark.parametrize('way', ['hub', 'file', 'checkpoint_path'])
def test_timm_starts_from_a_file_of_our_model(saved_by_timm, change, way):
    model, folder, options = saved_by_timm
    timm = needed('timm')
    if way == 'hub':
        made = timm.create_model(f'local-dir:{folder}', pretrained=True, **change)
    else:
        name = model.pretrained_cfg['architecture']
        options = {'num_classes': 5, **options, **change}
        if way == 'file':
            overlay = {'file': str(folder / 'training.pth'), 'num_classes': 5}
            made = timm.create_model(name, pretrained=True, pretrained_cfg_overlay=overlay, **options)
        elif change.get('num_classes', 5) != 5:
            pytest.skip('of timm, a whole checkpoint, whose head must fit')
        else:
            made = timm.create_model(name, checkpoint_path=str(folder / 'training.pth'), **options)
    own, given = made.state_dict(), model.state_dict()
    changed = {name for name in own if name not in given or not torch.equal(own[name], given[name])}
    allowed = {'head.weight', 'head.bias'} if 'num_classes' in change else set()
    allowed |= {'backbone.patch_embed.projection.weight'} if 'in_chans' in change else set()
    allowed |= {name for name in own if 'features_only' in change and 'backbone.norm' in name}
    assert changed <= allowed
    made.eval()(torch.rand(1, change.get('in_chans', 3), 64, 64))


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize(
    'options', [{}, {'bias': 'lora_only'}, {'bias': 'all'}, {'modules_to_save': ['norm1', 'patch_embed']}], ids=str
)
def test_what_peft_saves_loads_again(tmp_path, kind, options):
    peft = needed('peft')
    config = peft.LoraConfig(r=2, target_modules=['qkv'], **options)
    trained = peft.get_peft_model(make(kind, 1), config)
    for parameter in trained.parameters():
        if parameter.requires_grad:
            parameter.data += 0.1
    trained.save_pretrained(tmp_path)
    assert_same_maps(peft.PeftModel.from_pretrained(make(kind, 1), tmp_path).eval(), trained.eval())


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('rank', [3, 4, 8, 32])
def test_a_checkpoint_loads_into_a_model_with_adapters_of_any_rank(kind, rank):
    """Ranks that equal numbers of heads or channels give a matrix of the adapter the shape of a weight."""
    peft = needed('peft')
    source = make(kind, 1)
    config = peft.LoraConfig(r=rank, target_modules='all-linear', modules_to_save=['norm1'])
    model = peft.get_peft_model(make(kind, 2), config)
    report = load_checkpoint(model.base_model.model, export_state_dict(source, 'official'), log=None)
    assert not {name for name in report.missing if 'lora' not in name}
    assert_same_maps(model.eval(), source)  # an adapter starts without an effect


class Detector(nn.Module):
    def __init__(self, kind, seed):
        super().__init__()
        self.backbone = make(kind, seed)
        self.head = randomize(nn.Linear(64, 5), seed)


def save_by_accelerate(model, folder):
    needed('accelerate').Accelerator(cpu=True).save_model(model, folder, max_shard_size='200KB')


def save_by_hub(model, folder):
    needed('huggingface_hub').save_torch_model(model, folder, max_shard_size='200KB')


def load_by_accelerate(model, folder):
    needed('accelerate').load_checkpoint_in_model(model, folder)


def load_by_hub(model, folder):
    needed('huggingface_hub').load_torch_model(model, folder)


def load_by_transformers(model, folder):
    needed('transformers.trainer_utils').load_sharded_checkpoint(model, folder)


@pytest.mark.parametrize('kind', KINDS)
@pytest.mark.parametrize('build', [make, Detector])
@pytest.mark.parametrize(
    ('save', 'load'),
    [
        (save_by_accelerate, load_by_accelerate),
        (save_by_hub, load_by_hub),
        (save_by_hub, load_by_transformers),
    ],
)
def test_shards_load_one_by_one(tmp_path, kind, build, save, load):
    source, model = build(kind, 1), build(kind, 2)
    save(source, tmp_path)
    assert len(list(tmp_path.glob('*.safetensors'))) > 1
    load(model, tmp_path)
    assert equal_weights(model, source)


@pytest.mark.parametrize('kind', KINDS)
def test_accelerate_loads_into_a_model_without_memory(tmp_path, kind):
    accelerate = needed('accelerate')
    source = make(kind, 1)
    accelerate.Accelerator(cpu=True).save_model(source, tmp_path)
    with accelerate.init_empty_weights():
        empty = kind(**TINY).eval()
    loaded = accelerate.load_checkpoint_and_dispatch(empty, str(tmp_path), device_map={'': 'cpu'})
    assert_same_maps(loaded, source)
