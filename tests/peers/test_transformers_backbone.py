"""SwinDenseBackbone in models of transformers, and replace_swin on existing models."""

import copy
import pickle

import pytest
import torch
from safetensors.torch import load_file, save_file

from swin_dense import SwinBackbone, load_checkpoint
from tests.conftest import TINY, randomize

tf = pytest.importorskip('transformers', reason='see the group peers of pyproject.toml')
from swin_dense.integrations.transformers import SwinDenseBackbone, SwinDenseConfig, replace_swin  # noqa: E402

IMAGE = torch.rand(2, 3, 96, 128)
THEIRS = {'embed_dim': 16, 'depths': [2, 2, 2, 2], 'num_heads': [1, 2, 4, 8], 'window_size': 2, 'image_size': 64}
STAGES = ['stage1', 'stage2', 'stage3', 'stage4']
SMALL_HEAD = {'encoder_layers': 1, 'decoder_layers': 2, 'num_attention_heads': 2, 'dim_feedforward': 32,
              'encoder_feedforward_dim': 32, 'num_queries': 5, 'hidden_dim': 32}  # fmt: skip
SMALL_DETR = {'d_model': 32, 'encoder_layers': 1, 'decoder_layers': 2, 'encoder_attention_heads': 2,
              'decoder_attention_heads': 2, 'encoder_ffn_dim': 32, 'decoder_ffn_dim': 32}  # fmt: skip
ONEFORMER = {'mask_dim': 32, 'conv_dim': 32, 'text_encoder_width': 32, 'text_encoder_vocab_size': 50,
             'text_encoder_num_layers': 1, 'text_encoder_n_ctx': 4, 'text_encoder_context_length': 9,
             'query_dec_layers': 1, 'task_seq_len': 9, 'is_training': False, **SMALL_HEAD}  # fmt: skip


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


def oneformer(backbone):
    return tf.OneFormerForUniversalSegmentation(tf.OneFormerConfig(backbone_config=backbone, **ONEFORMER))


