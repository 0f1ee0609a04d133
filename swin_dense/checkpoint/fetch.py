"""Download a checkpoint to a local file, verify its digest, and never keep an incomplete download."""

from __future__ import annotations

import contextlib
import glob
import hashlib
import logging
import os
import re
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPException, HTTPResponse
from pathlib import Path, PurePosixPath
from typing import IO, Any
from urllib.error import URLError
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from urllib.request import Request, urlopen

import torch
from torch.hub import tqdm

from swin_dense.checkpoint.files import USUAL_NAMES, check_hash, digest_of, read_index
from swin_dense.checkpoint.report import CheckpointError
from swin_dense.utils.addresses import any_error_as_os_error, file_system, is_address
from swin_dense.utils.atomic import written_whole
from swin_dense.utils.locks import alone

_logger = logging.getLogger(__package__)
_ATTEMPTS = 5
_TIMEOUT = 60  # seconds without any data
_CHUNK = 1 << 20
_FRAGMENT = re.compile(r'(sha256|sha384|sha512)=([0-9a-fA-F]+)')
# Query parameters that grant access or set response headers, and do not identify the file.
_ACCESS = re.compile(
    r'download|.*token|.*signature|sig|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid|x-(amz|goog)-.*'
    r'|response-content-.*|s[vterp]|spr|sk[tesv]|skoid|sktid'
)


