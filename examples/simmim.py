"""Pretrain a Swin-T on images without labels with SimMIM, in plain PyTorch.

    python examples/simmim.py photos/ --out swin.pth

`create_backbone(checkpoint='swin.pth')` then has the trained weights. Photos are a folder, a pattern, a tar file or a
.txt file with one path per line. `swin-dense train` does the same with held-out images, resuming and several GPUs.
"""

import argparse
import os

import torch
from torch.utils.data import DataLoader

from swin_dense import SimMIM, SwinBackbone
from swin_dense.features.images import normalize
from swin_dense.pretraining import UnlabelledImages
from swin_dense.utils.choices import IMAGENET_MEAN, IMAGENET_STD


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('photos', nargs='+')
    parser.add_argument('--out', required=True)
    parser.add_argument('--epochs', type=int, default=100)
    parser.add_argument('--batch-size', type=int, default=64)
    args = parser.parse_args()
    device = 'cuda' if torch.cuda.is_available() else 'cpu'

    photos = UnlabelledImages(args.photos, crop_size=192, held_out=0.0)
    photos.check()
    loader = DataLoader(photos, args.batch_size, shuffle=True, num_workers=4, drop_last=len(photos) > args.batch_size)
    backbone = SwinBackbone('t', window_size=6, out_indices=(3,), clamp_window=True, drop_path_rate=0.0)
    model = SimMIM(backbone).to(device)

    exempt = {f'backbone.{name}' for name in backbone.no_weight_decay()}
    groups = {0.05: [], 0.0: []}
    for name, parameter in model.named_parameters():
        groups[0.0 if parameter.ndim == 1 or name in exempt else 0.05].append(parameter)
    groups = [{'params': params, 'weight_decay': decay} for decay, params in groups.items()]
    optimizer = torch.optim.AdamW(groups, lr=2e-4 * args.batch_size / 512)
    warm_up = max(1, args.epochs // 10)
    rising = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=warm_up)
    falling = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, max(1, args.epochs - warm_up))
    schedule = torch.optim.lr_scheduler.SequentialLR(optimizer, [rising, falling], [warm_up])
    for epoch in range(1, args.epochs + 1):
        total = 0.0
        for batch in loader:
            img = normalize(batch['inputs'].to(device), IMAGENET_MEAN, IMAGENET_STD)
            with torch.autocast(device, torch.bfloat16, enabled=device == 'cuda'):
                loss = sum(model(img).values())
            optimizer.zero_grad()
            loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 5.0)
            optimizer.step()
            total += loss.item() / len(loader)
        schedule.step()
        print(f'epoch {epoch}: loss {total:.4f}')
        torch.save(model.state_dict(), f'{args.out}.unfinished')
        os.replace(f'{args.out}.unfinished', args.out)  # a killed run leaves a whole file


if __name__ == '__main__':
    main()
