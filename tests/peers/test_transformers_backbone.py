"""SwinDenseBackbone in models of transformers."""

import copy
import dataclasses

import pytest
import torch
from safetensors.torch import load_file, save_file

from swin_dense import SwinBackbone, load_checkpoint
from swin_dense.archs import weights
from tests.conftest import TINY, randomize

from .detection import train
from .peer import largest_difference, needed

tf = needed('transformers')
from swin_dense.integrations.transformers import SwinDenseBackbone, SwinDenseConfig  # noqa: E402

IMAGE = torch.rand(2, 3, 96, 128)
THEIRS = {'embed_dim': 16, 'depths': [2, 2, 2, 2], 'num_heads': [1, 2, 4, 8], 'window_size': 2, 'image_size': 64}
STAGES = ['stage1', 'stage2', 'stage3', 'stage4']
SMALL_HEAD = {'encoder_layers': 1, 'decoder_layers': 2, 'num_attention_heads': 2, 'dim_feedforward': 32,
              'encoder_feedforward_dim': 32, 'num_queries': 5, 'hidden_dim': 32}  # fmt: skip
SMALL_DETR = {'d_model': 32, 'encoder_layers': 1, 'decoder_layers': 2, 'encoder_attention_heads': 2,
              'decoder_attention_heads': 2, 'encoder_ffn_dim': 32, 'decoder_ffn_dim': 32}  # fmt: skip


def config(**options):
    return SwinDenseConfig('swin_t', **{**TINY, 'drop_path_rate': 0.0, **options})


def swin_config(**options):
    return tf.SwinConfig(**{**THEIRS, 'out_features': STAGES, **options})


def upernet(backbone):
    return tf.UperNetForSemanticSegmentation(
        tf.UperNetConfig(
            backbone_config=backbone, hidden_size=16, auxiliary_channels=16, auxiliary_in_channels=64, num_labels=3
        )
    )


def mask2former(backbone):
    return tf.Mask2FormerForUniversalSegmentation(
        tf.Mask2FormerConfig(backbone_config=backbone, feature_size=32, mask_feature_size=32, **SMALL_HEAD)
    )


def maskformer(backbone):
    decoder = tf.DetrConfig(**SMALL_DETR, num_queries=5)
    return tf.MaskFormerForInstanceSegmentation(
        tf.MaskFormerConfig(backbone_config=backbone, fpn_feature_size=32, mask_feature_size=32, decoder_config=decoder)
    )


def detr(backbone):
    return tf.DetrForObjectDetection(
        tf.DetrConfig(backbone_config=backbone, use_timm_backbone=False, num_queries=5, num_labels=3, **SMALL_DETR)
    )


MASKS = {'mask_labels': [torch.ones(1, 96, 128)] * 2, 'class_labels': [torch.tensor([1])] * 2}
LABELS = {
    upernet: {'labels': torch.ones(2, 96, 128, dtype=torch.int64)},
    mask2former: MASKS,
    maskformer: MASKS,
    detr: {'labels': [{'class_labels': torch.tensor([1]), 'boxes': torch.tensor([[0.5, 0.5, 0.4, 0.4]])}] * 2},
}


@pytest.mark.parametrize('build', LABELS)
def test_models_train(build):
    model = build(config()).train()
    losses = train(model, lambda: {'loss': model(pixel_values=IMAGE, **LABELS[build]).loss}, steps=6)
    assert losses[-1] < losses[0]
    without = [name for name, p in model.named_parameters() if 'backbone.' in name and p.grad is None]
    # DETR uses only the last map.
    assert {name.split('.')[-2] for name in without} == ({'norm0', 'norm1', 'norm2'} if build is detr else set())


@torch.no_grad()
def test_save_and_load(tmp_path):
    model = randomize(SwinDenseBackbone(config(out_features=['stage2', 'stage4']))).eval()
    assert model.channels == [32, 128]
    assert [x.shape[1] for x in model(IMAGE).feature_maps] == model.channels
    model.save_pretrained(tmp_path)
    for loaded in (SwinDenseBackbone.from_pretrained(tmp_path), tf.AutoModel.from_pretrained(tmp_path)):
        assert type(loaded) is SwinDenseBackbone
        assert largest_difference(loaded(IMAGE).feature_maps, model(IMAGE).feature_maps) == 0
    whole = randomize(upernet(config())).eval()
    whole.save_pretrained(tmp_path / 'whole')
    again = tf.UperNetForSemanticSegmentation.from_pretrained(tmp_path / 'whole').eval()
    assert largest_difference([again(IMAGE).logits], [whole(IMAGE).logits]) == 0


