"""``load_state_dict`` of the backbone, and of models that contain it, with checkpoints of other code bases."""

import copy
import io
import logging
import pickle

import pytest
import torch
from torch import nn

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.checkpoint import CheckpointError, allow_partial_loading, export_state_dict, load_checkpoint
from swin_dense.models.swin import SwinBlock
from tests.checkpoint.helpers import ARCH, prefixed
from tests.conftest import IfInstalled, equal_weights, needs_fully_shard, randomize

mmengine_checkpoint = IfInstalled('mmengine.runner.checkpoint')


class Detector(nn.Module):
    def __init__(self, seed=0, kind=SwinBackbone, **options):
        super().__init__()
        self.backbone = randomize(kind(**{**ARCH, **options}), seed)
        self.head = randomize(nn.Linear(2, 2), seed)


def frameworks_checkpoint(detector):
    """Return the state dict that mmdet saves for the same weights."""
    return prefixed('backbone.', export_state_dict(detector.backbone, 'mmdet')) | prefixed('head.', detector.head)


def without_prefix(state):
    return {name.removeprefix('backbone.'): tensor for name, tensor in state.items()}


def without(word, state):
    return {name: tensor for name, tensor in state.items() if word not in name}


def strictly(model, state):
    return model.load_state_dict(state)


def by_mmengine(model, state):
    return mmengine_checkpoint.load_state_dict(model, state, strict=False)


def loosely(model, state):
    return model.load_state_dict(state, strict=False)


LOADERS = [strictly, loosely, by_mmengine]


@pytest.mark.parametrize('load', LOADERS)
def test_a_whole_model_loads_the_frameworks_checkpoint(load):
    source, model = Detector(1), Detector(2)
    checkpoint = frameworks_checkpoint(source)
    names = list(checkpoint)
    load(model, checkpoint)
    assert equal_weights(model, source)
    assert list(checkpoint) == names  # the caller's dict is not changed


@pytest.mark.parametrize('load', LOADERS)
@pytest.mark.parametrize(
    'damage',
    [
        without_prefix,
        lambda state: {'model': without_prefix(state)},
        lambda state: without('reduction', state),
        lambda state: {name.replace('stages', 'levels'): tensor for name, tensor in state.items()},
        lambda state: {name: tensor[..., :1] for name, tensor in state.items()},
    ],
    ids=['bare backbone', 'classifier', 'missing', 'renamed', 'reshaped'],
)
def test_a_backbone_that_does_not_load_raises_and_keeps_its_weights(load, damage):
    model = Detector(2)
    before = copy.deepcopy(model.backbone)
    with pytest.raises(CheckpointError):
        load(model, damage(frameworks_checkpoint(Detector(1))))
    assert equal_weights(model.backbone, before)


PARTS = {'head': 'backbone', 'without the patch embedding': 'patch_embed', 'without a stage': 'stages.0'}


@pytest.mark.parametrize('word', PARTS.values(), ids=PARTS)
@pytest.mark.parametrize('kind', [SwinBackbone, SwinV2Backbone])
def test_a_part_of_the_models_own_state_loads_by_torch_if_it_may_be_one(kind, word, caplog):
    """As shards and adapters need it; of the same keys, mmengine and strict loads need all."""
    source, model = Detector(1, kind), Detector(2, kind)
    before = copy.deepcopy(model)
    part = without(word, source.state_dict())
    for load in (strictly, by_mmengine):
        with pytest.raises(CheckpointError):
            load(model, part)
        assert equal_weights(model.backbone, before.backbone)
    if word != 'backbone':
        with pytest.raises(CheckpointError):
            load_checkpoint(model.backbone, part)
    caplog.clear()
    result = loosely(model, part)
    assert equal_weights(part, model)
    assert {*result.missing_keys} == without('coords', source.state_dict()).keys() - part.keys()
    (warning,) = caplog.records
    assert 'with strict=False, the others keep their values: patch_embed' in warning.message or word == 'stages.0'
    assert warning.levelname == 'WARNING'
    loosely(model, {name: tensor for name, tensor in source.state_dict().items() if word in name})
    assert equal_weights(model, source)
    with pytest.raises(CheckpointError):  # with another key, it is not the model's own
        loosely(model, {**part, 'other': torch.zeros(1)})


