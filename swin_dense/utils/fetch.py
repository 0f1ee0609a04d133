"""Fetch the file of a checkpoint at an address.

It is downloaded once per machine for http and https, and verified by the digests in its address and in its name.
"""

from __future__ import annotations

import contextlib
import glob
import hashlib
import json
import logging
import re
import tempfile
from base64 import b64encode
from collections.abc import Iterator
from http.client import HTTPException
from pathlib import Path, PurePosixPath
from urllib.error import URLError
from urllib.parse import parse_qsl, unquote, urlencode, urlsplit
from urllib.request import Request, urlopen

from torch.hub import get_dir

from swin_dense.utils import packages, private
from swin_dense.utils.addresses import without_secrets
from swin_dense.utils.atomic import atomic_path, exclusive_lock, remove
from swin_dense.utils.checks import shortened
from swin_dense.utils.digest import file_digest
from swin_dense.utils.errors import CheckpointError

_logger = logging.getLogger('swin_dense.checkpoint')  # where users find all messages of a load
_TIMEOUT = 60  # seconds without any data
_CHUNK = 1 << 20
INDEX = '.index.json'  # appended to the usual file name if the weights are in several shards
# Names of weight files in folders and repositories of transformers and timm, in order of preference.
USUAL_NAMES = ('model.safetensors', f'model.safetensors{INDEX}', 'pytorch_model.bin', f'pytorch_model.bin{INDEX}')
# The beginning of a SHA-256, as in the names of torch.hub: swin-1cdeb081.pth. A suffix of decimal digits is more often
# a date or a step; 32 and 40 hexadecimal digits are an MD5 and a SHA-1.
_HASH_SUFFIX = re.compile(r'-(?=\d*[a-f])([0-9a-f]{8,16}|[0-9a-f]{64})$')
_FRAGMENT = re.compile(r'(sha256|sha384|sha512)=([0-9a-fA-F]+)')
# Query parameters that grant access or set response headers, and do not identify the file.
_ACCESS = re.compile(
    r'download|.*token|.*signature|sig|expires|policy|key-pair-id|awsaccesskeyid|googleaccessid|x-(amz|goog)-.*'
    r'|response-content-.*|s[vterp]|spr|sk[tesv]|skoid|sktid'
)


@contextlib.contextmanager
def local_file(address: str) -> Iterator[Path]:
    """Yield a local copy of the file at an address, which may exist inside the context only.

    The address is http, https or file; ``hf://owner/repository[@revision][/file]``, with huggingface_hub (for an index,
    all of its shards are downloaded too); or any other that fsspec reads, such as ``s3://`` with s3fs. It may end in
    ``#sha256=DIGEST`` (or sha384, sha512) to verify the file.

    Raises:
        CheckpointError: the address cannot be reached or has an unsupported scheme, or the file has another digest.
        ImportError: a package that the scheme needs is not installed.
    """
    try:
        parts = urlsplit(address)
    except ValueError as error:  # an IPv6 host without its closing bracket, say
        raise CheckpointError(f'{address!r} is not an address: {error}') from error
    digest = _FRAGMENT.fullmatch(parts.fragment)
    if parts.fragment and digest is None:
        raise CheckpointError(
            f'{without_secrets(address)}: the part after # must be sha256=DIGEST (or sha384, sha512), got '
            f'{parts.fragment!r}'
        )
    address = address.partition('#')[0]
    with contextlib.ExitStack() as stack:
        if parts.scheme in ('http', 'https'):
            path = _download(address, digest)
        elif parts.scheme == 'file':
            path = Path(unquote(parts.path))
        elif parts.scheme == 'hf':
            path = _download_from_hub(address)
        else:
            path = _fetch_by_fsspec(address, stack.enter_context(tempfile.TemporaryDirectory()))
        try:
            _check_digest(path, digest)
            yield path
        except CheckpointError as error:
            if parts.scheme not in ('http', 'https'):
                raise
            raise CheckpointError(
                f'{error}\n  It was downloaded from {without_secrets(address)} to {path}; delete the file to fetch it '
                'again.'
            ) from None


def _check_digest(path: Path, digest: re.Match[str] | None) -> None:
    """Raise a CheckpointError if a file does not have the digest at the end of its address."""
    if digest is not None and (actual := file_digest(path, digest[1])) != digest[2].lower():
        raise CheckpointError(f'{path} must have the {digest[1]} digest {digest[2].lower()}, but has {actual}')


def _download(address: str, digest: re.Match[str] | None) -> Path:
    """Download a file, once per machine and address, into a folder of its own beside the checkpoints of torch.hub."""
    parts = urlsplit(address)
    name = Path(unquote(parts.path)).name
    if name in ('', '..'):
        raise CheckpointError(f'{without_secrets(address)} names no file')
    # The same file has many addresses if each request is signed, so secrets do not count.
    query = sorted((key, value) for key, value in parse_qsl(parts.query) if not _ACCESS.fullmatch(key.lower()))
    identity = hashlib.sha256(f'{without_secrets(address)}?{urlencode(query)}'.encode()).hexdigest()[:16]
    path = Path(get_dir(), 'checkpoints', 'swin_dense', identity, name)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        # One process on a machine downloads; the others wait for it.
        with exclusive_lock(path.with_name(f'{name}.lock')):
            if not path.exists():
                for leftover in path.parent.glob(f'.????????-{glob.escape(name)}'):  # of a process that was killed
                    remove(leftover)
                with atomic_path(path) as unfinished:
                    _receive(address, unfinished)
                    _check_digest(unfinished, digest)
                    check_suffix(unfinished, name)
    except CheckpointError as error:
        raise CheckpointError(
            f'{without_secrets(address)} sent a file with an unexpected digest; nothing was kept: {error}'
        ) from None
    except (OSError, HTTPException, ValueError) as error:  # a ValueError: of an odd address, or the name of a file
        reason = error.reason if type(error) is URLError else error
        raise CheckpointError(
            f'{without_secrets(address)} cannot be fetched: {reason}; nothing was kept. Without a network connection, '
            f'download the file on another machine and give its path, or copy it to {path}'
        ) from None  # the message has the reason, and the traceback is that of the sockets
    return path


