"""A page contains the numbers of the model, has labels in two languages, and loads no other file."""

import base64
import contextlib
import io
import json
import re

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense import SwinBackbone, SwinV2Backbone
from swin_dense.explore.colours import pca_rgb
from swin_dense.explore.page import make_page
from swin_dense.explore.receptive_field import token_receptive_fields
from swin_dense.explore.record import make_record, msa_flops, window_msa_flops
from swin_dense.features.pyramid import extract_pyramid
from swin_dense.images.presets import IMAGENET_MEAN, IMAGENET_STD
from swin_dense.images.reading import normalize, read_image
from swin_dense.utils.choices import LANGUAGES
from tests.conftest import ROOT, TINY, photograph, randomize, tiny
from tests.explore.decoding import Decoded, block_bytes, facts_of

ASSETS = ROOT / 'swin_dense' / 'explore' / 'assets'
PHOTOGRAPH = photograph(75, 106)
MODELS = {
    'v1': lambda: SwinBackbone(**TINY),
    'v2': lambda: SwinV2Backbone(**TINY),
    'without bias, 2 x 5': lambda: SwinBackbone(
        **TINY, window_size=(2, 5), qkv_bias=False, use_rel_pos_bias=False, out_indices=(1, 3)
    ),
    'position alone': lambda: SwinBackbone(**TINY, qk_scale=0.0, clamp_window=True),
}


@pytest.fixture(scope='module', params=MODELS)
def made(request):
    # Random weights give large scores, so that the error of their attention weights depends on the seed.
    backbone = randomize(MODELS[request.param](), seed=4 if request.param == 'v1' else 0).eval()
    return backbone, make_page(make_record(backbone, PHOTOGRAPH), 'photo.jpg', True)


def test_attention_equals_the_models(made):
    """Compare with the weights that the dropout of every block gets."""
    backbone, page = made
    facts, blocks = facts_of(page.text), block_bytes(page.text)
    largest, recorded = 0.0, []
    with contextlib.ExitStack() as hooks, torch.no_grad():
        for block in (block for stage in backbone.stages for block in stage.blocks):
            drop = block.attn.w_msa.attn_drop
            hooks.enter_context(drop.register_forward_pre_hook(lambda module, args: recorded.append(args[0])))
        backbone(normalize(read_image(PHOTOGRAPH), IMAGENET_MEAN, IMAGENET_STD)[None])
    places = [(stage, block) for stage, layer in enumerate(backbone.stages) for block in range(len(layer.blocks))]
    for place, expected in zip(places, recorded, strict=True):
        found, is_real = Decoded(facts, blocks, *place).weights()
        is_shown = (is_real[:, :, None] & is_real[:, None])[:, None]
        largest = max(largest, ((found - expected).abs() * is_shown).max().item())
    assert largest <= page.off + 1e-5
    assert page.off < 0.02  # random weights give large scores and thus large errors
    assert (facts['off'], facts['usuallyOff']) == (page.off, page.usually_off)
    assert page.usually_off <= page.off


def test_a_compiled_backbone_is_refused_by_name():
    backbone = tiny().eval()
    backbone.compile(backend='eager')
    with torch.no_grad():
        backbone(normalize(read_image(PHOTOGRAPH), IMAGENET_MEAN, IMAGENET_STD)[None])  # compiled without hooks
    with pytest.raises(ValueError, match='the backbone is compiled'):
        make_record(backbone, PHOTOGRAPH)


def test_pyramid_and_photograph(made):
    backbone, page = made
    facts = facts_of(page.text)
    pyramid = extract_pyramid(backbone, PHOTOGRAPH)
    assert [level['stride'] for level in facts['levels']] == list(pyramid)
    for level, features in zip(facts['levels'], pyramid.values(), strict=True):
        colours = opened(level['picture']) / 255
        assert np.abs(colours - pca_rgb(features)).max() < 0.02
    assert facts['size'] == [75, 106]
    assert np.abs(opened(facts['photo']).astype(float) - PHOTOGRAPH).mean() < 12


def opened(address):
    return np.array(Image.open(io.BytesIO(base64.b64decode(address.partition(',')[2]))))


