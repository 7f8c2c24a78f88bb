"""A torchft-like policy: the step (or window) is lost by all, a death is told by silence, a joiner is waited for.

The figures are measured ones of torchft 0.2.0 (docs/simulation.md).
"""

from __future__ import annotations

from dataclasses import dataclass

from torchft_plus.goodput.elastic import NEVER, Elastic
from torchft_plus.goodput.failures import Failure
from torchft_plus.goodput.scenario import Scenario


@dataclass(frozen=True, slots=True)
class TorchftSettings:
    """Seconds."""

    heartbeat_timeout_s: float
    quorum_timeout_s: float | None
    """After which everybody dies if the Lighthouse does not answer; None: they try again."""
    reconnect_s: float
    """From the return of the Lighthouse to the next quorum."""


DEFAULT = TorchftSettings(5.0, 60.0, 1.9)
TUNED = TorchftSettings(1.0, None, 1.9)


class Torchft(Elastic):
    """One run."""

    def __init__(self, scenario: Scenario, settings: TorchftSettings) -> None:
        super().__init__(scenario, scenario.sync_every)
        self._settings = settings
        self._quorum_s = 0.0
        """Before this the dead are still waited for."""
        self._changed = False
        self._expires_s: float | None = None
        self._asking: set[int] = set()
        self._healing: set[int] = set()

    def died(self, failure: Failure) -> None:
        """Survivors compute to the end of the step; it is lost, and the next quorum waits for the heartbeat timeout."""
        silent_until_s = self.now_s + self._settings.heartbeat_timeout_s
        sync_s = self.finish_s - self.reduce_s
        if self.unit_steps > 1 and self.scenario.window_loss == "sync" and self.now_s < sync_s:
            self.delay(max(sync_s, silent_until_s) + self.scenario.reconfigure_s - sync_s)
            return
        self.doomed = True
        self._changed = True
        self._quorum_s = max(self._quorum_s, silent_until_s)

    def returned(self, group: int) -> None:
        """It is in the next quorum."""
        self._asking.add(group)

    def forget(self, group: int) -> None:
        """Gone again."""
        if group in self._healing:
            self._changed = True
            self._quorum_s = max(self._quorum_s, self.now_s + self._settings.heartbeat_timeout_s)
        self._asking.discard(group)
        self._healing.discard(group)

    def restart_s(self) -> float:
        """A replacement is not admitted before the dead one has timed out."""
        return max(self.scenario.restart_s, self._settings.heartbeat_timeout_s)

    def waits(self) -> bool:
        """A quorum changes, or there is no Lighthouse to ask."""
        return self._changed or bool(self._asking or self._healing) or self.now_s < self.lighthouse_back_s

    def boundary(self) -> None:
        """A new quorum: whoever is healed contributes, whoever joins is waited for."""
        if self.now_s < self.lighthouse_back_s and self._settings.quorum_timeout_s is not None:
            self.finish_s = NEVER
            self._expires_s = self.now_s + self._settings.quorum_timeout_s
            self.at(self._expires_s, "expired", 0)
            return
        ready_s = max(self.now_s, self._quorum_s)
        if self.now_s < self.lighthouse_back_s:
            ready_s = max(ready_s, self.lighthouse_back_s + self._settings.reconnect_s)
        self.delay(ready_s - self.now_s)
        for group in sorted(self._healing):
            self.contribute(group)
        self._healing.clear()
        if self._changed or self._asking:
            download_s = self.scenario.transfer_s if self._asking else 0.0
            self.delay(self.scenario.reconfigure_s + download_s - self.compute_s)
        self._healing, self._asking, self._changed = self._asking, set(), False

    def happened(self, kind: str, group: int, at_s: float) -> None:
        """The quorum was asked for in vain: every trainer ends."""
        if at_s == self._expires_s and self.finish_s == NEVER and self.contributors:
            self.all_die()
