"""``torch.hub`` lists, documents and builds the entry points of hubconf.py."""

import pytest
import torch

from tests.conftest import ROOT, TINY, equal_weights, tiny

NAMES = [f'{network}_{size}' for network in ('swin', 'swinv2') for size in 'blst']


def load(name, **options):
    return torch.hub.load(str(ROOT), name, source='local', **options)


def test_entry_points_are_exactly_the_published_sizes(tmp_path, monkeypatch):
    """Use a repository in the cache of torch.hub, because torch.hub.list and help accept no local folder."""
    monkeypatch.setenv('TORCH_HOME', str(tmp_path))
    (tmp_path / 'hub').mkdir()
    (tmp_path / 'hub' / 'me_swin_dense_main').symlink_to(ROOT)
    assert sorted(torch.hub.list('me/swin_dense:main', trust_repo=True)) == NAMES
    assert 'Return swin_t. ' in torch.hub.help('me/swin_dense:main', 'swin_t', trust_repo=True)


CHANNELS = {
    't': (192, 384),
    's': (192, 384),
    'b': (256, 512),
    'l': (384, 768),
}


@pytest.mark.parametrize('name', NAMES)
def test_every_entry_point_builds_its_size(name):
    network, _, size = name.partition('_')
    with torch.device('meta'):
        backbone = load(name, out_indices=(1, 2))
    assert type(backbone).__name__ == {'swin': 'SwinBackbone', 'swinv2': 'SwinV2Backbone'}[network]
    assert backbone.out_channels == CHANNELS[size]
    assert backbone.arch.depths[2] == (6 if size == 't' else 18)
    assert not backbone.training


def test_a_checkpoint_is_loaded_from_a_path(tmp_path):
    weights = tiny()
    torch.save({'model': weights.state_dict()}, tmp_path / 'swin.pth')
    assert equal_weights(load('swin_t', checkpoint=tmp_path / 'swin.pth', **TINY), weights)
    with pytest.raises(TypeError, match="'windw_size'; did you mean 'window_size'"):
        load('swin_t', windw_size=7)
