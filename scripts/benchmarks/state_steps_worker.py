"""One replica group of ``bench state``, part *steps*: a training loop with a large state, that may join late.

It tells each attempt at a step like ``recovery_worker``. With ``link_bytes_per_s`` its servers send no faster than that on
each connection, as over a link of which recovery may take only a share.
"""

from __future__ import annotations

import socket
import sys
import threading
import time
from typing import Any

import torch

from benchmarks.channel import Channel
from benchmarks.recovery_worker import end_with, model_of, train
from benchmarks.state_worker import make_state
from benchmarks.systems import (
    Membership,
    TorchftTuning,
    import_system,
    torchft_plus_system,
    torchft_system,
)
from benchmarks.workload import Workload

_SO_MAX_PACING_RATE = 47
"""Linux's number; Python has no name for it."""


def pace_servers(bytes_per_s: int) -> None:
    """Every connection that a Python server of this process accepts sends at most so fast (the kernel's own pacing)."""
    listen = socket.socket.listen

    def paced(self: socket.socket, *backlog: int) -> None:
        self.setsockopt(socket.SOL_SOCKET, _SO_MAX_PACING_RATE, bytes_per_s)
        listen(self, *backlog)

    socket.socket.listen = paced


def main() -> None:
    """Set up, wait for the word to join, then train until the channel closes."""
    channel = Channel()
    options = channel.receive()
    assert options is not None
    torch.set_num_threads(1)
    if options["link_bytes_per_s"]:
        pace_servers(options["link_bytes_per_s"])
    ballast = make_state(options["size_bytes"], filled=not options["late"])
    workload = Workload(**options["workload"])
    module, optimizer = model_of(workload)
    import_system(options["system"])  # the CPU that this takes belongs to no step that is measured
    channel.send(ready=True)
    if channel.receive() is None:
        return
    threading.Thread(target=end_with, args=(channel,), daemon=True).start()
    channel.send(entered=time.monotonic())
    member = Membership(options["replica_id"], options["lighthouse"], min_replicas=2)
    if options["system"] == "torchft_plus":
        system = torchft_plus_system(member, module)
        system.manager.state.register_tensors("ballast", lambda: ballast, advanced_by_optimizer=True)
    else:

        def load(state: dict[str, dict[str, Any]]) -> None:
            module.load_state_dict(state["model"])
            optimizer.load_state_dict(state["optimizer"])
            for name, tensor in state["ballast"].items():
                ballast[name].copy_(tensor)

        def save() -> dict[str, dict[str, Any]]:
            return {
                "model": module.state_dict(),
                "optimizer": optimizer.state_dict(),
                "ballast": ballast,
            }

        system = torchft_system(member, save, load, TorchftTuning())
    train(channel, system, module, optimizer, "ddp", workload)


if __name__ == "__main__":
    sys.exit(main())
