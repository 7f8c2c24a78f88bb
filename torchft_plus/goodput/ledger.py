"""What a run committed, lost and waited for, counted in whole steps."""

from __future__ import annotations

import math
from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True)
class Account:
    """The result of one run under one policy."""

    goodput: float
    """Committed steps x contributors, over what the full membership would have committed undisturbed."""
    steps: int
    """Committed, and not rolled back."""
    lost_steps: float
    """Computed by groups that did not die, and never committed (or rolled back): in steps of the run."""
    stall_s: float
    """Time in which nobody computed although the run was not over."""
    failures: int
    """Of groups."""
    total_losses: int
    """Every group was without the state at once: the run went back to a checkpoint."""
    seconds_with: tuple[float, ...]
    """Index k: time with k contributing groups."""


@dataclass(slots=True)
class Ledger:
    """Counts of one run; ``commit`` in the order of time."""

    replicas: int
    checkpoint_steps: int
    steps: int = 0
    weighted: int = 0
    """Sum of the contributors of each step."""
    since_checkpoint: int = 0
    """The part of ``weighted`` that is in no checkpoint yet."""
    lost_steps: float = 0.0
    stall_s: float = 0.0
    failures: int = 0
    total_losses: int = 0
    seconds_with: list[float] = field(default_factory=list[float])
    _since_s: float = 0.0

    def __post_init__(self) -> None:
        self.seconds_with = [0.0] * (self.replicas + 1)

    def commit(self, steps: int, contributors: int) -> None:
        """So many more steps, one after the other; checkpoints are written at multiples of ``checkpoint_steps``."""
        saved = (self.steps + steps) // self.checkpoint_steps * self.checkpoint_steps
        unsaved = self.steps + steps - saved
        if saved > self.steps:
            self.since_checkpoint = 0
        self.since_checkpoint += contributors * min(steps, unsaved)
        self.steps += steps
        self.weighted += steps * contributors

    def roll_back(self) -> None:
        """Go back to the last checkpoint."""
        saved = self.steps // self.checkpoint_steps * self.checkpoint_steps
        self.lost_steps += self.steps - saved
        self.weighted -= self.since_checkpoint
        self.steps, self.since_checkpoint = saved, 0

    def note_time(self, now_s: float, contributors: int) -> None:
        """Until now there were so many contributing groups."""
        self.seconds_with[contributors] += now_s - self._since_s
        self._since_s = now_s

    def account(self, duration_s: float, step_s: float) -> Account:
        """The result of a run of ``duration_s``."""
        undisturbed = whole(duration_s, step_s) * self.replicas
        return Account(
            goodput=self.weighted / undisturbed,
            steps=self.steps,
            lost_steps=self.lost_steps,
            stall_s=self.stall_s,
            failures=self.failures,
            total_losses=self.total_losses,
            seconds_with=tuple(self.seconds_with),
        )


def whole(duration_s: float, unit_s: float) -> int:
    """How many units fit; what is short of one by rounding only counts."""
    return max(0, math.floor(duration_s / unit_s + 1e-9))
