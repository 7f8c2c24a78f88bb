"""A plain PyTorch loop with DiLoCo, for tests that kill it. One rank of one replica group.

Environment: what Manager reads, and TRAINER_SYNCS, TRAINER_SYNC_EVERY, TRAINER_FRAGMENTS (1 or 2), TRAINER_DELAY,
TRAINER_ALPHA_PERCENT, TRAINER_CODEC (with error feedback), TRAINER_STEP_MS (of an inner step), TRAINER_TIMEOUT_MS,
TRAINER_SYNC_MS (0: by steps), TRAINER_DIE_IN ("launch", "finish" or "apply") with TRAINER_DIE_AT (sync): SIGKILL itself there.
Each inner step is an event "inner" {sync, inner_steps, total} in {replica}.{rank}.inner.jsonl.
"""

from __future__ import annotations

import logging
import os
import signal
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lighthouse.events import EventLog
from torchft_plus import DiLoCo, Manager, ProcessGroupGloo


def setting(name: str, default: int) -> int:
    return int(os.environ.get(f"TRAINER_{name}", default))


def die_in(manager: Manager, phase: str, at_sync: int) -> None:
    """Let the process be killed around the calls of a sync."""

    def deadly(call: Callable[..., Any], before: bool) -> Callable[..., Any]:
        def wrapped(*arguments: Any, **named: Any) -> Any:
            due = manager.current_step() + 1 == at_sync
            if due and before:
                os.kill(os.getpid(), signal.SIGKILL)
            result = call(*arguments, **named)
            if due and not before:
                os.kill(os.getpid(), signal.SIGKILL)
            return result

        return wrapped

    if phase == "launch":
        manager.launch_step = deadly(manager.launch_step, before=False)
    elif phase == "finish":
        manager.finish_step = deadly(manager.finish_step, before=True)
    elif phase == "apply":
        manager.finish_step = deadly(manager.finish_step, before=False)


def main() -> None:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s.%(msecs)03d %(message)s", datefmt="%H:%M:%S")
    torch.set_num_threads(1)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 32), nn.Tanh(), nn.Linear(32, 1))
    if int(os.environ.get("WORLD_SIZE", "1")) > 1:
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        dist.init_process_group("gloo", timeout=timedelta(seconds=60))
        fully_shard(model, mesh=init_device_mesh("cpu", (dist.get_world_size(),)))
    manager = Manager(
        ProcessGroupGloo(), timeout=timedelta(milliseconds=setting("TIMEOUT_MS", 20_000)), digest_every=1
    )
    die_in(manager, os.environ.get("TRAINER_DIE_IN", ""), setting("DIE_AT", 0))
    name = f"{manager.replica_id()}.{os.environ['RANK']}"
    events = EventLog.from_environment(f"{name}.inner", name)
    inner = torch.optim.AdamW(model.parameters(), lr=0.01)
    fragments: list[nn.Module] = [model] if setting("FRAGMENTS", 1) == 1 else [model[0], model[2]]
    outers = [torch.optim.SGD(f.parameters(), lr=0.7, momentum=0.9, nesterov=True) for f in fragments]
    sync_ms = setting("SYNC_MS", 0)
    diloco = DiLoCo(
        manager,
        fragments,
        inner,
        outers,
        sync_every=setting("SYNC_EVERY", 10),
        fragment_sync_delay=setting("DELAY", 0),
        fragment_update_alpha=setting("ALPHA_PERCENT", 0) / 100,
        codec=os.environ.get("TRAINER_CODEC"),
        error_feedback="TRAINER_CODEC" in os.environ,
        sync_seconds=sync_ms / 1000 if sync_ms else None,
    )
    seed = sum(manager.replica_id().encode())
    total = 0
    with diloco:
        while manager.current_step() < setting("SYNCS", 1_000_000):
            generator = torch.Generator().manual_seed(seed * 100_003 + total)
            batch = torch.randn(8, 16, generator=generator)
            time.sleep(setting("STEP_MS", 20) / 1000)
            inner.zero_grad()
            (model(batch) - batch.sum(1, keepdim=True)).square().mean().backward()
            inner.step()
            total += 1
            events.emit("inner", sync=manager.current_step(), inner_steps=diloco.inner_steps, total=total)
    manager.shutdown()
    if dist.is_initialized():
        dist.destroy_process_group()


if __name__ == "__main__":
    main()
