"""Continuous batching: order, growth, eviction, and who owns which block."""

from __future__ import annotations

import random
import struct

import pytest

from wavepp_worker.base.errors import OverloadedError
from wavepp_worker.decode.batcher import Batcher, DecodeSequence
from wavepp_worker.wire.mailbox import Sampling

B = 4


def make_batcher(blocks: int = 8, requests_max: int = 4, chunk_tokens: int = 8) -> Batcher:
    return Batcher(blocks, B, requests_max, queue_max=3, chunk_tokens=chunk_tokens)


def make_sequence(rid: int, tokens: int, *, handed: bool = True) -> DecodeSequence:
    text = [100 * rid + index for index in range(tokens)]
    return DecodeSequence(rid, text, tokens - 1 if handed else 0, Sampling())


def start(batcher: Batcher, *sequences: DecodeSequence) -> None:
    for sequence in sequences:
        batcher.add(sequence)
    for sequence in batcher.admit():
        batcher.fetched(sequence.rid)


def step(batcher: Batcher) -> list[tuple[int, int, int]]:
    """Run one step as the loop does; every chunk's token is 7."""
    chunks = batcher.plan()
    batcher.computed(chunks)
    for chunk in chunks:
        if chunk.wants_token:
            batcher.append(chunk.rid, 7)
    batcher.check_invariants()
    return [(chunk.rid, chunk.start, chunk.length) for chunk in chunks]


def test_a_handed_sequence_continues_with_its_last_token() -> None:
    batcher = make_batcher()
    batcher.add(make_sequence(1, 9))
    (sequence,) = batcher.admit()
    assert len(sequence.table) == 3  # eight tokens come from the prefill worker, one is computed
    assert batcher.plan() == []
    batcher.fetched(1)
    (chunk,) = batcher.plan()
    assert (chunk.start, chunk.length, chunk.wants_token) == (8, 1, True)
    assert chunk.tokens == struct.pack("<I", 108)


def test_sequences_run_together_one_token_a_step() -> None:
    batcher = make_batcher()
    start(batcher, make_sequence(1, 3), make_sequence(2, 5))
    assert step(batcher) == [(1, 2, 1), (2, 4, 1)]
    assert step(batcher) == [(1, 3, 1), (2, 5, 1)]


def test_a_prompt_without_a_hand_off_is_computed_in_chunks() -> None:
    batcher = make_batcher()
    start(batcher, make_sequence(1, 3), make_sequence(2, 12, handed=False))
    assert step(batcher) == [(1, 2, 1), (2, 0, 8)]
    assert step(batcher) == [(1, 3, 1), (2, 8, 4)]
    assert step(batcher) == [(1, 4, 1), (2, 12, 1)]


def test_admission_is_first_come_first_served() -> None:
    batcher = make_batcher(blocks=6)
    start(batcher, make_sequence(1, 8))
    batcher.add(make_sequence(2, 20))
    batcher.add(make_sequence(3, 4))  # would fit, but waits behind 2
    assert batcher.admit() == []
    batcher.drop(1)
    assert [sequence.rid for sequence in batcher.admit()] == [2]


def test_the_number_of_running_sequences_is_bounded() -> None:
    batcher = make_batcher(requests_max=2)
    for rid in (1, 2, 3):
        batcher.add(make_sequence(rid, 2))
    assert [sequence.rid for sequence in batcher.admit()] == [1, 2]
    batcher.fetched(1)
    batcher.drop(1)
    assert [sequence.rid for sequence in batcher.admit()] == [3]


def test_a_full_queue_refuses() -> None:
    batcher = make_batcher()
    for rid in (1, 2, 3):
        batcher.add(make_sequence(rid, 2))
    with pytest.raises(OverloadedError):
        batcher.add(make_sequence(4, 2))
    assert batcher.waiting_count() == 3


def test_the_youngest_gives_way_and_is_computed_again() -> None:
    batcher = make_batcher(blocks=4)
    start(batcher, make_sequence(1, 4))
    start(batcher, make_sequence(2, 4))
    for _ in range(4):
        assert [rid for rid, _, _ in step(batcher)] == [1, 2]
    assert [len(batcher.text(rid)) for rid in (1, 2)] == [8, 8]
    step(batcher)
    assert batcher.used_blocks() == 4
    assert [rid for rid, _, _ in step(batcher)] == [1]  # 1 takes its third block from 2
    assert batcher.evictions == 1
    assert batcher.admit() == []  # no block would be left for growth
    batcher.drop(1)
    assert batcher.admit() == []  # nothing to fetch: computed here
    assert step(batcher) == [(2, 0, 8)]
    assert step(batcher) == [(2, 8, 1)]
    assert list(batcher.text(2))[:4] == [200, 201, 202, 203]


