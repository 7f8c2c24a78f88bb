"""Runs ``torchft_plus.titan`` in a process of its own and writes what became of the trainer to ``TITAN_RESULT``.

``TITAN_SAVE=1`` saves its parameters beside it, as ``.pt``.
``TITAN_INFINITE=3`` spoils the gradients of the 3rd micro-batch. ``TITAN_DIE_IN_SYNC=3`` and ``TITAN_DIE_IN_STEP=25`` kill the
process when it has posted for the 3rd sync, or when it begins the 25th step. ``TITAN_REFUSE=3,5``
puts a double in the place of the Manager that refuses its 3rd and 5th attempt.
"""

from __future__ import annotations

import hashlib
import importlib
import json
import os
import signal
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch

from lighthouse.messages import Head
from torchft_plus.manager.manager import Manager
from torchft_plus.titan import cpu, mixin, step_mode, versions
from torchft_plus.titan.__main__ import main


class State:
    """Takes registrations; values must be JSON."""

    def register_module(self, name: str, module: torch.nn.Module) -> None: ...

    def register_optimizer(self, name: str, optimizer: torch.optim.Optimizer) -> None: ...

    def register_values(self, name: str, get: Callable[[], Any], set: Callable[[Any], None]) -> None:
        set(json.loads(json.dumps(get())))


class RefusingManager:
    """A lone group's Manager without a Lighthouse; some attempts are refused."""

    def __init__(self, refuse: set[int]) -> None:
        self.state = State()
        self.positions: dict[str, int] = {}
        self.parameters: list[torch.nn.Parameter] = []
        self._refuse = refuse
        self._attempt = self._step = 0

    def attach(self, reduction: Any) -> None: ...

    def start_step(self) -> Any:
        return SimpleNamespace(behind=False, caught_up=False)

    def finish_step(self, *, scalars: Mapping[str, float], positions: Mapping[str, int]) -> Any:
        self._attempt += 1
        refused = self._attempt in self._refuse
        if refused:
            for parameter in self.parameters:
                parameter.grad = None
        else:
            self._step += 1
            self.positions.update(positions)
        return SimpleNamespace(
            head=Head(self._step, 1),
            applied=not refused,
            refused=refused,
            contributors=1,
            contributed=not refused,
            scalars={} if refused else dict(scalars),
        )

    def record_or_step(self, optimizers: list[torch.optim.Optimizer], step: Callable[[], Any]) -> None:
        step()

    def current_step(self) -> int:
        return self._step

    def participating_rank(self) -> int:
        return 0

    def quorum_id(self) -> int:
        return 1

    def disk_saved(self, head: Head) -> None: ...

    def shutdown(self) -> None: ...


def stock_trainer(version: tuple[int, int]) -> type:
    module = importlib.import_module("torchtitan.train" if version == (0, 2) else "torchtitan.trainer")
    trainer: type = module.Trainer
    return trainer


def spoil(trainer: Any, micro_batch: int) -> None:
    """Make loss and gradients of the ``micro_batch``-th forward_backward_step infinite."""
    stock, count = trainer.forward_backward_step, iter(range(1, 1_000_000))

    def forward_backward_step(self: Any, **arguments: Any) -> torch.Tensor:
        loss: torch.Tensor = stock(self, **arguments)
        if next(count) != micro_batch:
            return loss
        for parameter in self.model_parts[0].parameters():
            parameter.grad.mul_(torch.inf)
        return loss * torch.inf

    trainer.forward_backward_step = forward_backward_step


def die_in_sync(sync: int) -> None:
    """SIGKILL when the pseudo-gradient of that sync is on its way."""
    launch = Manager.launch_step

    def launch_step(self: Manager, weight: float) -> None:
        launch(self, weight)
        if self.current_step() + 1 == sync:
            os.kill(os.getpid(), signal.SIGKILL)

    Manager.launch_step = launch_step


def die_in_step(trainer: Any, step: int) -> None:
    """SIGKILL in the forward of that step."""
    stock = trainer.forward_backward_step

    def forward_backward_step(self: Any, **arguments: Any) -> torch.Tensor:
        if self.step == step:
            os.kill(os.getpid(), signal.SIGKILL)
        loss: torch.Tensor = stock(self, **arguments)
        return loss

    trainer.forward_backward_step = forward_backward_step


def local_parameters(part: torch.nn.Module) -> dict[str, torch.Tensor]:
    """By name; of a DTensor the local shard."""
    return {
        name: (parameter.to_local() if hasattr(parameter, "to_local") else parameter).detach()
        for name, parameter in part.named_parameters()
    }


def digest(parts: list[torch.nn.Module]) -> str:
    state = hashlib.sha256()
    for part in parts:
        for name, local in local_parameters(part).items():
            state.update(name.encode() + local.numpy().tobytes())
    return state.hexdigest()


def write_result_at_close(trainer: Any, path: Path) -> None:
    close = trainer.close

    def write_and_close(self: Any) -> None:
        result = {
            "parameters": digest(self.model_parts),
            "step": self.step,
            "tokens": self.ntokens_seen,
            "rates": [group["lr"] for optimizer in self.optimizers for group in optimizer.param_groups],
            "plugin": isinstance(self, mixin.FaultTolerantMixin),
        }
        path.write_text(json.dumps(result))
        if os.environ.get("TITAN_SAVE"):
            torch.save(local_parameters(self.model_parts[0]), path.with_suffix(".pt"))
        close(self)

    trainer.close = write_and_close


if __name__ == "__main__":
    version = versions.check(versions.installed("torchtitan"), versions.installed("torch"))
    cpu.prepare(version)
    write_result_at_close(stock_trainer(version), Path(os.environ["TITAN_RESULT"]))
    if micro_batch := os.environ.get("TITAN_INFINITE"):
        spoil(stock_trainer(version), int(micro_batch))
    if sync := os.environ.get("TITAN_DIE_IN_SYNC"):
        die_in_sync(int(sync))
    if step := os.environ.get("TITAN_DIE_IN_STEP"):
        die_in_step(stock_trainer(version), int(step))
    if refused := os.environ.get("TITAN_REFUSE"):
        manager = RefusingManager({int(attempt) for attempt in refused.split(",")})
        setattr(mixin, "connect", lambda config: manager)  # noqa: B010
        setattr(step_mode, "gradient_reducer", lambda named: manager.parameters.extend(p for _, p in named))  # noqa: B010
    sys.exit(main())
