"""What one of torchtitan's steps is to the replica groups: the interface, and a step whose gradients are averaged."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from lighthouse.messages import Head
from torchft_plus.titan.gradients import IGNORE_INDEX, lay_out_gradient
from torchft_plus.titan.metrics import FaultToleranceMetrics
from torchft_plus.titan.seam import Outcome, gradient_reducer
from torchft_plus.titan.training_state import TrainingState


class StepMode(Protocol):
    """One trainer's steps. ``FaultTolerantMixin`` calls these in this order; all are for the training thread."""

    steps_per_commit: int
    """Steps of torchtitan for one committed step of the protocol."""
    metrics: FaultToleranceMetrics

    def prepare(self) -> None:
        """The trainer is built; no checkpoint has been loaded."""
        ...

    def join(self, manager: Any) -> None:
        """Whatever there was to load is loaded: register at the Manager."""
        ...

    def start(self) -> None:
        """A step of torchtitan starts: say which, and from where in the data."""
        ...

    @property
    def behind(self) -> bool:
        """No forward and no backward in this step."""
        ...

    def backward_ended(self) -> None:
        """The last micro-batch of the step is done."""
        ...

    def step_optimizers(self, step: Callable[[], Any]) -> None:
        """In the place of the optimizers' ``step``."""
        ...

    def step_schedulers(self, step: Callable[[], Any]) -> None:
        """In the place of the schedulers' ``step``; the last thing that changes state in a step."""
        ...

    def end(self) -> None:
        """The step has ended, in whatever way: set the trainer's ``step`` and ``ntokens_seen``."""
        ...

    @property
    def counts(self) -> bool:
        """The step is one to log, to save and to validate."""
        ...

    def mean_loss(self, own: float) -> float:
        """The loss to log, if torchtitan found ``own``."""
        ...

    def head_to_save(self) -> Head | None:
        """What a checkpoint now would hold, if this group is the writer."""
        ...

    def head(self) -> Head:
        """The head of the last commit of this process."""
        ...

    def end_of_training(self) -> None:
        """There will be no further step."""
        ...


class GradientSteps:
    """Each step of torchtitan is one of the protocol: gradients are averaged, and a refused step leaves no trace.

    Args:
        trainer: the ``FaultTolerantMixin``.
    """

    steps_per_commit = 1

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        self._outcome: Outcome | None = None
        self._behind = False
        self._state = TrainingState(trainer.lr_schedulers)
        self.metrics = FaultToleranceMetrics()

    def prepare(self) -> None:
        """See ``StepMode``."""

    def join(self, manager: Any) -> None:
        """See ``StepMode``."""
        trainer = self._trainer
        self._state.tokens = trainer.ntokens_seen
        parameters: list[tuple[str, torch.nn.Parameter]] = []
        for index, part in enumerate(trainer.model_parts):
            manager.state.register_module(f"model_{index}", part)
            parameters += [(f"{index}.{n}", p) for n, p in part.named_parameters() if p.requires_grad]
        for _, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lay_out_gradient)  # before the reducer's hooks
        for index, optimizer in enumerate(trainer.optimizers):
            manager.state.register_optimizer(f"optimizer_{index}", optimizer)
        manager.state.register_values("titan", self._state.get, self._state.set)
        manager.attach(gradient_reducer(parameters))

    def start(self) -> None:
        """See ``StepMode``."""
        trainer, manager = self._trainer, self._trainer.manager
        self._outcome = None
        if not self._behind:
            self._weigh()
        plan = manager.start_step()
        if plan.caught_up and self._weigh():
            plan = manager.start_step()  # over again: only now it is known which batches come
        self._behind = plan.behind
        self.metrics.started(plan.behind, time.monotonic())
        trainer.batches.seek(trainer.batches.committed if plan.behind else trainer.committed_position)
        trainer.step = manager.current_step() + 1

    def _weigh(self) -> bool:
        """Let this group's gradient count by its tokens, if that is wanted; says whether it is."""
        trainer = self._trainer
        if trainer.plugin.fault_tolerance.weighting != "tokens":
            return False
        trainer.batches.seek(trainer.committed_position)
        batches = trainer.batches.prefetch(trainer.batches_per_step)
        tokens = (
            torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum().to(trainer.device)
        )
        if trainer.parallel_dims.dp_enabled:
            dist.all_reduce(tokens, group=trainer.parallel_dims.get_mesh("batch").get_group())
        trainer.manager.set_weight(float(tokens))
        return True

    @property
    def behind(self) -> bool:
        """See ``StepMode``."""
        return self._behind

    def backward_ended(self) -> None:
        """Average over the groups, vote, and note what was committed."""
        trainer = self._trainer
        scalars: dict[str, float] = {}
        positions: dict[str, int] = {}
        if not self._behind:
            scalars = {"loss": rank_loss(trainer, trainer.losses), "tokens": float(trainer.tokens_given())}
            positions = {trainer.position_name: trainer.batches.position}
        outcome = self._outcome = trainer.manager.finish_step(scalars=scalars, positions=positions)
        self.metrics.finished(outcome, trainer.manager.quorum_id())
        if outcome.refused:
            return
        if not self._behind:
            trainer.batches.commit()
        # Every rank of a group moves by the same number, and every group by that of all groups.
        self._state.tokens += round(outcome.scalars.get("tokens", 0.0) / dist.get_world_size())
        trainer.ntokens_seen = self._state.tokens

    def step_optimizers(self, step: Callable[[], Any]) -> None:
        """See ``StepMode``."""
        if self._outcome is not None and self._outcome.applied:
            self._trainer.manager.record_or_step(list(self._trainer.optimizers), step)

    def step_schedulers(self, step: Callable[[], Any]) -> None:
        """See ``StepMode``."""
        if self._outcome is not None and self._outcome.applied:
            step()

    def end(self) -> None:
        """See ``StepMode``."""
        self._trainer.step = self._trainer.manager.current_step()
        self._trainer.ntokens_seen = self._state.tokens

    @property
    def counts(self) -> bool:
        """See ``StepMode``."""
        return self._outcome is not None and not self._outcome.refused

    def mean_loss(self, own: float) -> float:
        """Mean over the groups that contributed."""
        outcome = self._outcome
        if outcome is None or not outcome.contributors or "loss" not in outcome.scalars:
            return own
        return outcome.scalars["loss"] / outcome.contributors

    def head_to_save(self) -> Head | None:
        """See ``StepMode``."""
        if not self.counts or self._behind or self._trainer.manager.participating_rank() != 0:
            return None
        return self.head()

    def head(self) -> Head:
        """See ``StepMode``."""
        return Head() if self._outcome is None else self._outcome.head

    def end_of_training(self) -> None:
        """A group that is behind takes up the state it has fetched."""
        if self._behind:
            self._behind = self._trainer.manager.start_step().behind


def rank_loss(trainer: Any, losses: Sequence[torch.Tensor]) -> float:
    """What this rank adds to its group's mean loss: ranks of one tensor-parallel set hold the same loss."""
    dims = trainer.parallel_dims
    if not losses or (dims.pp_enabled and not trainer.pp_has_last_stage):
        return 0.0
    return float(torch.sum(torch.stack(list(losses)))) / dims.tp
