"""Images that only the loader or the storage of a config can read: the check asks it, as mmdet and mmseg do."""

import contextlib
import json
import shutil
import tempfile
from pathlib import Path

import numpy as np
import pytest
from mmcv.transforms import BaseTransform
from mmengine.fileio import BaseStorageBackend, backends, register_backend
from mmengine.registry import TRANSFORMS
from PIL import Image

from tests.workbench.configs.data import TRAIN, VAL, check_data, dataset_of

STORED = {}  # what the storage holds, by path


class LoadFolder(BaseTransform):
    """Load an image from a folder with an array, as zarr stores them, and ask for more than its path."""

    def transform(self, results):
        pixels = np.load(Path(results['img_path'], '0.npy'))
        results['img'] = pixels + results['img_id'] * 0
        results['img_shape'] = results['ori_shape'] = pixels.shape[:2]
        return results


class Memory(BaseStorageBackend):
    """Storage of files that the file system does not have."""

    def get(self, path):
        return STORED[str(path)]

    def get_text(self, path, encoding='utf-8'):
        return self.get(path).decode(encoding)

    @contextlib.contextmanager
    def get_local_path(self, path):
        with tempfile.NamedTemporaryFile(suffix='.json') as file:
            Path(file.name).write_bytes(self.get(path))
            yield file.name


@pytest.fixture
def own_classes():
    TRANSFORMS.register_module(name='LoadFolder', module=LoadFolder)
    register_backend('memory', Memory)
    yield
    TRANSFORMS.module_dict.pop('LoadFolder')
    backends.registry_utils.backends.pop('memory')
    STORED.clear()


def test_a_detector_with_its_own_loader(fruit, own_classes):
    config = fruit.write()
    for split, file in (('train2017', TRAIN), ('val2017', VAL)):
        for path in (fruit.root / split).glob('*.jpg'):
            folder = path.with_suffix('.zarr')
            folder.mkdir()
            np.save(folder / '0.npy', np.asarray(Image.open(path)))
            path.unlink()
        text = (fruit.root / file).read_text().replace('.jpg', '.zarr')
        (fruit.root / file).write_text(text)
    for split in ('train', 'val'):
        config[f'{split}_dataloader'].dataset.pipeline[0] = {'type': 'LoadFolder'}
    assert dataset_of(config, 'train')[0]['inputs'].shape[0] == 3
    check_data(config, ('train', 'val'))
    (fruit.root / 'train2017/3.zarr/0.npy').unlink()
    with pytest.raises(ValueError, match=r'LoadFolder cannot load \d of \d images: \S+3\.zarr \(FileNotFoundError'):
        check_data(config, ('train', 'val'))
    np.save(fruit.root / 'train2017/3.zarr/0.npy', np.zeros((32, 64, 3), np.uint8))
    with pytest.raises(ValueError, match=r'3\.zarr is stated as 64 x 64 pixels, but is read as 64 x 32'):
        check_data(config, ('train', 'val'))


def store(root):
    """Move all images and masks below a folder into the storage."""
    for path in root.rglob('*.*'):
        if path.suffix in ('.jpg', '.png'):
            STORED[str(path)] = path.read_bytes()
            path.unlink()


@pytest.mark.parametrize('kind', ['fruit', 'roads'])
def test_images_in_a_storage_of_its_own(request, own_classes, kind):
    data = request.getfixturevalue(kind)
    config = data.write()
    names = {}
    if kind == 'roads':  # mmseg lists a folder, or reads names from a file
        for split in ('train', 'val'):
            names[split] = data.root / f'{split}.txt'
            names[split].write_text('0\n1\n2\n3\n')
    store(data.root)
    if kind == 'fruit':
        shutil.rmtree(data.root / 'train2017')
    for split in ('train', 'val'):
        dataset = config[f'{split}_dataloader'].dataset
        if names:
            dataset.ann_file = str(names[split])
        for step in dataset.pipeline:
            if step['type'] == 'LoadImageFromFile' or (names and step['type'] == 'LoadAnnotations'):
                step['backend_args'] = {'backend': 'memory'}
    assert dataset_of(config, 'train')[0]['inputs'].shape[0] == 3
    check_data(config, ('train', 'val'))
    gone = next(path for path in STORED if Path(path).stem == '0' and 'train' in path)
    STORED.pop(gone)
    with pytest.raises(ValueError, match=r'LoadImageFromFile cannot load \d of \d images: \S+0\.\w+ \(KeyError'):
        check_data(config, ('train',))


def test_a_file_of_annotations_in_a_storage_is_read_there(fruit, own_classes):
    config = fruit.write()
    dataset = config.train_dataloader.dataset
    path = dataset.data_root + dataset.ann_file
    content = json.loads((fruit.root / TRAIN).read_text())
    STORED[path] = json.dumps(content).encode()
    (fruit.root / TRAIN).unlink()
    dataset.backend_args = {'backend': 'memory'}
    assert len(dataset_of(config, 'train')) == 4
    assert any('4 images, 0 without annotations, 4 annotations' in note for note in check_data(config, ('train',)))
    content['annotations'][0]['category_id'] = 99
    STORED[path] = json.dumps(content).encode()
    with pytest.raises(ValueError, match='no category has this category_id'):
        check_data(config, ('train',))
