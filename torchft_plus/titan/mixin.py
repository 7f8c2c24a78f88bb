"""Fault tolerance around torchtitan's stock trainer: what both supported versions have in common.

``FaultTolerantMixin`` stands before the stock ``Trainer`` in the bases of one small class per version. It overrides
``forward_backward_step``, ``train_step``, ``state_dict`` and ``close``, and wraps methods of the *instances* that the
stock trainer calls (optimizer and scheduler steps, loading, saving, logging, validation). No method is copied.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor

from lighthouse.messages import Head
from torchft_plus.titan.checkpoint import KEY, CommittedCheckpoints, SavedHead
from torchft_plus.titan.config import TitanConfig
from torchft_plus.titan.data import Batch, CommittedBatches, Share
from torchft_plus.titan.metrics import FaultToleranceMetrics
from torchft_plus.titan.seam import Outcome, StepManager, connect, gradient_reducer
from torchft_plus.titan.training_state import TrainingState

_Stock: Any = Any if TYPE_CHECKING else object


class FaultTolerantMixin(_Stock):
    """One replica group's trainer. A subclass says in which way its torchtitan differs."""

    plugin: TitanConfig
    """The checked run; set on the class before the trainer is built."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._manager: Any = None
        self._outcome: Outcome | None = None
        self._behind = False
        self._micro_batches = 0
        self._losses: list[torch.Tensor] = []
        self._timeouts_lowered = False
        self._saved: SavedHead | None = None
        self._reader_start: Any = None
        self._batches = CommittedBatches(self._load_data, self.batch_generator)
        self._training_state = TrainingState(self.lr_schedulers)
        self._metrics = FaultToleranceMetrics()
        self._checkpoints = CommittedCheckpoints(self.checkpointer)
        self._wrap_instances()

    # --- where the versions differ -----------------------------------------------------------------------------------

    def lower_timeouts(self) -> None:
        """After the first step: torchtitan's own deadline for the group's collectives, if the stock loop will not."""
        raise NotImplementedError

    def tokens_of(self, labels: torch.Tensor) -> int:
        """How far one batch moves torchtitan's ``ntokens_seen``."""
        raise NotImplementedError

    # --- set-up ------------------------------------------------------------------------------------------------------

    def connect(self) -> Any:
        """Make the Manager; tests put a double here."""
        return connect(self.plugin)

    def _wrap_instances(self) -> None:
        """Let the stock trainer's calls pass through us; on the instances, so that nobody else is affected."""
        step_optimizers, step_schedulers = self.optimizers.step, self.lr_schedulers.step
        load, save, log = self.checkpointer.load, self.checkpointer.save, self.metrics_processor.log

        def optimizers_step() -> None:
            if self._outcome is not None and self._outcome.applied:
                self.manager.record_or_step(list(self.optimizers), step_optimizers)

        def schedulers_step() -> None:
            if self._outcome is not None and self._outcome.applied:
                step_schedulers()

        def load_then_join(step: int = -1) -> bool:
            loaded = self._checkpoints.load(load, step)
            self._join()
            return loaded

        def save_committed(curr_step: int, last_step: bool = False) -> Any:
            if self._manager is None:  # a seed checkpoint: nothing is trained
                return save(curr_step, last_step=last_step)
            return self._checkpoints.save(save, curr_step, last_step, self._writes(), self.manager.disk_saved)

        def log_committed(step: int, global_avg_loss: float, *rest: Any, **named: Any) -> None:
            if self._committed:
                more = {**(named.pop("extra_metrics", None) or {}), **self._metrics.values()}
                log(step, self._mean_loss(global_avg_loss), *rest, extra_metrics=more, **named)

        self.optimizers.step, self.lr_schedulers.step = optimizers_step, schedulers_step
        self.checkpointer.load, self.checkpointer.save = load_then_join, save_committed
        self.metrics_processor.log = log_committed
        if hasattr(self, "validator"):
            should_validate = self.validator.should_validate
            self.validator.should_validate = lambda step: (
                self._committed and not self._behind and should_validate(step)
            )

    def _join(self) -> None:
        """Called by the stock ``train`` when it has loaded its checkpoint, before the first step."""
        self._training_state.tokens = self.ntokens_seen
        manager = self._manager = self.connect()
        parameters: list[tuple[str, torch.nn.Parameter]] = []
        for index, part in enumerate(self.model_parts):
            refuse_unshared_buffers(part, self.plugin.group_size)
            manager.state.register_module(f"model_{index}", part)
            parameters += [(f"{index}.{n}", p) for n, p in part.named_parameters() if p.requires_grad]
        for _, parameter in parameters:
            parameter.register_post_accumulate_grad_hook(lay_out_gradient)  # before the reducer's hooks
        for index, optimizer in enumerate(self.optimizers):
            manager.state.register_optimizer(f"optimizer_{index}", optimizer)
        manager.state.register_values("titan", self._training_state.get, self._training_state.set)
        manager.attach(gradient_reducer(parameters))
        if self._saved is not None:
            manager.restore_head(Head(self._saved.step, self._saved.quorum_id))
            manager.state.apply_values({"torchft_plus": {"positions": dict(self._saved.positions)}})

    @property
    def manager(self) -> StepManager:
        """The Manager of this rank; exists from the moment that training starts."""
        assert self._manager is not None, "the manager is made when training starts"
        return self._manager

    @property
    def share(self) -> Share:
        """This group's part of the data."""
        return Share(self.plugin.replica_index, self.plugin.group_size)

    def _load_data(self) -> Iterator[Batch]:
        """Read this rank's share from its beginning."""
        with torch.random.fork_rng(devices=[]):  # taking the state makes a reader, which draws a seed
            if self._reader_start is None:
                self._reader_start = self.dataloader.state_dict()
            self.dataloader.load_state_dict(self._reader_start)
        return iter(self.dataloader)

    # --- a step ------------------------------------------------------------------------------------------------------

    @property
    def _committed(self) -> bool:
        return self._outcome is not None and not self._outcome.refused

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One attempt of a step; a refused one leaves no trace, and its batches are given again.

        ``data_iterator`` is not used: the place in the data follows the commits, also those of a predecessor.
        """
        self._start_step()
        try:
            super().train_step(self._batches.step())
        finally:
            self.step = self.manager.current_step()
            self.ntokens_seen = self._training_state.tokens
        if self._committed and not self._behind and not self._timeouts_lowered:
            self._timeouts_lowered = True
            self.lower_timeouts()

    def _start_step(self) -> None:
        self._outcome = None
        if not self._behind:
            self._weigh()
        plan = self.manager.start_step()
        if plan.caught_up and self._weigh():
            plan = self.manager.start_step()  # over again: only now it is known which batches come
        self._behind = plan.behind
        self._metrics.started(plan.behind, time.monotonic())
        self._batches.seek(
            self._batches.committed if plan.behind else self.manager.positions.get(self._position_name, 0)
        )
        self.step = self.manager.current_step() + 1
        self._micro_batches = 0
        self._losses.clear()

    def _weigh(self) -> bool:
        """Let this group's gradient count by its tokens, if that is wanted; says whether it is."""
        if self.plugin.fault_tolerance.weighting != "tokens":
            return False
        self._batches.seek(self.manager.positions.get(self._position_name, 0))
        batches = self._batches.prefetch(self._batches_per_step)
        tokens = torch.stack([(labels != IGNORE_INDEX).sum() for _, labels in batches]).sum().to(self.device)
        if self.parallel_dims.dp_enabled:
            dist.all_reduce(tokens, group=self.parallel_dims.get_mesh("batch").get_group())
        self.manager.set_weight(float(tokens))
        return True

    @property
    def _batches_per_step(self) -> int:
        return self.gradient_accumulation_steps * getattr(self, "num_pipeline_parallel_microbatches", 1)

    @property
    def _position_name(self) -> str:
        return str(self.share.index)

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        """One micro-batch, without forward and backward while this group is behind; the last one ends the step."""
        if self._behind:
            loss = torch.zeros((), dtype=torch.float32, device=self.device)
        else:
            loss = cast(torch.Tensor, super().forward_backward_step(**arguments))
            self._losses.append(loss.detach().clone())
        self._micro_batches += 1
        if self._micro_batches == self.gradient_accumulation_steps:
            self._finish_step()
        # A step that is not finite is skipped by all groups; torchtitan 0.3 would end this process for it.
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)

    def _finish_step(self) -> None:
        """Average over the groups, vote, and note what was committed."""
        scalars: dict[str, float] = {}
        positions: dict[str, int] = {}
        if not self._behind:
            tokens = sum(self.tokens_of(labels) for _, labels in self._batches.given)
            scalars = {"loss": self._rank_loss(), "tokens": float(tokens)}
            positions = {self._position_name: self._batches.position}
        outcome = self._outcome = self.manager.finish_step(scalars=scalars, positions=positions)
        self._metrics.finished(outcome, self.manager.quorum_id())
        if outcome.refused:
            return
        if not self._behind:
            self._batches.commit()
        # Every rank of a group moves by the same number, and every group by that of all groups.
        self._training_state.tokens += round(outcome.scalars.get("tokens", 0.0) / dist.get_world_size())
        self.ntokens_seen = self._training_state.tokens

    def _rank_loss(self) -> float:
        """What this rank adds to the group's mean loss: ranks of one tensor-parallel set hold the same loss."""
        dims = self.parallel_dims
        if dims.pp_enabled and not self.pp_has_last_stage:
            return 0.0
        return float(torch.sum(torch.stack(self._losses))) / dims.tp

    def _mean_loss(self, own: float) -> float:
        """Mean over the groups that contributed."""
        outcome = self._outcome
        if outcome is None or not outcome.contributors or "loss" not in outcome.scalars:
            return own
        return outcome.scalars["loss"] / outcome.contributors

    def should_continue_training(self) -> bool:
        """Until ``training.steps`` are committed; a group that is behind then takes up the state it has fetched."""
        if super().should_continue_training():
            return True
        if self._behind:
            self._behind = self.manager.start_step().behind
        return False

    # --- disk and end ------------------------------------------------------------------------------------------------

    def _writes(self) -> Head | None:
        """The head to save, if this group is the one that writes now."""
        outcome = self._outcome
        if outcome is None or outcome.refused or self._behind or self.manager.participating_rank() != 0:
            return None
        return outcome.head

    def state_dict(self) -> dict[str, Any]:
        """torchtitan's ``train_state`` and the head, for disk checkpoints."""
        state: dict[str, Any] = super().state_dict()
        if self._checkpoints.expects_head:
            outcome = self._outcome
            head = Head() if outcome is None else outcome.head
            self._checkpoints.note_saved()
            positions = {} if self._manager is None else dict(self.manager.positions)
            state[KEY] = SavedHead(head.step, head.quorum_id, self._shares, positions).to_text()
        return state

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of ``state_dict``."""
        super().load_state_dict(state_dict)
        text = state_dict.get(KEY)
        if text is not None:
            saved = SavedHead.from_text(text)
        elif (
            self.share.size == 1
        ):  # written by the stock trainer, which reads the same share in the same order
            saved = SavedHead(
                self.step, 0, self._shares, {self._position_name: self.step * self._batches_per_step}
            )
        else:
            saved = SavedHead(self.step, 0)
        self._saved = saved.for_shares(self._shares)

    @property
    def _shares(self) -> int:
        return self.share.size * self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard

    def close(self) -> None:
        """Leave the run in good order, then end torchtitan's own parts."""
        if self._manager is not None:
            self._manager.shutdown()
        super().close()


