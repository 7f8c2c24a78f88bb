"""Several reductions on one lane: one after the other, in the same order on every replica.

A lane matches operations by their order. When hooks post buckets depends on what a replica has learned so far (a restarted one
posts everything at the end), so whatever else uses the lane in the same step must not slip in between: it waits until its
predecessor has posted everything. The Manager chains its reductions with ``follow``.
"""

from __future__ import annotations

from typing import Protocol

from torchft_plus.process_group.lane import Lane
from torchft_plus.reduce.reduction import Posted


class Predecessor(Protocol):
    """A reduction that comes first."""

    def is_posted(self) -> bool:
        """True if everything of this step has been posted."""
        ...

    def may_post(self) -> bool:
        """True once this step's inputs can be complete: its ``post`` would not be premature."""
        ...

    def post(self, lane: Lane) -> Posted:
        """Post what has not been posted on this lane; may be called again."""
        ...