def _receive(address: str, path: Path) -> None:
    """Download an address, which may contain credentials as in ``https://user:password@host/``."""
    parts = urlsplit(address)
    access, _, host = parts.netloc.rpartition('@')
    request = Request(parts._replace(netloc=host).geturl(), headers={'User-Agent': 'swin_dense'})
    if access:
        encoded = b64encode(unquote(access).encode()).decode()
        request.add_unredirected_header('Authorization', f'Basic {encoded}')  # not sent to the host of a redirect
    with urlopen(request, timeout=_TIMEOUT) as response:
        total = int(response.headers.get('Content-Length', -1))
        size = 'of unknown size' if total < 0 else f'{total / 1e6:.1f} MB'
        # A warning is printed without a configuration of logging, too.
        _logger.warning('Downloading %s (%s) into %s', without_secrets(address), size, path.parent)
        bar = private.progress_bar(total=None if total < 0 else total, unit='B', unit_scale=True, desc=path.name)
        with bar as show, path.open('wb') as file:
            while block := response.read(_CHUNK):
                file.write(block)
                show(len(block))
            if total not in (-1, file.tell()):
                raise HTTPException(f'the connection ended after {file.tell()} of {total} bytes')


def _download_from_hub(address: str) -> Path:
    """Download a file with huggingface_hub. For an index, also download its shards into the same folder."""
    hub = packages.optional(without_secrets(address), 'huggingface_hub')
    owner, _, rest = address.partition('://')[2].partition('/')
    repository, _, file = rest.partition('/')
    repository, _, revision = repository.partition('@')
    if not owner or not repository:
        raise CheckpointError(f'{without_secrets(address)} must be of the form hf://owner/repository[@revision][/file]')
    unreachable: Exception | None = None

    def fetch(name: str) -> Path:
        # An unreachable hub costs half a minute per attempt, so after the first failure only use the cache.
        options = {'revision': revision or None, 'local_files_only': unreachable is not None}
        return Path(hub.hf_hub_download(f'{owner}/{repository}', name, **options))

    try:
        for name in [file] if file else USUAL_NAMES:
            try:
                path = fetch(name)
                break
            except hub.errors.LocalEntryNotFoundError as error:
                unreachable = unreachable or error
            except hub.errors.EntryNotFoundError:
                continue
        else:
            names = file or ' or '.join(USUAL_NAMES)
            raise unreachable or CheckpointError(f'{without_secrets(address)}: the repository has no file {names}')
        for shard in shards_of(path) if path.name.endswith(INDEX) else ():
            if fetch(str(PurePosixPath(name).with_name(shard))).parent != path.parent:
                raise CheckpointError(f'{without_secrets(address)} changed during the download; load it again')
    except CheckpointError:
        raise
    except Exception as error:
        raise CheckpointError(f'{without_secrets(address)} cannot be fetched: {error}') from error
    return path


def _fetch_by_fsspec(address: str, folder: str) -> Path:
    import fsspec  # a dependency of torch

    path = Path(folder, PurePosixPath(urlsplit(address).path).name or 'checkpoint')
    try:
        system, inside = fsspec.core.url_to_fs(address)
        system.get_file(inside, str(path))
    except ImportError as error:
        raise ImportError(f'{without_secrets(address)}: {error}') from error
    except Exception as error:  # of any file system
        place = without_secrets(address)
        reason = error if place == address else type(error).__name__  # the message may contain secrets
        raise CheckpointError(
            f'{place} cannot be fetched: {reason}. The address must begin with http://, https://, hf://, '
            'file:// or a scheme that fsspec supports'
        ) from error
    return path


def check_suffix(path: Path, name: str) -> None:
    """Raise a CheckpointError if a file's SHA-256 does not begin with the digits in its name, current or future."""
    suffix = _HASH_SUFFIX.search(Path(name).stem)
    if suffix is not None and not (actual := file_digest(path)).startswith(suffix[1]):
        raise CheckpointError(
            f'by the name {name} its SHA-256 begins with {suffix[1]}, but it begins with {actual[:8]}: '
            'the file is damaged or is another file. Download it again, or rename it if you trust it'
        )


def shards_of(path: Path) -> dict[str, list[str]]:
    """Return the shards listed in an index of ``save_pretrained``, mapped to their tensor names."""
    try:
        places = json.loads(path.read_text(encoding='utf-8'))['weight_map']
        shards: dict[str, list[str]] = {name: [] for name in sorted(set(places.values()))}
        for key, name in places.items():
            shards[name].append(key)
    except Exception as error:  # the file may have any content
        raise CheckpointError(
            f'{path} is not an index of save_pretrained, or is damaged: {shortened(repr(error))}'
        ) from error
    for name in shards:
        if not isinstance(name, str) or name != Path(name).name or name.endswith(INDEX):
            raise CheckpointError(f'{path} lists {shortened(repr(name))}, which is not a shard in the same folder')
    return shards
