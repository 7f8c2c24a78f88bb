"""One process of ``bench overhead``: runs blocks of steps of the mode that it is told, and times them.

``plain`` and ``plain_again`` are the same thing twice: what differs between them is noise.
"""

from __future__ import annotations

import gc
import os
import resource
import time
from collections.abc import Callable
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

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

Step = Callable[[], None]

WIDTHS = {"mlp": [1024, 2048, 2048, 2048, 64], "model16": [15, 1]}
"""Layer widths of the workloads that are models: 10.6 M and 16 parameters."""
BATCH = 32
DEADLINE = timedelta(seconds=60)


def train_step(model: nn.Module, optimizer: Any, inputs: torch.Tensor, targets: torch.Tensor) -> Step:
    """One step of a training loop as everybody writes it."""

    def step() -> None:
        optimizer.zero_grad()
        nn.functional.mse_loss(model(inputs), targets).backward()
        optimizer.step()

    return step


def plain_calls(tensor: torch.Tensor) -> Step:
    """The collective alone."""

    def step() -> None:
        tensor.fill_(1.0)
        dist.all_reduce(tensor)

    return step


def managed_calls(system: System, tensor: torch.Tensor) -> Step:
    """The manager's three calls of a step."""
    manager = system.manager

    def step() -> None:
        tensor.fill_(1.0)
        manager.start_quorum()
        manager.allreduce(tensor).wait()
        if not manager.should_commit():
            raise RuntimeError("a step was not committed: the measurement is void")

    return step


class Modes:
    """The modes of one worker, made for one workload."""

    def __init__(self, workload: str, rank: int, lighthouses: dict[str, str]) -> None:
        self._workload = workload
        self._rank = rank
        self.systems: list[System] = []
        self.steps: dict[str, Step] = {}
        for mode in ("plain", "plain_again"):
            self.steps[mode] = self._plain()
        for mode, address in lighthouses.items():
            self.steps[mode] = self._managed(mode, address)

    def _plain(self) -> Step:
        if self._workload not in WIDTHS:
            return plain_calls(torch.ones(16))
        module = mlp(WIDTHS[self._workload])
        model = nn.parallel.DistributedDataParallel(module)
        return train_step(model, sgd(module), *self._batch())

    def _managed(self, mode: str, address: str) -> Step:
        module = mlp(WIDTHS.get(self._workload, [4, 4]))
        optimizer = sgd(module)
        member = Membership(f"replica_{self._rank}", address, min_replicas=2)
        if mode == "torchft_plus":
            system = torchft_plus_system(member, module)
        else:
            tuning = TorchftTuning(use_async_quorum=mode == "torchft async")
            system = torchft_system(member, module.state_dict, module.load_state_dict, tuning)
        self.systems.append(system)
        if self._workload not in WIDTHS:
            return managed_calls(system, torch.ones(16))
        model, wrapped = system.wrap(module, optimizer)
        return train_step(model, wrapped, *self._batch())

    def _batch(self) -> tuple[torch.Tensor, torch.Tensor]:
        widths = WIDTHS[self._workload]
        generator = torch.Generator().manual_seed(1 + self._rank)
        return (
            torch.randn(BATCH, widths[0], generator=generator),
            torch.randn(BATCH, widths[-1], generator=generator),
        )


def run_block(step: Step, count: int) -> dict[str, float]:
    """Mean wall time, CPU time (all threads) and page faults of ``count`` steps, after one that is not counted."""
    step()
    wall, cpu, faults = time.perf_counter(), time.process_time(), page_faults()
    for _ in range(count):
        step()
    wall, cpu, faults = time.perf_counter() - wall, time.process_time() - cpu, page_faults() - faults
    return {"wall_ms": 1000 * wall / count, "cpu_ms": 1000 * cpu / count, "faults": faults / count}


def page_faults() -> int:
    """Pages that the kernel had to give this process so far."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_minflt


def main() -> None:
    """Set up as the first command says, then run blocks until the channel closes."""
    channel = Channel()
    options = channel.receive()
    assert options is not None
    torch.set_num_threads(1)
    rank, port = options["rank"], options["store_port"]
    store = open_store(rank, port)
    if rank == 0:
        channel.send(store_port=store.port)
    dist.init_process_group("gloo", store=store, rank=rank, world_size=2, timeout=DEADLINE)
    modes = Modes(options["workload"], rank, options["lighthouses"])
    channel.send(ready=True)
    gc.collect()
    while (command := channel.receive()) is not None:
        channel.send(**run_block(modes.steps[command["mode"]], command["steps"]))
    # The peer may be gone already, and nobody needs a farewell: what is left must not hold up the bench.
    os._exit(0)


def open_store(rank: int, port: int) -> TCPStore:
    """Rank 0 opens the store on a port of its own choice, the other connects to it."""
    return TCPStore("127.0.0.1", port, is_master=rank == 0, wait_for_workers=False, timeout=DEADLINE)


if __name__ == "__main__":
    main()
