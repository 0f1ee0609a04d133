"""Pooled features of very many images on Ray Data: actors, on one machine or a cluster, and Parquet.

    python examples/features_ray.py photos/ --out out --checkpoint swin_tiny.pth --levels 32 --actors 4
    python examples/features_ray.py bucket/photos --out bucket/out --filesystem 's3://bucket?region=eu-west-1' ...

Needs ray[data] and swin_dense on every machine. `ray start` on each machine makes a cluster; RAY_ADDRESS names it. To
continue a run that was killed, start the same command again; read OUT/rows when it has ended. If a machine dies, the
run continues as long as the others have two CPUs more than there are actors. With fewer, Ray waits for more: stop it
and continue with fewer --actors. Ray listens on all interfaces, so authentication is on, with a token that every
machine has in ~/.ray/auth_token. Exit status: 0, 1 if rows have an error, 2 if nothing was started.
"""

import argparse
import json
import os
import sys

os.environ.setdefault('RAY_AUTH_MODE', 'token')  # which Ray reads when it is imported

import ray
from pyarrow import dataset, fs
from ray.data.checkpoint import CheckpointConfig

from swin_dense.features import Extractor
from swin_dense.images.listing import IMAGE_SUFFIXES


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument('images', nargs='+', help='files and folders that every machine reaches under this path')
    parser.add_argument('--out', required=True, help='folder for rows, checkpoint and settings, reached by all')
    parser.add_argument('--checkpoint', required=True, help='of the backbone, a file or an address')
    parser.add_argument('--levels', type=int, nargs='+')
    parser.add_argument('--pool', default='avg')
    parser.add_argument('--max-side', type=int)
    parser.add_argument('--actors', type=int, default=1)
    parser.add_argument('--gpus', type=float, default=0, help='of each actor')
    parser.add_argument('--cpus', type=int, help='that Ray counts where it starts by itself (default: all)')
    parser.add_argument('--blocks', type=int, help='pieces in which images are read and rows written (default: by Ray)')
    parser.add_argument('--filesystem', help='object storage of images and OUT, an address of pyarrow.fs')
    args = parser.parse_args()

    options = {'checkpoint': args.checkpoint, 'levels': args.levels, 'pool': args.pool, 'max_side': args.max_side}
    absolute = str if args.filesystem else os.path.abspath
    system = fs.FileSystem.from_uri(args.filesystem)[0] if args.filesystem else fs.LocalFileSystem()
    out, text = absolute(args.out), json.dumps(options, indent=2)
    system.create_dir(out)
    if system.get_file_info(f'{out}/settings.json').type == fs.FileType.NotFound:
        with system.open_output_stream(f'{out}/settings.json') as file:
            file.write(text.encode())
    if (found := system.open_input_stream(f'{out}/settings.json').read().decode()) != text:
        parser.error(f'{out} has rows of other settings: {found}')  # ends with 2

    address = os.environ.get('RAY_ADDRESS', 'local')
    ray.init(address, num_cpus=args.cpus if address == 'local' else None)
    # Ray waits for ever, and says nothing, without a CPU for reading beside the actors and the filter of what is done.
    cpus, needed = ray.cluster_resources().get('CPU', 0), args.actors + 2
    if cpus < needed:
        parser.error(f'{args.actors} actors and the reading need {needed} CPUs, and there are {cpus:g}: fewer --actors')
    # What is done is known by path: without a checkpoint, rows of a run that goes on would be there twice.
    done = CheckpointConfig('path', f'{out}/done', delete_checkpoint_on_success=False, override_filesystem=system)
    done.checkpoint_actor_pool_max_size = 1  # the filter
    ray.data.DataContext.get_current().checkpoint_config = done
    suffixes = [suffix[1:] for suffix in IMAGE_SUFFIXES]
    read = {
        'include_paths': True,
        'filesystem': system,
        'file_extensions': suffixes,
        'override_num_blocks': args.blocks,
    }
    ray.data.read_binary_files([absolute(path) for path in args.images], **read).map_batches(
        Extractor,
        fn_constructor_kwargs=options,
        batch_size=None,  # as many rows as a block has, which it goes through in smaller batches itself
        compute=ray.data.ActorPoolStrategy(size=args.actors),
        num_cpus=1,
        num_gpus=args.gpus,
        max_restarts=3,  # an image that kills its process would otherwise restart actors without end
    ).write_parquet(f'{out}/rows', filesystem=system)
    table = dataset.dataset(f'{out}/rows', filesystem=system)
    failed = table.count_rows(filter=dataset.field('error') != '')
    print(f'{table.count_rows()} rows, {failed} with an error, in {out}/rows', file=sys.stderr)
    return 1 if failed else 0


if __name__ == '__main__':
    sys.exit(main())