IGNORE_INDEX = -100
"""Label of a token that does not count, in torch and in torchtitan."""


def lay_out_gradient(parameter: torch.Tensor) -> None:
    """Let a gradient lie as its parameter does.

    Tensor parallelism without FSDP leaves some as unsummed parts; the optimizer would lay them out in its step. All ranks of
    a group run the same backward, so the collective that this may take comes in the same order on each.
    """
    gradient = parameter.grad
    if (
        isinstance(gradient, DTensor)
        and isinstance(parameter, DTensor)
        and gradient.placements != parameter.placements
    ):
        with torch.no_grad():
            parameter.grad = gradient.redistribute(placements=parameter.placements)


class _NamesBuffers(Protocol):
    def named_buffers(self) -> Iterator[tuple[str, torch.Tensor]]: ...


def refuse_unshared_buffers(model: _NamesBuffers, group_size: int) -> None:
    """Refuse a model whose training moves a buffer by counts of its own group only.

    Raises:
        ValueError: names the buffer and the mend.
    """
    for name, _ in model.named_buffers():
        if group_size > 1 and name.rsplit(".", 1)[-1].startswith("expert_bias"):
            raise ValueError(
                f"{name} follows the token counts of one replica group, so the groups would drift apart: "
                "switch the model's expert load balancing (load_balance_coeff) off, or train with group_size = 1."
            )