@contextlib.contextmanager
def local_file(source: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a local copy of the file at ``source``. The copy may be temporary, so use it inside the context only.

    Args:
        source: a path; an http, https or file address; ``hf://owner/repository[@revision][/file]``, with
            huggingface_hub (for an index, all of its shards are downloaded too); or any other address that fsspec
            reads, such as ``s3://`` with s3fs. An address may end in ``#sha256=DIGEST`` (or sha384, sha512) to verify
            the file.

    Raises:
        CheckpointError: the address cannot be reached or has an unsupported scheme, or the file has another digest.
        ImportError: a package that the scheme needs is not installed.
    """
    address = os.fspath(source)
    if not is_address(address):
        yield Path(address)
        return
    address, _, fragment = address.partition('#')
    scheme, _, rest = address.partition('://')
    digest = _read_fragment(address, fragment)
    if scheme in ('http', 'https'):
        path = _download(address, digest)
        try:
            _check_digest(path, digest)
            yield path
        except CheckpointError as error:
            raise CheckpointError(
                f'{error}\n  It was downloaded from {shown(address)}; delete the file to fetch it again.'
            ) from error
        return
    with contextlib.ExitStack() as stack:
        if scheme == 'file':
            path = Path(unquote(urlsplit(address).path))
        elif scheme == 'hf':
            path = _download_from_hub(address, rest)
        else:
            path = stack.enter_context(_fetched_by_fsspec(address))
        _check_digest(path, digest)
        yield path


def shown(source: str | os.PathLike[str]) -> str:
    """Return a path or an address for messages and files, without user names, passwords, tokens and signatures."""
    text = os.fspath(source)
    if not is_address(text):
        return text
    parts = urlsplit(text)
    return f'{parts.scheme}://{parts.netloc.rpartition("@")[2]}{parts.path}'


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
    if digest is None:
        return
    algorithm, expected = digest
    actual = digest_of(path, algorithm)
    if actual != expected:
        raise CheckpointError(f'{path} must have the {algorithm} digest {expected}, but has {actual}')


def _download(address: str, digest: tuple[str, str] | None) -> Path:
    """Download a file into the checkpoint cache shared by torch.hub and mmengine, under the name in its address."""
    name = Path(unquote(urlsplit(address).path)).name
    if name in ('', '..'):
        raise CheckpointError(f'{shown(address)} names no file')
    path = Path(torch.hub.get_dir(), 'checkpoints', name)
    origin = path.with_name(f'{name}.origin')
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # One process on a machine downloads; the others wait for it.
        with alone(path.with_name(f'{path.name}.lock')):
            if not path.exists():
                _fetch(address, path, origin, digest)
    if origin.exists() and origin.read_text() not in (address, _identity(address)):
        raise CheckpointError(
            f'{path} is another file with that name, from {shown(origin.read_text())}; remove it to fetch '
            f'{shown(address)}'
        )
    return path


def _identity(address: str) -> str:
    """Return a string that identifies a file: the address without secrets, and a hash of the other query parameters."""
    query = [(key, value) for key, value in parse_qsl(urlsplit(address).query) if not _ACCESS.fullmatch(key.lower())]
    query_hash = f' {hashlib.sha256(urlencode(sorted(query)).encode()).hexdigest()[:16]}' if query else ''
    return shown(address) + query_hash


def _fetch(address: str, path: Path, origin: Path, digest: tuple[str, str] | None) -> None:
    """Download to ``path``. An incomplete file, or one without the digest given in the address or name, is deleted."""
    for leftover in path.parent.glob(f'.????????-{glob.escape(path.name)}'):  # of a process that was killed
        leftover.unlink()
    try:
        with written_whole(path) as unfinished:
            with unfinished.path.open('wb') as file:
                _receive_all(address, file, path)
            try:
                _check_digest(unfinished.path, digest)
                check_hash(unfinished.path, path.name)
            except CheckpointError as error:
                raise CheckpointError(
                    f'{shown(address)} sent a file with an unexpected digest; nothing was kept: {error}'
                ) from error
            origin.write_text(_identity(address))
    except OSError as error:
        raise CheckpointError(f'{shown(address)} cannot be written to {path}: {error}') from error


def _receive_all(address: str, file: IO[bytes], path: Path) -> None:
    """Download an address into ``file``; after a broken connection, resume as long as each attempt receives data."""
    _logger.info('Downloading %s to %s', shown(address), path)
    validator: str | None = None
    for _ in range(_ATTEMPTS):
        before = file.tell()
        headers = {'User-Agent': 'swin_dense', 'Accept-Encoding': 'identity'}
        if before and validator:  # without a validator, start again: the file may have changed in between
            headers.update({'Range': f'bytes={before}-', 'If-Range': validator})
        lost = 'the connection ended too early'
        total = None
        try:
            with _open(_request(address, headers)) as response:
                validator = response.headers.get('ETag') or response.headers.get('Last-Modified')
                if response.status != 206:
                    before = file.seek(0)
                    file.truncate()
                length = response.headers.get('Content-Length')
                total = None if length is None else before + int(length)
                with tqdm(desc=path.name, total=total, initial=before, unit='B', unit_scale=True) as bar:
                    while chunk := _read(response):
                        file.write(chunk)
                        bar.update(len(chunk))
            if total in (None, file.tell()):
                return
        except (URLError, HTTPException, _ConnectionLostError) as error:
            lost = str(error)
            if file.tell() == before:
                break
    received = f' after {file.tell()} of {total} bytes' if total else ''
    raise CheckpointError(
        f'{shown(address)} cannot be fetched{received}: {lost}; nothing was kept. Without a network connection, '
        f'download the file on another machine and give its path instead of the address, or copy it to {path}'
    )


class _ConnectionLostError(Exception):
    """The connection broke. A type of its own, to distinguish it from an OSError of the local disk."""


def _request(address: str, headers: dict[str, str]) -> Request:
    """Return a request for an address, which may contain credentials as in ``https://user:password@host/``."""
    parts = urlsplit(address)
    access, _, host = parts.netloc.rpartition('@')
    request = Request(parts._replace(netloc=host).geturl(), headers=headers)
    if access:
        encoded = b64encode(unquote(access).encode()).decode()
        request.add_unredirected_header('Authorization', f'Basic {encoded}')  # not sent to the host of a redirect
    return request


def _open(request: Request) -> Any:
    try:
        return urlopen(request, timeout=_TIMEOUT)
    except URLError:
        raise
    except OSError as error:  # urlopen does not convert errors that occur while it waits for the response
        raise _ConnectionLostError(str(error)) from error


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read1(_CHUNK)  # read() would lose a partly received chunk when the connection breaks
    except OSError as error:
        raise _ConnectionLostError(str(error)) from error


def _download_from_hub(address: str, rest: str) -> Path:
    """Download a file with huggingface_hub. For an index, also download its shards into the same folder."""
    try:
        from huggingface_hub import hf_hub_download
        from huggingface_hub.errors import EntryNotFoundError, LocalEntryNotFoundError
    except ImportError as error:
        raise ImportError(f'{shown(address)} needs huggingface_hub: pip install huggingface_hub') from error
    owner, _, rest = rest.partition('/')
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
        for shard in read_index(path):
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
