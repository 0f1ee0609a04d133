"""Checkpoints that do not fit: the reason is named, the model keeps its weights, and parts load on request."""

import copy
import logging
import re

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from swin_dense import SwinBackbone, create_backbone
from swin_dense.checkpoint import CheckpointError, export_state_dict, load_checkpoint
from swin_dense.utils.checks import first_few
from swin_dense.utils.choices import FAMILIES
from tests.checkpoint.helpers import ARCH, build, load, official_classifier, prefixed, raises_and_keeps
from tests.conftest import equal_weights


def timm_s3():
    """Return weights with the windows of timm's swin_s3_tiny_224: 7, 7, 14 and 7."""
    state = export_state_dict(build(1, window_size=7), 'timm')
    for name, table in state.items():
        if name.startswith('layers.2') and name.endswith('bias_table'):
            state[name] = torch.randn(27 * 27, table.shape[1])
    return state


def test_windows_that_differ_per_stage_are_an_error():
    message = r'its windows differ per stage \(7x7, 7x7, 14x14, 7x7 tokens\).*allow_partial=True'
    for window in (7, 14):
        raises_and_keeps(build(2, window_size=window), timm_s3(), message)
    with pytest.raises(CheckpointError, match=message):
        create_backbone(checkpoint=timm_s3(), window_size=[7, 7, 7, 14])
    with pytest.raises(CheckpointError, match=message):
        build(2, window_size=7).load_state_dict(timm_s3())
    report = load(build(2, window_size=7), timm_s3(), allow_partial=True)
    assert set(report.resized.values()) == {'window 14x14 to 7x7, bicubic'}
    windows = [7, 7, 14, 7]
    made = create_backbone(checkpoint=timm_s3())
    assert made.windows == tuple((side, side) for side in windows)
    for model in (made, build(2, window_size=windows)):
        assert not load(model, timm_s3()).resized
    assert len(load(build(2, window_size=windows), build(1, window_size=7).state_dict()).resized) == 1
    load(build(2, window_size=7, out_indices=(0, 1)), timm_s3())  # does not have the stage of another window


PART = 'stages.1.blocks.0.attn.w_msa.qkv.weight'


def on_meta(tensor):
    return tensor.to('meta')


def quantised(tensor):
    return torch.quantize_per_tensor(tensor.float(), 0.1, 0, torch.qint8)


class Sharded(torch.Tensor):
    device_mesh = None  # as a DTensor has


@pytest.mark.parametrize(
    ('change', 'reason'),
    [
        (torch.Tensor.to_sparse, r'tensor; store it with to_dense\(\)'),
        (torch.Tensor.to_sparse_csr, 'not a dense tensor'),
        (quantised, r'quantised; store it with dequantize\(\)'),
        (lambda x: torch.nested.nested_tensor([x]), 'not a dense tensor'),
        (lambda x: x[:0], 'empty, as in a shard of'),
        (on_meta, r'device meta|in parts of different'),
        (lambda x: x.as_subclass(Sharded), 'a DTensor, which is sharded over devices'),
    ],
)
@pytest.mark.parametrize('family', ['mmdet', 'transformers', 'timm'])
@pytest.mark.filterwarnings('ignore')
def test_nothing_is_copied_if_one_tensor_cannot_be(change, reason, family):
    backbone = build(2)
    state = export_state_dict(build(1), family)
    key = next(key for key in state if re.search(r'1\.blocks\.0\..*(qkv|q_proj)\.weight', key))
    state[key] = change(state[key])
    raises_and_keeps(backbone, state, rf'Wrong shape or kind: stages\.1\..*({reason})')
    before = copy.deepcopy(backbone.state_dict())
    with pytest.raises(CheckpointError, match=reason):
        backbone.load_state_dict(state)
    assert equal_weights(backbone, before)
    report = load(backbone, state, allow_partial=True)
    assert list(report.mismatched) == [PART]
    assert torch.equal(backbone.state_dict()[PART], before[PART])


