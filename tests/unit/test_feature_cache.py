"""The vision cache: bounded in bytes, least recently used, whole under threads; its keys tell everything apart."""

from __future__ import annotations

import hashlib
import random
from concurrent.futures import ThreadPoolExecutor

import pytest

from deepstack_serving.errors import SettingsError, StageError
from deepstack_serving.feature_cache import CacheStatistics, FeatureCache, feature_key
from deepstack_serving.media import ImageLimits


def test_a_kept_value_is_the_same_object() -> None:
    cache: FeatureCache[list[int]] = FeatureCache(10)
    value = [1]
    cache.put("a", value, 10)
    assert cache.get("a") is value


def test_least_recently_used_is_dropped_first() -> None:
    cache: FeatureCache[int] = FeatureCache(10)
    cache.put("a", 1, 5)
    cache.put("b", 2, 5)
    cache.get("a")
    cache.put("c", 3, 5)
    assert (cache.get("a"), cache.get("b"), cache.get("c")) == (1, None, 3)


def test_as_many_are_dropped_as_the_new_one_needs() -> None:
    cache: FeatureCache[int] = FeatureCache(10)
    for key in "abc":
        cache.put(key, 1, 3)
    cache.put("d", 4, 7)
    assert cache.statistics().entries == 2
    assert cache.get("c") == 1


def test_a_value_handed_out_outlives_its_entry() -> None:
    cache: FeatureCache[list[int]] = FeatureCache(5)
    cache.put("a", [7], 5)
    value = cache.get("a")
    cache.put("b", [8], 5)
    assert (cache.get("a"), value) == (None, [7])


def test_a_new_value_replaces_the_old_one_and_its_bytes() -> None:
    cache: FeatureCache[int] = FeatureCache(10)
    cache.put("a", 1, 6)
    cache.put("a", 2, 4)
    assert (cache.get("a"), cache.statistics().used_bytes) == (2, 4)


def test_more_than_the_capacity_is_not_kept_and_drops_nothing_else() -> None:
    cache: FeatureCache[int] = FeatureCache(10)
    cache.put("a", 1, 10)
    cache.put("b", 2, 11)
    assert (cache.get("a"), cache.get("b")) == (1, None)


def test_capacity_zero_is_off() -> None:
    cache: FeatureCache[int] = FeatureCache(0)
    cache.put("a", 1, 1)
    assert cache.get("a") is None


def test_statistics_count_hits_misses_entries_and_bytes() -> None:
    cache: FeatureCache[int] = FeatureCache(10)
    cache.get("a")
    cache.put("a", 1, 3)
    cache.get("a")
    cache.get("a")
    assert cache.statistics() == CacheStatistics(hits=2, misses=1, entries=1, used_bytes=3)


def test_negative_capacity_is_refused() -> None:
    with pytest.raises(SettingsError, match="-1 bytes"):
        FeatureCache(-1)


@pytest.mark.parametrize("nbytes", [0, -4])
def test_entry_without_bytes_is_refused(nbytes: int) -> None:
    with pytest.raises(StageError, match=f"{nbytes} bytes"):
        FeatureCache[int](10).put("a", 1, nbytes)


def test_threads_leave_the_cache_whole() -> None:
    cache: FeatureCache[int] = FeatureCache(500)

    def work(seed: int) -> bool:
        chance = random.Random(seed)
        for _ in range(2_000):
            number = chance.randrange(40)
            found = cache.get(str(number))
            if found not in (None, number):
                return False
            cache.put(str(number), number, 1 + number * 3)
        return True

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(8)))
    cache.check_integrity()
    statistics = cache.statistics()
    assert statistics.hits + statistics.misses == 16_000


def test_a_wrong_byte_count_is_found() -> None:
    cache: FeatureCache[int] = FeatureCache(10)
    cache.put("a", 1, 3)
    cache._used_bytes = 4
    with pytest.raises(StageError, match="holds 3 bytes, counts 4"):
        cache.check_integrity()


def test_key_is_a_full_hash_and_repeats() -> None:
    key = feature_key(b"file", ImageLimits(10, 20), "checkpoint", (1, 2.5, None, True))
    assert key == feature_key(b"file", ImageLimits(10, 20), "checkpoint", (1, 2.5, None, True))
    assert len(key) == hashlib.sha256().digest_size * 2


@pytest.mark.parametrize(
    "other",
    [
        (b"filf", "ab", "c", 1),
        (b"file", "a", "bc", 1),
        (b"file", "abc", 1),
        (b"file", "abstr:c", 1),
        (b"file", "ab", "c", True),
        (b"file", "ab", "c", 1.0),
        (b"file", "ab", "c", "1"),
        (b"file", "ab", b"c", 1),
        (b"file", ("ab", "c"), 1),
        (b"file", "ab", "c"),
        (b"file", "ab", "c", 1, None),
        (b"file", "ab", "c", ImageLimits(1, 1)),
    ],
)
def test_key_tells_apart(other: tuple[bytes, *tuple[object, ...]]) -> None:
    assert feature_key(*other) != feature_key(b"file", "ab", "c", 1)


def test_key_depends_on_every_limit() -> None:
    limits = [ImageLimits(5, 6), ImageLimits(6, 5), ImageLimits(5, 6, 6)]
    assert len({feature_key(b"file", limit) for limit in limits}) == 3


def test_part_without_defined_bytes_is_refused() -> None:
    with pytest.raises(StageError, match="object has no defined bytes"):
        feature_key(b"file", object())
