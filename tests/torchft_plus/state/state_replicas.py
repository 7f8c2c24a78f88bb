"""Small replicas for the tests of the state room."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, SequentialLR

from lighthouse.messages import Head
from torchft_plus.state import FetchReport, StateRegistry, StateServer, fetch_state
from torchft_plus.state.staging import Departure
from torchft_plus.state.version_memory import Piece

MakeOptimizer = Callable[[list[dict[str, object]]], Optimizer]

STALL_MS = 3_000


def adamw(groups: list[dict[str, object]]) -> Optimizer:
    """The optimizer where it does not matter which."""
    return torch.optim.AdamW(groups, lr=0.1)


class Net(nn.Module):
    """Matrices only where an optimizer wants it, else also vectors and a parameter that is not used in every
    step."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.first = nn.Linear(6, 8, bias=bias)
        self.second = nn.Linear(8, 4, bias=bias)
        self.sometimes = nn.Parameter(torch.randn(4, 3))
        self.register_buffer("seen", torch.zeros(3))
        self.register_buffer("transient", torch.zeros(3), persistent=False)

    def forward(self, x: torch.Tensor, use_all: bool) -> torch.Tensor:
        y = self.second(torch.tanh(self.first(x)))
        return y @ self.sometimes if use_all else y


@dataclass
class Replica:
    """A model in training with everything registered."""

    net: Net
    optimizer: Optimizer
    scheduler: torch.optim.lr_scheduler.LRScheduler
    registry: StateRegistry

    def groups(self) -> list[nn.Parameter]:
        return list(self.net.parameters())

    def backward(self, step: int) -> None:
        """Gradients of a batch that depends on ``step`` only, clipped as a user would."""
        self.optimizer.zero_grad()
        generator = torch.Generator().manual_seed(step)
        x = torch.randn(16, 6, generator=generator)
        self.net(x, use_all=step % 3 != 0).square().mean().backward()
        self.clip()

    def take_gradients(self, other: Replica) -> None:
        """What a reduction would leave in ``.grad`` of both."""
        for own, theirs in zip(self.net.parameters(), other.net.parameters(), strict=True):
            own.grad = None if theirs.grad is None else theirs.grad.clone()

    def clip(self) -> None:
        nn.utils.clip_grad_norm_(self.net.parameters(), 0.05)

    def step(self) -> None:
        self.optimizer.step()
        self.scheduler.step()

    def train(self, first: int, last: int) -> None:
        """Steps ``first`` to ``last`` inclusive."""
        for step in range(first, last + 1):
            self.backward(step)
            self.step()


def make_replica(seed: int, make_optimizer: MakeOptimizer = adamw, bias: bool = True) -> Replica:
    """A replica whose weights depend on ``seed``: two parameter groups, warm-up and cosine schedule."""
    torch.manual_seed(seed)
    net = Net(bias)
    rest = [parameter for name, parameter in net.named_parameters() if not name.startswith("first")]
    optimizer = make_optimizer(
        [{"params": list(net.first.parameters()), "weight_decay": 0.01}, {"params": rest}]
    )
    if not isinstance(optimizer.param_groups[0]["lr"], torch.Tensor):
        optimizer.param_groups[1]["lr"] *= 0.5
    scheduler = SequentialLR(
        optimizer, [LinearLR(optimizer, 0.1, total_iters=4), CosineAnnealingLR(optimizer, 30)], milestones=[4]
    )
    registry = StateRegistry()
    registry.register_module("model", net)
    registry.register_optimizer("optimizer", optimizer)
    registry.register_values("scheduler", scheduler.state_dict, scheduler.load_state_dict)
    return Replica(net, optimizer, scheduler, registry)


def head_at(step: int) -> Head:
    """Some head of ``step``."""
    return Head(step, 77)


def serve(server: StateServer, head: Head, readers: int = 1) -> None:
    """A donor's training thread at the boundary of ``head``, with a reader expected."""
    server.pin(head, readers)
    server.publish(head)


def fetch(registry: StateRegistry, head: Head, *donors: str, **options: object) -> FetchReport:
    """``fetch_state`` with the deadlines of tests."""
    return fetch_state(registry, head, donors, **{"transfer_stall_ms": STALL_MS, **options})  # type: ignore[arg-type]


def apply(registry: StateRegistry, report: FetchReport) -> None:
    """Apply a fetched version at its own head."""
    registry.apply_values(report.plan.manifest.values)
    registry.apply_tensors(report.plan)


def bytes_of_piece(piece: Piece) -> bytes:
    """What a reader of ``piece`` gets."""
    return b"".join(bytes(view) for view in Departure().memory(piece.spans, piece.written))


class InBackground:
    """Runs a call on a thread; ``result`` waits for it and gives what it returned or raised."""

    def __init__(self, call: Callable[[], object]) -> None:
        self._call = call
        self._value: object = None
        self._error: BaseException | None = None
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        try:
            self._value = self._call()
        except BaseException as error:  # noqa: BLE001 - raised by result()
            self._error = error

    @property
    def running(self) -> bool:
        return self._thread.is_alive()

    def result(self, timeout: float = 30.0) -> object:
        self._thread.join(timeout)
        assert not self._thread.is_alive(), "the call did not end"
        if self._error is not None:
            raise self._error
        return self._value