def test_the_error_for_a_bare_backbone_suggests_a_fix():
    with pytest.raises(CheckpointError, match=r"'backbone\.'.*init_cfg=.*allow_partial"):
        Detector().load_state_dict(SwinBackbone(**ARCH).state_dict(), strict=False)
    with pytest.raises(CheckpointError, match='the state dict is empty'):
        SwinBackbone(**ARCH).load_state_dict({})


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
        head = prefixed('head.', source.head)
        with allow_partial_loading():
            missing, unexpected = model.load_state_dict(head, strict=False)
        assert equal_weights(model.head, source.head)
        assert equal_weights(model.backbone, before)
        assert len(missing) == len(before.state_dict())
        assert not unexpected
        with pytest.raises(CheckpointError):  # outside the context manager
            by_mmengine(model, head)

    def test_part_of_a_foreign_backbone_is_converted(self):
        source, model = Detector(1), Detector(2)
        half = {k: v for k, v in frameworks_checkpoint(source).items() if 'stages.0' in k}
        with allow_partial_loading():
            result = model.load_state_dict(half, strict=False)
        assert equal_weights(model.backbone.stages[0], source.backbone.stages[0])
        assert not equal_weights(model.backbone.stages[1], source.backbone.stages[1])
        assert 'backbone.stages.1.blocks.0.norm1.weight' in result.missing_keys


class LoRA(nn.Module):
    """A linear layer plus a low-rank product, as PEFT wraps a layer."""

    def __init__(self, layer, rank=2):
        super().__init__()
        self.base_layer = layer
        self.lora_A = nn.Linear(layer.in_features, rank, bias=False)
        self.lora_B = nn.Linear(rank, layer.out_features, bias=False)

    def forward(self, x):
        return self.base_layer(x) + self.lora_B(self.lora_A(x))


def with_lora(model):
    for stage in model.backbone.stages:
        for block in stage.blocks:
            block.attn.w_msa.qkv = LoRA(block.attn.w_msa.qkv)
            block.ffn.layers[0][0] = LoRA(block.ffn.layers[0][0])
    return model


def with_adapters(model):
    """Add parameters and a norm with buffers, without wrapping a module."""
    model.backbone.adapter = nn.Sequential(nn.Conv2d(3, 4, 1), nn.BatchNorm2d(4))
    for stage in model.backbone.stages:
        stage.adapter = nn.Linear(8, 8)
    return model


def additions(model):
    state = without('base_', model.state_dict())
    for name in Detector().state_dict():
        state.pop(name, None)
    return state