def grounding_dino(backbone):
    text = {'hidden_size': 16, 'num_hidden_layers': 1, 'num_attention_heads': 2, 'intermediate_size': 16}
    return tf.GroundingDinoForObjectDetection(
        tf.GroundingDinoConfig(
            backbone_config=backbone,
            text_config=tf.BertConfig(vocab_size=2000, **text),
            num_queries=5,
            max_text_len=8,
            **SMALL_DETR,
        )
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
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for _ in range(6):
        loss = model(pixel_values=IMAGE, **LABELS[build]).loss
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[-1] < losses[0]
    without = [name for name, p in model.named_parameters() if 'backbone.' in name and p.grad is None]
    # DETR uses only the last map.
    assert {name.split('.')[-2] for name in without} == ({'norm0', 'norm1', 'norm2'} if build is detr else set())


def largest_difference(ours, theirs):
    # Scores of absent words are -inf on both sides.
    return max((a - b).masked_fill(a == b, 0).abs().max().item() for a, b in zip(ours, theirs, strict=True))


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
    assert SwinDenseBackbone.from_pretrained(tmp_path, window_size=5).backbone.window_size == (5, 5)
    with pytest.raises(TypeError, match=r'dtype: a Swin of transformers takes .*; to change its dtype or device'):
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


def test_the_revision_is_passed_on(tmp_path, monkeypatch):
    """The revision is passed to AutoConfig, and to load_checkpoint for the weights of a transformers Swin."""
    from swin_dense.integrations import transformers as ours

    randomize(tf.SwinBackbone(swin_config())).save_pretrained(tmp_path)
    calls, auto, load = [], tf.AutoConfig.from_pretrained, ours.load_checkpoint

    def from_pretrained(name, **arguments):
        calls.append(arguments)
        return auto(tmp_path)

    monkeypatch.setattr(ours.AutoConfig, 'from_pretrained', from_pretrained)
    monkeypatch.setattr(ours, 'load_checkpoint', lambda model, place: (calls.append(place), load(model, tmp_path)))
    SwinDenseBackbone.from_pretrained('me/swin', revision='v1')
    SwinDenseBackbone.from_pretrained('me/swin')
    assert calls == [{'revision': 'v1'}, 'hf://me/swin@v1', {}, 'hf://me/swin']


def test_config():
    v2 = SwinDenseConfig('swinv2_t', **TINY, window_size=8, out_indices=[2, 4])
    assert v2.out_features == ['stage2', 'stage4']
    assert SwinDenseConfig.from_dict(v2.to_dict()).to_dict() == v2.to_dict()
    with pytest.raises(TypeError, match=r"'windowsize'.*'window_size'"):
        SwinDenseConfig('swin_t', windowsize=8)
    with pytest.raises(TypeError, match='num_channels follows'):
        SwinDenseConfig('swin_t', num_channels=4)
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


def tensors_of(output):
    for value in output.values():
        if isinstance(value, torch.Tensor):
            yield value
        elif isinstance(value, (tuple, list)):
            yield from (entry for entry in value if isinstance(entry, torch.Tensor))


@torch.no_grad()
@pytest.mark.parametrize(
    ('build', 'inputs', 'name'),
    [
        (upernet, {}, 'backbone.swin'),
        (mask2former, {}, 'model.pixel_level_module.encoder.swin'),
        (maskformer, {}, 'model.pixel_level_module.encoder.model'),
        (oneformer, {'task_inputs': torch.rand(2, 9)}, 'model.pixel_level_module.encoder.swin'),
        (
            grounding_dino,
            {'input_ids': torch.tensor([[101, 7, 1012, 102]] * 2)},
            'model.backbone.conv_encoder.model.swin',
        ),
        (tf.SwinModel, {'output_hidden_states': True}, ''),
        (tf.SwinForImageClassification, {'output_hidden_states': True}, 'swin'),
        (tf.SwinBackbone, {'output_hidden_states': True}, 'swin'),
    ],
    ids=lambda value: getattr(value, '__name__', None),
)
def test_replacing_keeps_the_outputs(build, inputs, name):
    stages = {'out_indices': [2, 3, 4], 'out_features': None} if build is grounding_dino else {}
    model = build(swin_config(**stages))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter += 0.05 * torch.randn_like(parameter)
    model.double().eval()
    inputs = {'pixel_values': IMAGE, **inputs}
    inputs = {name: value.double() if name != 'input_ids' and isinstance(value, torch.Tensor) else value
              for name, value in inputs.items()}  # fmt: skip
    before = list(tensors_of(model(**inputs)))
    report = replace_swin(model, image_size=(64, 96))
    after = list(tensors_of(model(**inputs)))
    assert len(before) > 0
    assert largest_difference(after, before) < 1e-9
    assert [item.name for item in report.items] == [name]
    assert 'ms before' in str(report)
    assert 'MiB before' in str(report)
    assert all(seconds > 0 for seconds in report.items[0].seconds)
    # The peak is lower because attention weights are not materialised.
    assert report.items[0].peak_bytes[1] < report.items[0].peak_bytes[0]


def test_replacing_keeps_gradients_frozen_parameters_and_mode():
    model = tf.SwinForImageClassification(swin_config()).train()
    model.swin.requires_grad_(False)
    replace_swin(model, (64, 64))
    assert model.swin.encoder.training
    assert not any(parameter.requires_grad for parameter in model.swin.encoder.parameters())
    model = tf.SwinForImageClassification(swin_config()).train()
    model.swin.encoder.layers[0].requires_grad_(False)
    model.swin.encoder.layers[2].blocks[1].layernorm_after.weight.requires_grad_(False)
    replace_swin(model, (64, 64))
    frozen = {name for name, parameter in model.swin.encoder.named_parameters() if not parameter.requires_grad}
    first = {f'stages.0.{name}' for name, _ in model.swin.encoder.stages[0].named_parameters()}
    assert frozen == {*first, 'stages.2.blocks.1.norm2.weight'}
    model = tf.SwinForImageClassification(swin_config(drop_path_rate=0.0)).train()
    other = tf.SwinForImageClassification(swin_config(drop_path_rate=0.0)).train()
    other.load_state_dict(model.state_dict())
    replace_swin(model, (64, 64))
    assert all(parameter.grad is None for parameter in model.parameters())
    for each in (model, other):
        each(IMAGE, labels=torch.tensor([1, 1])).loss.backward()
    ours, theirs = (each.swin.embeddings.patch_embeddings.projection.weight.grad for each in (model, other))
    assert (ours - theirs).abs().max() < 1e-5


@torch.no_grad()
@pytest.mark.parametrize('build', [upernet, maskformer, tf.SwinBackbone])
def test_replacing_keeps_the_outputs_on_maps_smaller_than_a_window(build):
    """Classifiers of transformers fail on such maps. The weights have float64 values that float32 cannot represent."""
    model = build(swin_config(window_size=7)).double().eval()
    for parameter in model.parameters():
        parameter += 0.05 * torch.randn_like(parameter)
    for size in ((64, 96), (49, 133)):
        image = torch.rand(1, 3, *size).double()
        copied = copy.deepcopy(model)
        replace_swin(copied, size)
        before, after = (list(tensors_of(each(pixel_values=image))) for each in (model, copied))
        assert largest_difference(after, before) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize('build', [tf.SwinModel, tf.SwinForImageClassification])
def test_replacing_keeps_the_outputs_of_a_classifier_whose_last_map_is_a_window(build):
    model = build(swin_config(window_size=3)).eval()
    randomize(model).double()
    image = torch.rand(1, 3, 96, 128).double()
    copied = copy.deepcopy(model)
    replace_swin(copied, (96, 128))
    before, after = (list(tensors_of(each(image, output_hidden_states=True))) for each in (model, copied))
    assert largest_difference(after, before) < 1e-9


@torch.no_grad()
@pytest.mark.parametrize('build', [upernet, mask2former, maskformer, oneformer, tf.SwinForImageClassification])
def test_files_are_interchangeable_before_and_after_replacing(build, tmp_path):
    """A file saved after the replacement loads into transformers, and a file saved before it loads afterwards."""
    inputs = {'pixel_values': IMAGE.double()} | (
        {'task_inputs': torch.rand(2, 9).double()} if build is oneformer else {}
    )
    original = randomize(build(swin_config())).double().eval()
    expected = list(tensors_of(original(**inputs)))
    replaced = build(swin_config()).double().eval()
    keys = list(replaced.state_dict())
    replace_swin(replaced, (64, 64))
    assert sorted(replaced.state_dict()) == sorted(keys)
    replaced.load_state_dict(original.state_dict())
    assert largest_difference(list(tensors_of(replaced(**inputs))), expected) < 1e-9
    replaced.save_pretrained(tmp_path)
    loaded = type(original).from_pretrained(tmp_path).eval()
    assert all(
        torch.equal(a, b) for a, b in zip(loaded.state_dict().values(), original.state_dict().values(), strict=True)
    )
    replace_swin(loaded, (64, 64))
    assert largest_difference(list(tensors_of(loaded(**inputs))), expected) < 1e-9


def test_a_replaced_model_trains_copies_and_supports_peft(tmp_path):
    peft = pytest.importorskip('peft', reason='see the group peers of pyproject.toml')
    model = tf.SwinForImageClassification(swin_config(drop_path_rate=0.0)).train()
    model.gradient_checkpointing_enable()
    replace_swin(model, (64, 64))
    assert model.swin.encoder.gradient_checkpointing
    model.gradient_checkpointing_disable()
    assert not model.swin.encoder.gradient_checkpointing
    model.gradient_checkpointing_enable()
    model(IMAGE, labels=torch.tensor([1, 1])).loss.backward()
    assert all(parameter.grad is not None for parameter in model.parameters())
    model.gradient_checkpointing_disable()
    lacking = {key: value for key, value in model.state_dict().items() if 'blocks.0.layernorm_before' not in key}
    with pytest.raises(RuntimeError, match=r'encoder\.stages\.0\.blocks\.0\.norm1'):
        model.load_state_dict(lacking)
    model.eval()
    for copied in (copy.deepcopy(model), pickle.loads(pickle.dumps(model))):
        assert torch.equal(copied(IMAGE).logits, model(IMAGE).logits)
    state = {key: value.clone() for key, value in model.state_dict().items()}
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=['qkv'], init_lora_weights=False)).eval()
    adapted.save_pretrained(tmp_path)
    other = tf.SwinForImageClassification(swin_config(drop_path_rate=0.0))
    replace_swin(other, (64, 64))
    other.load_state_dict(state)
    loaded = peft.PeftModel.from_pretrained(other, tmp_path).eval()
    assert torch.equal(loaded(IMAGE).logits, adapted(IMAGE).logits)


