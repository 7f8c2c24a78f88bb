"""Models and backwards in which the order, the number or the presence of gradients is unusual."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

Backward = Callable[[nn.Module, int, int], None]
"""(model, rank, step) -> all backwards of one step."""


class Net(nn.Module):
    """A few layers of uneven size; ``skip`` names layers that a forward leaves out, ``order`` how it goes through."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(16, 16) for _ in range(6)])
        self.head = nn.Linear(16, 4)

    def forward(self, x: torch.Tensor, order: tuple[int, ...] = (0, 1, 2, 3, 4, 5)) -> torch.Tensor:
        for index in order:
            x = torch.tanh(self.layers[index](x))
        return self.head(x)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(8, 8)
        self.second = nn.Linear(8, 8)
        self.second.weight = self.first.weight

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.tanh(self.first(x)))


def data(rank: int, step: int, part: int = 0, width: int = 16) -> torch.Tensor:
    generator = torch.Generator().manual_seed(1000 * step + 10 * rank + part)
    return torch.randn(5, width, generator=generator)


def _plain(model: nn.Module, rank: int, step: int) -> None:
    model(data(rank, step)).square().sum().backward()


def _accumulate(model: nn.Module, rank: int, step: int) -> None:
    for part in range(2):
        model(data(rank, step, part)).square().sum().backward()


def _retain_graph(model: nn.Module, rank: int, step: int) -> None:
    loss = model(data(rank, step)).square().sum()
    loss.backward(retain_graph=True)
    loss.backward()


def _unused(model: nn.Module, rank: int, step: int) -> None:
    model(data(rank, step), (0, 1, 4, 5)).square().sum().backward()


def _used_by_one(model: nn.Module, rank: int, step: int) -> None:
    model(data(rank, step), (0, 1, 2) if rank == 0 else (0, 3)).square().sum().backward()


def _orders_differ(model: nn.Module, rank: int, step: int) -> None:
    order = (0, 1, 2, 3, 4, 5) if rank == 0 else (5, 3, 1, 4, 2, 0)
    model(data(rank, step), order).square().sum().backward()


def _mixture(model: nn.Module, rank: int, step: int) -> None:
    """Use and order change every step, as between experts."""
    generator = torch.Generator().manual_seed(77 * step + rank)
    order = torch.randperm(6, generator=generator)[: 2 + step % 3].tolist()
    model(data(rank, step), tuple(order)).square().sum().backward()


def _reentrant(model: nn.Module, rank: int, step: int) -> None:
    assert isinstance(model, Net)
    x = data(rank, step).requires_grad_()
    for layer in model.layers:
        x = torch.tanh(checkpoint(layer, x, use_reentrant=True))
    model.head(x).square().sum().backward()


def _chunked_loss(model: nn.Module, rank: int, step: int) -> None:
    """The head's backward runs in the forward, chunk by chunk (torchtitan 0.3)."""
    assert isinstance(model, Net)
    x = data(rank, step)
    for layer in model.layers:
        x = torch.tanh(layer(x))
    cut = x.detach().requires_grad_()
    for chunk in cut.chunk(2):
        model.head(chunk).square().sum().backward()
    x.backward(cut.grad)


def _sometimes_twice(model: nn.Module, rank: int, step: int) -> None:
    """A second backward that nobody announced, in step 2, on rank 1 only."""
    _plain(model, rank, step)
    if step == 2 and rank == 1:
        model(data(rank, step, 1)).square().sum().backward()


def _nothing_on_one(model: nn.Module, rank: int, step: int) -> None:
    if rank == 0 or step % 2 == 0:
        _plain(model, rank, step)


def _tied(model: nn.Module, rank: int, step: int) -> None:
    model(data(rank, step, width=8)).square().sum().backward()


def _compiled(model: nn.Module, rank: int, step: int) -> None:
    if not hasattr(model, "compiled"):
        model.compiled = [torch.compile(model, backend="aot_eager")]  # type: ignore[assignment]
    model.compiled[0](data(rank, step)).square().sum().backward()  # type: ignore[index, operator]


@dataclass(frozen=True)
class Case:
    backward: Backward
    model: type[nn.Module] = Net
    repeats: int = 0
    """Steps that had to be posted again."""
    overlaps: bool = True
    """From the second step on everything is posted when backward ends."""


CASES = {
    "plain": Case(_plain),
    "accumulate": Case(_accumulate),
    "retain_graph": Case(_retain_graph),
    "unused": Case(_unused),
    "used_by_one": Case(_used_by_one),
    "orders_differ": Case(_orders_differ),
    "mixture": Case(_mixture, repeats=-1, overlaps=False),
    "reentrant": Case(_reentrant),
    "chunked_loss": Case(_chunked_loss),
    "sometimes_twice": Case(_sometimes_twice, repeats=1, overlaps=False),
    "nothing_on_one": Case(_nothing_on_one, overlaps=False),
    "tied": Case(_tied, Tied),
    "compiled": Case(_compiled),
}
