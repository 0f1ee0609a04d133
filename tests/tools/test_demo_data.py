"""The demo data set, read by the libraries that read the real COCO and ADE20K."""

import filecmp
import json
import subprocess
import sys

import numpy as np
import pytest
from mmdet.datasets import CocoDataset
from mmengine.registry import DATASETS, DefaultScope, init_default_scope
from mmseg.datasets import ADE20KDataset
from PIL import Image
from pycocotools.coco import COCO

from tests.conftest import ROOT
from tests.mm.demo import demo_config

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


@pytest.mark.parametrize(('framework', 'cls'), [('mmdet', CocoDataset), ('mmseg', ADE20KDataset)])
def test_the_frameworks_read_it_through_their_own_pipelines(framework, cls, data):
    cfg = demo_config(framework, data)
    with DefaultScope.overwrite_default_scope(None):
        init_default_scope(framework)
        train = DATASETS.build(cfg.train_dataloader.dataset)
        val = DATASETS.build(cfg.val_dataloader.dataset)
        assert type(train) is cls
        assert (len(train), len(val)) == (60, 2)
        sample = train[0]
    assert sample['inputs'].shape[0] == 3
    if framework == 'mmdet':
        instances = sample['data_samples'].gt_instances
        assert len(instances) == len(instances.masks) > 0
        assert int(instances.labels.max()) < 5
    else:
        labels = set(sample['data_samples'].gt_sem_seg.data.unique().tolist())
        assert labels <= {0, 1, 2, 3, 4, 5, 255}
        assert len(labels) > 1


def test_the_same_seed_makes_the_same_files(data, tmp_path):
    assert make(tmp_path / 'again').returncode == 0
    files = [path.relative_to(data) for path in data.rglob('*') if path.is_file()]
    same, different, missing = filecmp.cmpfiles(data, tmp_path / 'again', files, shallow=False)
    assert (len(same), different, missing) == (len(files), [], [])
    assert make(tmp_path / 'other', '--seed', '1').returncode == 0
    name = 'coco/annotations/instances_train2017.json'
    assert json.loads((data / name).read_text()) != json.loads((tmp_path / 'other' / name).read_text())


def test_existing_files_are_kept_without_force(data, tmp_path):
    (tmp_path / 'mine').mkdir()
    (tmp_path / 'mine' / 'notes.txt').write_text('keep')
    refused = make(tmp_path / 'mine')
    assert refused.returncode == 2
    assert '--force' in refused.stderr
    assert (tmp_path / 'mine' / 'notes.txt').read_text() == 'keep'
    assert make(tmp_path / 'none', '--train', '0').returncode == 2
    assert [path.name for path in tmp_path.iterdir()] == ['mine']
