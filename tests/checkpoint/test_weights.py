"""For every row of the table in docs/checkpoints.md, a small file in the published format loads completely."""

import dataclasses
import pickle
import re

import pytest
import torch

from swin_dense import CheckpointError, SwinBackbone, SwinV2Backbone, export_state_dict, load_checkpoint
from tests.checkpoint.helpers import prefixed
from tests.conftest import ROOT, equal_weights, randomize

ARCH = {
    'embed_dims': 16,
    'depths': (2, 1, 2, 1),
    'num_heads': (1, 2, 2, 4),
    'window_size': 3,
}
ALL, LATER, NONE = (0, 1, 2, 3), (1, 2, 3), ()

# The names that transformers used when the published files were written.
FORMER = [
    (r'attention\.q_proj', 'attention.self.query'),
    (r'attention\.k_proj', 'attention.self.key'),
    (r'attention\.v_proj', 'attention.self.value'),
    (r'attention\.relative_position_bias\.(?=relative)', 'attention.self.'),
    (r'attention\.o_proj', 'attention.output.dense'),
    (r'mlp\.fc1', 'intermediate.dense'),
    (r'mlp\.fc2', 'output.dense'),
    (r'^swin\.', ''),
]
OF_MASKFORMER = [
    (r'^(?=encoder|embeddings)', 'model.'),
    *((f'norms.stage{stage + 1}', f'norms.{stage}') for stage in range(4)),
]


@dataclasses.dataclass
class Row:
    """A published format of weights.

    Attributes:
        family: the code base whose names the weights have.
        norms: stages with an output norm in the file.
        prefix: of the names.
        twin: what is before the names of a copy of the weights, if there is one.
        under: the key of the weights in the file, if they are not alone.
        ending: the file's.
        beside: names of other parameters in the same dict, with spaces between.
        around: other entries of the file.
        renamed: patterns in names, and what is in their place.
        as_arrays: whether the weights are NumPy arrays.
        transposed: whether linear weights are (inputs, outputs).
    """

    family: str
    norms: tuple[int, ...]
    prefix: str = ''
    twin: str = ''
    under: str = ''
    ending: str = '.pth'
    beside: str = ''
    around: dict = dataclasses.field(default_factory=dict)
    renamed: list = dataclasses.field(default_factory=list)
    as_arrays: bool = False
    transposed: bool = False

    def content(self, backbone):
        """Return the content of the file for the weights of a backbone."""
        weights = exported(backbone, self.family, self.norms)
        for pattern, replacement in self.renamed:
            weights = {re.sub(pattern, replacement, name): value for name, value in weights.items()}
        state = {name: beside(name) for name in self.beside.split()}
        state |= prefixed(self.prefix, weights)
        state |= prefixed(self.twin, weights) if self.twin else {}
        if self.transposed:
            linear = [name for name, value in state.items() if value.ndim == 2 and 'relative' not in name]
            state |= {name: state[name].T.contiguous() for name in linear}
        if self.as_arrays:
            state = {name: value.numpy() for name, value in state.items()}
        return {**({self.under: state} if self.under else state), **self.around}


def exported(backbone, family, norms):
    """Return the weights with the names of another code base, with the output norms of some stages."""
    absent = [stage for stage in ALL if stage not in norms]
    stems = [f'norm{stage}.' for stage in absent] + [f'hidden_states_norms.stage{stage + 1}.' for stage in absent]
    state = export_state_dict(backbone, family)
    return {name: value for name, value in state.items() if not name.startswith(tuple(stems))}


def beside(name):
    """Return a parameter, or a buffer, of the model around the backbone."""
    if name.endswith('index'):
        return torch.zeros(9, 9, dtype=torch.long)
    return torch.zeros(128) if 'norm' in name else torch.zeros(5, 128)


