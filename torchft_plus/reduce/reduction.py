"""What one step reduces, in a form that can be reduced again.

The Manager drives reductions; it knows nothing of buckets. ``GradientReducer`` (gradients) and ``RecordedOperations``
(``Manager.allreduce``) are the two implementations.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from torchft_plus.process_group.lane import Lane, Operation


@dataclass(frozen=True, slots=True)
class Posted:
    """Everything that this rank had to post is posted."""

    operations: tuple[Operation, ...]
    stale: bool = False
    """What was posted does not match the local inputs any more (a parameter fired after its bucket had left):
    everybody posts everything again, in the same quorum."""
    finite: bool = True


class Reduction(Protocol):
    """One step's reduction on one rank. All methods run on the training thread."""

    def digest(self) -> str:
        """Digest of layout and implementation flags; equal on all replicas, or the quorum is refused."""
        ...

    def begin(self, lane: Lane | None, weight: float) -> None:
        """A step starts. With a lane, data may be posted on it as soon as it is ready; without, only counted.

        ``weight`` is this group's contribution weight; 0 means zeros (a joiner).
        """
        ...

    def post(self, lane: Lane) -> Posted:
        """The inputs are complete: post what has not been posted on this very lane in this attempt.

        On another lane than the one of ``begin`` or the last ``post``, or after ``again``, everything is posted from
        the local inputs into fresh staging; the abandoned staging is kept until its operations have ended. Never raises
        for a broken lane.
        """
        ...

    def again(self) -> None:
        """Somebody was stale: the next ``post`` posts everything again, also on the same lane."""
        ...

    def write_back(self, total_weight: float) -> None:
        """All operations of the last ``post`` ended well and the step is committed: results replace the inputs."""
        ...

    def discard(self) -> None:
        """The step was refused: local inputs are dropped, nothing is left behind."""
        ...


class AttachedReduction(Reduction, Protocol):
    """A reduction that shares its lane with others (``Manager.attach``).

    A lane matches operations by their order. When hooks post depends on what a replica has learned so far, so the
    reductions of a step follow each other: none posts before the one before it has posted everything.
    """

    def follow(self, predecessor: AttachedReduction) -> None:
        """Post nothing of a step before ``predecessor`` has posted everything of it."""
        ...

    def is_posted(self) -> bool:
        """True if everything of this step has been posted."""
        ...

    def may_post(self) -> bool:
        """True once this step's inputs can be complete: ``post`` would not be premature."""
        ...

    def reduced_parameters(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Names and parameters that its results move: a joiner must receive them."""
        ...

    def caught_up(self) -> None:
        """A fetched state has replaced this replica's, and recorded steps were replayed on it: put back what the
        reduction itself had written since."""
        ...