def test_receptive_fields_equal_those_of_analysis(made):
    backbone, page = made
    stages = facts_of(page.text)['stages']
    for stage, reaches in zip(stages, token_receptive_fields(backbone, PHOTOGRAPH.shape[:2]), strict=True):
        for block, reach in zip(stage['blocks'], reaches, strict=True):
            assert (block['rows'], block['columns']) == (reach.rows.tolist(), reach.columns.tolist())


def test_costs(made):
    paper, *stages = facts_of(made[1].text)['costs']
    height, width, everywhere, windowed = paper['sizes'][paper['start']]
    assert (height, width, everywhere - windowed) == (112, 112, 40_124_743_680)
    for series in stages:
        for height, width, everywhere, windowed in series['sizes']:
            assert everywhere == msa_flops(height, width, series['channels'])
            assert windowed == window_msa_flops(height, width, series['channels'], series['window'])
        start = series['sizes'][series['start']][:2]
        size = facts_of(made[1].text)['stages'][series['name']]['size']
        assert start == [-(-side // step) * step for side, step in zip(size, series['window'], strict=True)]


def test_a_page_requests_nothing(made):
    text = re.sub(r'data:image/\w+;base64,[\w+/=]+', 'data:', made[1].text)
    assert '://' not in text
    assert not re.findall(r'(?:src|href)\s*=\s*["\'](?!data:)', text)
    assert not re.findall(r'\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|import)\s*\(', text)
    assert "default-src 'none'" in text


def test_a_size_limit_reduces_precision():
    backbone = tiny()
    record = make_record(backbone, PHOTOGRAPH)
    exact = make_page(record, 'photo.jpg', False)
    size = len(exact.text.encode())
    coarse = make_page(record, 'photo.jpg', False, limit=size * 3 // 4)
    assert len(coarse.text.encode()) <= size * 3 // 4
    assert exact.off < coarse.off < 0.5
    with pytest.raises(ValueError, match=r'at least .* MB, but the limit is 0\.1 MB'):
        make_page(record, 'photo.jpg', False, limit=100_000)


@pytest.mark.slow
def test_a_page_of_swin_t_fits_the_limit():
    """Swin-T at 512 x 512 pixels, with weights that need the whole limit of 12 MB."""
    backbone = SwinBackbone('t').eval()
    with torch.no_grad():
        for layer in backbone.stages:
            for block in layer.blocks:
                block.attn.w_msa.qkv.weight.mul_(4)
    page = make_page(make_record(backbone, photograph(512, 512)), 'photo.jpg', True)
    assert 10_000_000 < len(page.text.encode()) <= 12_000_000
    assert page.usually_off < 0.02


@pytest.mark.parametrize('size', [(1, 1), (3, 200), (64, 64)])
def test_image_sizes(size):
    image = np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint16)
    facts = facts_of(make_page(make_record(SwinBackbone(**TINY).eval(), image), 'a', True).text)
    assert facts['size'] == list(size)


def test_a_file_name_cannot_inject_html():
    backbone = SwinBackbone(**TINY).eval()
    name = '</script><img src=x onerror=alert(1)>&"<!--facts-->.jpg'
    text = make_page(make_record(backbone, PHOTOGRAPH), name, True).text
    assert '<img' not in text
    assert facts_of(text)['name'] == name


def test_languages_have_the_same_labels():
    labels = json.loads((ASSETS / 'labels.json').read_text(encoding='utf-8'))
    assert tuple(labels) == LANGUAGES
    assert labels['en'].keys() == labels['zh'].keys()
    for key, words in labels['en'].items():
        assert set(re.findall(r'\{\w+\}', words)) == set(re.findall(r'\{\w+\}', labels['zh'][key])), key
    used = set(re.findall(r'data-label="(\w+)"', (ASSETS / 'page.html').read_text()))
    script = (ASSETS / 'page.js').read_text()
    assert used <= labels['en'].keys()
    for key in labels['en']:
        assert key in used or f"'{key}'" in script or key in ('content', 'position', 'windows', 'attention', 'reach'), (
            key
        )
