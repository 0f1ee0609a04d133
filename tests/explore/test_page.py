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
from tests.explore.decoding import decoded, facts_of

ASSETS = ROOT / 'swin_dense' / 'explore' / 'assets'
PHOTOGRAPH = photograph(75, 106)
UNUSUAL = {
    'window_size': (2, 5),
    'qkv_bias': False,
    'use_rel_pos_bias': False,
    'out_indices': (1, 3),
}
MODELS = {
    # Random weights give large scores, so that the error of their attention weights depends on the seed.
    'v1': (SwinBackbone, {}, 4),
    'v2': (SwinV2Backbone, {}, 0),
    'without bias, 2 x 5': (SwinBackbone, UNUSUAL, 0),
    'position alone': (SwinBackbone, {'qk_scale': 0.0, 'clamp_window': True}, 0),
}


@pytest.fixture(scope='module', params=MODELS)
def made(request):
    kind, options, seed = MODELS[request.param]
    backbone = randomize(kind(**TINY, **options), seed).eval()
    return backbone, make_page(make_record(backbone, PHOTOGRAPH), 'photo.jpg', True)


def run(backbone):
    with torch.no_grad():
        backbone(normalize(read_image(PHOTOGRAPH), IMAGENET_MEAN, IMAGENET_STD)[None])


def test_attention_equals_the_models(made):
    """Compare with the weights that the dropout of every block gets."""
    backbone, page = made
    recorded, largest = [], 0.0
    with contextlib.ExitStack() as hooks:
        for name, drop in backbone.named_modules():
            if name.endswith('.w_msa.attn_drop'):
                hook = drop.register_forward_pre_hook(lambda module, args: recorded.append(args[0]))
                hooks.enter_context(hook)
        run(backbone)
    for (found, is_real), expected in zip(decoded(page.text), recorded, strict=True):
        is_shown = is_real[:, None, :, None] & is_real[:, None, None]
        largest = max(largest, ((found - expected).abs() * is_shown).max().item())
    assert largest <= page.off + 1e-5
    assert page.usually_off <= page.off < 0.02  # random weights give large scores and thus large errors
    facts = facts_of(page.text)
    assert (facts['off'], facts['usuallyOff']) == (page.off, page.usually_off)


def test_a_compiled_backbone_is_refused_by_name():
    backbone = SwinBackbone(embed_dims=8, depths=(1,), num_heads=(1,)).eval()
    backbone.compile(backend='eager')
    run(backbone)  # compiled without hooks
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
    facts = facts_of(made[1].text)
    paper, *stages = facts['costs']
    height, width, everywhere, windowed = paper['sizes'][paper['start']]
    assert (height, width, everywhere - windowed) == (112, 112, 40_124_743_680)
    for series in stages:
        channels, window = series['channels'], series['window']
        for height, width, everywhere, windowed in series['sizes']:
            assert everywhere == msa_flops(height, width, channels)
            assert windowed == window_msa_flops(height, width, channels, window)
        start = series['sizes'][series['start']][:2]
        size = facts['stages'][series['name']]['size']
        assert start == [-(-side // step) * step for side, step in zip(size, window, strict=True)]


def test_a_page_requests_nothing(made):
    text = re.sub(r'data:image/\w+;base64,[\w+/=]+', 'data:', made[1].text)
    assert '://' not in text
    assert not re.findall(r'(?:src|href)\s*=\s*["\'](?!data:)', text)
    assert not re.findall(r'\b(fetch|XMLHttpRequest|WebSocket|EventSource|sendBeacon|import)\s*\(', text)
    assert "default-src 'none'" in text


def test_a_size_limit_reduces_precision():
    record = make_record(tiny(), PHOTOGRAPH)
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
    for name, parameter in backbone.named_parameters():
        if name.endswith('qkv.weight'):
            parameter.data *= 4
    page = make_page(make_record(backbone, photograph(512, 512)), 'photo.jpg', True)
    assert 10_000_000 < len(page.text.encode()) <= 12_000_000
    assert page.usually_off < 0.02


@pytest.mark.parametrize('size', [(1, 1), (3, 200)])
def test_image_sizes(size):
    image = np.random.default_rng(0).integers(0, 255, (*size, 3), dtype=np.uint16)
    page = make_page(make_record(tiny(), image), 'a', True)
    assert facts_of(page.text)['size'] == list(size)


def test_a_file_name_cannot_inject_html():
    name = '</script><img src=x onerror=alert(1)>&"<!--facts-->.jpg'
    text = make_page(make_record(tiny(), PHOTOGRAPH), name, True).text
    assert '<img' not in text
    assert facts_of(text)['name'] == name


def test_languages_have_the_same_labels_and_all_are_used():
    labels = json.loads((ASSETS / 'labels.json').read_text(encoding='utf-8'))
    assert tuple(labels) == LANGUAGES
    english, chinese = labels.values()
    assert english.keys() == chinese.keys()
    for key, words in english.items():
        assert sorted(re.findall(r'\{\w+\}', words)) == sorted(re.findall(r'\{\w+\}', chinese[key])), key
    in_page = set(re.findall(r'data-label="(\w+)"', (ASSETS / 'page.html').read_text()))
    in_script = set(re.findall(r"'(\w+)'", (ASSETS / 'page.js').read_text()))
    assert in_page <= english.keys()
    assert english.keys() <= in_page | in_script | {'content', 'position', 'windows', 'attention', 'reach'}
