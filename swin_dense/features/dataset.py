"""Image files read ahead of their use by threads, within a limit of memory, and shared among ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Generator, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from torch import Tensor

from swin_dense import checks
from swin_dense.features.decode import ImageError, decoded_bytes

# What images that are being read, or are read and not yet asked for, may take together. One alone may take more.
_AHEAD_BYTES = 1 << 30


@dataclass(frozen=True)
class Sample:
    """One image file.

    Attributes:
        index: which one.
        image: (C, H, W), in the type that it is stored in; None where it could not be read.
        error: why not.
    """

    index: int
    image: Tensor | None
    error: str | None = None


def read_ahead(
    paths: Sequence[str], indices: Iterable[int], read: Callable[[str], Tensor], workers: int
) -> Generator[Sample, None, None]:
    """Read image files in order, by threads that are ahead of the caller; decoders release Python's lock.

    Args:
        paths: of the files.
        indices: which of them, in this order.
        read: path to image.
        workers: how many threads; 0 reads each image when it is asked for.
    """
    if workers == 0:
        for index in indices:
            yield _try_to_read(index, paths[index], read)
        return
    todo = deque(indices)
    ahead: deque[tuple[Future[Sample], int]] = deque()
    taken = 0
    pool = ThreadPoolExecutor(workers)
    try:
        while todo or ahead:
            while todo and len(ahead) < 4 * workers:
                cost = decoded_bytes(paths[todo[0]])
                if ahead and taken + cost > _AHEAD_BYTES:
                    break
                index = todo.popleft()
                ahead.append((pool.submit(_try_to_read, index, paths[index], read), cost))
                taken += cost
            cost = ahead[0][1]
            yield ahead.popleft()[0].result()  # without a name here, so that the caller alone holds the image
            taken -= cost
    finally:
        pool.shutdown(cancel_futures=True)


def _try_to_read(index: int, path: str, read: Callable[[str], Tensor]) -> Sample:
    try:
        return Sample(index, read(path))
    except (ImageError, OSError, MemoryError) as error:
        return Sample(index, None, str(error) or type(error).__name__)


def chunk_shares(images: int, chunk_size: int, rank: int, world_size: int) -> list[list[int]]:
    """Return the chunks of consecutive images, by index, that one rank of several takes.

    Images meet only images of their own chunk in a batch, so which ones run together, and with it the last bit of
    their features, depends neither on the number of ranks nor on what is finished already.
    """
    checks.integer('chunk_size', chunk_size)
    if not 0 <= rank < world_size:
        raise ValueError(f'rank must lie between 0 and world_size - 1 = {world_size - 1}, got {rank}')
    starts = range(rank * chunk_size, images, world_size * chunk_size)
    return [list(range(start, min(start + chunk_size, images))) for start in starts]
