"""The systems side by side: plain torch, torchft and torchft_plus, behind the calls that they share.

torchft and torchft_plus are imported when asked for: each worker runs in an environment that has one of them.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from itertools import pairwise
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

LEARNING_RATE = 1e-3


def import_system(name: str) -> None:
    """Import what a system's manager needs; both packages import most of themselves only when it is asked for."""
    package = importlib.import_module(name)
    for part in ("Manager", "ProcessGroupGloo", "DistributedDataParallel", "Optimizer"):
        getattr(package, part)


@dataclass(frozen=True, slots=True)
class System:
    """One replica group of one rank: its manager and the classes that go with it."""

    manager: Any
    ddp: Callable[[Any, nn.Module], nn.Module]
    optimizer: Callable[[Any, torch.optim.Optimizer], Any]

    def wrap(self, module: nn.Module, optimizer: torch.optim.Optimizer) -> tuple[nn.Module, Any]:
        """Module and optimizer as the system's documentation says to wrap them."""
        return self.ddp(self.manager, module), self.optimizer(self.manager, optimizer)


@dataclass(frozen=True, slots=True)
class Membership:
    """What a manager must know to meet the others."""

    replica_id: str
    lighthouse: str
    """host:port"""
    min_replicas: int
    job_id: str = "bench"


def torchft_plus_manager(member: Membership) -> Any:
    """This repository's manager, at its defaults."""
    plus = importlib.import_module("torchft_plus")
    return plus.Manager(
        pg=plus.ProcessGroupGloo(),
        min_replica_size=member.min_replicas,
        rank=0,
        world_size=1,
        lighthouse_addr=member.lighthouse,
        replica_id=member.replica_id,
        job_id=member.job_id,
    )


def torchft_plus_system(member: Membership, module: nn.Module) -> System:
    """This repository, at its defaults; ``module`` is what a replica that joins is healed with, and its optimizer."""
    plus = importlib.import_module("torchft_plus")
    manager = torchft_plus_manager(member)
    manager.state.register_module("model", module)
    return System(manager, plus.DistributedDataParallel, plus.Optimizer)


@dataclass(frozen=True, slots=True)
class TorchftTuning:
    """torchft's arguments; the defaults are torchft's own."""

    use_async_quorum: bool = True
    process_group_timeout_s: float = 60.0
    timeout_s: float = 60.0
    quorum_timeout_s: float = 60.0
    heartbeat_interval_ms: int = 100


def torchft_system(
    member: Membership, state: Callable[[], Any], load: Callable[[Any], Any], tuning: TorchftTuning
) -> System:
    """torchft; ``state`` and ``load`` are what a replica that joins is healed with."""
    torchft = importlib.import_module("torchft")
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=tuning.process_group_timeout_s)),
        load_state_dict=load,
        state_dict=state,
        min_replica_size=member.min_replicas,
        use_async_quorum=tuning.use_async_quorum,
        timeout=timedelta(seconds=tuning.timeout_s),
        quorum_timeout=timedelta(seconds=tuning.quorum_timeout_s),
        heartbeat_interval=timedelta(milliseconds=tuning.heartbeat_interval_ms),
        rank=0,
        world_size=1,
        store_addr="127.0.0.1",
        store_port=store.port,
        lighthouse_addr=f"http://{member.lighthouse}",
        replica_id=member.replica_id,
        hostname="127.0.0.1",
    )
    manager.bench_store = store  # lives as long as the manager
    return System(manager, torchft.DistributedDataParallel, torchft.Optimizer)


def mlp(widths: list[int], seed: int = 0) -> nn.Sequential:
    """Linear layers with ReLU between them, the same weights in every process."""
    generator = torch.Generator().manual_seed(seed)
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(widths):
        linear = nn.Linear(fan_in, fan_out)
        with torch.no_grad():
            linear.weight.normal_(0.0, fan_in**-0.5, generator=generator)
            linear.bias.zero_()
        layers += [linear, nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def sgd(module: nn.Module) -> torch.optim.SGD:
    """Plain SGD: an optimizer that costs as little as can be hides nothing."""
    return torch.optim.SGD(module.parameters(), lr=LEARNING_RATE)


def adamw(module: nn.Module) -> torch.optim.AdamW:
    """With a state of twice the parameters."""
    return torch.optim.AdamW(module.parameters(), lr=LEARNING_RATE)
