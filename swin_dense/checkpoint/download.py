"""Fetch the file at an address, once per machine, and verify it."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import re
import shutil
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from urllib.request import Request, urlopen

import torch
from torch.hub import tqdm

from swin_dense.checkpoint.read import INDEX, USUAL_NAMES, check_suffix, file_digest, read_index
from swin_dense.checkpoint.report import CheckpointError
from swin_dense.utils.addresses import any_error_as_os_error, file_system, shown
from swin_dense.utils.atomic import alone, written_whole

_logger = logging.getLogger(__package__)
_TIMEOUT = 60  # seconds without any data
_CHUNK = 1 << 20
_FRAGMENT = re.compile(r'(sha256|sha384|sha512)=([0-9a-fA-F]+)')
# Query parameters that grant access or set response headers, and do not identify the file.
_ACCESS = re.compile(
    r'download|.*token|.*signature|sig|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid|x-(amz|goog)-.*'
    r'|response-content-.*|s[vterp]|spr|sk[tesv]|skoid|sktid'
)


@contextlib.contextmanager
def local_file(address: str) -> Iterator[Path]:
    """Yield a local copy of the file at an address, which may exist inside the context only.

    Args:
        address: an http, https or file address; ``hf://owner/repository[@revision][/file]``, with huggingface_hub (for
            an index, all of its shards are downloaded too); or any other address that fsspec reads, such as ``s3://``
            with s3fs. It may end in ``#sha256=DIGEST`` (or sha384, sha512) to verify the file.

    Raises:
        CheckpointError: the address cannot be reached or has an unsupported scheme, or the file has another digest.
        ImportError: a package that the scheme needs is not installed.
    """
    try:
        parts = urlsplit(address)
    except ValueError as error:  # an IPv6 host without its closing bracket, say
        raise CheckpointError(f'{address!r} is not an address: {error}') from error
    digest = _read_fragment(address, parts.fragment)
    address = address.partition('#')[0]
    if parts.scheme in ('http', 'https'):
        path = _download(address, digest)
        try:
            _check_digest(path, digest)
            yield path
        except CheckpointError as error:
            raise CheckpointError(
                f'{error}\n  It was downloaded from {shown(address)} to {path}; delete the file to fetch it again.'
            ) from error
        return
    with contextlib.ExitStack() as stack:
        if parts.scheme == 'file':
            path = Path(unquote(parts.path))
        elif parts.scheme == 'hf':
            path = _download_from_hub(address)
        else:
            path = stack.enter_context(_fetched_by_fsspec(address))
        _check_digest(path, digest)
        yield path


def _read_fragment(address: str, fragment: str) -> tuple[str, str] | None:
    """Return (algorithm, hexadecimal digest), or None for an empty fragment."""
    if not fragment:
        return None
    match = _FRAGMENT.fullmatch(fragment)
    if match is None:
        raise CheckpointError(
            f'{shown(address)}: the part after # must be sha256=DIGEST (or sha384, sha512), got {fragment!r}'
        )
    return match[1], match[2].lower()


def _check_digest(path: Path, digest: tuple[str, str] | None) -> None:
    if digest is not None and (actual := file_digest(path, digest[0])) != digest[1]:
        raise CheckpointError(f'{path} must have the {digest[0]} digest {digest[1]}, but has {actual}')


def _download(address: str, digest: tuple[str, str] | None) -> Path:
    """Download a file, once per machine and address, into a folder of its own beside the checkpoints of torch.hub."""
    parts = urlsplit(address)
    name = Path(unquote(parts.path)).name
    if name in ('', '..'):
        raise CheckpointError(f'{shown(address)} names no file')
    # The same file has many addresses if each request is signed, so secrets do not count.
    query = sorted((key, value) for key, value in parse_qsl(parts.query) if not _ACCESS.fullmatch(key.lower()))
    identity = hashlib.sha256(f'{shown(address)}?{urlencode(query)}'.encode()).hexdigest()[:16]
    path = Path(torch.hub.get_dir(), 'checkpoints', 'swin_dense', identity, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One process on a machine downloads; the others wait for it.
        with alone(path.with_name(f'{name}.lock')):
            if not path.exists():
                for leftover in path.parent.glob(f'.????????-{glob.escape(name)}'):  # of a process that was killed
                    leftover.unlink()
                with written_whole(path) as unfinished:
                    _receive(address, unfinished.path)
                    _check_digest(unfinished.path, digest)
                    check_suffix(unfinished.path, name)
    except CheckpointError as error:
        raise CheckpointError(
            f'{shown(address)} sent a file with an unexpected digest; nothing was kept: {error}'
        ) from error
    except (OSError, HTTPException, ValueError) as error:  # a ValueError: of an odd address, or the name of a file
        raise CheckpointError(
            f'{shown(address)} cannot be fetched: {error}; nothing was kept. Without a network connection, download '
            f'the file on another machine and give its path instead of the address, or copy it to {path}'
        ) from error
    return path


def _receive(address: str, path: Path) -> None:
    _logger.info('Downloading %s', shown(address))
    with urlopen(_request(address), timeout=_TIMEOUT) as response:
        total = int(response.headers.get('Content-Length', -1))
        bar = tqdm.wrapattr(response, 'read', total=None if total < 0 else total, desc=path.name)
        with bar as stream, path.open('wb') as file:
            shutil.copyfileobj(stream, file, _CHUNK)
            if total not in (-1, file.tell()):
                raise HTTPException(f'the connection ended after {file.tell()} of {total} bytes')


def _request(address: str) -> Request:
    """Return a request for an address, which may contain credentials as in ``https://user:password@host/``."""
    parts = urlsplit(address)
    access, _, host = parts.netloc.rpartition('@')
    request = Request(parts._replace(netloc=host).geturl(), headers={'User-Agent': 'swin_dense'})
    if access:
        encoded = b64encode(unquote(access).encode()).decode()
        request.add_unredirected_header('Authorization', f'Basic {encoded}')  # not sent to the host of a redirect
    return request


