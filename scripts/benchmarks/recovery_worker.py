"""One replica group of ``bench recovery``: an ordinary training loop that tells each attempt at a step.

First a line with ``ready``, the time before it asks for a quorum. Then a line an attempt: ``time`` (monotonic seconds, the
same clock in all processes), ``step``, ``committed``, ``participants``, and ``crc`` of the parameters after a commit (null
while they are not yet those of the others, and where none is due).
"""

from __future__ import annotations

import ctypes
import os
import sys
import threading
import time
import zlib
from typing import Any

import torch
from torch import nn

from benchmarks.channel import Channel
from benchmarks.systems import (
    Membership,
    System,
    TorchftTuning,
    adamw,
    import_system,
    mlp,
    sgd,
    torchft_plus_system,
    torchft_system,
)
from benchmarks.workload import Workload


def main() -> None:
    """Train until the channel closes; then end at once, as the bench is not about leaving."""
    channel = Channel()
    options = channel.receive()
    assert options is not None
    threading.Thread(target=end_with, args=(channel,), daemon=True).start()
    torch.set_num_threads(1)
    workload = Workload(**options["workload"])
    module, optimizer = model_of(workload)
    import_system(options["system"])
    channel.send(ready=time.monotonic())
    member = Membership(options["replica_id"], options["lighthouse"], options["min_replicas"])
    if options["system"] == "torchft_plus":
        system = torchft_plus_system(member, module)
    else:

        def load(state: dict[str, dict[str, object]]) -> None:
            module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        def save() -> dict[str, dict[str, object]]:
            return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}

        system = torchft_system(member, save, load, TorchftTuning(**options["tuning"]))
    train(channel, system, module, optimizer, options["gradients"], workload)


def model_of(workload: Workload) -> tuple[nn.Sequential, torch.optim.Optimizer]:
    """Module and optimizer, the same in every process."""
    module = mlp(list(workload.widths))
    return module, adamw(module) if workload.adam else sgd(module)


def train(
    channel: Channel,
    system: System,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    gradients: str,
    workload: Workload,
) -> None:
    """The loop. ``gradients``: "ddp" as documented, or "allreduce": one call for all of them after the backward."""
    manager = system.manager
    model, wrapped = system.wrap(module, optimizer)
    if gradients == "allreduce":
        model = module
    torch.manual_seed(os.getpid())
    while True:
        inputs, targets = made_up(workload)
        wrapped.zero_grad()
        before = manager.current_step()  # either call below may commit
        loss = nn.functional.mse_loss(model(inputs), targets)
        time.sleep(workload.device_time_s)
        loss.backward()
        if gradients == "allreduce":
            allreduce_gradients(system, module)
        wrapped.step()
        now, step = time.monotonic(), manager.current_step()
        level = manager.is_participating()
        channel.send(
            time=now,
            step=step,
            committed=step > before,
            participants=manager.num_participants() if level else 0,
            crc=checksum(module) if level and step % workload.digest_every == 0 else None,
        )


def made_up(workload: Workload) -> tuple[torch.Tensor, torch.Tensor]:
    """A batch: inputs and targets."""
    return torch.randn(workload.batch, workload.widths[0]), torch.randn(workload.batch, workload.widths[-1])


def allreduce_gradients(system: System, module: nn.Module) -> None:
    """Average all gradients as one flat tensor."""
    grads = [parameter.grad for parameter in module.parameters() if parameter.grad is not None]
    flat = torch.cat([grad.reshape(-1) for grad in grads])
    system.manager.allreduce(flat).wait()
    for grad, part in zip(grads, flat.split([grad.numel() for grad in grads]), strict=True):
        grad.copy_(part.view_as(grad))


def checksum(module: nn.Module) -> int:
    """CRC-32 over all parameters."""
    crc = 0
    for parameter in module.parameters():
        crc = zlib.crc32(parameter.detach().numpy().data, crc)
    return crc


def end_with(channel: Channel) -> None:
    """End this process when the bench closes the channel; on command hold the GIL, as in a deadlock of a C extension."""
    while (command := channel.receive()) is not None:
        hold_gil(**command)
    sys.stderr.flush()
    os._exit(0)


def hold_gil(hold_gil_s: int) -> None:
    """No Python thread of this process runs for so long; threads of C++ do."""
    libc: Any = ctypes.PyDLL(None)  # unlike CDLL it keeps the GIL during a call
    libc.sleep(hold_gil_s)


if __name__ == "__main__":
    main()
