"""The figure of accuracy is drawn from the raw results and the metafiles."""

import json
import sys

from PIL import Image

from swin_dense.workbench.recipes.zoo import read_zoo
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'benchmarks'))

import published

ROWS = json.loads(published.RAW.read_text())['rows']


def test_every_published_recipe_has_a_measured_backbone():
    points = [point for data in published.PANELS for point in published.published(data)]
    assert {point.key for point in points} == set(ROWS)
    mask_rcnn = [recipe for recipe in read_zoo(published.ROOT, 'mask_rcnn') if 'box AP' in recipe.metrics]
    drawn = sorted(point.accuracy for point in points if point.head == 'Mask R-CNN')
    assert drawn == sorted(recipe.metrics['box AP'] for recipe in mask_rcnn)


def test_sizes_are_those_that_the_recipes_test_with():
    sizes = {point.size for data in published.PANELS for point in published.published(data)}
    assert sizes == {(800, 1344), (512, 512), (640, 640)}


def test_the_figure_is_drawn_in_the_published_size(tmp_path):
    published.draw_accuracy(ROWS, tmp_path / 'accuracy.png')
    drawn, kept = Image.open(tmp_path / 'accuracy.png'), Image.open(published.IMAGES / 'accuracy.png')
    assert drawn.size == kept.size
