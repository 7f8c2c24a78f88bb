"""One simulated run: everything put together, faults, then calm, and what must be true at the end."""

from __future__ import annotations

from dataclasses import dataclass

from lighthouse.core.quorum_core import EPOCHS_PER_S
from torchft_plus.testing.collective import Collectives
from torchft_plus.testing.donors import Directory
from torchft_plus.testing.faults import Faults
from torchft_plus.testing.launcher import Checkpoints, Launcher
from torchft_plus.testing.lighthouse_host import Disk, Lighthouse
from torchft_plus.testing.network import Network
from torchft_plus.testing.oracle import Oracle
from torchft_plus.testing.world import Settings, World

CALM_STEPS = 3
"""So many steps must be committed by all together after the last fault."""
RESTART_CHECK_MS = 50


@dataclass(frozen=True, slots=True)
class Report:
    """How a run went."""

    seed: int
    steps: int
    quorums: int
    incarnations: int
    total_losses: int
    lost_gradients: int
    events: int
    calm_ms: int
    """From the last fault until everybody had committed together."""


class Simulation:
    """One run. ``run`` raises Violation, or an AssertionError of ``validate`` of a core."""

    def __init__(self, settings: Settings, trace: bool = False) -> None:
        self.world = World(settings, trace)
        self.network = Network(self.world)
        timeouts = settings.timeouts
        self.collectives = Collectives(self.network, timeouts.configure_ms, 2 * timeouts.timeout_ms)
        self.directory = Directory(self.network)
        self.oracle = Oracle(self.world)
        self.disk = Checkpoints(self)
        self.lighthouse_disk = Disk()
        self.launcher = Launcher(self)
        self.oracle.groups = self.launcher.all
        self.faults = Faults(self)
        self.hosts: dict[str, str] = {}
        self.lighthouse: Lighthouse | None = None
        self.clock_step_seconds = 0
        """How wrong the clock is that epochs begin with."""
        self._lighthouses = 0
        self._highest_clock_seconds = 0.0
        self._highest_epoch = 0

    # --- the Lighthouse ------------------------------------------------------------------------------------------------

    def start_lighthouse(self) -> None:
        """Start a Lighthouse at the known address; an older one may still run."""
        self._lighthouses += 1
        clock_seconds = 1_000 + self.world.now_ms / 1_000 + self.clock_step_seconds
        if self.lighthouse_disk.record is None:
            # Assumed: a clock that stands behind the epochs given out, and the loss of the store, do not come together.
            clock_seconds = max(clock_seconds, (self._highest_epoch + 1) / EPOCHS_PER_S)
        elif clock_seconds <= self._highest_clock_seconds:
            self.world.hit("the clock is behind an earlier start")
        self._highest_clock_seconds = max(self._highest_clock_seconds, clock_seconds)
        self.lighthouse = Lighthouse(self, self._lighthouses, self.lighthouse_disk, clock_seconds)
        self.lighthouse.start()
        self._highest_epoch = max(self._highest_epoch, self.lighthouse.core.epoch)

    def crash_lighthouse(self, lose_disk: bool) -> None:
        """Its process ends; a new one is started, with the same disk or with an empty one."""
        if self.lighthouse is not None:
            self.lighthouse.die("crashed")
        if lose_disk:
            self.lighthouse_disk = Disk(self.lighthouse_disk.fails)
            self.oracle.disk_lost = True

    def _keep_lighthouse(self) -> None:
        if self.lighthouse is None or not self.lighthouse.alive:
            delay_ms = self.world.between((50, 300) if self.world.calm else (50, 2_500))
            self.world.scheduler.after(delay_ms, self._restart_lighthouse)
        else:
            self.world.scheduler.after(RESTART_CHECK_MS, self._keep_lighthouse)

    def _restart_lighthouse(self) -> None:
        if self.lighthouse is None or not self.lighthouse.alive:
            self.start_lighthouse()
        self._keep_lighthouse()

    # --- the run --------------------------------------------------------------------------------------------------------

    def run(self) -> Report:
        """Chaos, calm, liveness."""
        settings = self.world.settings
        self.start_lighthouse()
        self._keep_lighthouse()
        for index in range(settings.groups):
            self.world.scheduler.after(self.world.between((0, 100)), self.launcher.start, f"replica_{index}")
        self.faults.plan()
        self.world.scheduler.run(settings.chaos_ms)
        self.world.calm = True
        self.faults.end()
        if self.lighthouse is not None:
            self.lighthouse.life.wake()
        start_ms = self.world.now_ms
        if not self.world.scheduler.run(start_ms + settings.calm_ms, self._together):
            self.oracle.fail(
                "liveness", f"no {CALM_STEPS} common steps within {settings.calm_ms} ms: {self._standing()}"
            )
        return Report(
            seed=settings.seed,
            steps=max(self.oracle.head_of_step, default=0),
            quorums=len(self.oracle.quorums),
            incarnations=len(self.launcher.all),
            total_losses=self.oracle.total_losses,
            lost_gradients=self.oracle.lost_gradients,
            events=self.world.scheduler.events,
            calm_ms=self.world.now_ms - start_ms,
        )

    def _together(self) -> bool:
        return self.oracle.calm_steps >= CALM_STEPS

    def _standing(self) -> str:
        rows: list[str] = []
        for group in self.launcher.groups.values():
            core = group.core
            where = "not ready" if core is None else f"{core.head} level={core.level} floor={core.floor}"
            rows.append(f"{group.process}: {group.ended or where}")
        return "; ".join(rows)

    def stories(self) -> list[str]:
        """What every core that still exists says about itself."""
        lines: list[str] = []
        if self.lighthouse is not None:
            lines += [f"--- {self.lighthouse.life.name}", *self.lighthouse.core.story()[-40:]]
        for group in self.launcher.all[-2 * self.world.settings.groups :]:
            if group.core is not None:
                lines += [f"--- {group.name} ({group.ended or 'alive'})", *group.core.story()[-25:]]
        return lines
