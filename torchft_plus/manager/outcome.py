"""What the training thread is told at the two ends of a step."""

from __future__ import annotations

from dataclasses import dataclass, field

from lighthouse.messages import Head


@dataclass(frozen=True, slots=True)
class StepPlan:
    """How to run the step that starts."""

    step: int
    """The step's number if it is committed; the first step is 1."""
    behind: bool
    """This group lacks the state: skip forward and backward, take no data; ``finish_step`` all the same."""
    caught_up: bool = False
    """This group became level just now: the state was replaced under the caller."""


@dataclass(frozen=True, slots=True)
class StepOutcome:
    """How a step ended. Exactly one of ``applied``, ``skipped`` and ``refused`` is true."""

    head: Head
    """Where this group stands now."""
    applied: bool = False
    """Committed: gradients hold the averages, the optimizer steps (while behind, it records the step)."""
    skipped: bool = False
    """Committed as empty (nobody contributed, or a gradient was not finite): optimizer and schedule stay, data moves."""
    refused: bool = False
    """Not committed here: nothing moves, the batch is to be used again."""
    behind: bool = False
    """This group took part without the state; its optimizer step is recorded."""
    contributed: bool = False
    contributors: int = 0
    total_weight: float = 0.0
    retries: int = 0
    scalars: dict[str, float] = field(default_factory=dict[str, float])
    """The scalars given to ``finish_step``, summed over the ranks of every contributor."""
    positions: dict[str, int] = field(default_factory=dict[str, int])
    """Data positions of the contributors after this step."""


class ManagerError(RuntimeError):
    """This group cannot go on; the sentence says why and what to do."""


class Left(SystemExit):
    """Raised on the training thread when this group has left in good order; ends the process with status 0."""

    def __init__(self) -> None:
        super().__init__(0)
