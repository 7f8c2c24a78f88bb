"""One replica group of ``bench windows``: plain PyTorch with DiLoCo, of either system.

A line for each inner step: ``time`` (monotonic seconds), ``total`` inner steps of this process, ``syncs`` committed.
"""

from __future__ import annotations

import importlib
import os
import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from benchmarks.channel import Channel
from benchmarks.recovery_worker import end_with
from benchmarks.systems import Membership, TorchftTuning, mlp, torchft_plus_manager, torchft_system

WIDTHS = [16, 32, 1]


def main() -> None:
    """Train until the channel closes, or until it is this process's turn to die."""
    channel = Channel()
    options = channel.receive()
    assert options is not None
    threading.Thread(target=end_with, args=(channel,), daemon=True).start()
    torch.set_num_threads(1)
    module = mlp(WIDTHS)
    inner = torch.optim.AdamW(module.parameters(), lr=0.01)
    outer = torch.optim.SGD(module.parameters(), lr=0.7, momentum=0.9, nesterov=True)
    member = Membership(options["replica_id"], options["lighthouse"], min_replicas=1)
    if options["system"] == "torchft_plus":
        manager: Any = torchft_plus_manager(member)
        local_sgd: Any = importlib.import_module("torchft_plus.local_sgd")
        call = "launch_step"
    else:

        def load(state: dict[str, Any]) -> None:
            module.load_state_dict(state["model"])
            inner.load_state_dict(state["inner"])

        def save() -> dict[str, Any]:
            return {"model": module.state_dict(), "inner": inner.state_dict()}

        manager = torchft_system(member, save, load, TorchftTuning(use_async_quorum=False)).manager
        local_sgd = importlib.import_module("torchft.local_sgd")
        call = "allreduce"
    if options["die_at"]:
        die_before(manager, call, options["die_at"])
    torch.manual_seed(os.getpid())
    total = 0
    with local_sgd.DiLoCo(manager, [module], inner, [outer], sync_every=options["sync_every"]):
        while True:
            inputs = torch.randn(8, WIDTHS[0])
            time.sleep(options["step_s"])
            inner.zero_grad()
            nn.functional.mse_loss(module(inputs), inputs.sum(1, keepdim=True)).backward()
            inner.step()
            total += 1
            channel.send(time=time.monotonic(), total=total, syncs=manager.current_step())


def die_before(manager: Any, call: str, sync: int) -> None:
    """SIGKILL when the pseudo-gradient of that sync (or the first later one of both groups) is to be sent."""
    stock: Callable[..., Any] = getattr(manager, call)

    def deadly(*arguments: Any, **named: Any) -> Any:
        if manager.current_step() + 1 >= sync and manager.num_participants() == 2:
            os.kill(os.getpid(), signal.SIGKILL)
        return stock(*arguments, **named)

    setattr(manager, call, deadly)


if __name__ == "__main__":
    main()
