"""``load_state_dict`` of the backbone, and of models around it, with checkpoints of others."""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn

from swin_dense import SwinBackbone
from swin_dense.checkpoint import CheckpointError, allow_partial_loading, export_state_dict, load_checkpoint
from swin_dense.model import SwinBlock
from tests.conftest import TINY, IfInstalled, needs_fully_shard, randomize

mmengine_checkpoint = IfInstalled('mmengine.runner.checkpoint')

ARCH = {**TINY, 'embed_dims': 8, 'depths': (2, 1, 1, 1), 'window_size': 3}


class Detector(nn.Module):
    def __init__(self, seed=0, **options):
        super().__init__()
        self.backbone = randomize(SwinBackbone(**{**ARCH, **options}), seed)
        self.head = randomize(nn.Linear(2, 2), seed)


def same(ours, theirs):
    theirs = theirs.state_dict()
    return all(torch.equal(tensor, theirs[name]) for name, tensor in ours.state_dict().items())


def frameworks_checkpoint(detector):
    """Return what mmdet would save for the same weights."""
    state = {f'backbone.{k}': v for k, v in export_state_dict(detector.backbone, 'mmdet').items()}
    return state | {f'head.{k}': v for k, v in detector.head.state_dict().items()}


def strictly(model, state):
    return model.load_state_dict(state)


def by_mmengine(model, state):
    return mmengine_checkpoint.load_state_dict(model, state, strict=False)


LOADERS = [strictly, by_mmengine, lambda model, state: model.load_state_dict(state, strict=False)]


@pytest.mark.parametrize('load', LOADERS)
def test_a_whole_model_takes_the_frameworks_checkpoint(load):
    source, model = Detector(1), Detector(2)
    checkpoint = frameworks_checkpoint(source)
    before = dict(checkpoint)
    load(model, checkpoint)
    assert same(model, source)
    assert list(checkpoint) == list(before)  # the caller's dict is left alone


@pytest.mark.parametrize('load', LOADERS)
@pytest.mark.parametrize(
    'damage',
    [
        lambda state: {name: tensor for name, tensor in state.items() if 'backbone' not in name},
        lambda state: {name.removeprefix('backbone.'): tensor for name, tensor in state.items()},
        lambda state: {'model': {name.removeprefix('backbone.'): tensor for name, tensor in state.items()}},
        lambda state: {name: tensor for name, tensor in state.items() if 'reduction' not in name},
        lambda state: {name.replace('stages', 'levels'): tensor for name, tensor in state.items()},
        lambda state: {name: tensor[..., :1] for name, tensor in state.items()},
    ],
    ids=['head only', 'bare backbone', 'classifier', 'missing', 'renamed', 'reshaped'],
)
def test_a_backbone_that_does_not_arrive_raises_and_keeps_its_weights(load, damage):
    model = Detector(2)
    before = copy.deepcopy(model.backbone)
    with pytest.raises(CheckpointError):
        load(model, damage(frameworks_checkpoint(Detector(1))))
    assert same(model.backbone, before)


def test_the_error_of_a_bare_backbone_says_what_to_do():
    with pytest.raises(CheckpointError, match=r"no key begins with 'backbone\.'.*init_cfg=.*allow_partial_loading"):
        Detector().load_state_dict(SwinBackbone(**ARCH).state_dict(), strict=False)
    with pytest.raises(CheckpointError, match='the state dict is empty'):
        SwinBackbone(**ARCH).load_state_dict({})


def test_a_whole_checkpoint_goes_into_the_backbone_too():
    source, backbone = Detector(1), SwinBackbone(**ARCH)
    result = backbone.load_state_dict({'state_dict': frameworks_checkpoint(source), 'meta': {'epoch': 1}})
    assert same(backbone, source.backbone)
    assert not result.missing_keys
    assert not result.unexpected_keys


def test_new_output_norms_of_a_classifier_keep_their_values(caplog):
    source, backbone = randomize(SwinBackbone(**ARCH), 1), randomize(SwinBackbone(**ARCH), 2)
    norm = backbone.norm3.weight.clone()
    classifier = {name: tensor for name, tensor in source.state_dict().items() if not name.startswith('norm')}
    with caplog.at_level(logging.INFO, 'swin_dense'):
        backbone.load_state_dict({'model': classifier})
    assert 'new, as such checkpoints have no output norms: norm0.weight' in caplog.text
    assert torch.equal(backbone.norm3.weight, norm)
    assert torch.equal(backbone.layers[0].blocks[1].attn.qkv.bias, source.layers[0].blocks[1].attn.qkv.bias)


def test_unknown_entries_are_left_to_pytorch():
    backbone = SwinBackbone(**ARCH)
    state = {**backbone.state_dict(), 'adapter.weight': torch.zeros(1)}
    assert backbone.load_state_dict(state, strict=False).unexpected_keys == ['adapter.weight']
    with pytest.raises(RuntimeError, match='Unexpected key'):
        backbone.load_state_dict(state)


