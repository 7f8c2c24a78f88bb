"""What is simulated: cluster, failures and times, checked; and the presets."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields

from torchft_plus.config import ConfigError

POLICIES = ("ours", "torchft", "torchft-tuned", "checkpoint")
MAX_REPLICAS = 64
"""The recovery rounds are played by all groups with each other: the work grows with the square."""
MAX_FAILURES = 1_000_000
"""Expected in one run."""


@dataclass(frozen=True, slots=True)
class Scenario:
    """One cluster and its failures. Units are last in each name; every time is one of the modelled run."""

    replicas: int = 16
    hours: float = 24.0
    mtbf_s: float = 3_600.0
    """Mean time between failures, of the whole cluster at full strength; infinite: none."""
    regular: bool = False
    """Failures come at equal intervals and not at random (Poisson) times."""
    step_s: float = 5.0
    restart_s: float = 120.0
    """From the death of a group (checkpoint-restart: of any group) until its program is up and has built its model."""
    state_gb: float = 100.0
    """Size of one group's state."""
    bandwidth_gbps: float = 100.0
    """Gigabits a second at which one group reads a state, from its peers or from a checkpoint."""
    checkpoint_minutes: float = 15.0
    sync_every: int = 1
    """Steps between two averages under the torchft-like policies (DiLoCo)."""
    window_loss: str = "any"
    """When a death costs survivors the window: at "any" time, or only during the "sync" at its end."""
    silent_share: float = 0.1
    """Share of failures that leave no trace but silence (power loss, broken network card)."""
    reduce_share: float = 0.1
    """Share of a step after the backward, in which the rest of the gradients is reduced and voted upon."""
    apply_share: float = 0.02
    """Share of a step that the optimizer takes: what a joiner needs to replay one recorded step."""
    reconfigure_s: float = 1.0
    """Setting up the communicators of a new quorum, of ours and of the torchft-like policies."""
    lighthouse_mtbf_s: float = math.inf
    lighthouse_restart_s: float = 30.0

    def __post_init__(self) -> None:
        for name in (field.name for field in fields(self)):
            value = getattr(self, name)
            if isinstance(value, float) and math.isnan(value):
                raise ConfigError(f"{name} is not a number: give one")
        self._check(
            "replicas", 1 <= self.replicas <= MAX_REPLICAS, f"give 1 to {MAX_REPLICAS} replica groups"
        )
        for name in (
            "hours",
            "step_s",
            "bandwidth_gbps",
            "checkpoint_minutes",
            "mtbf_s",
            "lighthouse_mtbf_s",
        ):
            self._check(name, getattr(self, name) > 0, "give more than 0")
        for name in ("hours", "step_s", "restart_s", "state_gb", "checkpoint_minutes"):
            self._check(name, math.isfinite(getattr(self, name)), "give a finite number")
        for name in ("restart_s", "state_gb", "reconfigure_s"):
            self._check(name, getattr(self, name) >= 0, "give 0 or more")
        self._check("sync_every", self.sync_every >= 1, "give at least 1 step")
        self._check("window_loss", self.window_loss in ("any", "sync"), 'give "any" or "sync"')
        for name in ("silent_share", "reduce_share", "apply_share"):
            self._check(name, 0 <= getattr(self, name) <= 1, "give 0 to 1")
        self._check("lighthouse_restart_s", 0 <= self.lighthouse_restart_s < math.inf, "give 0 or more")
        self._check(
            "hours", self.duration_s >= self.step_s, f"a step of {self.step_s:g} s does not fit into it"
        )
        self._check(
            "mtbf_s",
            self.duration_s / min(self.mtbf_s, self.lighthouse_mtbf_s) <= MAX_FAILURES,
            f"more than {MAX_FAILURES} failures are expected in {self.hours:g} h: give fewer hours or a longer time",
        )

    def _check(self, name: str, good: bool, mend: str) -> None:
        if not good:
            raise ConfigError(f"{name} is {getattr(self, name)}: {mend}")

    @property
    def duration_s(self) -> float:
        """Length of the run."""
        return self.hours * 3_600

    @property
    def transfer_s(self) -> float:
        """How long one group reads a state."""
        return self.state_gb * 8 / self.bandwidth_gbps

    @property
    def checkpoint_steps(self) -> int:
        """Steps from checkpoint to checkpoint, at least one."""
        return max(1, round(self.checkpoint_minutes * 60 / self.step_s))


@dataclass(frozen=True, slots=True)
class Preset:
    """A known cluster: what it stands for, and the scenario."""

    about: str
    values: Mapping[str, float | int | bool]


PRESETS = {
    "llama3": Preset(
        "Llama 3 405B: 419 failures in 54 days on 16,384 GPUs, as 16 groups of 1,024",
        {
            "replicas": 16,
            "hours": 54 * 24,
            "mtbf_s": 54 * 86_400 / 419,
            "step_s": 6.0,
            "restart_s": 600.0,
            "state_gb": 6_500.0,
            "bandwidth_gbps": 1_600.0,
            "checkpoint_minutes": 15.0,
        },
    ),
    "crash-every-180s": Preset(
        "one node of 16 groups crashes every 180 s in the mean; the torchft-like policies average every 20 steps",
        {
            "replicas": 16,
            "hours": 24,
            "mtbf_s": 180.0,
            "step_s": 2.0,
            "restart_s": 60.0,
            "state_gb": 100.0,
            "bandwidth_gbps": 100.0,
            "checkpoint_minutes": 1.0,
            "sync_every": 20,
        },
    ),
    "spot": Preset(
        "8 groups on machines that may be taken back: each is lost every 4 hours in the mean",
        {
            "replicas": 8,
            "hours": 72,
            "mtbf_s": 4 * 3_600 / 8,
            "step_s": 3.0,
            "restart_s": 300.0,
            "state_gb": 100.0,
            "bandwidth_gbps": 25.0,
            "checkpoint_minutes": 15.0,
        },
    ),
}
