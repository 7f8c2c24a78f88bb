"""torchft's half of the Manager: its names and arguments, said in terms of our steps."""

from __future__ import annotations

import logging
import os
from abc import abstractmethod
from collections.abc import Callable, Iterable, Mapping
from datetime import timedelta
from enum import Enum
from typing import Any

import torch
from torch.distributed import ReduceOp

from lighthouse.messages import Head
from torchft_plus.futures import future_timeout
from torchft_plus.manager.outcome import ManagerError, StepOutcome, StepPlan
from torchft_plus.manager.settings import Settings, SettingsError
from torchft_plus.manager.step_loop import StepLoop
from torchft_plus.process_group.works import InnerWork, SwallowingWork
from torchft_plus.reduce.codec import Int8Codec
from torchft_plus.reduce.recorded import RecordedOperations
from torchft_plus.reduce.reduction import AttachedReduction
from torchft_plus.state.registry import StateRegistry

logger = logging.getLogger(__name__)

TIMEOUT_SEC_ENV = "TORCHFT_TIMEOUT_SEC"
LoadState = Callable[[Any], None]
SaveState = Callable[[], Any]


class WorldSizeMode(Enum):
    """How the number of contributors follows from the quorum.

    DYNAMIC: whoever is there contributes. FIXED_WITH_SPARES (exactly ``min_replica_size`` contribute, the others stand
    by) is known by name and refused: see docs/from-torchft.md.
    """

    DYNAMIC = 0
    FIXED_WITH_SPARES = 1