class TestPartialLoading:
    def test_a_head_alone(self):
        source, model = Detector(1), Detector(2)
        before = copy.deepcopy(model.backbone)
        head = {f'head.{k}': v for k, v in source.head.state_dict().items()}
        with allow_partial_loading():
            missing, unexpected = model.load_state_dict(head, strict=False)
        assert same(model.head, source.head)
        assert same(model.backbone, before)
        assert len(missing) == len(before.state_dict())
        assert not unexpected
        with pytest.raises(CheckpointError):  # only inside
            model.load_state_dict(head, strict=False)

    def test_an_adapter(self):
        model = Detector()
        model.backbone.layers[0].blocks[0].attn.qkv.lora_A = nn.Linear(8, 2, bias=False)
        key = 'backbone.layers.0.blocks.0.attn.qkv.lora_A.weight'
        with allow_partial_loading():
            result = model.load_state_dict({key: torch.ones(2, 8)}, strict=False)
        assert model.backbone.layers[0].blocks[0].attn.qkv.lora_A.weight.eq(1).all()
        assert not result.unexpected_keys

    def test_part_of_a_foreign_backbone_is_converted(self):
        source, model = Detector(1), Detector(2)
        half = {k: v for k, v in frameworks_checkpoint(source).items() if 'stages.0' in k}
        with allow_partial_loading():
            result = model.load_state_dict(half, strict=False)
        assert same(model.backbone.layers[0], source.backbone.layers[0])
        assert not same(model.backbone.layers[1], source.backbone.layers[1])
        assert 'backbone.layers.1.blocks.0.norm1.weight' in result.missing_keys


class TestCopies:
    def test_deepcopy_and_pickle_keep_the_hook(self):
        source, model = Detector(1), Detector(2)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        for copied in (
            copy.deepcopy(model),
            pickle.loads(pickle.dumps(model)),
            torch.load(buffer, weights_only=False),
        ):
            copied.load_state_dict(frameworks_checkpoint(source))
            assert same(copied, source)
            assert not same(model, source)

    def test_on_the_meta_device_tensors_are_assigned(self):
        source = Detector(1)
        with torch.device('meta'):
            model = Detector(2)
        model.load_state_dict(frameworks_checkpoint(source), assign=True)
        assert same(model, source)


@pytest.fixture(scope='module')
def one_process_group(tmp_path_factory):
    store = tmp_path_factory.mktemp('store') / 'store'
    torch.distributed.init_process_group('gloo', init_method=store.as_uri(), rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


needs_cpu_streams = pytest.mark.skipif(
    '__init__' not in vars(torch.cpu.Stream), reason=f'FSDP of torch {torch.__version__} does not run on a CPU'
)


class TestWrappers:
    def test_data_parallel(self, one_process_group):
        source, model = Detector(1), nn.parallel.DistributedDataParallel(Detector(2))
        model.load_state_dict({f'module.{k}': v for k, v in frameworks_checkpoint(source).items()})
        assert same(model.module, source)
        mmengine_checkpoint.load_state_dict(model, frameworks_checkpoint(Detector(3)))
        assert same(model.module, Detector(3))
        wrapped = nn.DataParallel(model.module.backbone)
        load_checkpoint(wrapped, export_state_dict(source.backbone, 'timm'), log=None)
        assert same(wrapped.module, source.backbone)

    def test_compiled_modules(self):
        source, backbone = randomize(SwinBackbone(**ARCH), 1), randomize(SwinBackbone(**ARCH), 2)
        compiled = torch.compile(backbone)
        load_checkpoint(compiled, export_state_dict(source, 'torchvision'), log=None)
        assert same(backbone, source)
        backbone.reset_parameters()
        backbone.layers[0] = torch.compile(backbone.layers[0])
        backbone.load_state_dict(export_state_dict(source, 'mmdet'))
        assert torch.equal(
            backbone.layers[0]._orig_mod.blocks[0].mlp.fc1.weight, source.layers[0].blocks[0].mlp.fc1.weight
        )
        exported = export_state_dict(backbone, 'official')
        assert exported.keys() == source.state_dict().keys()
        source.load_state_dict(backbone.state_dict())  # with the names of the wrapper

    @pytest.mark.filterwarnings('ignore')
    @needs_cpu_streams
    @pytest.mark.parametrize('use_orig_params', [True, False])
    @pytest.mark.parametrize('nested', [True, False])
    def test_fully_sharded(self, one_process_group, use_orig_params, nested):
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        source = Detector(1)
        model = FullyShardedDataParallel(
            Detector(2),
            auto_wrap_policy=ModuleWrapPolicy({SwinBlock}) if nested else None,
            use_orig_params=use_orig_params,
            device_id=torch.device('cpu'),
        )
        for state in (source.state_dict(), frameworks_checkpoint(source)):
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.zero_()
            model.load_state_dict(state)
            loaded = model.state_dict()
            assert all(torch.equal(loaded[name], tensor) for name, tensor in source.state_dict().items())

    @needs_fully_shard
    def test_fully_sharded_by_tensors(self, one_process_group):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.fsdp import fully_shard

        source, model = Detector(1), Detector(2)
        fully_shard(model.backbone.layers[0])
        fully_shard(model)
        set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
        loaded = model.state_dict()
        assert all(torch.equal(loaded[name].full_tensor(), tensor) for name, tensor in source.state_dict().items())
        with pytest.raises(CheckpointError, match=r'before fully_shard'):
            load_checkpoint(model.backbone, source.backbone.state_dict())
