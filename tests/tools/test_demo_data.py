"""The demo data set, read by the libraries that read the real COCO and ADE20K."""

import runpy
import subprocess
import sys

import numpy as np
import pytest
from mmseg.datasets import ADE20KDataset
from PIL import Image
from pycocotools.coco import COCO

from tests.conftest import ROOT

TOOL = ROOT / 'tools' / 'make_demo_data.py'


def make(out, *options):
    command = [sys.executable, TOOL, out, '--train', '60', '--val', '2', *options]
    return subprocess.run(command, capture_output=True, text=True)


@pytest.fixture(scope='module')
def data(tmp_path_factory):
    out = tmp_path_factory.mktemp('data') / 'demo'
    assert make(out).returncode == 0
    return out


@pytest.fixture(scope='module')
def coco(data):
    return COCO(data / 'coco' / 'annotations' / 'instances_train2017.json')


def test_annotations_describe_their_masks(coco):
    kinds = set()
    for annotation in coco.anns.values():
        mask = coco.annToMask(annotation).astype(bool)
        assert mask.sum() == annotation['area']
        rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
        assert annotation['bbox'] == [columns[0], rows[0], np.ptp(columns) + 1, np.ptp(rows) + 1]
        assert annotation['category_id'] in coco.cats
        kinds.add((annotation['iscrowd'], type(annotation['segmentation'])))
    assert kinds == {(0, list), (0, dict), (1, dict)}


def test_instances_of_one_image_do_not_overlap_and_agree_with_the_label_map(data, coco):
    ade = data / 'ADEChallengeData2016' / 'annotations' / 'training'
    sys.path.insert(0, str(ROOT / 'tools'))
    from make_demo_data import ADE_LABELS

    names = ADE20KDataset.METAINFO['classes']
    assert [names[label - 1] for label in ADE_LABELS.values()] == ['ball', 'clock', 'box', 'flag', 'light']
    for image_id in coco.imgs:
        labels = np.asarray(Image.open(ade / f'ADE_train_{image_id:08}.png'))
        seen = np.zeros(labels.shape, int)
        for annotation in coco.loadAnns(coco.getAnnIds(image_id)):
            mask = coco.annToMask(annotation).astype(bool)
            seen += mask
            label = 0 if annotation['iscrowd'] else ADE_LABELS[coco.cats[annotation['category_id']]['name']]
            assert set(labels[mask]) == {label}
        assert seen.max() <= 1
        assert set(labels[seen == 0]) == {1}


def test_existing_files_are_kept_without_force(tmp_path):
    (tmp_path / 'notes.txt').write_text('keep')
    refused = make(tmp_path)
    assert refused.returncode == 2
    assert '--force' in refused.stderr
    assert [path.read_text() for path in tmp_path.iterdir()] == ['keep']


def test_an_interrupted_demo_prints_no_traceback(tmp_path, monkeypatch):
    def interrupted(*arguments, **options):
        raise KeyboardInterrupt

    monkeypatch.setattr(sys, 'argv', ['demo.py', str(tmp_path / 'demo')])
    monkeypatch.setattr(sys, 'path', list(sys.path))  # to which the program adds a folder
    monkeypatch.setattr(subprocess, 'Popen', interrupted)
    with pytest.raises(SystemExit, match='stopped; the next run keeps the data set'):
        runpy.run_path(str(ROOT / 'tools' / 'demo.py'), run_name='__main__')
