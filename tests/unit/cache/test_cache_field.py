"""What went wrong in practice with engines that do this job, against one rank's books."""

from __future__ import annotations

from tests.unit.cache.world import (
    cached,
    commit,
    install,
    key_at,
    learn,
    make_cache,
    serve,
)


def test_claim_after_the_prefix_was_allocated_to_another() -> None:
    """FS-20: A looks up, B takes everything evictable, A claims: less, never other content."""
    cache = make_cache(6)
    serve(cache, 1, "abcd")
    learn(cache, 2, "abcdX")
    hint = cache.hint(2)
    assert hint == 4
    install(cache, 3, "12345")  # two empty slots, and d, c, b
    cache.publish(3, 5)
    assert cache.acquire(2, 1, hint) == 1
    leased = cache._leases[2].parts[0].blocks
    assert [block.key for block in leased] == [key_at("a")]
    assert cached(cache) >= {key_at("a"), key_at("12345")}


def test_claim_between_reservation_and_allocation() -> None:
    """FS-20: B has only promised the blocks; A's claim holds them and B gets others or A less."""
    cache = make_cache(6)
    serve(cache, 1, "abcd")
    learn(cache, 2, "abcdX")
    hint = cache.hint(2)
    commit(cache, 3, "12345")
    endpoint = cache.acquire(2, 1, hint)
    assert endpoint == 1  # a is the only block that B leaves
    table = cache.materialize(3, 3).tables[0]
    kept = cache._leases[2].parts[0].blocks[0]
    assert kept.key == key_at("a")
    assert kept.slot not in table


def test_two_identical_cold_prompts() -> None:
    """FS-21: both copies are accounted for, whichever goes first."""
    for first, second in ((1, 2), (2, 1)):
        cache = make_cache(8)
        for rid in (1, 2):
            install(cache, rid, "abcd", cap=0)
        for rid in (1, 2):
            cache.publish(rid, 4)
        cache.free(first)
        learn(cache, 3, "abcde")
        assert cache.hint(3) == 4
        cache.free(second)
        assert (cache.view().free, cache.view().cached) == ((4,), (4,))
        install(cache, 4, "123456", cap=0)  # pressure: two of them go
        assert cache.hint(3) == 2
        cache.free(4)
        assert cache.acquire(3, 1, 4) == 2
        cache.release(3)
        cache.evict(0, 9)
        assert cache.view().free == (8,)
        assert cache.hint(3) == 0
