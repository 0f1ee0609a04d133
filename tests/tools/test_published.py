"""The figure of accuracy is drawn from the raw results and the metafiles."""

import json
import sys

from PIL import Image

from swin_dense.workbench.recipes.zoo import read_zoo
from tests.conftest import ROOT

sys.path.insert(0, str(ROOT / 'benchmarks'))

import published

ROWS = json.loads(published.RAW.read_text())['rows']


POINTS = [point for data in published.PANELS for point in published.published(data)]


def test_every_published_recipe_has_a_measured_backbone():
    assert {point.key for point in POINTS} == set(ROWS)
    recipes = read_zoo(published.ROOT, 'mask_rcnn')
    accuracies = [recipe.metrics['box AP'] for recipe in recipes if 'box AP' in recipe.metrics]
    drawn = [point.accuracy for point in POINTS if point.head == 'Mask R-CNN']
    assert sorted(drawn) == sorted(accuracies)


def test_sizes_are_those_that_the_recipes_test_with():
    assert {point.size for point in POINTS} == {(800, 1344), (512, 512), (640, 640)}


def test_the_figure_is_drawn_in_the_published_size(tmp_path):
    published.draw_accuracy(ROWS, tmp_path / 'accuracy.png')
    drawn, kept = Image.open(tmp_path / 'accuracy.png'), Image.open(published.IMAGES / 'accuracy.png')
    assert drawn.size == kept.size
