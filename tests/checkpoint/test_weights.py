"""For every row of the table in docs/checkpoints.md, a small file in the published format loads completely."""

import pickle
import re

import numpy as np
import pytest
import torch

from swin_dense import CheckpointError, SwinBackbone, SwinV2Backbone, export_state_dict, load_checkpoint
from tests.conftest import ROOT, equal_weights, randomize

ARCH = {'embed_dims': 16, 'depths': (2, 1, 2, 1), 'num_heads': (1, 2, 2, 4), 'window_size': 3}
OTHER = torch.zeros(3, 16)  # a parameter of the model around the backbone


def exported(backbone, family, prefix='', norms=True):
    """Return the weights with the names of another code base, without the output norms if ``norms`` is False."""
    state = export_state_dict(backbone, family)
    is_norm = re.compile(r'norm\d\.|hidden_states_norms')
    return {f'{prefix}{key}': tensor for key, tensor in state.items() if norms or not is_norm.match(key)}


def classifier(backbone, family, prefix=''):
    head = {'norm.weight': torch.ones(128), 'norm.bias': torch.zeros(128), 'head.weight': torch.zeros(5, 128)}
    return {**exported(backbone, family, prefix, norms=False), **{prefix + key: value for key, value in head.items()}}


def renamed(state, *pairs):
    for pattern, replacement in pairs:
        state = {re.sub(pattern, replacement, key): tensor for key, tensor in state.items()}
    return state


def transformers(backbone, prefix, **options):
    """Return the weights with the names that transformers used when the published files were written."""
    return renamed(
        exported(backbone, 'transformers', **options),
        (
            r'attention\.([qkv])_proj',
            lambda match: 'attention.self.' + {'q': 'query', 'k': 'key', 'v': 'value'}[match[1]],
        ),
        (r'attention\.relative_position_bias\.(?=relative)', 'attention.self.'),
        (r'attention\.o_proj', 'attention.output.dense'),
        (r'mlp\.fc1', 'intermediate.dense'),
        (r'mlp\.fc2', 'output.dense'),
        (r'^swin\.', ''),
        (r'^', prefix),
    )


def detectron2(backbone, prefix='backbone.'):
    arrays = {key: tensor.numpy() for key, tensor in exported(backbone, 'official', prefix).items()}
    arrays[f'{prefix}layers.0.blocks.0.attn.relative_position_index'] = np.zeros((9, 9), np.int64)
    arrays['sem_seg_head.predictor.query_feat.weight'] = np.zeros((3, 16), np.float32)
    return {'model': arrays, '__author__': 'their own', 'matching_heuristics': True}


def satlas(backbone):
    state = exported(backbone, 'torchvision', 'backbone.backbone.', norms=False)
    return {**state, 'upsample.layers.0.0.weight': OTHER, 'backbone.backbone.head.weight': OTHER}


def maskformer_of_transformers(backbone):
    prefix = 'model.pixel_level_module.encoder.'
    state = transformers(backbone, f'{prefix}model.')
    return renamed(
        {**state, 'model.transformer_module.queries_embedder.weight': OTHER},
        (
            re.escape(f'{prefix}model.hidden_states_norms.stage') + r'(\d)',
            lambda match: f'{prefix}hidden_states_norms.{int(match[1]) - 1}',
        ),
    )


