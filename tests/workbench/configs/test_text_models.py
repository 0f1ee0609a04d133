"""Own classes in the models of mmdet that read their names, Grounding DINO and GLIP, with a small language model."""

import re
from types import SimpleNamespace

import pytest
import torch
from mmdet.models.dense_heads import atss_vlfusion_head
from mmdet.models.language_models import bert
from mmengine.registry import DATASETS, MODELS, init_default_scope

from swin_dense.workbench.configs.experiment import Experiment
from swin_dense.workbench.configs.own_classes import set_classes
from swin_dense.workbench.recipes.files import load_recipe
from tests.workbench.configs.data import CLASSES

GROUNDING_DINO = 'grounding_dino_swin-t_finetune_16xb2_1x_coco'
GLIP = 'glip_atss_swin-t_a_fpn_dyhead_16xb2_ms-2x_funtune_coco'
WIDTH = 768


class Encoded(dict):
    """The tokens of texts, as transformers returns them."""

    __getattr__ = dict.__getitem__

    def to(self, device):
        return self

    def char_to_token(self, index):
        return next((number for number, (start, end) in enumerate(self.spans) if start <= index < end), None)


class Tokenizer:
    """A tokenizer with a number for each word; 101 begins a text and 102 ends it."""

    def __init__(self):
        self.numbers = {'[CLS]': 101, '[SEP]': 102, '.': 1012, '?': 1029}

    def convert_tokens_to_ids(self, tokens):
        return [self.numbers.setdefault(token, 2000 + len(self.numbers)) for token in tokens]

    def __call__(self, texts, padding=False, max_length=256, **_):
        rows, spans = [], []
        for text in texts:
            words = list(re.finditer(r'\w+|[^\w\s]', text))
            spans = [(-1, -1), *(word.span() for word in words)]
            rows.append(self.convert_tokens_to_ids(['[CLS]', *(word[0] for word in words), '[SEP]']))
        length = max_length if padding == 'max_length' else max(map(len, rows))
        ids = torch.tensor([row + [0] * (length - len(row)) for row in rows])
        mask = (ids > 0).long()
        return Encoded(
            input_ids=ids, attention_mask=mask, special_tokens_mask=mask, token_type_ids=0 * ids, spans=spans
        )

    batch_encode_plus = __call__


class Words(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.table = torch.nn.Embedding(4000, WIDTH)

    def forward(self, input_ids, **_):
        return SimpleNamespace(hidden_states=(None, self.table(input_ids)))


@pytest.fixture
def language(monkeypatch):
    """Replace what mmdet's BertModel takes from transformers, which is not downloaded here."""
    monkeypatch.setattr('swin_dense.utils.packages.find_spec', lambda name: name)
    made = {'AutoTokenizer': Tokenizer, 'HFBertModel': Words, 'BertConfig': lambda: SimpleNamespace(hidden_size=WIDTH)}
    for name, make in made.items():
        stand_in = SimpleNamespace(from_pretrained=lambda *_, make=make, **__: make())
        for module in (bert, atss_vlfusion_head):
            monkeypatch.setattr(module, name, stand_in, raising=False)


@pytest.mark.parametrize('recipe', [GROUNDING_DINO, GLIP])
def test_a_text_model_learns_own_classes(fruit, language, recipe):
    """One step of training changes the words of the classes, and predictions have their names."""
    settings = ['load_from=None', 'model.backbone.init_cfg=None', 'model.backbone.frozen_stages=-1']
    if recipe == GROUNDING_DINO:
        settings += ['model.encoder.num_layers=1', 'model.encoder.num_cp=0', 'model.decoder.num_layers=1']
        settings += ['model.num_queries=20', 'model.test_cfg.max_per_img=20']
    config = fruit.write('--set', *settings, name=recipe)
    assert config.model.bbox_head.num_classes == len(CLASSES)
    (data,) = Experiment(config).datasets_of(['train'])  # GLIP repeats it
    packing = data.pipeline[-1]
    steps = [{'type': 'LoadImageFromFile'}, {'type': 'LoadAnnotations', 'with_bbox': True}]
    resize = {'type': 'Resize', 'scale': (128, 128), 'keep_ratio': True}
    unmirrored = {'type': 'RandomFlip', 'prob': 0.0}
    init_default_scope('mmdet')
    dataset = DATASETS.build({**data.entry, 'pipeline': [*steps, resize, unmirrored, packing]})
    torch.manual_seed(0)
    model = MODELS.build(config.model)
    model.init_weights()  # mmdet's constructors leave parameters uninitialised, which may be NaN
    batch = {'inputs': [dataset[index]['inputs'] for index in range(2)]}
    batch['data_samples'] = [dataset[index]['data_samples'] for index in range(2)]
    assert [tuple(sample.text) for sample in batch['data_samples']] == [tuple(CLASSES)] * 2
    losses = model(**model.data_preprocessor(batch, training=True), mode='loss')
    total = sum(loss for key, value in losses.items() for loss in (value if isinstance(value, list) else [value]))
    total.backward()
    assert torch.isfinite(total)
    tokenizer = model.language_model.tokenizer
    words = tokenizer.convert_tokens_to_ids(['apple', 'ripe', 'pear'])
    moved = model.language_model.language_backbone.body.model.table.weight.grad.abs().sum(1) > 0
    assert moved[words].all()
    model.eval()
    with torch.no_grad():
        predicted = model(**model.data_preprocessor(batch, training=False), mode='predict')[0].pred_instances
    assert set(predicted.labels.tolist()) <= {0, 1}


@pytest.mark.parametrize(
    ('recipe', 'reason'),
    [
        ('grounding_dino_swin-t_pretrain_obj365', 'is a ODVGDataset, whose files have texts of their own'),
        ('glip_atss_swin-t_a_fpn_dyhead_pretrain_obj365', 'hands no names of classes to the model'),
    ],
)
def test_recipes_whose_data_name_no_classes_say_so(recipe, reason):
    with pytest.raises(ValueError, match=reason) as caught:
        set_classes(Experiment(load_recipe(recipe)), CLASSES)
    for name in (GROUNDING_DINO, GLIP):
        assert name in str(caught.value)
        set_classes(Experiment(load_recipe(name)), CLASSES)
