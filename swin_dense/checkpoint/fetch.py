"""Turn an address into a local file."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path
from urllib.error import URLError
from urllib.parse import unquote, urlparse

import torch

from swin_dense.checkpoint.report import CheckpointError


@contextlib.contextmanager
def local_file(source: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a local file with what ``source`` addresses; it may be gone afterwards.

    Args:
        source: a path; an address of http, https or file; ``hf://owner/repository[@revision][/file]``, with
            huggingface_hub; or any other address that mmengine's file backends read, such as ``s3://``.

    Raises:
        CheckpointError: the address cannot be reached or is of an unknown kind.
        ImportError: a package that the kind of address needs is not installed.
    """
    address = os.fspath(source)
    scheme, separator, rest = address.partition('://')
    if not separator:
        yield Path(address)
    elif scheme == 'file':
        yield Path(unquote(urlparse(address).path))
    elif scheme in ('http', 'https'):
        yield _download(address)
    elif scheme == 'hf':
        yield _download_from_hub(address, rest)
    else:
        with _mmengine_file(address, scheme) as path:
            yield path


def _download(address: str) -> Path:
    """Fetch a file into the cache that torch.hub and mmengine share, where it is called as in its address."""
    from filelock import FileLock

    name = Path(unquote(urlparse(address).path)).name
    path = Path(torch.hub.get_dir(), 'checkpoints', name)
    origin = path.with_name(f'{name}.origin')
    path.parent.mkdir(parents=True, exist_ok=True)
    # One of several processes on a machine downloads, the others wait for it.
    with FileLock(f'{path}.lock'):
        if not path.exists():
            try:
                torch.hub.download_url_to_file(address, str(path))
            except (URLError, OSError) as error:
                raise CheckpointError(f'{address} cannot be fetched: {error}') from error
            origin.write_text(address)
        elif origin.exists() and origin.read_text() != address:
            raise CheckpointError(
                f'{path} holds another file of that name, from {origin.read_text()}; remove it to fetch {address}'
            )
    return path


def _download_from_hub(address: str, rest: str) -> Path:
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError
    except ImportError as error:
        raise ImportError(f'{address} needs huggingface_hub: pip install huggingface_hub') from error
    owner, _, rest = rest.partition('/')
    repository, _, file = rest.partition('/')
    repository, _, revision = repository.partition('@')
    if not owner or not repository:
        raise CheckpointError(f'{address} must be of the form hf://owner/repository[@revision][/file]')
    for name in [file] if file else ['model.safetensors', 'pytorch_model.bin']:
        try:
            return Path(hf_hub_download(f'{owner}/{repository}', name, revision=revision or None))
        except EntryNotFoundError:
            continue
        except Exception as error:
            raise CheckpointError(f'{address} cannot be fetched: {error}') from error
    raise CheckpointError(f'{address}: the repository has no file {file or "model.safetensors or pytorch_model.bin"}')


@contextlib.contextmanager
def _mmengine_file(address: str, scheme: str) -> Iterator[Path]:
    known = 'paths and addresses of file, http, https and hf'
    try:
        from mmengine.fileio import get_local_path
    except ImportError as error:
        raise ImportError(f'{address}: {scheme}:// needs mmengine; without it there are {known}') from error
    with contextlib.ExitStack() as stack:
        try:
            path = stack.enter_context(get_local_path(address))
        except Exception as error:
            raise CheckpointError(
                f'{address} cannot be fetched through mmengine ({error}); there are also {known}'
            ) from error
        yield Path(path)
