"""Checkpoints that are nearly those of a Swin: extras, transposed layers, other networks, odd types and names."""

import pickle
import re

import pytest
import torch

from swin_dense import SwinBackbone, SwinClassifier, SwinV2Backbone, create_backbone, load_checkpoint
from swin_dense.checkpoint import CheckpointError, export_state_dict
from swin_dense.utils.choices import FAMILIES
from tests.checkpoint.helpers import ARCH, build, load, official_classifier, prefixed, raises_and_keeps
from tests.conftest import equal_weights, randomize


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize(
    'extra',
    ['norm_up.weight', 'normalize.mean', 'norm.running_mean', 'norms.0.weight', 'layers_up.0.weight', 'stages_up.x'],
)
def test_a_module_beside_a_whole_backbone_is_reported(family, extra):
    source, backbone = build(1), build(2)
    exported = export_state_dict(source, family)
    inner = 'swin.' if family == 'transformers' else ''
    report = load(backbone, {**exported, f'{inner}{extra}': torch.ones(3)})
    assert report.unexpected == [f'{inner}{extra}']
    assert equal_weights(backbone, source)


@pytest.mark.parametrize('extra', ['norm0.scale', 'norm12.weight.x', 'layers.0.blocks.0.adapter.weight', 'layers.7.x'])
def test_a_parameter_within_the_numbered_modules_of_a_backbone_is_refused(extra):
    state = {**export_state_dict(build(1), 'official'), extra: torch.ones(3)}
    raises_and_keeps(build(2), state, f'but not in the model: {re.escape(extra)}')


def as_in_paddle(state):
    """Return weights as paddle.save stores them: arrays, in which linear weights are (inputs, outputs)."""
    is_linear = {name for name, tensor in state.items() if tensor.ndim == 2 and 'relative' not in name}
    arrays = {name: (tensor.T if name in is_linear else tensor).numpy() for name, tensor in state.items()}
    return {**arrays, 'StructuredToParameterName@@': {name: f'linear_{name}' for name in state}}


@pytest.mark.parametrize('allow_partial', [False, True])
@pytest.mark.parametrize('options', [{}, {'qkv_bias': False}, {'mlp_ratio': 1.0}, {'mlp_ratio': 0.5}])
def test_transposed_linear_layers_are_converted(tmp_path, options, allow_partial):
    """Of 24 channels, so that no width is three times another."""
    source, backbone = build(1, **options), build(2, **options)
    path = tmp_path / 'swin.pdparams'
    path.write_bytes(pickle.dumps(as_in_paddle(export_state_dict(source, 'official')), protocol=2))
    report = load(backbone, path, allow_partial=allow_partial)
    assert equal_weights(backbone, source)
    assert not report.missing
    assert 'note: linear weights are (inputs, outputs) in the checkpoint' in str(report)
    assert equal_weights(create_backbone(checkpoint=path, num_heads=ARCH['num_heads']), source.float())


@pytest.mark.parametrize('network', [SwinBackbone, SwinV2Backbone])
@pytest.mark.parametrize('family', ['official', 'timm', 'torchvision', 'transformers'])
def test_transposed_layers_of_any_family(network, family):
    source, backbone = (randomize(network(**ARCH), seed) for seed in (1, 2))
    load(backbone, as_in_paddle(export_state_dict(source, family)))
    assert equal_weights(backbone, source)


def test_a_transposed_classifier():
    state = official_classifier(build(1))['model']
    model = SwinClassifier(num_classes=10, **ARCH).double()
    load(model, as_in_paddle(state))
    assert torch.equal(model.head.weight, state['head.weight'].double())


def test_a_partial_load_does_not_guess_which_layers_are_transposed():
    state = export_state_dict(build(1), 'official')
    name = 'layers.1.blocks.0.mlp.fc1.weight'
    for allow_partial in (False, True):
        changed = {**state, name: state[name].T}
        match = r'stages\.1\.blocks\.0\.ffn\.layers\.0\.0\.weight is \(inputs, outputs\), but'
        raises_and_keeps(build(2), changed, match, allow_partial=allow_partial)


def lora(state):
    """Return the names of a model wrapped by PEFT, whose weights were not merged."""
    state = {name.replace('attn.qkv.', 'attn.qkv.base_layer.'): tensor for name, tensor in state.items()}
    beside = {'layers.0.blocks.0.attn.qkv.lora_A.default.weight': torch.zeros(2, 8)}
    return prefixed('base_model.model.', {**state, **beside})


def swinv2_cr(state):
    """Return the names of timm's swinv2_cr."""
    renamed = {name.replace('layers.', 'stages.'): x for name, x in state.items() if 'bias_table' not in name}
    for name in [name for name in renamed if name.endswith('attn.qkv.weight')]:
        stem = name.removesuffix('qkv.weight')
        renamed[f'{stem}meta_mlp.fc1.weight'] = torch.zeros(384, 2)
        renamed[f'{stem}logit_scale'] = torch.zeros(2)
    return renamed


def clap(state):
    """Return the names of the audio encoder of CLAP in transformers."""
    names = {
        'attn.proj': 'attention.output.dense',
        'attn.': 'attention.self.',
        'mlp.fc1': 'intermediate.dense',
        'mlp.fc2': 'output.dense',
        'norm1': 'layernorm_before',
        'norm2': 'layernorm_after',
    }
    renamed = {}
    for name, tensor in state.items():
        for old, new in names.items():
            name = name.replace(old, new)
        for part, chunk in zip(('query', 'key', 'value'), tensor.chunk(3), strict=False):
            renamed[f'audio_model.audio_encoder.{name.replace("qkv", part)}'] = chunk if 'qkv' in name else tensor
    return renamed


