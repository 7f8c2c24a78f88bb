"""How long our recovery takes: deaths and returns played through the real cores in ``torchft_plus.testing``.

Real in here: quorum core, step cores, votes and control words of all groups, streams, mesh and detection as the simulator
has them. ``Oracle`` checks the promises after every event: a survivor that lost a gradient would end the trial.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

from lighthouse.timeouts import Timeouts
from torchft_plus.testing.group import Group
from torchft_plus.testing.launcher import REPORT_EVERY_MS, Launcher
from torchft_plus.testing.simulation import Simulation
from torchft_plus.testing.world import Settings

COMPUTE_MS = 20
"""Short, so that computing hides nothing of what is measured."""
LIMIT_MS = 60_000


@dataclass(frozen=True, slots=True)
class Recovery:
    """Seconds, one value a trial."""

    death_s: tuple[float, ...]
    """From a death that breaks connections to the survivors' first commit without the dead."""
    silent_s: tuple[float, ...]
    """The same for a death that only silence tells."""
    join_s: tuple[float, ...]
    """Longest gap between two commits while a group joins, fetches and becomes level."""


class QuietLauncher(Launcher):
    """Restarts nobody by itself."""

    def group_ended(self, group: Group, silently: bool) -> None:
        if not silently:
            self._world.scheduler.after(
                self._world.between((0, REPORT_EVERY_MS)), self._report, group.process
            )


def measure(replicas: int, trials: int, seed: int) -> Recovery:
    """Play ``trials`` deaths of each kind, and as many returns, in quorums of ``replicas`` groups.

    Raises:
        AssertionError: a promise was broken, or a trial did not come to its end.
    """
    if replicas == 1:
        return Recovery((), (), ())
    loud = [_Trial(replicas, seed + index).run(silent=False) for index in range(trials)]
    silent = [_Trial(replicas, seed + trials + index).run(silent=True) for index in range(trials)]
    joins = tuple(join for _, join in [*loud, *silent])
    return Recovery(tuple(death for death, _ in loud), tuple(death for death, _ in silent), joins)


class _Trial:
    """One death and one return."""

    def __init__(self, replicas: int, seed: int) -> None:
        settings = Settings(
            seed=seed,
            groups=replicas,
            expected_replicas=replicas,
            timeouts=Timeouts(),
            join_timeout_ms=60_000,
            compute_ms=(COMPUTE_MS, COMPUTE_MS),
            apply_ms=(0, 0),
            transfer_ms=(100, 100),
            delay_ms=(0, 2),
            slow_message_chance=0.0,
            profile="crash",
            faults=0,
        )
        self._simulation = Simulation(settings)
        self._world = self._simulation.world
        self._world.calm = True
        self._launcher = QuietLauncher(self._simulation)
        self._simulation.launcher = self._launcher
        self._simulation.oracle.groups = self._launcher.all
        self._commits_ms: list[int] = []

    def run(self, silent: bool) -> tuple[float, float]:
        """Seconds of the death's recovery, and of the longest gap at the return."""
        simulation, world = self._simulation, self._world
        replicas = world.settings.groups
        simulation.start_lighthouse()
        for index in range(replicas):
            world.scheduler.after(world.between((0, 20)), self._launcher.start, f"replica_{index}")
        self._until(lambda: simulation.oracle.calm_steps >= 3, "the first quorum trains")
        world.scheduler.run(world.now_ms + world.between((0, 2 * COMPUTE_MS)))
        victim = self._launcher.groups[f"replica_{world.between((0, replicas - 1))}"]
        killed_ms, quorums = world.now_ms, len(simulation.oracle.quorums)
        victim.end(-9, "killed", silently=silent)
        self._until(lambda: self._committed_under(quorums), "the survivors go on")
        death_s = (world.now_ms - killed_ms) / 1_000
        self._commits_ms = [world.now_ms]
        simulation.oracle.calm_steps = 0
        self._launcher.start(victim.process.replica_id)
        self._until(lambda: simulation.oracle.calm_steps >= 3, "the returned one contributes")
        assert simulation.oracle.lost_gradients == 0, "a survivor lost a gradient"
        gaps = [after - before for before, after in zip(self._commits_ms, self._commits_ms[1:], strict=False)]
        return death_s, max(gaps) / 1_000

    def _committed_under(self, quorums: int) -> bool:
        oracle = self._simulation.oracle
        if len(oracle.quorums) <= quorums:
            return False
        return oracle.head_of_step[max(oracle.head_of_step)].quorum_id == max(oracle.quorums)

    def _until(self, done: Callable[[], bool], what: str) -> None:
        oracle, world = self._simulation.oracle, self._world
        seen = len(oracle.head_of_step)

        def look() -> bool:
            nonlocal seen
            if len(oracle.head_of_step) > seen:
                seen = len(oracle.head_of_step)
                self._commits_ms.append(world.now_ms)
            return done()

        if not world.scheduler.run(world.now_ms + LIMIT_MS, look):
            raise AssertionError(
                f"seed {world.settings.seed}: within {LIMIT_MS} ms it did not happen that {what}"
            )