class TorchftNames:
    """What a Manager offers under torchft's names. ``Manager`` derives from it and fills the attributes."""

    state: StateRegistry
    _loop: StepLoop
    _recorded: RecordedOperations
    _settings: Settings
    _attached: list[AttachedReduction]
    _last: StepOutcome | None
    _early: StepOutcome | None
    _started: bool
    _in_step: bool
    _windowed: bool
    _batches: int
    _max_retries: int | None

    def __init__(self) -> None:
        self._user_state: dict[str, tuple[LoadState, SaveState]] = {}
        self._wrapped: dict[str, torch.optim.Optimizer] = {}
        self._managed_group = False
        self._told: set[str] = set()
        self._refused_in_a_row = 0
        self._error: Exception | None = None
        self._first_quorum_timeout_s: float | None = None

    @abstractmethod
    def start_step(self) -> StepPlan:
        """See ``Manager``."""
        ...

    @abstractmethod
    def finish_step(self) -> StepOutcome:
        """See ``Manager``."""
        ...

    @abstractmethod
    def restore_head(self, head: Head, positions: Mapping[str, int] | None = None) -> None:
        """See ``Manager``."""
        ...

    # --- the step --------------------------------------------------------------------------------------------------

    def start_quorum(
        self, allow_heal: bool = True, shrink_only: bool = False, timeout: timedelta | None = None
    ) -> None:
        """torchft's name of ``start_step``.

        Args:
            allow_heal, shrink_only: accepted for torchft's sake: who joins and heals is up to the Lighthouse.
            timeout: for the first quorum, the only one that is waited for.

        Raises:
            TimeoutError: there was no first quorum within ``timeout``.
        """
        del allow_heal, shrink_only
        self._first_quorum_timeout_s = None if timeout is None else timeout.total_seconds()
        self._error = None
        self.start_step()

    def wait_quorum(self) -> None:
        """Nothing to wait for after ``start_quorum``: the quorum is known, its lane is waited for where it is used.

        Raises:
            ManagerError: ``start_quorum`` was not called before.
        """
        if self._loop.quorum is None:
            raise ManagerError("wait_quorum() before start_quorum()")

    def allreduce(
        self,
        tensor: torch.Tensor,
        should_quantize: bool = False,
        reduce_op: ReduceOp.RedOpType = ReduceOp.AVG,
    ) -> InnerWork:
        """Reduce ``tensor`` in place over the contributors of the quorum. Failures are left to the vote.

        Outside a step (before ``start_quorum`` or after ``should_commit``) nothing is exchanged and the tensor stays
        as it is: groups that come and go do not agree on what is reduced there.

        Args:
            tensor: dense.
            should_quantize: send int8 with a scale per 256 values, in both directions (torchft: fp8, which takes the
                same bytes and errs more). For sums and averages of floating tensors.
            reduce_op: SUM, AVG, PRODUCT, MIN, MAX, BAND, BOR or BXOR.
        """
        if not self._in_step:
            self._say_once("a reduction outside a step is not exchanged: the tensor keeps this group's value")
            return SwallowingWork((), [tensor], self.report_error)
        if not self._attached and not self._windowed and self._recorded.is_empty():
            self._loop.await_lane()
        return self._recorded.start(tensor, reduce_op, Int8Codec() if should_quantize else None)

    def should_commit(self, timeout: timedelta | None = None) -> bool:
        """Finish the step; True if its results are to be applied.

        A retry inside replaces results for which the caller had already waited. What the caller made of those (clipping,
        say) is gone then: do it again if ``results_changed`` says so.

        Args:
            timeout: accepted for torchft's sake: the deadlines of a step follow from the Manager's ``timeout``.

        Raises:
            RuntimeError: more than ``max_retries`` steps in a row were not committed.
        """
        del timeout
        early, self._early = self._early, None
        outcome = early or self.finish_step()
        self._refused_in_a_row = 0 if not outcome.refused else self._refused_in_a_row + 1
        if self._max_retries is not None and self._refused_in_a_row > self._max_retries:
            raise RuntimeError(
                f"{self._refused_in_a_row} steps in a row were not committed, more than max_retries={self._max_retries}"
            )
        return outcome.applied

    @property
    def results_changed(self) -> bool:
        """The last commit replaced results of ``allreduce`` that the caller had waited for: clip them again, say.

        It is the same on every replica that had waited, so those who ignore it stay equal all the same.
        """
        return self._recorded.results_changed

    def report_error(self, e: Exception) -> None:
        """Something failed locally in this step: this group contributes nothing to it."""
        self._error = self._error or e
        self._loop.object(str(e))

    def errored(self) -> Exception | None:
        """What ``report_error`` was told in this step."""
        reason = self._loop.objection
        return None if reason is None else self._error or ManagerError(reason)

    def wrap_future(self, fut: Any, default: Any, timeout: timedelta | None = None) -> Any:
        """A future with the outcome of ``fut``; after an error or ``timeout`` it has ``default``, and the error is reported.

        Args:
            fut: a ``torch.futures.Future``.
            default: what stands for the result of a failure.
            timeout: default: the Manager's.
        """
        limit = timeout or timedelta(milliseconds=self._settings.timeouts.timeout_ms)

        def take(done: Any) -> Any:
            try:
                return done.value()
            except Exception as error:  # noqa: BLE001 - whatever it is, the step is refused at the vote
                self.report_error(error)
                return default

        return future_timeout(fut, limit).then(take)

    # --- state -----------------------------------------------------------------------------------------------------

    def set_state_dict_fns(self, load_state_dict: LoadState, state_dict: SaveState) -> None:
        """The pair of callables for user state; before the first step. See ``register_state_dict_fn``."""
        self.register_state_dict_fn("user", load_state_dict, state_dict)

    def register_state_dict_fn(self, key: str, load_state_dict: LoadState, state_dict: SaveState) -> None:
        """A pair of callables for state that a joiner must receive (tensors and plain values, nested).

        They are called on the training thread at step boundaries only, and not before the first step.

        Raises:
            ManagerError: after the first step.
        """
        if self._started:
            raise ManagerError("state is registered after the first step: do it before training starts")
        self._user_state[key] = (load_state_dict, state_dict)

    @property
    def has_user_state(self) -> bool:
        """Callables for user state were given."""
        return bool(self._user_state)

    def state_dict(self) -> dict[str, int]:
        """Where this group stands, for a checkpoint on disk."""
        head = self._loop.head
        return {"step": head.step, "batches_committed": self._batches, "quorum_id": head.quorum_id}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        """Inverse of ``state_dict``, before the first step; also takes torchft's, without ``quorum_id``."""
        self.restore_head(Head(state_dict["step"], state_dict.get("quorum_id", 0)))
        self._batches = state_dict["batches_committed"]

    def allow_state_dict_read(self) -> None:
        """Accepted for torchft's sake: state is only read at step boundaries, on the training thread."""

    def disallow_state_dict_read(self) -> None:
        """As ``allow_state_dict_read``."""

    def adopt_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None:
        """A wrapped optimizer: its state belongs to the group's, unless windows keep it local (DiLoCo)."""
        if name in self._wrapped:
            raise ManagerError(f"an optimizer named {name!r} is wrapped already: pass another name")
        if self._started:
            raise ManagerError("an optimizer is wrapped after the first step: do it before training starts")
        self._wrapped[name] = optimizer

    def _register_user_state(self) -> None:
        """At the first step, when all that the callables refer to exists."""
        if not self._windowed:
            for name, optimizer in self._wrapped.items():
                self.state.register_optimizer(name, optimizer)
        for key, (load, save) in self._user_state.items():
            # Between two syncs the model and the inner optimizers are each group's own.
            self.state.register_state_dict(
                key, save, load, changes_in_forward=self._windowed, shared=not self._windowed
            )
        if self._windowed or not self._wrapped:
            return
        parameters = [
            parameter
            for optimizer in self._wrapped.values()
            for group in optimizer.param_groups
            for parameter in group["params"]
        ]
        named = [(f"{index}", parameter) for index, parameter in enumerate(parameters)]
        missing = set(self.state.missing(named))
        held = {name: parameter for name, parameter in named if name in missing}
        if held:
            self.state.register_tensors("parameters", lambda: held, advanced_by_optimizer=True)

    # --- who is there ------------------------------------------------------------------------------------------------

    def current_step(self) -> int:
        """Number of committed steps."""
        return self._loop.head.step

    def batches_committed(self) -> int:
        """Sum of contributors over all committed steps of the run."""
        return self._batches

    def num_participants(self) -> int:
        """Members of the current quorum whose gradient counts (as of its formation, or of the last step)."""
        quorum = self._loop.quorum
        if self._last is not None and self._last.contributors:
            return self._last.contributors
        return 0 if quorum is None else quorum.contributors

    def participating_rank(self) -> int | None:
        """Replica rank in the quorum, None while behind."""
        quorum = self._loop.quorum
        return None if quorum is None or self._loop.behind else quorum.replica_rank

    def is_participating(self) -> bool:
        """True if this group's gradients count."""
        return self._loop.quorum is not None and not self._loop.behind

    def replica_id(self) -> str:
        """Stable name of this group."""
        return self._settings.replica_id

    # --- gradients that nobody reduced -------------------------------------------------------------------------------

    def expect_reductions(self) -> None:
        """Gradients are reduced by hooks through a ``ManagedProcessGroup``: see ``average_unreduced``."""
        self._managed_group = True

    def average_unreduced(self, parameters: Iterable[torch.Tensor]) -> None:
        """At the end of a step: average ``.grad`` if hooks were to do it and none did.

        torchtitan 0.2.2 hooks into FSDP, which it leaves out with one rank per group: its groups would part ways.
        """
        if not self._managed_group or self._attached or not self._recorded.is_empty() or not self._in_step:
            return
        self._say_once(
            "no hook has reduced a gradient in this step: they are averaged now, after any clipping"
        )
        for parameter in parameters:
            if parameter.grad is not None:
                self.allreduce(parameter.grad)

    def _say_once(self, sentence: str) -> None:
        if sentence not in self._told:
            self._told.add(sentence)
            logger.warning("%s (said once)", sentence)


def timeout_of(argument: timedelta | None) -> timedelta | None:
    """``TORCHFT_TIMEOUT_SEC``, which goes before the argument, as in torchft.

    Raises:
        SettingsError: it is not a positive number.
    """
    text = os.environ.get(TIMEOUT_SEC_ENV)
    if not text:
        return argument
    try:
        seconds = float(text)
    except ValueError:
        seconds = 0.0
    if seconds <= 0:
        raise SettingsError(f"{TIMEOUT_SEC_ENV} is {text!r}: it must be a number of seconds above 0")
    return timedelta(seconds=seconds)
