"""The command of examples/distill.py with a tiny vision transformer of transformers as the teacher."""

import pytest
import torch
from PIL import Image

from swin_dense import create_backbone
from tests.conftest import photograph
from tests.examples import load_example

from .peer import needed

tf = needed('transformers')
distill = load_example('distill')
SMALL = {'hidden_size': 24, 'num_hidden_layers': 2, 'num_attention_heads': 2, 'image_size': 28}


@pytest.mark.parametrize('registers', [0, 4])
def test_the_map_of_a_vision_transformer_has_its_tokens_in_their_places(registers):
    kinds = (
        (tf.Dinov2WithRegistersConfig, tf.Dinov2WithRegistersModel) if registers else (tf.Dinov2Config, tf.Dinov2Model)
    )
    more = {'num_register_tokens': registers} if registers else {}
    model = kinds[1](kinds[0](patch_size=14, **SMALL, **more)).eval()
    image = torch.rand(1, 3, 42, 70)
    with torch.no_grad():
        found = distill.vision_transformer(model)(image)
        tokens = model(image).last_hidden_state[0, 1 + registers :]
    assert found.shape == (1, 24, 3, 5)
    assert torch.equal(found[0, :, 1, 2], tokens[5 + 2])


def test_the_command(tmp_path, monkeypatch, capsys):
    tf.Dinov2Model(tf.Dinov2Config(patch_size=14, **SMALL)).save_pretrained(tmp_path / 'teacher')
    (tmp_path / 'photos').mkdir()
    for index in range(4):
        Image.fromarray(photograph(60, 80)).rotate(index).save(tmp_path / 'photos' / f'{index}.jpg')
    out = tmp_path / 'student.pth'
    options = ['--epochs', '2', '--batch-size', '2', '--side', '56', '--out', str(out)]
    monkeypatch.setattr(
        'sys.argv',
        [
            'distill.py',
            str(tmp_path / 'photos'),
            '--teacher',
            str(tmp_path / 'teacher'),
            *options,
        ],
    )
    monkeypatch.setattr(distill.os, 'cpu_count', lambda: 0)
    distill.main()
    assert 'at the end' in capsys.readouterr().out
    assert create_backbone(checkpoint=str(out)).out_channels == (96, 192, 384, 768)