@torch.no_grad()
def test_norms_missing_in_a_file_are_initialised(tmp_path):
    model = randomize(SwinDenseBackbone(config())).eval()
    model.save_pretrained(tmp_path)
    state = load_file(tmp_path / 'model.safetensors')
    save_file({key: value for key, value in state.items() if 'norm3' not in key}, tmp_path / 'model.safetensors',
              metadata={'format': 'pt'})  # fmt: skip
    loaded = SwinDenseBackbone.from_pretrained(tmp_path)
    assert torch.equal(loaded.backbone.norm3.weight, torch.ones(128))
    assert torch.equal(loaded.backbone.norm2.weight, model.backbone.norm2.weight)


@torch.no_grad()
def test_from_pretrained_loads_a_swin_of_transformers(tmp_path):
    theirs = randomize(tf.SwinBackbone(swin_config())).eval()
    theirs.save_pretrained(tmp_path)
    model = SwinDenseBackbone.from_pretrained(tmp_path)
    assert largest_difference(model(IMAGE).feature_maps, theirs(IMAGE).feature_maps) < 1e-4
    assert SwinDenseBackbone.from_pretrained(tmp_path, out_features=['stage3']).channels == [64]
    assert SwinDenseBackbone.from_pretrained(tmp_path, out_indices=[3]).channels == [64]
    assert SwinDenseConfig.of_swin(theirs.config, out_indices=[2, 4]).out_features == ['stage2', 'stage4']
    assert SwinDenseBackbone.from_pretrained(tmp_path, window_size=5).backbone.window_size == (5, 5)
    with pytest.raises(TypeError, match=r'dtype: .*; to change its dtype or device'):
        SwinDenseBackbone.from_pretrained(tmp_path, dtype=torch.float16)


@torch.no_grad()
def test_options_of_a_saved_backbone_can_be_changed(tmp_path):
    model = randomize(SwinDenseBackbone(config())).eval()
    model.save_pretrained(tmp_path)
    for kind in (SwinDenseBackbone, tf.AutoModel):
        loaded = kind.from_pretrained(tmp_path, frozen_stages=1, out_features=['stage3'])
        assert loaded.backbone.frozen_stages == 1
        assert [x.shape[1] for x in loaded(IMAGE).feature_maps] == loaded.channels == [64]
        with pytest.raises(TypeError, match='windowsize'):
            kind.from_pretrained(tmp_path, windowsize=5)
    assert SwinDenseBackbone.from_pretrained(tmp_path, dtype=torch.float16).dtype == torch.float16
    assert SwinDenseBackbone.from_pretrained(tmp_path, out_indices=[3]).channels == [64]


def test_another_window_of_a_saved_swin_v2_keeps_the_scale_of_its_position_networks(tmp_path):
    SwinDenseBackbone(SwinDenseConfig('swinv2_t', **TINY, window_size=4)).save_pretrained(tmp_path)
    loaded = SwinDenseBackbone.from_pretrained(tmp_path, window_size=6)
    assert (loaded.backbone.window_size, loaded.backbone.pretrained_window_size) == ((6, 6), (4, 4, 4, 4))


def test_published_weights_by_name(tmp_path, monkeypatch):
    """The options that the name does not say, such as the window, are those of the file."""
    arch = {'embed_dims': 32, 'depths': (1, 1, 1, 1), 'num_heads': (1, 2, 4, 8)}
    saved = randomize(SwinBackbone(arch, window_size=5))
    torch.save(saved.state_dict(), tmp_path / 'a.pth')
    one = dataclasses.replace(weights.published()['swin_t.in1k'], address=(tmp_path / 'a.pth').as_uri())
    monkeypatch.setattr(weights, 'published', lambda: {'swin_t.in1k': one})
    model = SwinDenseBackbone.from_pretrained('swin_t.in1k', out_indices=[2, 4], **arch)
    assert model.config.out_features == ['stage2', 'stage4']
    assert model.backbone.window_size == (5, 5)
    weight = 'stages.3.blocks.0.attn.w_msa.qkv.weight'
    assert torch.equal(model.backbone.state_dict()[weight], saved.state_dict()[weight])