@pytest.mark.parametrize('add', [with_lora, with_adapters])
class TestBackboneWithAdditions:
    def test_its_additions_alone_load(self, add):
        source, model = add(Detector(1)), add(Detector(2))
        kept = model.backbone.stages[1].blocks[0].norm1.weight.clone()
        expected = additions(source)
        result = model.load_state_dict(expected, strict=False)
        assert len(expected) > 5
        assert equal_weights(expected, model)
        assert torch.equal(model.backbone.stages[1].blocks[0].norm1.weight, kept)
        assert not result.unexpected_keys

    def test_its_own_state_loads(self, add):
        source, model = add(Detector(1)), add(Detector(2))
        model.load_state_dict(source.state_dict())
        assert equal_weights(model, source)
        backbone = add(Detector(3)).backbone
        report = load_checkpoint(backbone, source.state_dict(), log=None)
        assert equal_weights(backbone, source.backbone)
        assert not report.missing

    @pytest.mark.parametrize('load', LOADERS)
    def test_a_plain_checkpoint_loads_and_the_additions_are_new(self, add, load, caplog):
        source, model = Detector(1), add(Detector(2))
        before = copy.deepcopy(additions(model))
        with caplog.at_level(logging.INFO, 'swin_dense'):
            if load is strictly:
                model.backbone.load_state_dict(export_state_dict(source.backbone, 'timm'))
            else:
                load(model, frameworks_checkpoint(source))
        assert 'new, as the checkpoint cannot have them: ' in caplog.text
        assert equal_weights(before, model)
        loaded = {name.replace('base_layer.', ''): tensor for name, tensor in model.backbone.state_dict().items()}
        assert equal_weights(source.backbone, loaded)

    def test_missing_weights_still_raise_without_wrong_advice(self, add):
        state = without('stages.1.blocks.0.norm2', frameworks_checkpoint(Detector(1)))
        model = add(Detector(2))
        before = copy.deepcopy(model.state_dict())
        with pytest.raises(CheckpointError, match=r'Missing .*: stages\.1\.blocks\.0\.norm2') as raised:
            model.load_state_dict(state, strict=False)
        assert 'build the model' not in str(raised.value)
        assert 'allow_partial=True as an option of the backbone' in str(raised.value)
        assert equal_weights(model, before)


def test_a_model_with_lora_is_not_told_to_merge_it():
    state = without('stages.1.blocks.0.norm2', with_lora(Detector(1)).state_dict())
    with pytest.raises(CheckpointError, match=r'Missing .*: stages\.1\.blocks\.0\.norm2') as raised:
        with_lora(Detector(2)).load_state_dict(state)
    assert 'merge' not in str(raised.value)
    with pytest.raises(CheckpointError, match=r'It has parameters that no Swin has: .*base_layer'):
        Detector(2).load_state_dict(state)


def test_a_v2_is_recognised_when_its_position_networks_have_lora_too():
    source, model = (randomize(SwinV2Backbone(**ARCH), seed) for seed in (1, 2))
    for backbone in (source, model):
        for name, layer in list(backbone.named_modules()):
            if isinstance(layer, nn.Linear):
                parent, _, child = name.rpartition('.')
                setattr(backbone.get_submodule(parent), child, LoRA(layer))
    assert 'stages.0.blocks.0.attn.w_msa.cpb_mlp.0.base_layer.weight' in source.state_dict()
    base = without('lora_', source.state_dict())
    model.load_state_dict(base)
    assert equal_weights(base, model)


def test_weights_load_into_wrapped_modules():
    source, model = Detector(1), Detector(2)
    blocks = model.backbone.stages[0].blocks
    blocks[1] = nn.Sequential(blocks[1])
    model.load_state_dict(frameworks_checkpoint(source), strict=False)
    assert equal_weights(blocks[1][0], source.backbone.stages[0].blocks[1])


def test_an_ambiguous_wrapper_raises():
    model = Detector(2)
    norm = model.backbone.norm1
    model.backbone.norm1 = nn.ModuleDict({'original': norm, 'copy': copy.deepcopy(norm)})
    with pytest.raises(CheckpointError, match=r'model: backbone\.norm1|: norm1\.weight'):
        model.load_state_dict(frameworks_checkpoint(Detector(1)), strict=False)


def test_a_file_with_fewer_outputs_loads(caplog):
    source, model = Detector(1, out_indices=(1, 2, 3)), Detector(2)
    norm = copy.deepcopy(model.backbone.norm0)
    with caplog.at_level(logging.INFO, 'swin_dense'):
        model.load_state_dict(frameworks_checkpoint(source))
    assert 'new, as the checkpoint cannot have them: norm0.weight, norm0.bias' in caplog.text
    assert equal_weights(model.backbone.norm0, norm)
    assert equal_weights(model.backbone.norm1, source.backbone.norm1)