def test_a_sequence_being_fetched_is_not_evicted_nor_dropped() -> None:
    batcher = make_batcher(blocks=5)
    start(batcher, make_sequence(1, 7))
    batcher.add(make_sequence(2, 5))
    (fetching,) = batcher.admit()
    table = list(fetching.table)
    assert not batcher.drop(2)
    for _ in range(6):  # 1 grows to 13 tokens, into the last free block and beyond
        assert [rid for rid, _, _ in step(batcher)] == [1]
    assert step(batcher) == []  # no block for 1: it gives way itself
    assert fetching.table == table
    batcher.fetch_failed(2)
    batcher.check_invariants()
    assert batcher.admit() == []
    assert step(batcher)[0][:2] == (1, 0)


def test_dropping_a_waiting_sequence_forgets_it() -> None:
    batcher = make_batcher()
    batcher.add(make_sequence(1, 2))
    assert batcher.drop(1)
    assert batcher.admit() == []
    assert batcher.drop(1)


@pytest.mark.parametrize("seed", range(20))
def test_random_traffic_ends_with_every_answer_and_no_block_in_use(seed: int) -> None:
    chance = random.Random(seed)
    batcher = Batcher(chance.randint(6, 12), B, chance.randint(1, 5), queue_max=64, chunk_tokens=8)
    wanted = {}
    for rid in range(1, 13):
        tokens = chance.randint(1, 12)
        wanted[rid] = (tokens, tokens + chance.randint(1, 12))
        batcher.add(make_sequence(rid, tokens, handed=tokens > 1 and chance.random() < 0.7))
    fetching: list[DecodeSequence] = []
    done: dict[int, list[int]] = {}
    for _ in range(2000):
        fetching += batcher.admit()
        if fetching and chance.random() < 0.5:
            sequence = fetching.pop(chance.randrange(len(fetching)))
            if chance.random() < 0.1:
                batcher.fetch_failed(sequence.rid)
                del wanted[sequence.rid]
            else:
                batcher.fetched(sequence.rid)
        chunks = batcher.plan()
        batcher.check_invariants()
        batcher.computed(chunks)
        for chunk in chunks:
            if chunk.wants_token:
                batcher.append(chunk.rid, 7)
                if len(batcher.text(chunk.rid)) == wanted[chunk.rid][1]:
                    done[chunk.rid] = list(batcher.text(chunk.rid))
                    assert batcher.drop(chunk.rid)
        if len(done) == len(wanted):
            break
    assert set(done) == set(wanted)
    for rid, text in done.items():
        prompt, total = wanted[rid]
        assert text == [100 * rid + index for index in range(prompt)] + [7] * (total - prompt)
    assert batcher.used_blocks() == 0


def test_every_active_sequence_has_a_state_slot_of_its_own() -> None:
    """Given at admission, named in its chunks, free again when it ends, fails or is evicted."""
    batcher = Batcher(6, B, 2, queue_max=8, chunk_tokens=64, has_states=True)
    for rid in (1, 2, 3):
        batcher.add(DecodeSequence(rid, [1] * B, 0, Sampling()))
    batcher.admit()
    chunks = batcher.plan()
    assert [chunk.states[0].working for chunk in chunks] == [0, 1]
    assert all(chunk.tables[1] == () for chunk in chunks)
    batcher.check_invariants()
    batcher.computed(chunks)
    batcher.drop(1)
    batcher.admit()
    batcher.check_invariants()
    states = {chunk.rid: chunk.states[0].working for chunk in batcher.plan()}
    assert states[3] == 0
    for rid in (2, 3):
        batcher.drop(rid)
    batcher.check_invariants()
    assert batcher.active_count() == 0


def test_a_model_without_states_names_none() -> None:
    batcher = Batcher(6, B, 2, queue_max=8, chunk_tokens=64)
    batcher.add(DecodeSequence(1, [1] * B, 0, Sampling()))
    batcher.admit()
    (chunk,) = batcher.plan()
    assert chunk.states == ()
    assert len(chunk.tables) == 1