@pytest.mark.parametrize('change', [torch.Tensor.to_sparse, quantised, on_meta])
@pytest.mark.filterwarnings('ignore')
def test_other_kinds_of_tensors_in_a_file_are_named(tmp_path, change):
    state = build(1).state_dict()
    state[PART] = change(state[PART])
    torch.save(state, tmp_path / 'a.pth')
    kind = r'stored as torch\._utils\._rebuild_\w+tensor\w*, not as a dense tensor'
    raises_and_keeps(build(2), tmp_path / 'a.pth', rf'{re.escape(PART)} is {kind}')


def test_a_shard_of_zero_3_advises_no_option():
    state = {name: tensor[:0] for name, tensor in build(1).state_dict().items()}
    message = raises_and_keeps(build(2), state, 'zero_to_fp32')
    assert 'build the model' not in message
    with pytest.raises(CheckpointError, match='zero_to_fp32'):
        create_backbone(checkpoint=state)


@pytest.mark.parametrize(
    ('key', 'family'),
    [
        ('head.fc.weight', 'mmpretrain'),
        ('roi_head.mask_head.fc.weight', 'mmdet'),
        ('aux_head.fc.weight', 'mmdet'),
        ('bbox_head.fc.weight', 'mmdet'),
    ],
)
def test_only_a_head_beside_the_backbone_is_that_of_mmpretrain(key, family):
    state = {**prefixed('backbone.', build(1)), key: torch.zeros(3, 64)}
    assert load(build(2), state).family == family


@pytest.mark.parametrize('digits', [4, 12, 5000])
@pytest.mark.parametrize('name', ['stages.{}.blocks.0.norm1.weight', 'stages.0.blocks.{}.x', 'norm{}.weight'])
def test_numbers_in_names_are_bounded(digits, name):
    """Neither a list of that many stages nor Python's limit for the digits of an integer is reached."""
    state = {**build(1).state_dict(), name.format('9' * digits): torch.zeros(3)}
    raises_and_keeps(build(2), state, 'but not in the model')
    with pytest.raises(CheckpointError):
        create_backbone(checkpoint=state)


@pytest.mark.parametrize('name', ['absolute_pos_embed', PART.replace('qkv.weight', 'relative_position_bias_table')])
def test_a_model_is_not_built_for_parameters_of_another_rank(name):
    state = build(1, use_abs_pos_embed=True, pretrain_img_size=32).state_dict()
    state[name] = torch.tensor(1.0)
    with pytest.raises(CheckpointError):
        create_backbone(checkpoint=state)


class TestCauses:
    def test_another_published_architecture(self):
        with torch.device('meta'):
            small = SwinBackbone('s').state_dict()
        advice = r"a Swin-S with depths \(2, 2, 18, 2\).*build the model with arch='s'"
        raises_and_keeps(SwinBackbone('t'), small, advice)

    def test_no_option_is_advised_for_a_replaced_module(self):
        backbone = build()
        for stage in backbone.stages:
            for block in stage.blocks:
                block.attn.w_msa.qkv = torch.nn.Identity()
        message = raises_and_keeps(backbone, build().state_dict(), r'but not in the model: .*qkv\.weight')
        assert 'build the model' not in message

    @pytest.mark.parametrize(
        ('option', 'value'),
        [
            ('depths', (2, 1, 3, 1)),
            ('num_heads', (1, 2, 4, 8)),
            ('mlp_ratio', 2.0),
            ('qkv_bias', False),
            ('patch_norm', False),
            ('use_abs_pos_embed', True),
            ('use_rel_pos_bias', False),
            ('patch_size', 2),
        ],
    )
    def test_another_option_is_advised_alone(self, option, value):
        source = build(**{option: value}).state_dict()
        message = raises_and_keeps(build(), source, 'build the model with')
        (advice,) = re.findall('build the model with .*', message)
        assert f'build the model with {option}={value}' in advice

    @pytest.mark.parametrize(
        'source',
        [
            {},
            {'weight': torch.zeros(3)},
            {'model': {}},
            {'state_dict': {'fc.weight': 3}},
            # A ViT, with the same patch embedding.
            {'patch_embed.proj.weight': torch.zeros(16, 3, 4, 4), 'blocks.0.attn.qkv.weight': torch.zeros(48, 16)},
        ],
    )
    def test_no_swin(self, source):
        raises_and_keeps(build(), source, 'no parameters of a Swin Transformer were found')

    def test_wrong_types(self):
        with pytest.raises(TypeError, match='an address or a dict, got int'):
            load(build(), 3)
        with pytest.raises(TypeError, match=r'got ModuleDict; pass its \.backbone'):
            load(torch.nn.ModuleDict({'backbone': build()}), {})
        integers = {name: tensor.long() for name, tensor in build().state_dict().items()}
        raises_and_keeps(build(), integers, 'torch.int64 in the checkpoint')
        with torch.device('meta'):
            on_meta = SwinBackbone(**ARCH)
        with pytest.raises(CheckpointError, match='meta device'):
            load(on_meta, build().state_dict())

    def test_a_merging_layer_without_an_input(self):
        """Its inputs cannot be put in our order, although its elements are a multiple of four."""
        state = export_state_dict(build(1), 'timm')
        key = 'layers.1.downsample.reduction.weight'
        state[key] = state[key][:, 1:]
        raises_and_keeps(build(2), state, r'\(16, 31\) in the checkpoint, \(16, 32\) in the model')

    def test_an_integer_part_of_a_parameter(self):
        """Concatenated with the other parts, which are floats, it would become a float tensor."""
        state = export_state_dict(build(1), 'transformers')
        key = next(key for key in state if 'q_proj.weight' in key)
        raises_and_keeps(
            build(2),
            {**state, key: state[key].long()},
            'in parts of different shapes, types',
        )