# {first column of the page's table: (suffix, content, stages with an output norm in the file)}
ALL, LATER, NONE = (0, 1, 2, 3), (1, 2, 3), ()
ROWS = {
    'Swin Transformer, classifiers': ('.pth', lambda b: {'model': classifier(b, 'official')}, NONE),
    'Swin Transformer, detectors and segmentors': (
        '.pth',
        lambda b: {'meta': {'epoch': 36}, 'state_dict': {**exported(b, 'official', 'backbone.'), 'neck.weight': OTHER}},
        ALL,
    ),
    'MoBY': (
        '.pth',
        lambda b: {
            'model': {
                **exported(b, 'official', 'encoder.', norms=False),
                **exported(b, 'official', 'encoder_k.', norms=False),
                'queue1': OTHER,
            }
        },
        NONE,
    ),
    'SimMIM': (
        '.pth',
        lambda b: {
            'model': {
                **exported(b, 'official', 'encoder.', norms=False),
                'encoder.mask_token': torch.zeros(1, 1, 16),
                'decoder.0.weight': OTHER,
            }
        },
        NONE,
    ),
    'mmdet, mmsegmentation': (
        '.pth',
        lambda b: {'meta': {}, 'state_dict': {**exported(b, 'mmdet', 'backbone.'), 'bbox_head.fc_cls.weight': OTHER}},
        ALL,
    ),
    'mmpretrain': (
        '.pth',
        lambda b: {
            'state_dict': {
                **{
                    k: x
                    for k, x in exported(b, 'mmpretrain', 'backbone.').items()
                    if not re.match(r'backbone.norm[012]', k)
                },
                'head.fc.weight': OTHER,
            }
        },
        (3,),
    ),
    'timm': ('.safetensors', lambda b: renamed(classifier(b, 'timm'), (r'^head\.', 'head.fc.')), NONE),
    'segmentation_models_pytorch': (
        '.pth',
        lambda b: {
            **renamed(exported(b, 'timm', 'encoder.model.', norms=False), (r'layers\.(?=\d)', 'layers_')),
            'segmentation_head.0.weight': OTHER,
        },
        NONE,
    ),
    'torchvision': ('.pth', lambda b: classifier(b, 'torchvision'), NONE),
    'transformers: Swin': (
        '.safetensors',
        lambda b: {
            **transformers(b, 'swin.', norms=False),
            'swin.layernorm.weight': torch.ones(128),
            'swin.layernorm.bias': torch.zeros(128),
            'classifier.weight': torch.zeros(5, 128),
        },
        NONE,
    ),
    'transformers: Mask2Former, OneFormer': (
        '.safetensors',
        lambda b: {
            **transformers(b, 'model.pixel_level_module.encoder.'),
            'model.transformer_module.queries_embedder.weight': OTHER,
        },
        ALL,
    ),
    'transformers: MaskFormer': ('.bin', maskformer_of_transformers, ALL),
    'transformers: UperNet': (
        '.bin',
        lambda b: {**transformers(b, 'backbone.'), 'decode_head.classifier.weight': OTHER},
        ALL,
    ),
    'transformers: Donut': (
        '.bin',
        lambda b: {**transformers(b, 'encoder.', norms=False), 'decoder.model.decoder.embed_tokens.weight': OTHER},
        NONE,
    ),
    'Mask2Former, MaskFormer, OneFormer, CAT-Seg': ('.pkl', detectron2, ALL),
    "Mask2Former's converted backbones": (
        '.pkl',
        lambda b: {'model': classifier(b, 'official'), '__author__': 'third_party', 'matching_heuristics': True},
        NONE,
    ),
    'detectron2, training checkpoints': (
        '.pth',
        lambda b: {
            'model': {**exported(b, 'official', 'backbone.'), 'criterion.empty_weight': OTHER},
            'optimizer': {'state': {0: {'exp_avg': OTHER}}},
            'iteration': 89999,
        },
        ALL,
    ),
    'Grounding DINO': (
        '.pth',
        lambda b: {
            'model': {
                **{k: x for k, x in exported(b, 'official', 'module.backbone.0.').items() if '.norm0.' not in k},
                'module.bert.pooler.dense.weight': OTHER,
            }
        },
        LATER,
    ),
    'GLIP': (
        '.pth',
        lambda b: {
            'model': {
                **{k: x for k, x in exported(b, 'official', 'module.backbone.body.').items() if '.norm0.' not in k},
                'module.backbone.fpn.fpn_inner2.weight': OTHER,
            }
        },
        LATER,
    ),
    'BiRefNet': ('.safetensors', lambda b: {**exported(b, 'official', 'bb.'), 'decoder.conv_out1.weight': OTHER}, ALL),
    'SatlasPretrain': ('.pth', satlas, NONE),
    'torch.compile, DataParallel': ('.pth', lambda b: exported(b, 'mmdet', 'module._orig_mod.'), ALL),
    'dicts of NumPy arrays': ('.pkl', lambda b: {k: x.numpy() for k, x in exported(b, 'mmdet').items()}, ALL),
}


def build(row, seed):
    if row == 'SatlasPretrain':  # a Swin V2-B for images of 9 channels
        return randomize(SwinV2Backbone(**ARCH, in_channels=9, pretrained_window_size=3), seed)
    return randomize(SwinBackbone(**ARCH), seed)


def write(path, content):
    if path.suffix == '.safetensors':
        pytest.importorskip('safetensors.torch').save_file(content, path)
    elif path.suffix == '.pkl':
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize('row', ROWS)
def test_a_published_file_loads(row, tmp_path):
    ending, content, norms = ROWS[row]
    source, backbone = build(row, 1), build(row, 2)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    report = load_checkpoint(backbone, write(tmp_path / f'published{ending}', content(source)), log=None)
    if row in ('MoBY', 'SimMIM'):
        assert (report.family, report.unexpected) == (row.lower(), [])
    expected = source.state_dict()
    for name, tensor in backbone.state_dict().items():
        output = re.fullmatch(r'norm(\d)\.\w+', name)
        is_new = output is not None and int(output[1]) not in norms
        assert torch.equal(tensor, before[name] if is_new else expected[name]), name
        assert (name in report.new) == is_new


def test_the_page_lists_these_files():
    page = (ROOT / 'docs' / 'checkpoints.md').read_text()
    (lines,) = re.findall(r'^\| Weights of .*\n\| --- .*\n((?:\| .*\n)+)', page, re.M)
    table = [line.split(' | ')[0].removeprefix('| ') for line in lines.splitlines()]
    assert table[: len(ROWS)] == list(ROWS)
    assert table[len(ROWS) :] == ['CTransPath']


def test_the_error_for_ctranspath_names_its_stem():
    """Its stem has three convolutions; all other layers have the names and shapes of the official Swin-T."""
    backbone = build('', 2)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    state = exported(build('', 1), 'official', norms=False)
    del state['patch_embed.proj.weight'], state['patch_embed.proj.bias']
    channels = 3
    for layer, out in ((0, 4), (3, 8)):
        state[f'patch_embed.proj.{layer}.weight'] = torch.zeros(out, channels, 3, 3)
        for name in ('weight', 'bias', 'running_mean', 'running_var'):
            state[f'patch_embed.proj.{layer + 1}.{name}'] = torch.zeros(out)
        channels = out
    state['patch_embed.proj.6.weight'], state['patch_embed.proj.6.bias'] = torch.zeros(16, 8, 1, 1), torch.zeros(16)
    with pytest.raises(CheckpointError, match='several convolutions, as in CTransPath') as error:
        load_checkpoint(backbone, {'model': state}, log=None)
    assert 'allow_partial' not in str(error.value)
    assert equal_weights(backbone, before)