def test_the_revision_is_passed_on(tmp_path, monkeypatch):
    """The revision is passed to AutoConfig, and to load_checkpoint for the weights of a transformers Swin."""
    from swin_dense.integrations import transformers as ours

    randomize(tf.SwinBackbone(swin_config())).save_pretrained(tmp_path)
    calls, auto, load = [], tf.AutoConfig.from_pretrained, ours.load_checkpoint

    def from_pretrained(name, **arguments):
        calls.append(arguments)
        return auto(tmp_path)

    monkeypatch.setattr(ours.AutoConfig, 'from_pretrained', from_pretrained)
    monkeypatch.setattr(
        ours, 'load_checkpoint', lambda model, place, prefix: (calls.append(place), load(model, tmp_path))
    )
    SwinDenseBackbone.from_pretrained('me/swin', revision='v1')
    SwinDenseBackbone.from_pretrained('me/swin')
    assert calls == [{'revision': 'v1'}, 'hf://me/swin@v1', {}, 'hf://me/swin']


def test_config():
    v2 = SwinDenseConfig('swinv2_t', **TINY, window_size=8, out_indices=[2, 4])
    assert v2.out_features == ['stage2', 'stage4']
    assert SwinDenseConfig.from_dict(v2.to_dict()).to_dict() == v2.to_dict()
    with pytest.raises(TypeError, match=r"'windowsize'.*'window_size'.*SwinDenseConfig\.of_swin"):
        SwinDenseConfig('swin_t', windowsize=8)
    with pytest.raises(TypeError, match="option 'hidden_act'"):  # transformers would set it, and nothing read it
        SwinDenseConfig('swin_t', hidden_act='relu')
    with pytest.raises(TypeError, match='num_channels follows'):
        SwinDenseConfig('swin_t', num_channels=4)
    labelled = SwinDenseConfig('swin_t', id2label={0: 'a'}, output_hidden_states=True, dtype='float16', num_labels=1)
    assert labelled.num_labels == 1
    with pytest.raises(ValueError, match='the stem is not returned'):
        SwinDenseConfig('swin_t', out_features=['stem'])


def test_hidden_states_and_checkpointing():
    model = SwinDenseBackbone(config())
    states = model(IMAGE, output_hidden_states=True).hidden_states
    assert [tuple(x.shape[1:]) for x in states] == [(16, 24, 32), (32, 12, 16), (64, 6, 8), (128, 3, 4)]
    with pytest.raises(ValueError, match='output_attentions cannot be True'):
        model(IMAGE, output_attentions=True)
    model.gradient_checkpointing_enable()
    assert all(block.with_cp for stage in model.backbone.stages for block in stage.blocks)
    sum(x.sum() for x in model.train()(IMAGE).feature_maps).backward()
    assert all(parameter.grad is not None for parameter in model.parameters())


@torch.no_grad()
@pytest.mark.parametrize('build', [upernet, mask2former, detr])
def test_a_finished_model_with_our_backbone_keeps_its_outputs(build):
    """As on the page: a model with the converted config, the weights of its heads, and those of its Swin."""
    theirs = build(swin_config())
    for parameter in theirs.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    changed = copy.deepcopy(theirs.config)
    changed.backbone_config = SwinDenseConfig.of_swin(theirs.config.backbone_config)
    ours = type(theirs)(changed)
    (backbone,) = (module for module in ours.modules() if isinstance(module, SwinDenseBackbone))
    ((name, swin),) = ((n, m) for n, m in theirs.named_modules() if isinstance(m, tf.SwinBackbone))
    load_checkpoint(backbone.backbone, swin.state_dict(), log=None)
    heads = {key: value for key, value in theirs.state_dict().items() if not key.startswith(f'{name}.')}
    ours.load_state_dict({**ours.state_dict(), **heads})
    outputs = [list(model.double().eval()(pixel_values=IMAGE.double()).to_tuple()) for model in (ours, theirs)]
    outputs = [[out for out in each if isinstance(out, torch.Tensor)] for each in outputs]
    assert len(outputs[0]) > 0
    assert largest_difference(*outputs) < 1e-5
