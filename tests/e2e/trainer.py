"""A plain PyTorch training loop on torchft_plus, for tests that kill it. One rank of one replica group.

Environment: what Manager reads, and TRAINER_STEPS, TRAINER_STEP_MS (sleep in each step, a stand-in for computing), TRAINER_WIDTH
(of the model), TRAINER_STATE_MB (ballast in the state), TRAINER_TIMEOUT_MS, TRAINER_FSDP (1: FSDP2 inside the group),
TRAINER_CHECKPOINT_EVERY (so many steps a checkpoint is written to the folder TRAINER_CHECKPOINTS, and loaded at the start;
0: never), TRAINER_CATCH_UP_MAX_STEPS, TRAINER_GIL_DEADLOCK_AFTER (so many steps of this process it holds the GIL for ever;
0: never).
"""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lighthouse.messages import Head
from torchft_plus import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo


def setting(name: str, default: int) -> int:
    return int(os.environ.get(f"TRAINER_{name}", default))


def build_model(width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Linear(16, width), nn.ReLU(), nn.Linear(width, width), nn.ReLU(), nn.Linear(width, 1)
    )


class Checkpoints:
    """One file on this group's own disk, replaced as a whole; it names the head that it is of."""

    def __init__(self, manager: Manager, path: Path, parts: dict[str, Any]) -> None:
        self._manager, self._path, self._parts = manager, path, parts

    def load(self) -> None:
        if self._path.exists():
            saved = torch.load(self._path, weights_only=True)
            for name, part in self._parts.items():
                part.load_state_dict(saved[name])
            self._manager.restore_head(Head(*saved["head"]))

    def save(self) -> None:
        head = self._manager.head()
        parts = {name: part.state_dict() for name, part in self._parts.items()}
        torch.save({**parts, "head": [head.step, head.quorum_id]}, self._path.with_suffix(".new"))
        self._path.with_suffix(".new").replace(self._path)
        self._manager.disk_saved(head)


def manual_step(manager: Manager, optimizer: torch.optim.Optimizer) -> None:
    """torchft's low-level calls: reduce, clip what was reduced, vote, step."""
    parameters = [parameter for group in optimizer.param_groups for parameter in group["params"]]
    for work in [manager.allreduce(parameter.grad) for parameter in parameters]:
        work.wait()
    torch.nn.utils.clip_grad_norm_(parameters, 0.5)
    if manager.should_commit():
        if manager.results_changed:
            torch.nn.utils.clip_grad_norm_(parameters, 0.5)
        manager.record_or_step([optimizer], optimizer.step)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    steps, width = setting("STEPS", 1_000_000), setting("WIDTH", 32)
    model = build_model(width)
    fsdp = setting("FSDP", 0) == 1
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    if fsdp:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        for layer in model:
            if isinstance(layer, nn.Linear):
                fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    timeout_ms = setting("TIMEOUT_MS", 20_000)
    manager = Manager(
        ProcessGroupGloo(),
        min_replica_size=setting("MIN_REPLICAS", 1),
        timeout=timedelta(milliseconds=timeout_ms),
        digest_every=1,
        catch_up_max_steps=setting("CATCH_UP_MAX_STEPS", 64),
    )
    manager.state.register_module("model", model)
    manual = setting("MANUAL", 0) == 1
    wrapped = model if manual else DistributedDataParallel(manager, model)
    inner = torch.optim.AdamW(model.parameters(), lr=0.05)
    optimizer = Optimizer(manager, inner)
    scheduler = torch.optim.lr_scheduler.ExponentialLR(inner, 0.99)
    manager.state.register_values("scheduler", scheduler.state_dict, scheduler.load_state_dict)
    ballast = torch.zeros(setting("STATE_MB", 0) * 262_144)
    manager.state.register_tensors("ballast", lambda: {"ballast": ballast}, advanced_by_optimizer=True)
    replica = manager.replica_id()
    checkpoint_every = setting("CHECKPOINT_EVERY", 0)
    checkpoints = Checkpoints(
        manager,
        Path(os.environ.get("TRAINER_CHECKPOINTS", ".")) / f"{replica}.pt",
        {"model": model, "optimizer": inner, "scheduler": scheduler},
    )
    if checkpoint_every:
        checkpoints.load()
    seed = sum(replica.encode())
    deadlock_after, turns = setting("GIL_DEADLOCK_AFTER", 0), 0
    while manager.current_step() < steps:
        before = manager.current_step()
        optimizer.zero_grad()  # starts the step
        time.sleep(setting("STEP_MS", 20) / 1000)
        turns += 1
        if turns == deadlock_after:
            ctypes.PyDLL(None).sleep(1_000_000)
        generator = torch.Generator().manual_seed(seed * 100_003 + manager.current_step())
        batch = torch.randn(8, 16, generator=generator)
        loss = (wrapped(batch) - batch.sum(1, keepdim=True)).square().mean()
        loss.backward()
        if manual:
            manual_step(manager, inner)
        else:
            optimizer.step()
        if manager.current_step() > before:
            scheduler.step()
            if (
                checkpoint_every
                and manager.is_participating()
                and manager.current_step() % checkpoint_every == 0
            ):
                checkpoints.save()
    manager.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    sys.exit(main())
