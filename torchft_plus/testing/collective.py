"""Collectives with their nasty truth: an operation ends well at any subset of its members, also late.

A *collective* is what rank r of every group of one quorum shares; a *seat* is one member's side of it (its lane).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from torchft_plus.testing.content import Gradient
from torchft_plus.testing.network import Life, Network

Ended = Callable[[], None]
RETRY_MS = 15
"""How often an operation that hangs looks again."""


@dataclass(slots=True)
class Operation:
    """One allreduce on one seat."""

    on_end: Ended
    gradient: Gradient | None
    ended: bool = False
    error: str | None = None
    peer_rank: int | None = None
    result: tuple[Gradient, ...] = ()

    def end(self, error: str | None, peer_rank: int | None, result: tuple[Gradient, ...] = ()) -> None:
        """Well or not, once."""
        if not self.ended:
            self.ended, self.error, self.peer_rank, self.result = True, error, peer_rank, result
            self.on_end()


@dataclass(slots=True)
class Seat:
    """One member's lane."""

    collective: Collective
    life: Life
    rank: int
    on_built: Callable[[str | None, int | None], None]
    built: bool = False
    failed: str | None = None
    operations: dict[tuple[int, int], Operation] = field(default_factory=dict[tuple[int, int], Operation])

    def post(self, key: tuple[int, int], gradient: Gradient | None, on_end: Ended) -> Operation:
        """Start the allreduce of ``key`` = (step, round); ``gradient`` None: zeros."""
        operation = Operation(on_end, gradient)
        if self.failed is not None:
            self.life.after(0, operation.end, self.failed, None)
            return operation
        self.operations[key] = operation
        self.collective.posted(key)
        return operation

    def abort(self, reason: str) -> None:
        """End everything here as failed, soon; the others notice, or not."""
        if self.failed is None:
            self.failed = reason
            for operation in self.operations.values():
                self.life.after(self.life.world.between((0, 4)), operation.end, reason, None)
            self.collective.broken_by(self, silently=False)


class Collective:
    """All seats of one quorum and group rank."""

    def __init__(self, network: Network, world_size: int, build_ms: int, operation_ms: int) -> None:
        self._network = network
        self._world = network.world
        self._world_size = world_size
        self._build_ms = build_ms
        self._operation_ms = operation_ms
        self._complete: set[tuple[int, int]] = set()
        self.seats: dict[int, Seat] = {}

    # --- building --------------------------------------------------------------------------------------------------

    def join(self, life: Life, rank: int, on_built: Callable[[str | None, int | None], None]) -> Seat:
        """Take the seat of ``rank``; ``on_built`` is called with None, or why not and who is to blame."""
        seat = Seat(self, life, rank, on_built)
        self.seats[rank] = seat
        life.after(self._build_ms, self._build_failed, seat, "not built in time", None)
        if len(self.seats) == self._world_size:
            for other in self.seats.values():
                other.life.after(self._world.between((0, 10)), self._build, other)
        return seat

    def _build(self, seat: Seat) -> None:
        if seat.built or seat.failed is not None:
            return
        if self._hindered(seat):
            seat.life.after(RETRY_MS, self._build, seat)
            return
        seat.built = True
        seat.on_built(None, None)

    def _build_failed(self, seat: Seat, reason: str, peer_rank: int | None) -> None:
        if not seat.built and seat.failed is None:
            seat.failed = reason
            seat.on_built(reason, peer_rank)

    # --- operations ------------------------------------------------------------------------------------------------

    def posted(self, key: tuple[int, int]) -> None:
        """Somebody has posted ``key``: when all have, it can end well, for each at its own time."""
        if len(self.seats) < self._world_size or any(key not in s.operations for s in self.seats.values()):
            return
        if key in self._complete:
            return
        self._complete.add(key)
        for seat in self.seats.values():
            seat.life.after(self._delay_ms(seat), self._finish, seat, key)

    def _finish(self, seat: Seat, key: tuple[int, int]) -> None:
        operation = seat.operations[key]
        if operation.ended:
            return
        if self._hindered(seat) and self._world.chance(0.8):
            seat.life.after(RETRY_MS, self._finish, seat, key)
            return
        inputs = [other.operations[key].gradient for other in self.seats.values()]
        operation.end(None, None, tuple(sorted(g for g in inputs if g is not None)))

    def _delay_ms(self, seat: Seat) -> int:
        """How long data takes to ``seat``: as long as the slowest link to it."""
        if self._network.is_whole:
            return self._world.delay_ms()
        sources = {other.life.host: None for other in self.seats.values() if other is not seat}
        delays = [self._network.delay_ms(source, seat.life.host) for source in sources]
        return max(delays, default=0)

    def broken_by(self, culprit: Seat, silently: bool) -> None:
        """A member is gone: what the others run fails now, later, or (a silent loss) not before a deadline."""
        for seat in self.seats.values():
            if seat is culprit or silently or self._hindered(seat):
                continue
            if not seat.built:
                seat.life.after(
                    self._world.between((0, 30)), self._build_failed, seat, "a peer left", culprit.rank
                )
            if self._world.chance(0.9):
                delay_ms = self._world.between((0, 40))
                blamed = culprit.rank if self._world.chance(0.5) else None
                seat.life.after(delay_ms, self._fail, seat, blamed)

    def _fail(self, seat: Seat, blamed: int | None) -> None:
        if seat.failed is None:
            seat.failed = "a peer broke the connection"
            for operation in seat.operations.values():
                operation.end(seat.failed, blamed)
            self.broken_by(seat, silently=False)

    def _hindered(self, seat: Seat) -> bool:
        """True if an operation of ``seat`` waits for somebody who is frozen, gone or behind a partition."""
        for other in self.seats.values():
            if other is seat:
                continue
            if other.life.paused or not other.life.alive:
                return True
            mine, theirs = seat.life.host, other.life.host
            if self._network.blocked(mine, theirs) or self._network.blocked(theirs, mine):
                return True
        return False


class Collectives:
    """All collectives of a run, by quorum and group rank."""

    def __init__(self, network: Network, build_ms: int, operation_ms: int) -> None:
        self._network = network
        self._build_ms = build_ms
        self._operation_ms = operation_ms
        self._by_key: dict[tuple[int, int], Collective] = {}

    def join(
        self,
        quorum_id: int,
        group_rank: int,
        world_size: int,
        life: Life,
        rank: int,
        on_built: Callable[[str | None, int | None], None],
    ) -> Seat:
        """Build the lane of ``rank`` in ``quorum_id``."""
        key = (quorum_id, group_rank)
        if key not in self._by_key:
            self._by_key[key] = Collective(self._network, world_size, self._build_ms, self._operation_ms)
        return self._by_key[key].join(life, rank, on_built)

    def life_ended(self, life: Life, silently: bool) -> None:
        """A process is gone: its seats break."""
        for collective in self._by_key.values():
            for seat in collective.seats.values():
                if seat.life is life and seat.failed is None:
                    seat.failed = "dead"
                    collective.broken_by(seat, silently)
