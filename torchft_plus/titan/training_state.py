"""What a trainer shares with the other replica groups beside parameters and optimizer state."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Advance:
    """What one committed step added."""

    step: int
    tokens: int
    applied: bool


class TrainingState:
    """Tokens seen and learning rate schedule, which move with committed steps only.

    A joiner's values come from a donor as of some step, while commits go on: what was committed after that step is added
    again when they arrive, whatever came first.

    Args:
        schedulers: torchtitan's container of learning rate schedulers.
        step_schedulers: its own ``step``.
    """

    def __init__(self, schedulers: Any, step_schedulers: Callable[[], None]) -> None:
        self._schedulers = schedulers
        self._step_schedulers = step_schedulers
        self._since_join: list[Advance] = []
        self.step = 0
        self.tokens = 0
        """Tokens that all groups committed, divided by the ranks of one group: torchtitan's ``ntokens_seen``."""

    def restore(self, step: int, tokens: int) -> None:
        """Take over what was loaded from disk; the schedule was restored by torchtitan."""
        self.step, self.tokens = step, tokens

    def advance(self, advance: Advance, behind: bool) -> None:
        """A step was committed. The schedule is not stepped here, but where torchtitan does it."""
        self.step = advance.step
        self.tokens += advance.tokens
        if behind:
            self._since_join.append(advance)
        else:
            self._since_join.clear()

    def get(self) -> dict[str, Any]:
        """For the state registry."""
        return {"step": self.step, "tokens": self.tokens, "schedulers": self._schedulers.state_dict()}

    def set(self, values: dict[str, Any]) -> None:
        """Take over a donor's values, and what was committed here after them."""
        self.step, self.tokens = int(values["step"]), int(values["tokens"])
        self._schedulers.load_state_dict(values["schedulers"])
        for advance in self._since_join:
            if advance.step > self.step:
                self.step = advance.step
                self.tokens += advance.tokens
                if advance.applied:
                    self._step_schedulers()
        self._since_join.clear()
