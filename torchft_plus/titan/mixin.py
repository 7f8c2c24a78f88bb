"""Fault tolerance around torchtitan's stock trainer: what both supported versions have in common.

``FaultTolerantMixin`` stands before the stock ``Trainer`` in the bases of one small class per version. It overrides
``forward_backward_step``, ``train_step``, ``state_dict`` and ``close``, and wraps methods of the *instances* that the
stock trainer calls (optimizer and scheduler steps, loading, saving, logging, validation). No method is copied. What a
step is to the other groups is the business of its ``StepMode``.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, Protocol, cast

import torch

from lighthouse.messages import Head
from torchft_plus.titan.checkpoint import KEY, CommittedCheckpoints, SavedHead
from torchft_plus.titan.config import TitanConfig
from torchft_plus.titan.data import Batch, CommittedBatches, Share
from torchft_plus.titan.seam import StepManager, connect
from torchft_plus.titan.semi_sync import Windows
from torchft_plus.titan.step_mode import GradientSteps, StepMode

_Stock: Any = Any if TYPE_CHECKING else object


class FaultTolerantMixin(_Stock):
    """One replica group's trainer. A subclass says in which way its torchtitan differs."""

    plugin: TitanConfig
    """The checked run; set on the class before the trainer is built."""

    def __init__(self, config: Any) -> None:
        super().__init__(config)
        self._manager: Any = None
        self._micro_batches = 0
        self._timeouts_lowered = False
        self._saved: SavedHead | None = None
        self._reader_start: Any = None
        self.losses: list[torch.Tensor] = []
        """Of the micro-batches of the present step."""
        self.batches = CommittedBatches(self._load_data, self.batch_generator)
        windows = self.plugin.fault_tolerance.semi_sync_method is not None
        self._mode: StepMode = Windows(self) if windows else GradientSteps(self)
        self.checkpoints = CommittedCheckpoints(self.checkpointer)
        self._mode.prepare()
        self._wrap_instances()

    # --- where the versions differ -----------------------------------------------------------------------------------

    @abstractmethod
    def lower_timeouts(self) -> None:
        """After the first step: torchtitan's own deadline for the group's collectives, if the stock loop will not."""
        ...

    @abstractmethod
    def tokens_of(self, labels: torch.Tensor) -> int:
        """How far one batch moves torchtitan's ``ntokens_seen``."""
        ...

    @property
    @abstractmethod
    def training_steps(self) -> int:
        """torchtitan's ``training.steps``."""
        ...

    # --- set-up ------------------------------------------------------------------------------------------------------

    def connect(self) -> Any:
        """Make the Manager; tests put a double here."""
        return connect(self.plugin)

    def _wrap_instances(self) -> None:
        """Let the stock trainer's calls pass through us; on the instances, so that nobody else is affected."""
        mode = self._mode
        step_optimizers, step_schedulers = self.optimizers.step, self.lr_schedulers.step
        load, save, log = self.checkpointer.load, self.checkpointer.save, self.metrics_processor.log

        def load_then_join(step: int = -1) -> bool:
            loaded = self.checkpoints.load(load, step)
            self._join()
            return loaded

        def save_committed(curr_step: int, last_step: bool = False) -> Any:
            if self._manager is None:  # a seed checkpoint: nothing is trained
                return save(curr_step, last_step=last_step)
            head = mode.head_to_save()
            return self.checkpoints.save(save, curr_step, last_step, head, self.manager.disk_saved)

        def log_committed(step: int, global_avg_loss: float, *rest: Any, **named: Any) -> None:
            if mode.counts:
                more = {**(named.pop("extra_metrics", None) or {}), **mode.metrics.values()}
                log(step, mode.mean_loss(global_avg_loss), *rest, extra_metrics=more, **named)

        self.optimizers.step = lambda: mode.step_optimizers(step_optimizers)
        self.lr_schedulers.step = lambda: mode.step_schedulers(step_schedulers)
        self.checkpointer.load, self.checkpointer.save = load_then_join, save_committed
        self.metrics_processor.log = log_committed
        if hasattr(self, "validator"):
            should_validate = self.validator.should_validate
            self.validator.should_validate = lambda step: (
                mode.counts and not mode.behind and should_validate(step)
            )

    def _join(self) -> None:
        """Called by the stock ``train`` when it has loaded its checkpoint, before the first step."""
        manager = self._manager = self.connect()
        for part in self.model_parts:
            refuse_unshared_buffers(part, self.plugin.group_size)
        self._mode.join(manager)
        if self._saved is not None:
            manager.restore_head(Head(self._saved.step, self._saved.quorum_id), dict(self._saved.positions))

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

    def train_step(self, data_iterator: Iterator[Batch]) -> None:
        """One attempt of a step; a refused one leaves no trace, and its batches are given again.

        ``data_iterator`` is not used: the place in the data follows the commits, also those of a predecessor.
        """
        self._mode.start()
        self._micro_batches = 0
        self.losses.clear()
        try:
            super().train_step(self.batches.step())
        finally:
            self._mode.end()
        if self._mode.counts and not self._mode.behind and not self._timeouts_lowered:
            self._timeouts_lowered = True
            self.lower_timeouts()

    def forward_backward_step(self, **arguments: Any) -> torch.Tensor:
        """One micro-batch, without forward and backward while this group is behind; the last one ends the step."""
        if self._mode.behind:
            loss = torch.zeros((), dtype=torch.float32, device=self.device)
        else:
            loss = cast(torch.Tensor, super().forward_backward_step(**arguments))
            self.losses.append(loss.detach().clone())
        self._micro_batches += 1
        if self._micro_batches == self.gradient_accumulation_steps:
            self._mode.backward_ended()
        # A step that is not finite is skipped by all groups; torchtitan 0.3 would end this process for it.
        return torch.nan_to_num(loss, nan=0.0, posinf=0.0, neginf=0.0)

    @property
    def batches_per_step(self) -> int:
        """Batches of one rank."""
        return self.gradient_accumulation_steps * getattr(self, "num_pipeline_parallel_microbatches", 1)

    @property
    def position_name(self) -> str:
        """Under which the Manager keeps the position of this group's share."""
        return str(self.share.index)

    @property
    def committed_position(self) -> int:
        """Batches of this group's share that were committed."""
        return self.manager.positions.get(self.position_name, 0)

    def tokens_given(self) -> int:
        """Tokens of the present step's batches."""
        return sum(self.tokens_of(labels) for _, labels in self.batches.given)

    def should_continue_training(self) -> bool:
        """Until ``training.steps`` are committed."""
        if super().should_continue_training():
            return True
        self._mode.end_of_training()
        return False

    # --- disk and end ------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """torchtitan's ``train_state`` and the head, for disk checkpoints."""
        state: dict[str, Any] = super().state_dict()
        if self.checkpoints.expects_head:
            head = self._mode.head()
            self.checkpoints.note_saved()
            positions = {} if self._manager is None else dict(self.manager.positions)
            saved = SavedHead(head.step, head.quorum_id, self._shares, positions, self._mode.steps_per_commit)
            state[KEY] = saved.to_text()
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
            positions = {self.position_name: self.step * self.batches_per_step}
            saved = SavedHead(self.step, 0, self._shares, positions)
        else:
            saved = SavedHead(self.step, 0)
        self._saved = saved.for_shares(self._shares).for_steps_per_commit(self._mode.steps_per_commit)

    @property
    def _shares(self) -> int:
        return self.share.size * self.parallel_dims.dp_replicate * self.parallel_dims.dp_shard

    def close(self) -> None:
        """Leave the run in good order, then end torchtitan's own parts."""
        if self._manager is not None:
            self._manager.shutdown()
        super().close()


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
