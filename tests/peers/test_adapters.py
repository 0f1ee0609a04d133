"""PEFT, torchao and torch.fx with the backbone, as documented in docs/elsewhere.md, and examples/adapters.py."""

import pytest
import torch

from swin_dense import SwinBackbone, SwinClassifier, SwinV2Backbone, allow_partial_loading
from tests.conftest import TINY, equal_weights, randomize
from tests.examples import load_example

from .detection import train
from .peer import largest_difference, needed

IMAGE = torch.rand(1, 3, 97, 133)
LINEAR = ['qkv', 'proj', 'layers.0.0', 'layers.1', 'reduction']


def build(**options):
    return SwinBackbone('t', **TINY, drop_path_rate=0.0, **options).eval()


def train_for_five_steps(model):
    def compute_losses():
        return {'loss': sum(x.square().mean() for x in model(IMAGE))}

    train(model.train(), compute_losses, steps=5, lr=1e-2)


class TestPEFT:
    @pytest.fixture(autouse=True)
    def _weights(self):
        self.peft = needed('peft')
        self.weights = build().state_dict()

    def adapted(self, **options):
        backbone = build()
        backbone.load_state_dict(self.weights)
        return self.peft.get_peft_model(
            backbone,
            self.peft.LoraConfig(
                r=4,
                target_modules=LINEAR,
                **options,
            ),
        )

    def test_adapters_train_save_load_and_merge(self, tmp_path):
        model = self.adapted()
        before = [x.detach() for x in model.eval()(IMAGE)]
        train_for_five_steps(model)
        trained = {name for name, p in model.named_parameters() if p.requires_grad}
        assert {name.split('.lora')[0].split('.')[-1] for name in trained} == {'qkv', 'proj', '0', '1', 'reduction'}
        assert all(p.grad is not None for p in model.parameters() if p.requires_grad)
        with torch.no_grad():
            after = model.eval()(IMAGE)
            assert largest_difference(after, before) > 1e-3
            model.save_pretrained(tmp_path)
            backbone = build()
            backbone.load_state_dict(self.weights)
            loaded = self.peft.PeftModel.from_pretrained(backbone, tmp_path).eval()
            expected = model.state_dict()
            assert equal_weights(loaded, expected)
            # Not 0: sums may have another order where the loaded weights have another alignment in memory.
            assert largest_difference(loaded(IMAGE), after) < 1e-5
            merged = loaded.merge_and_unload()
            assert type(merged) is SwinBackbone
            assert largest_difference(merged(IMAGE), after) < 1e-5
            assert merged.state_dict().keys() == self.weights.keys()


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


@torch.no_grad()
def test_torchao_stores_weights_in_8_bits(tmp_path):
    quantization = needed('torchao.quantization')
    backbone = SwinBackbone('t').eval()
    before = backbone(IMAGE)
    in_float32 = sum(4 * parameter.numel() for parameter in backbone.parameters())
    quantization.quantize_(backbone, quantization.Int8WeightOnlyConfig())
    after = backbone(IMAGE)
    assert all((a - b).norm() < 0.03 * b.norm() for a, b in zip(after, before, strict=True))
    torch.save(backbone.state_dict(), tmp_path / 'int8.pth')
    assert (tmp_path / 'int8.pth').stat().st_size < 0.27 * in_float32
    loaded = SwinBackbone('t').eval()
    quantization.quantize_(loaded, quantization.Int8WeightOnlyConfig())
    loaded.load_state_dict(torch.load(tmp_path / 'int8.pth'))
    assert largest_difference(loaded(IMAGE), after) == 0


def test_fx_tracing_is_refused_with_an_alternative():
    extraction = needed('torchvision.models.feature_extraction')
    for model in (build(), SwinV2Backbone('t', **TINY), SwinClassifier('swin_t', 5, **TINY)):
        with pytest.raises(TypeError, match=r'torch\.fx cannot trace .*out_indices'):
            torch.fx.symbolic_trace(model)
        with pytest.raises(TypeError, match=r'torch\.fx cannot trace .*forward hooks'):
            extraction.create_feature_extractor(model, ['stages.1'])


def test_fx_traces_the_backbone_as_a_leaf():
    extraction = needed('torchvision.models.feature_extraction')
    classifier = randomize(SwinClassifier('swin_t', 5, **TINY)).eval()
    nodes = {'backbone': 'maps', 'head': 'scores'}
    leaf = {'leaf_modules': [SwinBackbone]}
    extractor = extraction.create_feature_extractor(classifier, nodes, tracer_kwargs=leaf)
    found = extractor(IMAGE)
    assert torch.equal(found['scores'], classifier(IMAGE))
    assert torch.equal(found['maps'][-1], classifier.backbone(IMAGE)[-1])