def video(state):
    return {**state, 'patch_embed.proj.weight': torch.ones(8, 3, 2, 4, 4)}


def quantised(state):
    """Return the tensors of a model of torch.ao's quantize_dynamic; the weights are in tuples, which are not read."""
    kept = {}
    for name, tensor in state.items():
        stem = name.rpartition('.')[0]
        is_linear = stem.endswith(('qkv', 'proj', 'fc1', 'fc2', 'reduction')) and 'embed' not in name
        kept |= {f'{stem}.scale': torch.ones(1), f'{stem}.zero_point': torch.zeros(1)} if is_linear else {name: tensor}
    return kept


def channels(state):
    return {name: x[:, :5] if 'layers.1.blocks.0.attn.qkv.weight' in name else x for name, x in state.items()}


def without_mlp(state):
    return {name.replace('mlp.fc', 'mlp.w'): x for name, x in state.items() if 'qkv' not in name}


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (lora, r'no Swin has: .*\.attn\.qkv\.base_layer\.weight.*merge_and_unload'),
        (swinv2_cr, r'no Swin has: patch_embed\.proj.*, \.\.\. \(\d+ in all\).*use the code of that network'),
        (clap, r'no Swin has: .*layernorm_before.*use the code of that network'),
        (video, r'no Swin has: patch_embed\.projection\.weight \(8, 3, 2, 4, 4\).* a Swin of videos'),
        (quantised, r'no Swin has: .*\.(scale|zero_point).*before a model is quantised'),
    ],
)
def test_what_is_nearly_a_swin_is_named(change, message):
    state = change(export_state_dict(build(1), 'official'))
    with pytest.raises(CheckpointError, match=message):
        create_backbone(checkpoint=state)
    for network in (SwinBackbone, SwinV2Backbone):
        text = raises_and_keeps(network(**ARCH), state, message)
        assert 'allow_partial' not in text  # what fits was trained beside what does not
        assert 'Build SwinBackbone' not in text


@pytest.mark.parametrize(
    ('change', 'message'),
    [
        (channels, r'channels of its stages do not double: .*qkv\.weight is \(48, 5\)'),
        (
            without_mlp,
            r'lacks .*attn\.w_msa\.qkv\.weight.* \(\d+ in all\). It has parameters that no Swin has: .*mlp\.w1\.weight',
        ),
    ],
)
def test_what_a_size_cannot_be_inferred_from_is_named(change, message):
    with pytest.raises(CheckpointError, match=message):
        create_backbone(checkpoint=change(export_state_dict(build(1), 'official')))


ODD_TYPES = ['bits8', 'bits16', 'uint4', 'int4', 'float4_e2m1fn_x2', 'uint16', 'complex64', 'float8_e5m2', 'bool']


@pytest.mark.parametrize('dtype', [name for name in ODD_TYPES if hasattr(torch, name)])
@pytest.mark.filterwarnings('ignore')
def test_tensors_of_odd_types(dtype):
    """An index buffer of such a type is ignored; a parameter is an error."""
    source, backbone = build(1), build(2)
    state = export_state_dict(source, 'mmdet')
    odd = torch.empty(9, 9, dtype=getattr(torch, dtype))
    index = {name: odd for name in state if name.endswith('relative_position_index')}
    load(backbone, {**state, **index})
    assert equal_weights(backbone, source)
    name = 'stages.0.blocks.0.attn.w_msa.relative_position_bias_table'
    if dtype == 'float8_e5m2':
        return  # a floating-point number, so it loads
    for table in (odd, odd.flatten()):
        raises_and_keeps(backbone, {**state, name: table}, rf'{re.escape(name)} is (of the type )?torch\.{dtype}')


NUL = '\0\n\x1b[2J'


@pytest.mark.parametrize('place', [f'a{NUL}.pth', f'{NUL}/a.safetensors', f'a{NUL}', f'swin_t.{NUL}'])
def test_a_path_with_a_nul(place):
    for source in (place, f'file:///{place}', f'https://127.0.0.1:1/{place}', f'memory://{place}'):
        with pytest.raises((FileNotFoundError, CheckpointError)):
            load_checkpoint(build(), source)


@pytest.mark.parametrize('name', [f'stages.0.{NUL}', f'{NUL}stages.0.blocks.0.norm1.weight', NUL])
def test_a_name_that_cannot_be_printed(name):
    state = {**build(1).state_dict(), f'stages.0.blocks.0.{name}': torch.zeros(2)}
    for source in (state, {name: torch.zeros(2)}, prefixed(f'{name}.', state) | prefixed('b.', state)):
        text = raises_and_keeps(build(2), source, 'the given dict')
        assert not set(NUL[:1] + NUL[2:3]) & set(text)


LONG = 'x' * 900


@pytest.mark.parametrize(
    'source',
    [
        {f'{LONG}{number}': torch.zeros(1) for number in range(5)},
        {f'stages.0.blocks.0.{LONG}{number}': torch.zeros(1) for number in range(5)} | build(1).state_dict(),
        build(1).state_dict() | {'stages.999.blocks.999.norm1.weight': torch.zeros(1)},
        {
            'stages.998.blocks.0.norm1.weight': torch.zeros(1),
            'stages.998.blocks.0.attn.w_msa.qkv.weight': torch.ones(3, 1),
        },
        prefixed(f'{LONG}.', build(1).state_dict()) | prefixed(f'{LONG}y.', build(1).state_dict()),
    ],
)
def test_errors_quote_names_in_part(source):
    messages = []
    for act in (lambda: load(build(2), source), lambda: create_backbone(checkpoint=source)):
        try:
            act()
        except ValueError as error:
            messages += str(error).splitlines()
    assert messages
    assert max(map(len, messages)) < 1500
