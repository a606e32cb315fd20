"""The vision encoder's memory of images it has seen: features by full hash, bounded in bytes, oldest use drops first.

Asked before an image is decoded and filled after the tower has run. The cache owns nothing but references: what was
handed out stays valid after it was dropped here.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass, fields, is_dataclass
from threading import Lock
from typing import Generic, TypeVar

from deepstack_serving.errors import SettingsError, StageError

Value = TypeVar("Value")


@dataclass(frozen=True)
class CacheStatistics:
    """Counts since the start; `used_bytes` and `entries` are those of now."""

    hits: int
    misses: int
    entries: int
    used_bytes: int


class FeatureCache(Generic[Value]):
    """Least recently used, for any number of threads. A capacity of 0 keeps nothing."""

    def __init__(self, capacity_bytes: int) -> None:
        if capacity_bytes < 0:
            raise SettingsError(f"the feature cache's capacity is {capacity_bytes} bytes; allowed is 0 (off) or more")
        self._capacity_bytes = capacity_bytes
        self._entries: OrderedDict[str, tuple[Value, int]] = OrderedDict()
        self._used_bytes = self._hits = self._misses = 0
        self._lock = Lock()

    def get(self, key: str) -> Value | None:
        """The value kept under `key`, now the most recently used one."""
        with self._lock:
            entry = self._entries.get(key)
            if entry is None:
                self._misses += 1
                return None
            self._hits += 1
            self._entries.move_to_end(key)
            return entry[0]

    def __contains__(self, key: str) -> bool:
        """Whether `get` would find it; that is no use of it."""
        with self._lock:
            return key in self._entries

    def put(self, key: str, value: Value, nbytes: int) -> None:
        """Keep `value`, which occupies `nbytes`, in place of what `key` had; what exceeds the capacity is not kept."""
        if nbytes < 1:
            raise StageError(f"a cache entry of {nbytes} bytes cannot be bounded; the least is 1")
        with self._lock:
            self._drop(key)
            if nbytes > self._capacity_bytes:
                return
            while self._used_bytes + nbytes > self._capacity_bytes:
                self._drop(next(iter(self._entries)))
            self._entries[key] = (value, nbytes)
            self._used_bytes += nbytes

    def statistics(self) -> CacheStatistics:
        """A consistent picture of the counters."""
        with self._lock:
            return CacheStatistics(self._hits, self._misses, len(self._entries), self._used_bytes)

    def check_integrity(self) -> None:
        """Raise StageError unless the entries add up to the counted bytes and fit the capacity."""
        with self._lock:
            total_bytes = sum(nbytes for _, nbytes in self._entries.values())
            if total_bytes != self._used_bytes or total_bytes > self._capacity_bytes:
                raise StageError(
                    f"the cache holds {total_bytes} bytes, counts {self._used_bytes}, may hold {self._capacity_bytes}"
                )

    def _drop(self, key: str) -> None:
        entry = self._entries.pop(key, None)
        if entry is not None:
            self._used_bytes -= entry[1]


def feature_key(data: bytes, *parts: object) -> str:
    """SHA-256 over an image file and all that its features depend on besides: limits, resizing, checkpoint, dtype.

    A part may be None, a bool, int, float, str or bytes, a tuple of parts, or a dataclass of parts.
    """
    digest = hashlib.sha256()
    for part in (data, *parts):
        digest.update(_framed(part))
    return digest.hexdigest()


def _framed(part: object) -> bytes:
    # Type and length go before every content, so no two different part lists give the same bytes.
    if isinstance(part, tuple):
        content = b"".join(_framed(item) for item in part)
    elif is_dataclass(part) and not isinstance(part, type):
        content = b"".join(_framed((field.name, getattr(part, field.name))) for field in fields(part))
    elif isinstance(part, bytes):
        content = part
    elif isinstance(part, str):
        content = part.encode("utf-8", "surrogatepass")
    elif part is None or isinstance(part, bool | int | float):
        content = repr(part).encode()
    else:
        raise StageError(f"a {type(part).__name__} has no defined bytes and cannot be part of a cache key")
    kind = type(part).__qualname__
    return f"{kind}:{len(content)}:".encode() + content