# By the first column of the page's table.
ROWS = {
    'Swin Transformer, classifiers': Row('official', NONE, under='model', beside='norm.weight norm.bias head.weight'),
    'Swin Transformer, detectors and segmentors': Row(
        'official', ALL, 'backbone.', under='state_dict', beside='neck.weight', around={'meta': {'epoch': 36}}
    ),
    'MoBY': Row('official', NONE, 'encoder.', twin='encoder_k.', under='model', beside='queue1'),
    'SimMIM': Row('official', NONE, 'encoder.', under='model', beside='encoder.mask_token decoder.0.weight'),
    'mmdet, mmsegmentation': Row(
        'mmdet', ALL, 'backbone.', under='state_dict', beside='bbox_head.fc_cls.weight', around={'meta': {}}
    ),
    'mmpretrain': Row('mmpretrain', (3,), 'backbone.', under='state_dict', beside='head.fc.weight'),
    'timm': Row('timm', NONE, ending='.safetensors', beside='norm.weight norm.bias head.fc.weight'),
    'segmentation_models_pytorch': Row(
        'timm', NONE, 'encoder.model.', beside='segmentation_head.0.weight', renamed=[(r'layers\.(?=\d)', 'layers_')]
    ),
    'torchvision': Row('torchvision', NONE, beside='norm.weight norm.bias head.weight'),
    'transformers: Swin': Row(
        'transformers',
        NONE,
        'swin.',
        ending='.safetensors',
        beside='swin.layernorm.weight swin.layernorm.bias classifier.weight',
        renamed=FORMER,
    ),
    'transformers: Mask2Former, OneFormer': Row(
        'transformers',
        ALL,
        'model.pixel_level_module.encoder.',
        ending='.safetensors',
        beside='model.transformer_module.queries_embedder.weight',
        renamed=FORMER,
    ),
    'transformers: MaskFormer': Row(
        'transformers',
        ALL,
        'model.pixel_level_module.encoder.',
        ending='.bin',
        beside='model.transformer_module.queries_embedder.weight',
        renamed=[*FORMER, *OF_MASKFORMER],
    ),
    'transformers: UperNet': Row(
        'transformers', ALL, 'backbone.', ending='.bin', beside='decode_head.classifier.weight', renamed=FORMER
    ),
    'transformers: Donut': Row(
        'transformers',
        NONE,
        'encoder.',
        ending='.bin',
        beside='decoder.model.decoder.embed_tokens.weight',
        renamed=FORMER,
    ),
    'Mask2Former, MaskFormer, OneFormer, CAT-Seg': Row(
        'official',
        ALL,
        'backbone.',
        under='model',
        ending='.pkl',
        beside='backbone.layers.0.blocks.0.attn.relative_position_index sem_seg_head.predictor.query_feat.weight',
        around={'__author__': 'their own', 'matching_heuristics': True},
        as_arrays=True,
    ),
    "Mask2Former's converted backbones": Row(
        'official',
        NONE,
        under='model',
        ending='.pkl',
        beside='norm.weight norm.bias head.weight',
        around={'__author__': 'third_party', 'matching_heuristics': True},
    ),
    'detectron2, training checkpoints': Row(
        'official',
        ALL,
        'backbone.',
        under='model',
        beside='criterion.empty_weight',
        around={'optimizer': {'state': {0: {'exp_avg': torch.zeros(3, 16)}}}, 'iteration': 89999},
    ),
    'Grounding DINO': Row(
        'official', LATER, 'module.backbone.0.', under='model', beside='module.bert.pooler.dense.weight'
    ),
    'GLIP': Row(
        'official', LATER, 'module.backbone.body.', under='model', beside='module.backbone.fpn.fpn_inner2.weight'
    ),
    'BiRefNet': Row('official', ALL, 'bb.', ending='.safetensors', beside='decoder.conv_out1.weight'),
    'SatlasPretrain': Row(
        'torchvision', NONE, 'backbone.backbone.', beside='upsample.layers.0.0.weight backbone.backbone.head.weight'
    ),
    'PaddleClas, PaddleDetection': Row(
        'official',
        NONE,
        ending='.pdparams',
        beside='norm.weight norm.bias layers.0.blocks.0.attn.relative_position_bias',
        around={'StructuredToParameterName@@': {'norm.weight': 'layer_norm_52.w_0'}},
        as_arrays=True,
        transposed=True,
    ),
    'torch.compile, DataParallel': Row('mmdet', ALL, 'module._orig_mod.'),
    'dicts of NumPy arrays': Row('mmdet', ALL, ending='.pkl', as_arrays=True),
}


def build(name, seed):
    if name == 'SatlasPretrain':  # a Swin V2-B for images of 9 channels
        return randomize(SwinV2Backbone(**ARCH, in_channels=9, pretrained_window_size=3), seed)
    return randomize(SwinBackbone(**ARCH), seed)


def write(path, content):
    if path.suffix == '.safetensors':
        pytest.importorskip('safetensors.torch').save_file(content, path)
    elif path.suffix in ('.pkl', '.pdparams'):
        path.write_bytes(pickle.dumps(content))
    else:
        torch.save(content, path)
    return path


@pytest.mark.parametrize('name', ROWS)
def test_a_published_file_loads(name, tmp_path):
    row = ROWS[name]
    source, backbone = build(name, 1), build(name, 2)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    path = write(tmp_path / f'published{row.ending}', row.content(source))
    report = load_checkpoint(backbone, path, log=None)
    assert report.family == (name.lower() if name in ('MoBY', 'SimMIM') else row.family)
    preset = 'satlas-sentinel2-ms' if name == 'SatlasPretrain' else None
    assert backbone.input_preset == preset
    new = [f'norm{stage}.{leaf}' for stage in ALL if stage not in row.norms for leaf in ('weight', 'bias')]
    assert sorted(report.new) == sorted(new)
    expected = {**source.state_dict(), **{name: before[name] for name in new}}
    assert equal_weights(backbone, expected)


def test_the_page_lists_these_files():
    page = (ROOT / 'docs' / 'checkpoints.md').read_text()
    (lines,) = re.findall(r'^\| Weights of .*\n\| --- .*\n((?:\| .*\n)+)', page, re.M)
    table = [line.split(' | ')[0].removeprefix('| ') for line in lines.splitlines()]
    assert table[: len(ROWS)] == list(ROWS)
    assert table[len(ROWS) :] == ['CTransPath']


def test_the_error_for_ctranspath_names_the_parameters_of_its_stem():
    """Its stem has three convolutions; all other layers have the names and shapes of the official Swin-T."""
    backbone = build('', 2)
    before = {name: tensor.clone() for name, tensor in backbone.state_dict().items()}
    state = exported(build('', 1), 'official', NONE)
    del state['patch_embed.proj.weight'], state['patch_embed.proj.bias']
    state['patch_embed.proj.0.weight'] = torch.zeros(4, 3, 3, 3)
    state['patch_embed.proj.3.weight'] = torch.zeros(8, 4, 3, 3)
    state['patch_embed.proj.6.weight'] = torch.zeros(16, 8, 1, 1)
    state['patch_embed.proj.6.bias'] = torch.zeros(16)
    for name in ('weight', 'bias', 'running_mean', 'running_var'):
        state[f'patch_embed.proj.1.{name}'] = torch.zeros(4)
        state[f'patch_embed.proj.4.{name}'] = torch.zeros(8)
    with pytest.raises(CheckpointError, match=r'no Swin has: .*patch_embed\.proj\.0\.weight.*another network') as error:
        load_checkpoint(backbone, {'model': state}, log=None)
    assert 'allow_partial' not in str(error.value)
    assert equal_weights(backbone, before)
