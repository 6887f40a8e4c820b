"""Every order of steps of a small worker, instead of some.

From the start, each possible step leads to a world; worlds that no future can tell apart are one
state.  The search ends when no new state is left, so what it checked holds for every interleaving:

    each step       books re-derived, one endpoint, numbers without gaps, order, slots hold what
                    is read (all in `machines_world` and below)
    each state      undisturbed, it ends: following the first possible step, every request ends
    each end        nothing is held, nothing is under way
"""

from __future__ import annotations

import pickle
from collections import deque
from collections.abc import Callable, Iterator
from typing import TypeVar

from msgspec import Struct

from wavepp_worker.base.errors import InvariantError, check
from wavepp_worker.sim.machines_picture import digest
from wavepp_worker.sim.machines_world import SmallWorld, Step

T = TypeVar("T")


class Exploration(Struct, frozen=True):
    """What a complete search saw.

    Attributes:
        states: distinct states, the start included.
        steps: distinct (state, step) pairs.
        ends: states in which every request has ended.
        depth: the longest shortest way to a state, in steps.
        calm_steps_max: the longest undisturbed way from a state to an end.
    """

    states: int
    steps: int
    ends: int
    depth: int
    calm_steps_max: int


class ExplorationError(InvariantError):
    """A step broke something, or a state has no calm end; the message tells the way there."""


class _Node(Struct):
    """One state; `calm` is where its first possible step leads."""

    parent: int
    step: Step | None
    depth: int
    calm: int = -1
    is_end: bool = False


def explore(
    start: SmallWorld,
    *,
    states_max: int,
    check_merges: bool = False,
) -> Exploration:
    """Try all orders of steps from `start`, disturbances included.

    Args:
        states_max: more states than this mean that the world is too large to be explored.
        check_merges: whenever a known state is reached on another way, compare what can happen
            next with what could happen there: they must lead to the same states.

    Raises:
        ExplorationError: something does not hold.
    """
    return _Search(start, states_max, check_merges).run()


class _Search:
    def __init__(self, start: SmallWorld, states_max: int, check_merges: bool) -> None:
        self._states_max = states_max
        self._seen_worlds: dict[int, bytes] | None = {} if check_merges else None
        self._numbers: dict[bytes, int] = {}
        self._nodes: list[_Node] = []
        self._frontier: deque[tuple[int, bytes]] = deque()
        self._step_count = 0
        self._reach(start, -1, None)

    def run(self) -> Exploration:
        while self._frontier:
            number, frozen = self._frontier.popleft()
            self._expand(number, frozen)
        return Exploration(
            states=len(self._nodes),
            steps=self._step_count,
            ends=sum(node.is_end for node in self._nodes),
            depth=max(node.depth for node in self._nodes),
            calm_steps_max=self._check_calm_ends(),
        )

    def _expand(self, number: int, frozen: bytes) -> None:
        world: SmallWorld = pickle.loads(frozen)
        node = self._nodes[number]
        if world.is_over:
            node.is_end = True
            self._at(number, None, world.check_end)
            return
        lone = world.lone_step()
        if lone is not None:
            node.calm = self._take(number, frozen, lone)
            return
        calm = list(world.steps())
        self._at(number, None, lambda: check(bool(calm), "nothing can happen any more"))
        for step in calm:
            reached = self._take(number, frozen, step)
            if node.calm < 0:
                node.calm = reached
        for step in world.disturbances():
            self._take(number, frozen, step)

    def _take(self, number: int, frozen: bytes, step: Step) -> int:
        """Do one step, and again with an eviction between each two sections of it."""
        world: SmallWorld = pickle.loads(frozen)
        sections = self._do(world, number, step)
        for disturbed in _disturbed(world, step, sections):
            other: SmallWorld = pickle.loads(frozen)
            if other.evictions_left:
                self._do(other, number, disturbed)
                self._reach(other, number, disturbed)
        return self._reach(world, number, step)

    def _do(self, world: SmallWorld, number: int, step: Step) -> int:
        return self._at(number, step, lambda: world.do(step))

    def _reach(self, world: SmallWorld, parent: int, step: Step | None) -> int:
        self._step_count += step is not None
        key = digest(world)
        number = self._numbers.get(key)
        if number is not None:
            self._check_merge(number, world)
            return number
        number = self._numbers[key] = len(self._nodes)
        check(number < self._states_max, "the world is too large", states=number)
        depth = self._nodes[parent].depth + 1 if self._nodes else 0
        self._nodes.append(_Node(parent, step, depth))
        frozen = pickle.dumps(world, pickle.HIGHEST_PROTOCOL)
        self._frontier.append((number, frozen))
        if self._seen_worlds is not None:
            self._seen_worlds[number] = frozen
        return number

    def _check_merge(self, number: int, world: SmallWorld) -> None:
        if self._seen_worlds is None:
            return
        known = pickle.loads(self._seen_worlds[number])
        is_alike = _successors(world) == _successors(known)
        check(is_alike, "two worlds with one picture differ", story=self._story(number))

    def _check_calm_ends(self) -> int:
        """Follow the calm steps from every state; return the longest way to an end."""
        left: dict[int, int] = {number: 0 for number, node in enumerate(self._nodes) if node.is_end}
        for first in range(len(self._nodes)):
            way: dict[int, None] = {}
            number = first
            while number not in left:
                if number in way:
                    raise ExplorationError(f"never ends, undisturbed:\n{self._story(first)}")
                way[number] = None
                number = self._nodes[number].calm
            steps = left[number]
            for passed in reversed(way):
                steps += 1
                left[passed] = steps
        return max(left.values())

    def _at(self, number: int, step: Step | None, action: Callable[[], T]) -> T:
        """Run `action`; tell the way to a failure."""
        try:
            return action()
        except InvariantError as error:
            story = self._story(number) + (f"\n  {step}" if step else "")
            raise ExplorationError(f"{error}\nafter\n{story}") from error

    def _story(self, number: int) -> str:
        """Return the steps that lead to a state."""
        steps: list[Step] = []
        while (step := self._nodes[number].step) is not None:
            steps.append(step)
            number = self._nodes[number].parent
        return "\n".join(f"  {step}" for step in reversed(steps))


def _successors(world: SmallWorld) -> list[tuple[Step, bytes]]:
    """Return every step that is possible, with the state that it leads to."""
    frozen = pickle.dumps(world, pickle.HIGHEST_PROTOCOL)
    found: list[tuple[Step, bytes]] = []
    for step in [] if world.is_over else [*world.steps(), *world.disturbances()]:
        other: SmallWorld = pickle.loads(frozen)
        other.do(step)
        found.append((step, digest(other)))
    return found


def _disturbed(world: SmallWorld, step: Step, sections: int) -> Iterator[Step]:
    """Yield the step with an eviction before its second, third, ... section.

    Before the first section is the same as an eviction before the whole step.
    """
    rank = step.other if step.kind == "deliver" else step.rank
    for section in range(1, sections):
        for window in range(len(world.spec.windows[rank])):
            yield step._replace(evict_before=section, window=window)
