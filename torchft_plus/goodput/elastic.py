"""A run whose groups come and go: what is common to our policy and to the torchft-like ones.

Time goes from event to event; between events steps are counted by arithmetic. A *unit* is what is committed at once: a
step, or a window of steps. The unit under way commits at ``finish_s``, with the gradients of ``contributors``.
"""

from __future__ import annotations

import heapq
import math
from abc import ABC, abstractmethod
from collections.abc import Sequence

from torchft_plus.goodput.failures import Failure
from torchft_plus.goodput.ledger import Account, Ledger, whole
from torchft_plus.goodput.scenario import Scenario

NEVER = math.inf


class Elastic(ABC):
    """One run of groups that may leave and join at any unit.

    Args:
        scenario: cluster and times.
        unit_steps: steps in a unit.
    """

    def __init__(self, scenario: Scenario, unit_steps: int) -> None:
        self.scenario = scenario
        self.unit_steps = unit_steps
        self.unit_s = unit_steps * scenario.step_s
        self.reduce_s = scenario.reduce_share * scenario.step_s
        self.compute_s = scenario.step_s - self.reduce_s
        """What of a step can hide the building of a quorum."""
        cadence = max(1, round(scenario.checkpoint_steps / unit_steps)) * unit_steps
        self.ledger = Ledger(scenario.replicas, cadence)
        self.now_s = 0.0
        self.finish_s = self.unit_s
        self.contributors = set(range(scenario.replicas))
        self.doomed = False
        """The unit under way will not be committed."""
        self.lighthouse_back_s = 0.0
        self._restarting: dict[int, float] = {}
        """Groups without a program, or that wait for somebody to load a checkpoint: since when it is up."""
        self._events: list[tuple[float, int, str, int]] = []
        self._number = 0

    # --- what a policy decides ------------------------------------------------------------------------------

    @abstractmethod
    def died(self, failure: Failure) -> None:
        """A contributor has died and others are left."""

    @abstractmethod
    def returned(self, group: int) -> None:
        """The program of ``group`` is up again, and there is somebody to join."""

    @abstractmethod
    def forget(self, group: int) -> None:
        """A group that joins, and does not contribute yet, is gone again."""

    @abstractmethod
    def waits(self) -> bool:
        """True if ``boundary`` has something to do."""

    @abstractmethod
    def boundary(self) -> None:
        """A unit has ended at ``now_s``; ``finish_s`` is that of the next one, which may be delayed or joined."""

    @abstractmethod
    def happened(self, kind: str, group: int, at_s: float) -> None:
        """An event that the policy has noted with ``at``."""

    # --- what a policy can do -------------------------------------------------------------------------------

    def delay(self, seconds: float) -> None:
        """Everybody waits: the unit under way ends later."""
        self.finish_s += max(0.0, seconds)

    def at(self, at_s: float, kind: str, group: int) -> None:
        """Note an event."""
        self._number += 1
        heapq.heappush(self._events, (at_s, self._number, kind, group))

    def contribute(self, group: int) -> None:
        """``group`` has the state: its gradient counts from the next unit on."""
        self._note_time()
        self.contributors.add(group)

    def restart_s(self) -> float:
        """From a death until the new program may ask for a quorum."""
        return self.scenario.restart_s

    def all_die(self) -> None:
        """Every program ends."""
        for group in range(self.scenario.replicas):
            if group not in self._restarting:
                self._restart(group)
        self._go_back()

    # --- the run --------------------------------------------------------------------------------------------

    def run(self, failures: Sequence[Failure]) -> Account:
        """Play the whole run."""
        for failure in failures:
            self._play_until(failure.at_s)
            self._strike(failure)
        self._play_until(self.scenario.duration_s)
        self._note_time()
        ledger, step_s = self.ledger, self.scenario.step_s
        useful_s = (ledger.steps + ledger.lost_steps) * step_s + self._computed_s()
        ledger.stall_s = max(0.0, self.now_s - useful_s)
        return ledger.account(self.now_s, step_s)

    def _note_time(self) -> None:
        self.ledger.note_time(self.now_s, len(self.contributors))

    def _computed_s(self) -> float:
        """What is computed of the unit under way."""
        return max(0.0, self.now_s - (self.finish_s - self.unit_s))

    def _play_until(self, until_s: float) -> None:
        while True:
            event_s = self._events[0][0] if self._events else NEVER
            at_s = min(event_s, self.finish_s)
            if at_s > until_s + 1e-9 * self.unit_s:
                break
            self.now_s = max(self.now_s, at_s)
            if self.finish_s <= event_s:
                self._finish_units(min(until_s, event_s))
            else:
                event = heapq.heappop(self._events)
                self._happen(event[2], event[3], event_s)
        self.now_s = max(self.now_s, until_s)

    def _finish_units(self, until_s: float) -> None:
        """The unit under way ends, and as many after it as nobody disturbs."""
        if self.doomed:
            self.ledger.lost_steps += self.unit_steps
            self.doomed = False
        else:
            self.ledger.commit(self.unit_steps, len(self.contributors))
        self.finish_s += self.unit_s
        if self.waits():
            self.boundary()
            return
        count = whole(until_s - self.now_s, self.unit_s)
        self.ledger.commit(count * self.unit_steps, len(self.contributors))
        self.finish_s += count * self.unit_s
        self.now_s += count * self.unit_s

    def _happen(self, kind: str, group: int, at_s: float) -> None:
        if kind == "ready":
            if self.contributors and self._restarting.get(group) == at_s:
                del self._restarting[group]
                self.returned(group)
        elif kind == "loaded":
            if not self.contributors and self._first_loaded() == (at_s, group):
                self._go_on(group)
        else:
            self.happened(kind, group, at_s)

    def _strike(self, failure: Failure) -> None:
        group = failure.group
        if group is None:
            self.lighthouse_back_s = self.now_s + self.scenario.lighthouse_restart_s
            return
        self.ledger.failures += 1
        self._note_time()
        contributed = group in self.contributors
        self._restart(group)
        if contributed and self.contributors:
            self.died(failure)
        elif contributed:
            self._go_back()
        elif not self.contributors:
            self._plan_load()

    def _restart(self, group: int) -> None:
        self.contributors.discard(group)
        self.forget(group)
        self._restarting[group] = self.now_s + self.restart_s()
        self.at(self._restarting[group], "ready", group)

    # --- nobody has the state -------------------------------------------------------------------------------

    def _go_back(self) -> None:
        """Everybody who is up loads a checkpoint; the first to have it goes on, the others join it."""
        self.ledger.total_losses += 1
        self.ledger.roll_back()
        self.ledger.lost_steps += self._computed_s() / self.scenario.step_s
        self.finish_s, self.doomed = NEVER, False
        for group in range(self.scenario.replicas):
            if group not in self._restarting:
                self.forget(group)
                self._restarting[group] = self.now_s
        self._plan_load()

    def _first_loaded(self) -> tuple[float, int]:
        return min((ready_s + self.scenario.transfer_s, group) for group, ready_s in self._restarting.items())

    def _plan_load(self) -> None:
        at_s, group = self._first_loaded()
        self.at(at_s, "loaded", group)

    def _go_on(self, group: int) -> None:
        self._note_time()
        del self._restarting[group]
        self.contributors.add(group)
        self.finish_s = self.now_s + self.unit_s
        for other, ready_s in sorted(self._restarting.items()):
            if ready_s <= self.now_s:
                self._restarting[other] = self.now_s
                self.at(self.now_s, "ready", other)
