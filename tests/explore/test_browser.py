"""The page in a real browser: every control is used, and its attention weights are compared with the model's."""

import contextlib
import re
import shutil
import time

import numpy as np
import pytest
import torch
from PIL import Image

from swin_dense.explore.page import make_page
from swin_dense.explore.record import make_record
from swin_dense.ops.windows import Grid, slots_of_windows
from tests.conftest import TINY, photograph, tiny
from tests.examples import load_example

PHOTOGRAPH = photograph(150, 212)
BROWSERS = ('chromium', 'chromium-browser', 'google-chrome')

BACKGROUND = 'getComputedStyle(document.body).backgroundColor'

pytestmark = pytest.mark.slow


@pytest.fixture(scope='module')
def backbone():
    return tiny()


@pytest.fixture(scope='module')
def file(backbone, tmp_path_factory):
    made = make_page(make_record(backbone, PHOTOGRAPH), 'a photo.png', True)
    path = tmp_path_factory.mktemp('my pages') / 'a page.html'
    path.write_text(made.text, encoding='utf-8')
    return path, made.off


@pytest.fixture(scope='module')
def browser():
    api = pytest.importorskip('playwright.sync_api', reason='needs playwright')
    program = next(filter(None, map(shutil.which, BROWSERS)), None)
    if program is None:
        pytest.skip(f'needs a browser, one of {", ".join(BROWSERS)}')
    with api.sync_playwright() as playwright:
        running = playwright.chromium.launch(executable_path=program, args=['--no-sandbox'])
        yield running
        running.close()


@pytest.fixture
def opened(browser, file):
    """Return a function that opens the page; fail on console messages, errors and requests for other files."""
    with contextlib.ExitStack() as stack:
        events = []

        def open_page(width=1280, **options):
            context = browser.new_context(viewport={'width': width, 'height': 900}, **options)
            stack.callback(context.close)
            page = context.new_page()
            page.set_default_timeout(60_000)
            page.on('console', lambda message: events.append(message.text))
            page.on('pageerror', lambda error: events.append(str(error)))
            page.on('request', lambda request: request.url.startswith('data:') or events.append(request.url))
            page.goto(file[0].as_uri())
            wait_until(lambda: page.locator('#where').inner_text())
            assert events == [file[0].as_uri()]
            return page

        yield open_page
        assert events[1:] == []


def wait_until(condition, seconds=30):
    end = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.02)


def wait_for_frames(page):
    page.evaluate(
        'new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(() => setTimeout(done, 30))))'
    )


def look(page, name):
    """Wait until pending frames are drawn, and return the content of a canvas as a data URL."""
    wait_for_frames(page)
    return page.locator(name).evaluate('(canvas) => canvas.toDataURL()')


def text(page, name):
    wait_for_frames(page)
    return page.locator(name).inner_text()


def value(page, name):
    wait_for_frames(page)
    return page.locator(name).input_value()


def choose(page, name, number):
    page.check(f'input[name={name}][value="{number}"]')


def chosen(page, name):
    return page.locator(f'input[name={name}]:checked').get_attribute('value')


def show_attention(page):
    page.check('input[value=attention]')
    wait_until(lambda: text(page, '#verdict'))


def attention_of(page, stage, block, cell, shape):
    """Return the weights that the page computes for a cell, (A, H, W), and those of padding, (A,)."""
    computed = page.evaluate('(at) => swinExplorer.attention(...at)', [stage, block, *cell])
    weights, padding = np.zeros(shape), np.zeros(shape[0])
    for head, values in enumerate(computed['heads']):
        for slot, weight in zip(computed['slots'], values['weights'], strict=False):
            if slot['isPadding']:
                padding[head] += weight
            else:
                weights[head, slot['row'], slot['column']] = weight
    return weights, padding


