"""PEFT, torchao and torch.fx with the backbone, as documented in docs/elsewhere.md, and examples/adapters.py."""

import pytest
import torch

from swin_dense import SwinBackbone, SwinClassifier, SwinV2Backbone, allow_partial_loading
from tests.conftest import TINY, randomize
from tests.examples import load_example

from .detection import train
from .peer import largest_difference, needed

IMAGE = torch.rand(1, 3, 97, 133)


def build(**options):
    return SwinBackbone('t', **TINY, drop_path_rate=0.0, **options).eval()


def train_for_five_steps(model):
    def compute_losses():
        return {'loss': sum(x.square().mean() for x in model(IMAGE))}

    train(model.train(), compute_losses, steps=5, lr=1e-2)


def test_adapters_of_peft_train_save_load_and_merge(tmp_path):
    peft = needed('peft')
    weights = build().state_dict()

    def with_weights():
        backbone = build()
        backbone.load_state_dict(weights)
        return backbone

    targets = ['qkv', 'proj', 'layers.0.0', 'layers.1', 'reduction']
    model = peft.get_peft_model(with_weights(), peft.LoraConfig(r=4, target_modules=targets)).eval()
    before = [x.detach() for x in model(IMAGE)]
    train_for_five_steps(model)
    assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
    with torch.no_grad():
        after = model.eval()(IMAGE)
        assert largest_difference(after, before) > 1e-3
        model.save_pretrained(tmp_path)
        merged = peft.PeftModel.from_pretrained(with_weights(), tmp_path).eval().merge_and_unload()
        # Not 0: sums may have another order where the loaded weights have another alignment in memory.
        assert largest_difference(merged(IMAGE), after) < 1e-5
    assert type(merged) is SwinBackbone
    assert merged.state_dict().keys() == weights.keys()


@pytest.fixture(scope='module')
def example():
    needed('peft')
    needed('mmengine')
    return load_example('adapters')


@pytest.mark.parametrize(
    ('kind', 'more'),
    [
        ('SwinDenseMona', {'dim': 8}),
        ('SwinDenseLoRA', {'rank': 4}),
    ],
)
def test_the_example_starts_as_its_base_trains_and_keeps_what_it_trained(example, tmp_path, kind, more):
    options = {**TINY, 'drop_path_rate': 0.0, **more}
    torch.save(randomize(SwinBackbone(**TINY)).state_dict(), tmp_path / 'swin.pth')
    pretrained = {'type': 'Pretrained', 'checkpoint': str(tmp_path / 'swin.pth')}

    def built():
        model = example.MODELS.build({'type': kind, 'init_cfg': pretrained, **options})
        model.init_weights()
        return model

    base = SwinBackbone(**TINY).eval()
    base.load_state_dict(torch.load(tmp_path / 'swin.pth'))
    model = built()
    before = {name: parameter.clone() for name, parameter in model.named_parameters()}
    with torch.no_grad():
        expected = base(IMAGE)
        assert largest_difference(model.eval()(IMAGE), expected) < 1e-5
    train_for_five_steps(model)
    trained = {name for name, parameter in model.named_parameters() if parameter.requires_grad}
    assert trained == {name for name in before if 'mona' in name or 'lora' in name or 'norm' in name}
    changed = {name for name, parameter in model.named_parameters() if not torch.equal(parameter, before[name])}
    assert changed == trained

    adapter = {name: tensor for name, tensor in model.state_dict().items() if name in trained}
    torch.save(adapter, tmp_path / 'adapter.pth')
    loaded = built()
    with allow_partial_loading():
        loaded.load_state_dict(torch.load(tmp_path / 'adapter.pth'), strict=False)
    with torch.no_grad():
        after = model.eval()(IMAGE)
        assert largest_difference(after, expected) > 1e-3
        assert largest_difference(loaded.eval()(IMAGE), after) < 1e-5


@pytest.mark.parametrize('form', [{'with_cp': 'mlp'}, {'with_cp': True}])
def test_mona_trains_with_checkpointing(example, form):
    model = example.SwinDenseMona(**TINY, **form, dim=8).train()
    sum(x.square().mean() for x in model(IMAGE)).backward()
    assert all(parameter.grad is not None for parameter in model.parameters() if parameter.requires_grad)


def test_fx_tracing_is_refused_but_for_the_backbone_as_a_leaf():
    extraction = needed('torchvision.models.feature_extraction')
    for model in (build(), SwinV2Backbone('t', **TINY), SwinClassifier('swin_t', 5, **TINY)):
        with pytest.raises(TypeError, match=r'torch\.fx cannot trace .*out_indices'):
            torch.fx.symbolic_trace(model)
        with pytest.raises(TypeError, match=r'torch\.fx cannot trace .*forward hooks'):
            extraction.create_feature_extractor(model, ['stages.1'])
    extraction = needed('torchvision.models.feature_extraction')
    classifier = randomize(SwinClassifier('swin_t', 5, **TINY)).eval()
    nodes = {'backbone': 'maps', 'head': 'scores'}
    leaf = {'leaf_modules': [SwinBackbone]}
    extractor = extraction.create_feature_extractor(classifier, nodes, tracer_kwargs=leaf)
    found = extractor(IMAGE)
    assert torch.equal(found['scores'], classifier(IMAGE))
    assert torch.equal(found['maps'][-1], classifier.backbone(IMAGE)[-1])
