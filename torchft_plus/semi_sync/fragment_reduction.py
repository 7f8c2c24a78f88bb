"""The ``Reduction`` of a semi-synchronous step: the gradient reducer of the fragment whose turn it is."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence

import torch

from torchft_plus.process_group.lane import Lane
from torchft_plus.reduce.reducer import GradientReducer
from torchft_plus.reduce.reduction import AttachedReduction, Posted


class FragmentReduction:
    """One gradient reducer per fragment; a step reduces one of them.

    Args:
        reducers: of the pseudo-gradients, by fragment.
        turn: the fragment of the step after the last committed one.
    """

    def __init__(self, reducers: Sequence[GradientReducer], turn: Callable[[], int]) -> None:
        self._reducers = list(reducers)
        self._turn = turn
        self._current = self._reducers[0]
        self._launched = False
        self._weight = 1.0

    def launch(self) -> None:
        """The pseudo-gradient of this step is there: it may be posted from now on."""
        self._launched = True

    # --- Reduction -----------------------------------------------------------------------------------------------

    def digest(self) -> str:
        """Digest of all fragments' layouts."""
        parts = [reducer.digest() for reducer in self._reducers]
        return hashlib.sha256(" ".join(parts).encode()).hexdigest()[:16]

    def begin(self, lane: Lane | None, weight: float) -> None:
        """A step starts, or its weight is known now."""
        self._current, self._weight = self._reducers[self._turn()], weight
        self._current.begin(lane, weight)

    def post(self, lane: Lane) -> Posted:
        """See ``Reduction``."""
        return self._current.post(lane)

    def again(self) -> None:
        """See ``Reduction``."""
        self._current.again()

    def write_back(self, total_weight: float) -> None:
        """See ``Reduction``; averages are in ``.grad`` of the global copy then."""
        self._launched = False
        self._current.write_back(total_weight)

    def discard(self) -> None:
        """See ``Reduction``."""
        self._launched = False
        self._current.discard()

    # --- AttachedReduction ---------------------------------------------------------------------------------------

    def follow(self, predecessor: AttachedReduction) -> None:
        """See ``AttachedReduction``."""
        for reducer in self._reducers:
            reducer.follow(predecessor)

    def is_posted(self) -> bool:
        """See ``AttachedReduction``."""
        return self._current.is_posted()

    def may_post(self) -> bool:
        """Only once the pseudo-gradient is there (within a window there is none), or if there will be none."""
        return self._launched or self._weight == 0

    def reduced_parameters(self) -> Sequence[tuple[str, torch.Tensor]]:
        """Names and tensors of the global copies."""
        return [named for reducer in self._reducers for named in reducer.reduced_parameters()]

    def caught_up(self) -> None:
        """See ``AttachedReduction``; what error feedback still owed belonged to the state that was replaced."""
        for reducer in self._reducers:
            reducer.caught_up()
