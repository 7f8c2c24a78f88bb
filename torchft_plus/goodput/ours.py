"""Our policy: no survivor loses a step, nobody waits for a download. Recovery times come from the real cores."""

from __future__ import annotations

from random import Random

from torchft_plus.goodput.elastic import Elastic
from torchft_plus.goodput.failures import Failure
from torchft_plus.goodput.rounds import Recovery
from torchft_plus.goodput.scenario import Scenario


class Ours(Elastic):
    """One run.

    Args:
        recovery: measured times, from which each failure and each return draws.
        seed: of the draws.
    """

    def __init__(self, scenario: Scenario, recovery: Recovery, seed: int) -> None:
        super().__init__(scenario, unit_steps=1)
        self._recovery = recovery
        self._random = Random(f"ours {seed}")
        self._asking: set[int] = set()
        self._joined_s: dict[int, float] = {}
        """Takes part with zeros and fetches, since when."""
        self._fetched: set[int] = set()

    def died(self, failure: Failure) -> None:
        """The step under way is reduced again among those who are left, as soon as their quorum is there."""
        pool = self._recovery.silent_s if failure.silent else self._recovery.death_s
        begin_s = max(self.now_s, self.lighthouse_back_s)
        quorum_s = begin_s + self._draw(pool) + self.scenario.reconfigure_s
        self.delay(quorum_s - (self.finish_s - self.reduce_s))

    def returned(self, group: int) -> None:
        """It asks, and takes part with zeros from the next boundary on."""
        self._asking.add(group)

    def forget(self, group: int) -> None:
        """Who is behind contributes nothing, so its death costs a round that computing hides."""
        self._asking.discard(group)
        self._joined_s.pop(group, None)
        self._fetched.discard(group)

    def waits(self) -> bool:
        """Somebody asks or has fetched."""
        return bool(self._asking or self._fetched)

    def boundary(self) -> None:
        """Whoever has fetched replays and is level; whoever asks becomes a member."""
        scenario = self.scenario
        replays = [self.now_s - self._joined_s.pop(group) for group in self._fetched]
        if replays:
            self.delay(max(replays) * scenario.apply_share)
        for group in self._fetched:
            self.contribute(group)
        self._fetched.clear()
        if self._asking and self.now_s >= self.lighthouse_back_s:
            self.delay(self._draw(self._recovery.join_s) + scenario.reconfigure_s - self.compute_s)
            for group in sorted(self._asking):
                self._joined_s[group] = self.now_s
                self.at(self.now_s + scenario.transfer_s, "fetched", group)
            self._asking.clear()

    def happened(self, kind: str, group: int, at_s: float) -> None:
        """A fetch has ended, if it is not one of an earlier life."""
        if group in self._joined_s and at_s == self._joined_s[group] + self.scenario.transfer_s:
            self._fetched.add(group)

    def _draw(self, pool: tuple[float, ...]) -> float:
        return pool[int(self._random.random() * len(pool))]