def test_partial_loading_keeps_parameters_that_do_not_load():
    source, backbone = build(1), build(2)
    norm, mlp = 'stages.3.blocks.0.norm1.weight', 'stages.0.blocks.0.ffn.layers.0.0.weight'
    kept = backbone.stages[3].blocks[0].norm1.weight.clone()
    state = source.state_dict()
    del state[norm]
    state[mlp] = torch.zeros(32, 5)  # not adapted, as that of other image channels is
    state['stages.0.blocks.7.norm1.weight'] = torch.zeros(8)
    report = load(backbone, state, allow_partial=True)
    assert set(report.missing) == {norm, mlp}
    assert set(report.mismatched) == {mlp}
    assert report.unexpected == ['stages.0.blocks.7.norm1.weight']
    assert torch.equal(backbone.stages[3].blocks[0].norm1.weight, kept)
    assert torch.equal(backbone.norm2.bias, source.norm2.bias)
    assert all(word in str(report) for word in ('missing', 'wrong shape', 'unexpected'))
    other = build(embed_dims=16, num_heads=(4,) * 4)
    raises_and_keeps(backbone, other.state_dict(), 'none of its parameters fits', allow_partial=True)


def test_of_many_names_the_first_five_are_listed():
    assert first_few('abcde') == 'a, b, c, d, e'
    assert first_few('abcdef', '; ') == 'a; b; c; d; e; ... (6 in all)'


def test_the_report_is_logged(capsys, caplog):
    lines = []
    with caplog.at_level(logging.INFO, 'swin_dense'):
        load_checkpoint(build(), build(1).state_dict())
        assert 'family: mmdet' in caplog.text
        caplog.clear()
        load_checkpoint(build(), build(1).state_dict(), log=lines.append)
        load_checkpoint(build(), build(1).state_dict(), log=None)
    (report,) = lines
    assert '\n  family: mmdet, Swin V1' in str(report)
    assert not caplog.records
    assert not capsys.readouterr().out


@pytest.mark.parametrize('change', [{'window_size': 5}, {'in_channels': 1}])
def test_resizing_is_logged_as_a_warning(caplog, change):
    with caplog.at_level(logging.INFO, 'swin_dense'):
        load_checkpoint(build(), build(1).state_dict())
        load_checkpoint(build(**change), build(1).state_dict())
        build(**change).load_state_dict(build(1).state_dict())
    assert [record.levelname for record in caplog.records] == ['INFO', 'WARNING', 'WARNING']
    assert 'resized' in caplog.text


