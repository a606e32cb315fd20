"""Image files decoded in threads: those of a call side by side, and meanwhile those of calls to come."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Generic, TypeVar

from PIL import Image

from deepstack_serving.errors import InvalidRequestError
from deepstack_serving.media.image_file import ImageLimits, decode, naming, probe

T = TypeVar("T")
MOST_EXPECTED = 16


class Decoding(Generic[T]):
    """`finish` turns each picture into what is wanted of it, in the same thread. For one caller at a time."""

    def __init__(self, pool: ThreadPoolExecutor, limits: ImageLimits, finish: Callable[[Image.Image], T]) -> None:
        self._pool, self._limits, self._finish = pool, limits, finish
        self._expected: dict[bytes, Future[T]] = {}

    def each(self, files: Mapping[int, bytes]) -> Iterator[tuple[int, T]]:
        """Files by their number in the request; each comes out once it is there and those before it are.

        Raises InvalidRequestError; of several bad ones the first is named.
        """
        futures = {number: self._future(data, self._expected) for number, data in files.items()}
        try:
            for number, future in futures.items():
                with naming(number):
                    result = future.result()
                yield number, result
        finally:
            _cancel(futures.values())

    def expect(self, files: Iterable[bytes]) -> None:
        """Begin with files that a later `each` will probably ask for, and drop those that none has asked for.

        They have no more pixels and bytes together than one file may have, and are no more than MOST_EXPECTED, as small
        ones may be enlarged.
        """
        before, self._expected = self._expected, {}
        pixels, size = self._limits.max_pixels, self._limits.max_bytes
        for data in dict.fromkeys(files):
            try:
                pixels, size = pixels - probe(data, self._limits).pixels, size - len(data)
            except InvalidRequestError:  # the call that asks for it says so
                continue
            if pixels < 0 or size < 0 or len(self._expected) == MOST_EXPECTED:
                break
            self._expected[data] = self._future(data, before)
        _cancel(before.values())

    def forget_all_but(self, files: Iterable[bytes]) -> None:
        """Drop what was expected and is not among these, before it holds them up."""
        kept, before = set(files), self._expected
        self._expected = {data: future for data, future in before.items() if data in kept}
        _cancel(future for data, future in before.items() if data not in kept)

    def _future(self, data: bytes, begun: dict[bytes, Future[T]]) -> Future[T]:
        if data in begun:
            return begun.pop(data)
        return self._pool.submit(lambda: self._finish(decode(data, self._limits)))


def _cancel(futures: Iterable[Future[T]]) -> None:
    """Those that have not begun."""
    for future in futures:
        future.cancel()
