"""The page in a real browser: every control is used, and its attention weights are compared with the model's."""

import contextlib
import shutil
import time

import numpy as np
import pytest
from PIL import Image

from swin_dense.explore.page import make_page
from swin_dense.explore.record import make_record
from swin_dense.ops.windows import Grid, region_ids
from tests.conftest import TINY, photograph, tiny
from tests.examples import load_example

PHOTOGRAPH = photograph(150, 212)
BROWSERS = ('chromium', 'chromium-browser', 'google-chrome')

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


def test_attention_equals_the_models(opened, backbone, file):
    page = opened()
    generator, token_attention = np.random.default_rng(0), load_example('pictures').token_attention
    for stage in range(4):
        for block in range(2):
            pixel = tuple(int(generator.integers(side)) for side in PHOTOGRAPH.shape[:2])
            expected = token_attention(backbone, PHOTOGRAPH, stage, block, pixel).numpy()
            cell = [side // (4 * 2**stage) for side in pixel]
            computed = page.evaluate('(at) => swinExplorer.attention(...at)', [stage, block, *cell])
            found, padding = np.zeros(expected.shape), np.zeros(len(expected))
            for at, slot in enumerate(computed['slots']):
                for head, values in enumerate(computed['heads']):
                    if slot['isPadding']:
                        padding[head] += values['weights'][at]
                    else:
                        found[head, slot['row'], slot['column']] = values['weights'][at]
            assert np.abs(found - expected).max() <= file[1] + 1e-5
            assert np.abs(padding - (1 - expected.sum((1, 2)))).max() <= 49 * file[1] + 1e-5


def test_every_control(opened):
    page = opened()
    assert page.locator('#random').is_visible()
    assert page.title() == 'a photo.png · swin-dense explore'
    windows = look(page, '#photo')

    page.click('#play')
    wait_until(lambda: page.locator('#roll').input_value() == '100')
    rolled = look(page, '#photo')
    assert rolled != windows
    page.click('#play')
    wait_until(lambda: page.locator('#roll').input_value() == '0')
    assert look(page, '#photo') == windows
    page.locator('#roll').fill('40')
    assert look(page, '#photo') not in (windows, rolled)

    ids = region_ids(Grid((19, 27), (7, 7), (3, 3))).reshape(3, 4, 49)[-1, 1]  # the window of a token at the upper edge
    share = float((ids[:, None] == ids).float().mean())
    assert page.locator('#mask-note').inner_text().startswith(f'Window 2, 1: 2 regions, {100 * share:.0f}%')
    mask = look(page, '#mask')
    page.locator('#photo').hover(position={'x': 5, 'y': 5})
    assert page.locator('#where').inner_text().startswith('Pixel')
    assert look(page, '#mask') != mask
    page.check('input[name=blocks][value="0"]')
    wait_for_frames(page)
    assert page.locator('#play').is_disabled()
    assert '100%' in page.locator('#mask-note').inner_text()

    page.check('input[value=attention]')
    wait_until(lambda: page.locator('#verdict').inner_text())
    for stage in range(4):
        page.check(f'input[name=stages][value="{stage}"]')
        page.check('input[name=blocks][value="1"]')
        heads = page.locator('input[name=heads]')
        assert heads.count() == 1 + TINY['num_heads'][stage]
        mean = look(page, '#weights')
        heads.last.check()
        assert (look(page, '#weights') == mean) == (TINY['num_heads'][stage] == 1)
    page.check('input[name=stages][value="0"]')
    assert page.locator('input[name=heads]:checked').get_attribute('value') == 'mean'

    page.check('input[value=reach]')
    steps = page.locator('#steps button')
    assert steps.count() == 8
    steps.nth(5).click()
    wait_for_frames(page)
    assert steps.nth(5).get_attribute('aria-pressed') == 'true'
    assert page.locator('input[name=stages]:checked').get_attribute('value') == '2'

    assert '40,124,743,680' in page.locator('#saved').inner_text()
    page.select_option('#preset', '1')
    own = page.locator('#size-label').inner_text()
    assert 'this photograph' in own
    page.locator('#size').fill('20')
    assert page.locator('#size-label').inner_text() != own


def test_pointer_and_keyboard(opened):
    page = opened()
    page.check('input[value=attention]')
    photo = page.locator('#photo')
    box = photo.bounding_box()
    scale = box['width'] / PHOTOGRAPH.shape[1]
    where = page.locator('#where')
    photo.hover(position={'x': 100.5 * scale, 'y': 60.5 * scale})
    wait_for_frames(page)
    assert where.inner_text().startswith('Pixel 60, 100 ')
    photo.click(position={'x': 30.5 * scale, 'y': 20.5 * scale})
    photo.hover(position={'x': 100.5 * scale, 'y': 60.5 * scale})
    wait_for_frames(page)
    assert page.locator('#pin').is_visible()
    assert where.inner_text().startswith('Pixel 20, 30 ')

    levels = [look(page, f'#levels figure:nth-child({number}) canvas') for number in range(1, 5)]
    page.locator('#levels canvas').nth(1).click(position={'x': 5, 'y': 90})
    wait_for_frames(page)
    assert not page.locator('#pin').is_visible()
    after = [look(page, f'#levels figure:nth-child({number}) canvas') for number in range(1, 5)]
    assert all(one != other for one, other in zip(levels, after, strict=True))

    photo.focus()
    before = where.inner_text()
    page.keyboard.press('ArrowRight')
    page.keyboard.press('Shift+ArrowDown')
    wait_until(lambda: page.locator('#live').text_content())
    assert where.inner_text() != before
    assert 'has the largest weight' in page.locator('#live').text_content()
    for _ in range(60):
        page.keyboard.press('ArrowLeft')
    wait_for_frames(page)
    assert ', 0 of' in where.inner_text()
    seen = set()
    for _ in range(40):
        page.keyboard.press('Tab')
        seen.add(page.evaluate('document.activeElement.id || document.activeElement.name'))
    assert {'heads', 'preset', 'size', 'language', 'theme', 'views', 'stages', 'blocks', 'photo'} <= seen


def test_languages_themes_and_reduced_motion(opened):
    page = opened(color_scheme='dark', reduced_motion='reduce')
    dark = page.evaluate('getComputedStyle(document.body).backgroundColor')
    page.click('#theme')
    light = page.evaluate('getComputedStyle(document.body).backgroundColor')
    assert dark != light
    page.click('#language')
    assert page.locator('html').get_attribute('lang') == 'zh'
    for node in page.locator('[data-label]:visible').all():
        assert (
            any('\u4e00' <= letter <= '\u9fff' for letter in node.inner_text())
            or node.inner_text() == 'swin-dense explore'
        )
    page.click('#play')
    wait_for_frames(page)
    assert page.locator('#roll').input_value() == '100'


@pytest.mark.parametrize('width', [360, 1280])
@pytest.mark.parametrize('view', ['windows', 'attention', 'reach'])
def test_the_page_fits_the_screen(opened, width, view, tmp_path):
    """The page is not wider than the screen and not blank, and every control has an accessible name."""
    page = opened(width)
    page.check(f'input[value={view}]')
    wait_for_frames(page)
    assert page.evaluate('document.documentElement.scrollWidth') <= width
    page.screenshot(path=tmp_path / 'page.png', full_page=True)
    assert len(np.unique(np.array(Image.open(tmp_path / 'page.png')).reshape(-1, 3), axis=0)) > 1000
    nameless = page.evaluate("""() => [...document.querySelectorAll('button, input, select, canvas[role]')]
        .filter((node) => node.checkVisibility())
        .filter((node) => !(node.ariaLabel || node.textContent.trim() || node.labels?.[0]?.textContent.trim()))
        .map((node) => node.outerHTML)""")
    assert nameless == []