def _download_from_hub(address: str) -> Path:
    """Download a file with huggingface_hub. For an index, also download its shards into the same folder."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError as error:
        raise ImportError(f'{shown(address)} needs huggingface_hub: pip install huggingface_hub') from error
    owner, _, rest = address.partition('://')[2].partition('/')
    repository, _, file = rest.partition('/')
    repository, _, revision = repository.partition('@')
    if not owner or not repository:
        raise CheckpointError(f'{shown(address)} must be of the form hf://owner/repository[@revision][/file]')
    names = [file] if file else USUAL_NAMES
    unreachable: Exception | None = None

    def fetch(name: str) -> Path:
        # An unreachable hub costs half a minute per attempt, so after the first failure only use the cache.
        cached_only = unreachable is not None
        return Path(
            hf_hub_download(f'{owner}/{repository}', name, revision=revision or None, local_files_only=cached_only)
        )

    try:
        for name in names:
            try:
                path = fetch(name)
                break
            except LocalEntryNotFoundError as error:
                unreachable = unreachable or error
            except EntryNotFoundError:
                continue
        else:
            raise unreachable or CheckpointError(f'{shown(address)}: the repository has no file {" or ".join(names)}')
        for shard in read_index(path) if path.name.endswith(INDEX) else ():
            if fetch(str(PurePosixPath(name).with_name(shard))).parent != path.parent:
                raise CheckpointError(f'{shown(address)} changed during the download; load it again')
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f'{shown(address)} cannot be fetched: {error}') from error
    return path


@contextlib.contextmanager
def _fetched_by_fsspec(address: str) -> Iterator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, PurePosixPath(urlsplit(address).path).name or 'checkpoint')
        try:
            with any_error_as_os_error(shown(address)):
                system, inside = file_system(address)
                system.get_file(inside, str(path))
        except OSError as error:
            reason = error if shown(address) == address else type(error).__name__  # the message may contain secrets
            raise CheckpointError(
                f'{shown(address)} cannot be fetched: {reason}. The address must begin with http://, https://, hf://, '
                'file:// or a scheme that fsspec supports'
            ) from error
        yield path