class TestCopies:
    def test_deepcopy_and_pickle_keep_the_hook(self):
        source, model = Detector(1), Detector(2)
        buffer = io.BytesIO()
        torch.save(model, buffer)
        buffer.seek(0)
        saved = torch.load(buffer, weights_only=False)
        for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model)), saved):
            copied.load_state_dict(frameworks_checkpoint(source))
            assert equal_weights(copied, source)
            assert not equal_weights(model, source)

    def test_on_the_meta_device_tensors_are_assigned(self):
        source = Detector(1)
        with torch.device('meta'):
            model = Detector(2)
        model.load_state_dict(frameworks_checkpoint(source), assign=True)
        assert equal_weights(model, source)


@pytest.fixture(scope='module')
def one_process_group(tmp_path_factory):
    store = tmp_path_factory.mktemp('store') / 'store'
    torch.distributed.init_process_group(
        'gloo',
        init_method=store.as_uri(),
        rank=0,
        world_size=1,
    )
    yield
    torch.distributed.destroy_process_group()


needs_cpu_streams = pytest.mark.skipif(
    '__init__' not in vars(torch.cpu.Stream), reason=f'FSDP of torch {torch.__version__} does not run on a CPU'
)


class TestWrappers:
    def test_data_parallel(self, one_process_group):
        source, model = Detector(1), nn.parallel.DistributedDataParallel(Detector(2))
        model.load_state_dict(prefixed('module.', frameworks_checkpoint(source)))
        assert equal_weights(model.module, source)
        mmengine_checkpoint.load_state_dict(model, frameworks_checkpoint(Detector(3)))
        assert equal_weights(model.module, Detector(3))
        wrapped = nn.DataParallel(model.module.backbone)
        load_checkpoint(wrapped, export_state_dict(source.backbone, 'timm'), log=None)
        assert equal_weights(wrapped.module, source.backbone)

    def test_compiled_modules(self):
        source, backbone = Detector(1).backbone, Detector(2).backbone
        compiled = torch.compile(backbone)
        load_checkpoint(compiled, export_state_dict(source, 'torchvision'), log=None)
        assert equal_weights(backbone, source)
        backbone.reset_parameters()
        backbone.stages[0] = torch.compile(backbone.stages[0])
        backbone.load_state_dict(export_state_dict(source, 'mmdet'))
        assert equal_weights(backbone.stages[0]._orig_mod, source.stages[0])
        assert without('_index', export_state_dict(backbone, 'mmdet')).keys() == source.state_dict().keys()
        source.load_state_dict(backbone.state_dict())  # names include the wrapper's

    @pytest.mark.filterwarnings('ignore')
    @needs_cpu_streams
    @pytest.mark.parametrize('use_orig_params', [True, False])
    @pytest.mark.parametrize('nested', [True, False])
    def test_fully_sharded(self, one_process_group, use_orig_params, nested):
        from torch.distributed.fsdp import FullyShardedDataParallel
        from torch.distributed.fsdp.wrap import ModuleWrapPolicy

        source = Detector(1)
        policy = ModuleWrapPolicy({SwinBlock}) if nested else None
        model = FullyShardedDataParallel(
            Detector(2),
            auto_wrap_policy=policy,
            use_orig_params=use_orig_params,
            device_id=torch.device('cpu'),
        )
        model.load_state_dict(source.state_dict())
        assert equal_weights(source, model.state_dict())
        other = Detector(3)
        model.load_state_dict(frameworks_checkpoint(other))
        assert equal_weights(other, model.state_dict())

    @needs_fully_shard
    def test_fully_shard(self, one_process_group):
        from torch.distributed.checkpoint.state_dict import StateDictOptions, set_model_state_dict
        from torch.distributed.fsdp import fully_shard

        source, model = Detector(1), Detector(2)
        fully_shard(model.backbone.stages[0])
        fully_shard(model)
        set_model_state_dict(model, source.state_dict(), options=StateDictOptions(full_state_dict=True))
        loaded = {name: tensor.full_tensor() for name, tensor in model.state_dict().items()}
        assert equal_weights(source, loaded)
        with pytest.raises(CheckpointError, match=r'before fully_shard'):
            load_checkpoint(model.backbone, source.backbone.state_dict())
