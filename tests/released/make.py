"""Write the files of a released version into a folder, with the code of that version; README.md says how."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import torch
from PIL import Image

from swin_dense import SwinBackbone, SwinV2Backbone, extract_pyramid

# Two stages, one of them shifted, in half precision, for small files. The image needs padding of windows.
OPTIONS = {
    'embed_dims': 4,
    'depths': (2, 1),
    'num_heads': (1, 2),
    'strides': (4, 2),
    'out_indices': (0, 1),
}
SIZE, WINDOW = (22, 38), 4
# The table of a feature folder contains the absolute path of the image.
PHOTO = Path('/tmp/swin_dense_released/photo.png')


def random_weights(backbone: torch.nn.Module) -> dict[str, torch.Tensor]:
    """Return random weights in half precision, of all parameters; index buffers of older versions are kept."""
    generator = torch.Generator().manual_seed(0)
    parameters = dict(backbone.named_parameters())
    return {
        name: torch.randn(value.shape, generator=generator).mul(0.3).half() if name in parameters else value
        for name, value in backbone.state_dict().items()
    }


def main(out: Path) -> None:
    from safetensors.torch import save_file  # not needed to import OPTIONS

    out.mkdir(parents=True)
    PHOTO.parent.mkdir(exist_ok=True)
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (*SIZE, 3), np.uint8)).save(PHOTO)
    weights = random_weights(SwinBackbone(window_size=WINDOW, **OPTIONS))
    torch.save({'state_dict': weights, 'meta': {}}, out / 'backbone.pth')
    command = [
        sys.executable,
        '-m',
        'swin_dense',
        'features',
        str(PHOTO),
        '--checkpoint',
        str(out / 'backbone.pth'),
    ]
    for folder, options in (('maps', []), ('vectors', ['--pool', 'avg'])):
        subprocess.run([*command, '--out', str(out / folder), *options], check=True)
    v2 = SwinV2Backbone(window_size=WINDOW, **OPTIONS).eval()
    weights = random_weights(v2)
    save_file(weights, out / 'backbone_v2.safetensors')
    v2.load_state_dict(weights)
    np.save(out / 'map_v2.npy', extract_pyramid(v2, str(PHOTO))[8].numpy())


if __name__ == '__main__':
    main(Path(sys.argv[1]))