@pytest.mark.parametrize('stage', range(4))
@pytest.mark.parametrize('block', range(2))
def test_attention_equals_the_models(opened, backbone, file, stage, block):
    off = file[1] + 1e-5
    pixel = np.random.default_rng(stage + 4 * block).integers(PHOTOGRAPH.shape[:2]).tolist()
    expected = load_example('pictures').token_attention(backbone, PHOTOGRAPH, stage, block, pixel).numpy()
    cell = [side // (4 * 2**stage) for side in pixel]
    found, padding = attention_of(opened(), stage, block, cell, expected.shape)
    assert np.abs(found - expected).max() <= off
    assert np.abs(padding - (1 - expected.sum((1, 2)))).max() <= 49 * off


def test_the_view_of_windows(opened):
    page = opened()
    assert page.locator('#random').is_visible()
    assert page.title() == 'a photo.png · swin-dense explore'
    windows = look(page, '#photo')
    page.click('#play')
    wait_until(lambda: value(page, '#roll') == '100')
    rolled = look(page, '#photo')
    assert rolled != windows
    page.click('#play')
    wait_until(lambda: value(page, '#roll') == '0')
    assert look(page, '#photo') == windows
    page.locator('#roll').fill('40')
    assert look(page, '#photo') not in (windows, rolled)

    _, regions = slots_of_windows(Grid((19, 27), (7, 7), (3, 3)), torch.device('cpu'))
    ids = regions.reshape(3, 4, 49)[-1, 1]  # the window of a token at the upper edge
    share = float((ids[:, None] == ids).float().mean())
    assert text(page, '#mask-note').startswith(f'Window 2, 1: 2 regions, {100 * share:.0f}%')
    mask = look(page, '#mask')
    page.locator('#photo').hover(position={'x': 5, 'y': 5})
    assert text(page, '#where').startswith('Pixel')
    assert look(page, '#mask') != mask
    choose(page, 'blocks', 0)
    assert '100%' in text(page, '#mask-note')
    assert page.locator('#play').is_disabled()


def test_the_view_of_attention(opened):
    page = opened()
    show_attention(page)
    for stage, count in enumerate(TINY['num_heads']):
        choose(page, 'stages', stage)
        choose(page, 'blocks', 1)
        heads = page.locator('input[name=heads]')
        assert heads.count() == 1 + count
        mean = look(page, '#weights')
        heads.last.check()
        assert (look(page, '#weights') == mean) == (count == 1)
    choose(page, 'stages', 0)
    assert chosen(page, 'heads') == 'mean'


def test_the_view_of_receptive_fields_and_costs(opened):
    page = opened()
    page.check('input[value=reach]')
    steps = page.locator('#steps button')
    assert steps.count() == 8
    steps.nth(5).click()
    wait_for_frames(page)
    assert steps.nth(5).get_attribute('aria-pressed') == 'true'
    assert chosen(page, 'stages') == '2'
    assert text(page, '#saved').startswith('40.1 billion saved')
    page.select_option('#preset', '1')
    own = text(page, '#size-label')
    assert 'this photograph' in own
    page.locator('#size').fill('20')
    assert text(page, '#size-label') != own


def levels(page):
    return [look(page, f'#levels figure:nth-child({number}) canvas') for number in range(1, 5)]


def test_pointer(opened):
    page = opened()
    page.check('input[value=attention]')
    photo = page.locator('#photo')
    scale = photo.bounding_box()['width'] / PHOTOGRAPH.shape[1]
    first, second = ({'x': x * scale, 'y': y * scale} for x, y in ((100.5, 60.5), (30.5, 20.5)))
    photo.hover(position=first)
    assert text(page, '#where').startswith('Pixel 60, 100 ')
    photo.click(position=second)
    photo.hover(position=first)
    assert text(page, '#where').startswith('Pixel 20, 30 ')
    assert page.locator('#pin').is_visible()
    before = levels(page)
    page.locator('#levels canvas').nth(1).click(position={'x': 5, 'y': 90})
    after = levels(page)
    assert not page.locator('#pin').is_visible()
    assert all(one != other for one, other in zip(before, after, strict=True))


def test_a_fixed_token_is_released_where_the_page_says(opened):
    page = opened()
    photo = page.locator('#photo')
    for release in (lambda: page.click('#pin'), lambda: page.keyboard.press('Escape')):
        photo.click(position={'x': 40, 'y': 40})
        held = text(page, '#where')
        photo.hover(position={'x': 300, 'y': 200})
        assert text(page, '#where') == held
        release()
        wait_for_frames(page)
        assert not page.locator('#pin').is_visible()
        photo.hover(position={'x': 310, 'y': 200})
        assert text(page, '#where') != held
        page.mouse.move(0, 0)


def test_uniform_attention_is_called_so(browser, tmp_path):
    """Without a difference between keys, no term decides: weights of 0 make all scores equal."""
    backbone = tiny()
    for name, parameter in backbone.named_parameters():
        if 'qkv' in name or 'relative_position' in name:
            torch.nn.init.zeros_(parameter)
    path = tmp_path / 'page.html'
    path.write_text(make_page(make_record(backbone, PHOTOGRAPH), 'photo', False).text, encoding='utf-8')
    page = browser.new_page()
    page.goto(path.as_uri())
    show_attention(page)
    choose(page, 'blocks', 0)
    assert text(page, '#verdict') == (
        'The attention is nearly uniform: the largest weight is 2%, and equal weights would be 2%.'
    )
    assert text(page, '#heat-high') == 'weight 2%'
    page.close()


def test_colours_mean_the_same_in_both_schemes(opened):
    page = opened()
    show_attention(page)
    light = [look(page, name) for name in ('#scale', '#heat')]
    background = page.evaluate(BACKGROUND)
    page.click('#theme')
    assert [look(page, name) for name in ('#scale', '#heat')] == light
    assert page.evaluate(BACKGROUND) != background


def test_a_phone_shows_the_photograph_beside_what_a_tap_changes(opened):
    page = opened(360, has_touch=True)
    show_attention(page)
    page.locator('#heads').evaluate("(node) => node.scrollIntoView({block: 'end'})")
    shown = page.locator('#photo').bounding_box()
    assert shown['y'] >= 0
    assert shown['y'] + shown['height'] <= page.locator('#heads').bounding_box()['y']
    before = text(page, '#where')
    page.locator('#photo').tap(position={'x': 20, 'y': 20})
    assert text(page, '#where') != before


def test_keyboard(opened):
    page = opened()
    page.check('input[value=attention]')
    page.locator('#photo').focus()
    before = text(page, '#where')
    page.keyboard.press('ArrowRight')
    page.keyboard.press('Shift+ArrowDown')
    live = page.locator('#live')
    wait_until(live.text_content)
    assert 'has the largest weight' in live.text_content()
    assert text(page, '#where') != before
    for _ in range(60):
        page.keyboard.press('ArrowLeft')
    assert ', 0 of' in text(page, '#where')
    seen = set()
    for _ in range(40):
        page.keyboard.press('Tab')
        seen.add(page.evaluate('document.activeElement.id || document.activeElement.name'))
    assert {'heads', 'preset', 'size', 'language', 'theme', 'views', 'stages', 'blocks', 'photo'} <= seen


def test_languages_themes_and_reduced_motion(opened):
    page = opened(color_scheme='dark', reduced_motion='reduce')
    dark = page.evaluate(BACKGROUND)
    page.click('#theme')
    assert page.evaluate(BACKGROUND) != dark
    page.click('#language')
    assert page.locator('html').get_attribute('lang') == 'zh'
    for node in page.locator('[data-label]:visible').all():
        shown = node.inner_text()
        assert re.search('[\u4e00-\u9fff]', shown) or shown == 'swin-dense explore'
    page.click('#play')
    assert value(page, '#roll') == '100'


# Visible controls without an accessible name.
NAMELESS = """() => [...document.querySelectorAll('button, input, select, canvas[role]')]
    .filter((node) => node.checkVisibility())
    .filter((node) => !(node.ariaLabel || node.textContent.trim() || node.labels?.[0]?.textContent.trim()))
    .map((node) => node.outerHTML)"""


@pytest.mark.parametrize('width', [360, 1280])
@pytest.mark.parametrize('view', ['windows', 'attention', 'reach'])
def test_the_page_fits_the_screen(opened, width, view, tmp_path):
    """The page is not wider than the screen and not blank, and every control has an accessible name."""
    page = opened(width)
    page.check(f'input[value={view}]')
    wait_for_frames(page)
    assert page.evaluate('document.documentElement.scrollWidth') <= width
    page.screenshot(path=tmp_path / 'page.png', full_page=True)
    colours = Image.open(tmp_path / 'page.png').convert('RGB').getcolors(2**24)
    assert len(colours) > 1000
    assert page.evaluate(NAMELESS) == []
