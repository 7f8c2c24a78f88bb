"""One replica group of ``bench recovery``: an ordinary training loop that tells each attempt at a step.

A line an attempt: ``time`` (monotonic seconds, the same clock in all processes), ``step``, ``committed``, ``participants``, and
``crc`` of the parameters after a commit (null while they are not yet those of the others).
"""

from __future__ import annotations

import os
import sys
import threading
import time
import zlib

import torch
from torch import nn

from benchmarks.channel import Channel
from benchmarks.systems import (
    Membership,
    System,
    TorchftTuning,
    mlp,
    sgd,
    torchft_plus_system,
    torchft_system,
)

WIDTHS = [256, 512, 256, 64]
BATCH = 32
DEVICE_TIME_S = 0.03
"""Stands for the accelerator's part of the step, so that three groups fit on two cores."""


def main() -> None:
    """Train until the channel closes; then end at once, as the bench is not about leaving."""
    channel = Channel()
    options = channel.receive()
    assert options is not None
    threading.Thread(target=end_with, args=(channel,), daemon=True).start()
    torch.set_num_threads(1)
    module = mlp(WIDTHS)
    optimizer = sgd(module)
    member = Membership(options["replica_id"], options["lighthouse"], min_replicas=2)
    if options["system"] == "torchft_plus":
        system = torchft_plus_system(member, module)
    else:

        def load(state: dict[str, dict[str, object]]) -> None:
            module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])

        def save() -> dict[str, dict[str, object]]:
            return {"model": module.state_dict(), "optimizer": optimizer.state_dict()}

        system = torchft_system(member, save, load, TorchftTuning(**options["tuning"]))
    train(channel, system, module, optimizer, options["gradients"])


def train(
    channel: Channel, system: System, module: nn.Module, optimizer: torch.optim.Optimizer, gradients: str
) -> None:
    """The loop. ``gradients``: "ddp" as documented, or "allreduce": one call for all of them after the backward."""
    manager = system.manager
    model, wrapped = system.wrap(module, optimizer)
    if gradients == "allreduce":
        model = module
    torch.manual_seed(os.getpid())
    while True:
        inputs, targets = torch.randn(BATCH, WIDTHS[0]), torch.randn(BATCH, WIDTHS[-1])
        wrapped.zero_grad()
        before = manager.current_step()  # either call below may commit
        loss = nn.functional.mse_loss(model(inputs), targets)
        time.sleep(DEVICE_TIME_S)
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
            crc=checksum(module) if level else None,
        )


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
    """End this process when the bench closes the channel."""
    while channel.receive() is not None:
        pass
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