def test_the_report_of_a_classifier_suggests_clamp_window():
    checkpoint = official_classifier(build(1))
    assert 'clamp_window=True' in str(load(build(), checkpoint))
    assert 'clamp_window' not in str(load(build(clamp_window=True), checkpoint))
    assert 'clamp_window' not in str(load(build(), build(1).state_dict()))


@pytest.mark.parametrize(
    ('prefix', 'head', 'is_classifier'),
    [
        ('', {'head.weight': (5, 64), 'head.bias': (5,)}, True),
        ('', {'head.weight': (5, 64, 1, 1)}, False),
        ('backbone.', {'head.weight': (5, 64), 'head.bias': (5,)}, False),  # as in docs/plain-pytorch.md
        ('backbone.', {'head.fc.weight': (5, 64)}, True),  # of mmpretrain
    ],
)
def test_a_head_of_the_users_own_is_no_classifier(prefix, head, is_classifier):
    state = prefixed(prefix, build(1)) | {name: torch.zeros(shape) for name, shape in head.items()}
    report = load(build(2), state)
    assert ('clamp_window=True' in str(report)) == is_classifier
    reason = 'the classifier' if is_classifier else 'other parts of the model'
    assert report.left_out == dict.fromkeys(head, reason)


def test_a_patch_embedding_of_another_name_is_named_and_not_left_random():
    """As in a network that has one for each sensor: what is left over is what is missing."""
    state = {key.replace('patch_embed.projection', 'conv_rgb.0'): x for key, x in build(1).state_dict().items()}
    message = raises_and_keeps(build(2), state, r'Missing in the checkpoint: patch_embed\.projection\.weight')
    assert 'In the checkpoint, but not in the model: conv_rgb.0.weight, conv_rgb.0.bias.' in message
    assert 'allow_partial' not in message


def spoiled(items, data):
    """Return the entries of a state dict of which one is dropped, renamed, reshaped, retyped or copied."""
    index = data.draw(st.integers(0, len(items) - 1))
    key, tensor = items[index]
    if not isinstance(tensor, torch.Tensor):
        return items
    name = data.draw(st.sampled_from([f'{key}x', f'x.{key}', key.replace('.0.', '.1.')]))
    value = data.draw(st.sampled_from([None, 'text', 3, tensor.long()]))
    changes = {
        'drop': [],
        'rename': [(name, tensor)],
        'flatten': [(key, tensor.flatten())],
        'wrap': [(key, tensor[None])],
        'grow': [(key, torch.cat([tensor, tensor]))],
        'type': [(key, value)],
        'copy': [(key, tensor), (f'module.{key}', tensor)],
    }
    change = data.draw(st.sampled_from(sorted(changes)))
    return [
        *items[:index],
        *changes[change],
        *items[index + 1 :],
    ]


@given(data=st.data())
@settings(max_examples=80)
def test_a_damaged_checkpoint_loads_correctly_or_not_at_all(data):
    options = {
        'depths': (1, 1),
        'num_heads': (1, 1),
        'embed_dims': 4,
    }
    source, backbone = build(1, **options), build(2, **options)
    family = data.draw(st.sampled_from(list(FAMILIES)))
    items = data.draw(st.permutations(list(export_state_dict(source, family).items())))
    for _ in range(data.draw(st.integers(0, 3))):
        items = spoiled(items, data)
    state = dict(items)
    before = copy.deepcopy(backbone.state_dict())
    try:
        report = load(backbone, state)
    except CheckpointError:
        assert equal_weights(backbone, before)
        return
    # Only output norms without an entry in the checkpoint may be new.
    tensors = [key for key, value in state.items() if isinstance(value, torch.Tensor)]
    for stage in {int(name.partition('.')[0].removeprefix('norm')) for name in report.new}:
        stems = (f'norm{stage}', f'hidden_states_norms.stage{stage + 1}')
        assert not any(key.startswith(stems) for key in tensors)
    new = {name: before[name] for name in report.new}
    assert equal_weights(backbone, {**source.state_dict(), **new})
