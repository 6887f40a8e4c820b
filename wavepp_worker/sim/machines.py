"""Rule-based machines: random sequences of calls against a model ten times simpler than the code.

    CacheMachine and its kinds    a RankCache and everything in it     (`machines_cache`)
    LeaseMachine, EscrowMachine   the same, held to one part of a request's life
    PoolMachine                   one window's slots on both tiers      (`machines_pool`)
    TreeMachine, IndexMachine     keys and counters                     (`machines_keys`)
    AdmissionMachine              P ranks, delayed messages             (`machines_world`)

Each has a factory attribute: another implementation is tested by a subclass that replaces it.  In
a test module `TestX = XMachine.TestCase` runs one; hypothesis is needed only here.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import ClassVar

from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    initialize,
    invariant,
    precondition,
    rule,
)

from wavepp_worker.cache.index import HintIndex
from wavepp_worker.cache.pool import BlockPool
from wavepp_worker.cache.rank_cache import RankCache
from wavepp_worker.cache.tree import PrefixTree
from wavepp_worker.sim.machines_admission import make_world
from wavepp_worker.sim.machines_cache import (
    FAMILIES,
    NEXT,
    REQUESTS_MAX,
    SECTIONS,
    CacheFactory,
    make_driver,
)
from wavepp_worker.sim.machines_choice import Choose
from wavepp_worker.sim.machines_keys import IndexDriver, TreeDriver
from wavepp_worker.sim.machines_pool import PoolDriver, PoolFactory
from wavepp_worker.sim.machines_world import SmallWorld


def drawn_from(data: st.DataObject) -> Choose:
    """Return a chooser that lets Hypothesis choose."""
    return lambda choices: data.draw(st.sampled_from(choices))


class CacheMachine(RuleBasedStateMachine):
    """A dense cache.

    Attributes:
        make_cache: called like `RankCache`.
        kinds: of windows; see `machines_cache.make_driver`.
        sections: per phase of a request, what may be done next.
        warm_steps: phases that a prompt of each family goes through at the start, if it is drawn.
    """

    make_cache: ClassVar[CacheFactory] = RankCache
    kinds: ClassVar[Sequence[str]] = ("dense",)
    sections: ClassVar[Mapping[str, Sequence[str]]] = SECTIONS
    arrival_steps: ClassVar[int] = len(NEXT)

    @initialize(data=st.data(), warm=st.lists(st.sampled_from(FAMILIES), max_size=4))
    def start(self, data: st.DataObject, warm: list[tuple[int, ...]]) -> None:
        """Make an empty cache, or one that has served a prompt of each family in `warm`."""
        self.driver = make_driver(type(self).make_cache, self.kinds, drawn_from(data))
        for family in warm:
            rid = self.driver.announce(family[: self.driver.longest])
            self.driver.advance(rid, len(NEXT))

    @rule(data=st.data())
    @precondition(lambda self: len(self.driver.requests) < REQUESTS_MAX)
    def arrive(self, data: st.DataObject) -> None:
        """A request comes."""
        self.driver.arrive(drawn_from(data), self.arrival_steps)

    @rule(data=st.data())
    @precondition(lambda self: bool(self.driver.requests))
    def act(self, data: st.DataObject) -> None:
        """A section of some request runs."""
        self.driver.act(drawn_from(data), self.sections)

    @rule(data=st.data())
    @precondition(lambda self: bool(self.driver.requests))
    def hint(self, data: st.DataObject) -> None:
        """A hint is asked for."""
        self.driver.do_hint(drawn_from(data))

    @rule(data=st.data())
    def evict(self, data: st.DataObject) -> None:
        """Unused content goes."""
        self.driver.do_evict(drawn_from(data))

    @invariant()
    def books_agree(self) -> None:
        """All counts are the model's."""
        if hasattr(self, "driver"):
            self.driver.compare()

    def teardown(self) -> None:
        """Nothing leaks."""
        if hasattr(self, "driver"):
            self.driver.end()


class TwoWindowMachine(CacheMachine):
    """Two dense windows of different sizes."""

    kinds = ("dense", "dense")


class HostTierMachine(CacheMachine):
    """A dense cache that offloads its victims."""

    kinds = ("host",)


class RecurrentMachine(CacheMachine):
    """Snapshots alone: a request needs its working state and nothing else."""

    kinds = ("recurrent",)


class SlidingMachine(CacheMachine):
    """A window of sliding attention."""

    kinds = ("sliding",)


class HybridMachine(CacheMachine):
    """Attention and recurrent layers on one rank."""

    kinds = ("dense", "recurrent")


