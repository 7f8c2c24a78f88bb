"""Runs windows of inner steps and the syncs between them, on any Manager.

The step of the protocol is the *outer* step: it lasts from one sync to the next. Inner steps ask nobody anything. A peer that dies
between two syncs is missed at the sync and no earlier; one that dies within a sync costs a second reduction of the saved
pseudo-gradients, and no inner step.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

import torch

from torchft_plus.manager.outcome import StepOutcome, StepPlan
from torchft_plus.reduce.codec import Codec
from torchft_plus.reduce.layout import DEFAULT_BUCKET_BYTES
from torchft_plus.reduce.reducer import GradientReducer
from torchft_plus.reduce.reduction import AttachedReduction
from torchft_plus.semi_sync.fragment import Fragment
from torchft_plus.semi_sync.fragment_reduction import FragmentReduction
from torchft_plus.semi_sync.schedule import Schedule, TimedWindow
from torchft_plus.state.registry import StateRegistry

logger = logging.getLogger(__name__)


class WindowManager(Protocol):
    """What the outer loop needs of a ``Manager``."""

    state: StateRegistry

    def attach(self, reduction: AttachedReduction) -> None: ...

    def use_windows(self) -> None: ...

    def start_step(self) -> StepPlan: ...

    def inner_step_done(self) -> None: ...

    def window_is_due(
        self, inner_steps: int, ready: bool = False, least_peers: int = 1, grace_ms: int = 0
    ) -> bool: ...

    def launch_step(self, weight: float) -> None: ...

    def finish_step(
        self, scalars: Mapping[str, float] | None = None, positions: Mapping[str, int] | None = None
    ) -> StepOutcome: ...

    def record_or_step(self, optimizers: list[torch.optim.Optimizer], step: Callable[[], Any]) -> Any: ...

    def report_error(self, e: Exception) -> None: ...

    def current_step(self) -> int: ...


class OuterLoop:
    """The outer half of DiLoCo for one rank. All methods are for the training thread.

    Args:
        manager: of this rank, before its first step.
        fragments: parts of the model, in the order of their syncs; the same on every replica.
        schedule: when they are synchronised.
        timed: let windows end by time, too.
        bucket_bytes: size of the buckets that pseudo-gradients travel in.
        codec: send pseudo-gradients in fewer bytes.
        error_feedback: add to a fragment's next pseudo-gradient what the codec took away.
        syncs: the run ends with this one; a group that is still behind then does not wait for its state.
        on_commit: called with each committed sync before the next window begins, also while this group is behind.
        clock: monotonic seconds.

    Raises:
        ValueError: the schedule is for another number of fragments.
    """

    def __init__(
        self,
        manager: WindowManager,
        fragments: Sequence[Fragment],
        schedule: Schedule,
        *,
        timed: TimedWindow | None = None,
        bucket_bytes: int = DEFAULT_BUCKET_BYTES,
        codec: Codec | None = None,
        error_feedback: bool = False,
        syncs: int | None = None,
        on_commit: Callable[[StepOutcome], None] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        if schedule.fragments != len(fragments):
            raise ValueError(
                f"the schedule is for {schedule.fragments} fragments, and there are {len(fragments)}"
            )
        self._manager = manager
        self._fragments = list(fragments)
        self._schedule = schedule
        self._timed = timed
        self._syncs = syncs
        self._on_commit = on_commit
        self._clock = clock
        self._opened = False
        self._inner_steps = 0
        self._started_s = 0.0
        self._launched = False
        self._launched_weight = 0.0
        self._spoilt = False
        self._joined = False
        """This window began between two syncs of the others, and ends when they come to theirs."""
        self._origin = 0
        """The sync that this run began after, if this group was there from its beginning: a checkpoint's."""
        self._since_set = [0] * len(fragments)
        """Inner steps since each fragment was last taken over from the others."""
        self._tokens_since_set = [0.0] * len(fragments)
        reducers = [
            GradientReducer(
                fragment.named_shared(), bucket_bytes=bucket_bytes, codec=codec, error_feedback=error_feedback
            )
            for fragment in fragments
        ]
        self._reduction = FragmentReduction(reducers, self._turn)
        manager.use_windows()
        manager.attach(self._reduction)
        self._register(manager.state)

    def _register(self, state: StateRegistry) -> None:
        state.register_tensors(
            "outer_parameters",
            lambda: {name: p for fragment in self._fragments for name, p in fragment.named_shared()},
            advanced_by_optimizer=True,
        )
        for index, fragment in enumerate(self._fragments):
            state.register_optimizer(f"outer_optimizer_{index}", fragment.outer_optimizer)

    @property
    def inner_steps(self) -> int:
        """Inner steps of the running window."""
        return self._inner_steps

    @property
    def joined(self) -> bool:
        """The running window began with the others' state, which has replaced this group's."""
        return self._joined

    @property
    def spoilt(self) -> bool:
        """The last inner step ended in a sync that dropped what this group had trained, because it was not finite; what its
        inner optimizer remembers is not finite either."""
        return self._spoilt and self._inner_steps == 0

    def open(self) -> bool:
        """Enter the run: blocks for the first quorum and, if others are ahead, until their state is here. Repeatable.

        Returns:
            True if this call replaced the model by theirs.
        """
        if self._opened:
            return False
        self._opened = True
        self._next_window()
        if not self._joined:
            self._origin = self._manager.current_step()
        return self._joined

    def inner_step_done(
        self,
        scalars: Callable[[], Mapping[str, float]] | None = None,
        positions: Mapping[str, int] | None = None,
        tokens: float = 1.0,
    ) -> StepOutcome | None:
        """The inner optimizer has stepped. Synchronises if it is time.

        Args:
            scalars: called if there is a sync; gives plain numbers that are summed over all contributors.
            positions: this group's data positions as of now.
            tokens: of this inner step, the same on every rank of the group; they weigh it where windows end by time.

        Returns:
            How the sync ended, if there was one. If it was refused, this group has taken over the others' state.
        """
        self._manager.inner_step_done()
        self._inner_steps += 1
        self._since_set = [steps + 1 for steps in self._since_set]
        self._tokens_since_set = [before + tokens for before in self._tokens_since_set]
        if not self._launched:
            ends_early = self._ends_early()
            if not ends_early and self._inner_steps < self._schedule.launch_after:
                return None
            self._launch()
            if ends_early:
                return self._sync(scalars, positions)
        if self._inner_steps < self._schedule.window:
            return None
        return self._sync(scalars, positions)

    def _ends_early(self) -> bool:
        """This window ends here, before its number of inner steps is reached; the same on every rank of the group."""
        if self._inner_steps >= self._schedule.launch_after:
            return False
        timed = self._timed
        if timed is None:
            return self._joined and self._manager.window_is_due(self._inner_steps)
        return self._manager.window_is_due(
            self._inner_steps,
            ready=self._clock() - self._started_s >= timed.seconds,
            least_peers=timed.least_groups,
            grace_ms=int(1000 * timed.grace_seconds),
        )

    def _turn(self) -> int:
        return self._schedule.fragment(self._manager.current_step())

    def _launch(self) -> None:
        turn = self._turn()
        if not self._fragments[turn].save_pseudo_gradient():
            self._manager.report_error(
                ValueError("the local parameters are not finite: they are replaced by the global ones")
            )
        self._launched = True
        self._launched_weight = self._weight(turn)
        self._reduction.launch()
        self._manager.launch_step(self._launched_weight)

    def _weight(self, turn: int) -> float:
        """What this group's pseudo-gradient counts."""
        if self._timed is not None:
            return self._tokens_since_set[turn]
        full = self._schedule.is_full(self._manager.current_step() - self._origin, self._since_set[turn])
        return 1.0 if full else 0.0

    def _sync(
        self, scalars: Callable[[], Mapping[str, float]] | None, positions: Mapping[str, int] | None
    ) -> StepOutcome:
        turn = self._turn()
        self._spoilt = False
        outcome = self._manager.finish_step(None if scalars is None else scalars(), positions)
        if not outcome.refused:
            self._conclude(turn, outcome)
            self._spoilt = not outcome.contributed and self._launched_weight > 0
            if outcome.applied and outcome.contributed:
                self._fragments[turn].merge()
                self._forget(turn)
            elif self._spoilt:
                self.reset()  # what is not finite in one fragment spoils all others in the next forward
            else:
                self._fragments[turn].reset()
                self._forget(turn)
        self._fragments[turn].clear_pseudo_gradient()
        self._next_window()
        return outcome

    def _conclude(self, turn: int, outcome: StepOutcome) -> None:
        """The sync is committed: the outer optimizer steps, or its step is recorded while this group is behind."""
        if outcome.applied:
            optimizer = self._fragments[turn].outer_optimizer
            self._manager.record_or_step([optimizer], optimizer.step)
        self._fragments[turn].clear_pseudo_gradient()
        if self._on_commit is not None:
            self._on_commit(outcome)

    def _next_window(self) -> None:
        """Begin a window; while this group is behind, take part in the others' syncs without contributing."""
        self._joined = self._launched = False
        self._inner_steps = 0
        plan = self._manager.start_step()
        while plan.behind:
            turn = self._turn()
            outcome = self._manager.finish_step()
            if not outcome.refused:
                self._conclude(turn, outcome)
            if self._syncs is not None and self._manager.current_step() >= self._syncs:
                return
            plan = self._manager.start_step()
            self._joined = True
        if self._joined or plan.caught_up:
            self._take_over()
        self._started_s = self._clock()

    def _take_over(self) -> None:
        """Level again: train on from the global copy, and let the window end when the others' does."""
        logger.info(
            "level at sync %d: training goes on from the global parameters", self._manager.current_step()
        )
        self._joined = True
        self.reset()

    def _forget(self, turn: int) -> None:
        self._since_set[turn] = 0
        self._tokens_since_set[turn] = 0.0

    def reset(self) -> None:
        """Take over the global copy as it is: what this group has trained since is dropped."""
        for turn, fragment in enumerate(self._fragments):
            fragment.reset()
            self._forget(turn)