def test_unsupported_models_are_refused():
    with pytest.raises(ValueError, match='Linear contains no SwinModel'):
        replace_swin(torch.nn.Linear(1, 1))
    model = tf.SwinModel(swin_config(hidden_act='tanh'))
    with pytest.raises(ValueError, match="the activation 'tanh' is not supported"):
        replace_swin(model, (64, 64))
    model = tf.SwinModel(swin_config(output_attentions=True))
    with pytest.raises(ValueError, match='output_attentions cannot be True'):
        replace_swin(model, (64, 64))
    model = tf.SwinForImageClassification(swin_config()).eval()
    replace_swin(model, (64, 64))
    with pytest.raises(ValueError, match='output_attentions cannot be True'):
        model(IMAGE, output_attentions=True)


def test_either_all_encoders_or_none_are_replaced():
    models = torch.nn.ModuleList(tf.SwinModel(swin_config(hidden_act=name)) for name in ('gelu', 'tanh'))
    encoder = models[0].encoder
    with pytest.raises(ValueError, match="the activation 'tanh' is not supported"):
        replace_swin(models, (64, 64))
    assert models[0].encoder is encoder


@pytest.mark.parametrize('change', ['output', 'call'])
def test_an_incompatible_version_of_transformers_keeps_its_encoder(change, monkeypatch):
    """A future version of transformers might compute a different output, or call its encoder differently."""
    from swin_dense.integrations import transformers as ours

    model = tf.SwinModel(swin_config()).train()
    model.encoder.layers[0].eval()
    theirs, modes = model.encoder, [module.training for module in model.modules()]
    forward, measure = type(theirs).forward, ours._measure

    def mirrored(self, hidden_states, *args, **kwargs):
        return forward(self, hidden_states.flip(1), *args, **kwargs)

    def called(swin, image_size):
        if swin.encoder is not theirs:
            raise TypeError('an unexpected argument')
        return measure(swin, image_size)

    if change == 'output':
        monkeypatch.setattr(type(theirs), 'forward', mirrored)
        expected = pytest.raises(RuntimeError, match=f'SwinModel in transformers {tf.__version__} by .*% of the output')
    else:
        monkeypatch.setattr(ours, '_measure', called)
        expected = pytest.raises(TypeError, match='an unexpected argument')
    with expected:
        replace_swin(model, (64, 64))
    assert model.encoder is theirs
    assert [module.training for module in model.modules()] == modes


@torch.no_grad()
def test_our_weights_load_into_the_backbone():
    weights = randomize(SwinBackbone('t', **TINY)).eval()
    model = SwinDenseBackbone(config()).eval()
    load_checkpoint(model.backbone, weights.state_dict(), log=None)
    assert largest_difference(model(IMAGE).feature_maps, weights(IMAGE)) == 0