class MixedMachine(CacheMachine):
    """One window of every kind."""

    kinds = ("host", "sliding", "recurrent")


class LeaseMachine(CacheMachine):
    """Leases alone: taken, trimmed and released, while content goes and hints are asked for."""

    kinds = ("host", "recurrent")
    sections: ClassVar[Mapping[str, Sequence[str]]] = {
        "known": ("acquire",),
        "leased": ("trim", "trim", "acquire", "release"),
    }
    arrival_steps = 1


class EscrowMachine(CacheMachine):
    """Escrows alone: prepared, committed, claimed by other leases and released."""

    kinds = ("host", "recurrent")
    sections: ClassVar[Mapping[str, Sequence[str]]] = {
        "known": ("acquire",),
        "leased": ("prepare", "prepare", "trim"),
        "prepared": ("commit", "commit", "trim", "release"),
        "committed": ("commit", "acquire", "release"),
    }
    arrival_steps = 3


class _DriverMachine(RuleBasedStateMachine):
    """Rules that call one method of a driver, which compares after each."""

    driver: PoolDriver | TreeDriver | IndexDriver
    calls: ClassVar[Sequence[str]] = ()

    @rule(data=st.data())
    def call(self, data: st.DataObject) -> None:
        """One call, with arguments that Hypothesis chooses."""
        choose = drawn_from(data)
        getattr(self.driver, choose(self.calls))(choose)

    @invariant()
    def model_agrees(self) -> None:
        """The driver's comparison."""
        if hasattr(self, "driver"):
            self.driver.compare()


class PoolMachine(_DriverMachine):
    """One window's slots; `make_pool` is called like `BlockPool`."""

    make_pool: ClassVar[PoolFactory] = BlockPool
    calls = (
        *("take", "take", "publish", "publish", "pin", "unpin", "unpin"),
        *("reserve", "unreserve", "count", "onboard", "evict"),
    )

    @initialize(slots=st.integers(8, 64), host_slots=st.integers(0, 16), is_flat=st.booleans())
    def start(self, slots: int, host_slots: int, is_flat: bool) -> None:
        """Make an empty pool."""
        self.driver = PoolDriver(type(self).make_pool, slots, host_slots, is_flat)


class TreeMachine(_DriverMachine):
    """A prefix tree and its index; `make_tree` is called like `PrefixTree`."""

    make_tree: ClassVar[Callable[[int, HintIndex], PrefixTree]] = PrefixTree
    calls = ("attach", "attach", "attach", "detach", "walk")

    @initialize()
    def start(self) -> None:
        """Make an empty tree."""
        self.driver = TreeDriver(type(self).make_tree)


class IndexMachine(_DriverMachine):
    """The hint index; `make_index` is called like `HintIndex`."""

    make_index: ClassVar[Callable[[int], HintIndex]] = HintIndex
    calls = ("store", "remove", "drain")

    @initialize()
    def start(self) -> None:
        """Make an empty index."""
        self.driver = IndexDriver(type(self).make_index)


class AdmissionMachine(RuleBasedStateMachine):
    """One to four ranks; `world` is a `SmallWorld`, whose own `make_cache` may be replaced."""

    world: ClassVar[type[SmallWorld]] = SmallWorld
    requests_max: ClassVar[int] = 8

    @initialize(data=st.data())
    def start(self, data: st.DataObject) -> None:
        """Make an idle worker."""
        self.driver = make_world(type(self).world, drawn_from(data))

    @rule(data=st.data())
    @precondition(lambda self: len(self.driver.asked) < self.requests_max)
    def arrive(self, data: st.DataObject) -> None:
        """A request comes."""
        self.driver.arrive(drawn_from(data))

    @rule(data=st.data(), count=st.integers(1, 20))
    def step(self, data: st.DataObject, count: int) -> None:
        """Messages are delivered, waves run, rounds begin."""
        for _ in range(count):
            self.driver.step(drawn_from(data))

    @rule(data=st.data())
    def disturb(self, data: st.DataObject) -> None:
        """A cancel or an eviction."""
        self.driver.disturb(drawn_from(data))

    @rule(data=st.data())
    def repeat(self, data: st.DataObject) -> None:
        """A message is delivered once more."""
        self.driver.repeat(drawn_from(data))

    @invariant()
    def nobody_is_lost(self) -> None:
        """Every request is somewhere."""
        if hasattr(self, "driver"):
            self.driver.compare()

    def teardown(self) -> None:
        """Left alone, every request ends."""
        if hasattr(self, "driver"):
            self.driver.end()
