"""A step of torchtitan as an inner step: groups train by themselves and synchronise every so many steps."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist

from lighthouse.messages import Head
from torchft_plus.manager.outcome import StepOutcome
from torchft_plus.reduce.codec import codec
from torchft_plus.semi_sync.fragment import Fragment
from torchft_plus.semi_sync.outer_loop import OuterLoop
from torchft_plus.semi_sync.parts import register_rest
from torchft_plus.semi_sync.schedule import Schedule, timed_window
from torchft_plus.titan.fragments import plain_name, split
from torchft_plus.titan.metrics import FaultToleranceMetrics
from torchft_plus.titan.outer_state import OuterState
from torchft_plus.titan.step_mode import rank_loss
from torchft_plus.titan.training_state import align


class Windows:
    """Windows of inner steps between syncs; see ``StepMode`` for when its methods are called.

    The trainer's step is a function of the head, so that all groups are at the same step and learning rate:
    committed syncs x window + inner steps of the running window.

    Args:
        trainer: the ``FaultTolerantMixin``.
    """

    behind = False  # a group that lacks the state waits for it between two of its steps

    def __init__(self, trainer: Any) -> None:
        table = trainer.plugin.fault_tolerance
        self._trainer = trainer
        self._schedule = Schedule(table.sync_steps, table.fragments, table.fragment_sync_delay)
        self.steps_per_commit = self._schedule.window
        self.metrics = FaultToleranceMetrics(synchronises=True)
        self._fragments: list[Fragment] = []
        self._outer: OuterState | None = None
        self._loop: OuterLoop | None = None
        self._tokens = 0
        """torchtitan's ``ntokens_seen`` as of the last sync."""
        self._own_tokens = 0
        """Tokens of this rank since the last sync that it counted in, or since it took over the others' state."""
        self._losses: list[torch.Tensor] = []
        """Losses since the last sync."""
        self._steps = 0
        """Inner steps that they are from."""
        self._partial = False
        """The running window is one that began between two syncs of the others, and may not count."""
        self._seek = True
        self._writer: Head | None = None
        self._head = Head()

    @property
    def loop(self) -> OuterLoop:
        """Exists from the moment that training starts."""
        assert self._loop is not None, "the loop is made when training starts"
        return self._loop

    # --- set-up ------------------------------------------------------------------------------------------------------

    def prepare(self) -> None:
        """Make the global copy, for torchtitan to load into it."""
        trainer, table = self._trainer, self._trainer.plugin.fault_tolerance
        named = [(n, p) for n, p in named_parameters(trainer.model_parts) if p.requires_grad]
        parameters = dict(named)
        for names in split(list(parameters), table.num_fragments, table.module_fqns_per_model_fragment):
            own = [(name, parameters[name]) for name in names]
            self._fragments.append(Fragment(own, outer_optimizer(table, own), table.fragment_update_alpha))
        self._outer = trainer.checkpoints.outer = OuterState(self._fragments)

    def join(self, manager: Any) -> None:
        """See ``StepMode``."""
        trainer, table = self._trainer, self._trainer.plugin.fault_tolerance
        assert self._outer is not None, "prepare() comes first"
        for fragment in self._fragments:
            if self._outer.loaded:
                fragment.reset()  # a fresh window at the last sync, wherever the writer was
            else:
                fragment.copy_from_model()
        self._tokens = trainer.ntokens_seen
        self._loop = OuterLoop(
            manager,
            self._fragments,
            self._schedule,
            timed=timed_window(table.sync_seconds, table.sync_least_groups, table.sync_grace_seconds),
            codec=None if table.pseudo_gradient_codec is None else codec(table.pseudo_gradient_codec),
            error_feedback=table.error_feedback,
            syncs=trainer.training_steps // self.steps_per_commit,
            on_commit=self._committed,
        )
        register_rest(manager.state, trainer.model_parts)
        manager.state.register_values("titan", self._get, self._set)

    def _get(self) -> dict[str, Any]:
        return {"tokens": self._tokens}

    def _set(self, values: dict[str, Any]) -> None:
        self._tokens = int(values["tokens"])

    # --- a step ------------------------------------------------------------------------------------------------------

    def start(self) -> None:
        """See ``StepMode``; the first one enters the run."""
        trainer = self._trainer
        if self._seek:
            self._enter()
        trainer.step = self._step() + 1

    def _enter(self) -> None:
        """Before the first step."""
        began = time.monotonic()
        self.loop.open()
        if self.loop.joined:
            self.metrics.started(True, began)
        self.metrics.started(False, time.monotonic())
        self._take_over()

    def _take_over(self) -> None:
        """Train on from the global copy: data from the committed position, nothing accounted for yet."""
        trainer = self._trainer
        self._seek = False
        trainer.batches.seek(trainer.committed_position)
        self._partial = self.loop.joined
        self._own_tokens = 0
        self._clear_losses()
        align(trainer.lr_schedulers, self._step())

    def _step(self) -> int:
        return self._trainer.manager.current_step() * self.steps_per_commit + self.loop.inner_steps

    def backward_ended(self) -> None:
        """The gradients stay in the group."""

    def step_optimizers(self, step: Callable[[], Any]) -> None:
        """See ``StepMode``."""
        step()

    def step_schedulers(self, step: Callable[[], Any]) -> None:
        """The inner step is done: synchronise, if it is time."""
        trainer = self._trainer
        step()
        self._losses += trainer.losses
        self._steps += 1
        tokens = trainer.tokens_given()
        self._own_tokens += tokens
        trainer.batches.commit()
        positions = {trainer.position_name: trainer.batches.position}
        began = time.monotonic()
        outcome = self.loop.inner_step_done(self._scalars, positions, float(tokens))
        if outcome is None:
            return
        if outcome.refused:
            self.metrics.finished(outcome, trainer.manager.quorum_id())
        if self.loop.joined:
            self.metrics.started(True, began)
            self.metrics.started(False, time.monotonic())
            self._take_over()
            return
        if self.loop.spoilt:
            # The moments of the inner optimizers are not finite either. The data is not read again: it would end in the same.
            for optimizer in trainer.optimizers:
                optimizer.state.clear()
        elif self._partial and not outcome.contributed:
            self._take_over()
        self._partial = False
        self._clear_losses()
        align(trainer.lr_schedulers, self._step())

    def _scalars(self) -> Mapping[str, float]:
        loss = rank_loss(self._trainer, self._losses) / max(self._steps, 1)
        return {"loss": loss, "tokens": float(self._own_tokens)}

    def _clear_losses(self) -> None:
        self._losses.clear()
        self._steps = 0

    def _committed(self, outcome: StepOutcome) -> None:
        """A sync is committed; no word that could part the ranks of this group has been taken since."""
        trainer = self._trainer
        self._head = outcome.head
        self._tokens += round(outcome.scalars.get("tokens", 0.0) / dist.get_world_size())
        self.metrics.finished(outcome, trainer.manager.quorum_id())
        if outcome.contributed:
            self._own_tokens = 0
        writes = not outcome.behind and trainer.manager.participating_rank() == 0
        self._writer = outcome.head if writes else None
        if outcome.head.step * self.steps_per_commit >= trainer.training_steps:
            self.loop.reset()  # all groups end with the same parameters

    def end(self) -> None:
        """See ``StepMode``."""
        self._trainer.step = self._step()
        self._trainer.ntokens_seen = self._tokens

    @property
    def counts(self) -> bool:
        """Every inner step does."""
        return True

    def mean_loss(self, own: float) -> float:
        """The loss of this group: it trains by itself."""
        return own

    def head_to_save(self) -> Head | None:
        """See ``StepMode``; there is no writer before the first sync."""
        return self._writer

    def head(self) -> Head:
        """See ``StepMode``."""
        return self._head

    def end_of_training(self) -> None:
        """See ``StepMode``."""


def named_parameters(parts: list[torch.nn.Module]) -> list[tuple[str, torch.nn.Parameter]]:
    """Parameters of all model parts under plain names, which do not repeat: parts hold different layers."""
    return [(plain_name(name), p) for part in parts for name, p in part.named_parameters()]


def outer_optimizer(table: Any, named: list[tuple[str, torch.nn.Parameter]]) -> torch.optim.Optimizer:
    """The outer optimizer of a fragment; LocalSGD takes the average as it is."""
    parameters = [parameter for _, parameter in named]
    if table.semi_sync_method == "local_sgd":
        return torch.optim.SGD(parameters, lr=1.0)
    return torch.optim.SGD(
        parameters, lr=table.outer_lr, momentum=table.outer_momentum, nesterov=table.outer_nesterov
    )
