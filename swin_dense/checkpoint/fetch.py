"""Turn an address into a local file: whole and the one that was meant, or not there."""

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
_SILENCE = 60  # seconds without a byte after which a connection counts as lost
_PIECE = 1 << 20
_FRAGMENT = re.compile(r'(sha256|sha384|sha512)=([0-9a-fA-F]+)')
# Parts of a query that say who may fetch a file and how, not which file it is.
_ACCESS = re.compile(
    r'download|.*token|.*signature|sig|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid|x-(amz|goog)-.*'
    r'|response-content-.*|s[vterp]|spr|sk[tesv]|skoid|sktid'
)


@contextlib.contextmanager
def local_file(source: str | os.PathLike[str]) -> Iterator[Path]:
    """Yield a local file with what ``source`` addresses; it may be gone afterwards.

    Args:
        source: a path; an address of http, https or file; ``hf://owner/repository[@revision][/file]``, with
            huggingface_hub, where the index of several files brings these along; or any other address that fsspec
            reads, such as ``s3://`` with s3fs. An address may end in ``#sha256=`` (or sha384, sha512) and the digest
            that the file must have.

    Raises:
        CheckpointError: the address cannot be reached or is of an unknown kind, or the file is not the one meant.
        ImportError: a package that the kind of address needs is not installed.
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
                f'{error}\n  It is what was downloaded from {shown(address)}; delete the file to fetch it again.'
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
    """Return what to call a path or an address in messages and files: without passwords, tokens and signatures."""
    text = os.fspath(source)
    if not is_address(text):
        return text
    parts = urlsplit(text)
    return f'{parts.scheme}://{parts.netloc.rpartition("@")[2]}{parts.path}'


def _read_fragment(address: str, fragment: str) -> tuple[str, str] | None:
    """Return (algorithm, hexadecimal digest), or None where the address names none."""
    if not fragment:
        return None
    match = _FRAGMENT.fullmatch(fragment)
    if match is None:
        raise CheckpointError(
            f'{shown(address)}: after # must stand sha256=DIGEST (or sha384, sha512), got {fragment!r}'
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
    """Fetch a file into the cache that torch.hub and mmengine share, where it is called as in its address."""
    name = Path(unquote(urlsplit(address).path)).name
    if name in ('', '..'):
        raise CheckpointError(f'{shown(address)} names no file')
    path = Path(torch.hub.get_dir(), 'checkpoints', name)
    origin = path.with_name(f'{name}.origin')
    if not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        # One of several processes on a machine downloads, the others wait for it.
        with alone(path.with_name(f'{path.name}.lock')):
            if not path.exists():
                _fetch(address, path, origin, digest)
    if origin.exists() and origin.read_text() not in (address, _identity(address)):
        raise CheckpointError(
            f'{path} holds another file of that name, from {shown(origin.read_text())}; remove it to fetch '
            f'{shown(address)}'
        )
    return path


def _identity(address: str) -> str:
    """Return what tells one file from another: the address without secrets, and a hash of what else is asked for."""
    query = [(key, value) for key, value in parse_qsl(urlsplit(address).query) if not _ACCESS.fullmatch(key.lower())]
    asked = f' {hashlib.sha256(urlencode(sorted(query)).encode()).hexdigest()[:16]}' if query else ''
    return shown(address) + asked


def _fetch(address: str, path: Path, origin: Path, digest: tuple[str, str] | None) -> None:
    """Download to ``path`` what is complete and has the digest that the address or the name tells, or nothing."""
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
                    f'{shown(address)} sent another file than the one that was meant, which was not kept: {error}'
                ) from error
            origin.write_text(_identity(address))
    except OSError as error:
        raise CheckpointError(f'{shown(address)} cannot be kept as {path}: {error}') from error


def _receive_all(address: str, file: IO[bytes], path: Path) -> None:
    """Write what an address sends, going on where a broken connection ended for as long as something arrives."""
    _logger.info('Downloading %s to %s', shown(address), path)
    validator: str | None = None
    for _ in range(_ATTEMPTS):
        before = file.tell()
        headers = {'User-Agent': 'swin_dense', 'Accept-Encoding': 'identity'}
        if before and validator:  # else it starts again, as the file may have changed in between
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
                    while piece := _read(response):
                        file.write(piece)
                        bar.update(len(piece))
            if total in (None, file.tell()):
                return
        except (URLError, HTTPException, _LostError) as error:
            lost = str(error)
            if file.tell() == before:
                break
    received = f' after {file.tell()} of {total} bytes' if total else ''
    raise CheckpointError(
        f'{shown(address)} cannot be fetched{received}: {lost}; nothing was kept. Where there is no network, fetch it '
        f'elsewhere and give the path of the file in place of the address, or put it at {path}'
    )


class _LostError(Exception):
    """The connection broke, as against the disk on which the file is written."""


def _request(address: str, headers: dict[str, str]) -> Request:
    """Return a request of an address, which may hold a user and a password as in ``https://user:password@host/``."""
    parts = urlsplit(address)
    access, _, host = parts.netloc.rpartition('@')
    request = Request(parts._replace(netloc=host).geturl(), headers=headers)
    if access:
        encoded = b64encode(unquote(access).encode()).decode()
        request.add_unredirected_header('Authorization', f'Basic {encoded}')  # not for the host of a redirection
    return request


def _open(request: Request) -> Any:
    try:
        return urlopen(request, timeout=_SILENCE)
    except URLError:
        raise
    except OSError as error:  # while the answer is awaited, urlopen does not turn it into its own
        raise _LostError(str(error)) from error


def _read(response: HTTPResponse) -> bytes:
    try:
        return response.read1(_PIECE)  # what is there: of a whole piece, all would be lost where the connection breaks
    except OSError as error:
        raise _LostError(str(error)) from error


def _download_from_hub(address: str, rest: str) -> Path:
    """Fetch a file by huggingface_hub; where it is the index of several, these as well, which come to lie beside it."""
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
        # Out of reach, the hub is tried for half a minute: once, and then only what is in its cache.
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
                raise CheckpointError(f'{shown(address)} has changed while it was fetched; load it again')
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
            reason = error if shown(address) == address else type(error).__name__  # which may hold what is not shown
            raise CheckpointError(
                f'{shown(address)} cannot be fetched: {reason}. There are addresses of http, https, hf and file, and '
                'those that fsspec knows'
            ) from error
        yield path
