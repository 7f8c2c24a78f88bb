"""One replica group of ``bench convergence``: a small transformer on made-up text, by DiLoCo or by a step at a time.

A line for each commit: ``batches`` that all groups have committed, ``contributors``; ``loss`` on held-out text of the parameters
that all groups share, where it was due and this group is the one to find it; ``refused``: inner steps that this process has lost.
"""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import torch
from torch import nn
from torch.nn import functional

from benchmarks.channel import Channel
from benchmarks.recovery_worker import end_with
from torchft_plus import Manager, ProcessGroupGloo
from torchft_plus.reduce.reducer import GradientReducer
from torchft_plus.semi_sync.fragment import Fragment
from torchft_plus.semi_sync.outer_loop import OuterLoop
from torchft_plus.semi_sync.schedule import Schedule
from torchft_plus.titan.assets import documents

VOCABULARY = 128
"""Bytes of ASCII text."""
WIDTH, HEADS, LAYERS, LENGTH, BATCH = 48, 4, 2, 64, 8
LEARNING_RATE, OUTER_RATE, MOMENTUM, WARMUP = 3e-3, 0.7, 0.9, 0.03
TEXTS, HELD_OUT = 1500, 64


class Block(nn.Module):
    """One layer."""

    def __init__(self) -> None:
        super().__init__()
        self.before, self.middle = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.mix, self.out = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH)
        self.up, self.down = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """(batch, length, width) to the same."""
        parts = self.mix(self.before(x)).unflatten(-1, (3, HEADS, -1)).permute(2, 0, 3, 1, 4)
        mixed = functional.scaled_dot_product_attention(parts[0], parts[1], parts[2], is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).flatten(-2))
        return x + self.down(functional.gelu(self.up(self.middle(x))))


class Transformer(nn.Module):
    """Bytes in, the next byte out."""

    def __init__(self) -> None:
        super().__init__()
        self.bytes, self.places = nn.Embedding(VOCABULARY, WIDTH), nn.Embedding(LENGTH, WIDTH)
        self.layers = nn.ModuleList(Block() for _ in range(LAYERS))
        self.norm, self.head = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, VOCABULARY)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Mean loss of (batch, length + 1) tokens."""
        inputs, targets = tokens[:, :-1], tokens[:, 1:]
        x = self.bytes(inputs) + self.places.weight
        for layer in self.layers:
            x = layer(x)
        return functional.cross_entropy(self.head(self.norm(x)).flatten(0, 1), targets.flatten())


def text(seed: int) -> torch.Tensor:
    """A long text as bytes."""
    return torch.tensor(list(" ".join(documents(seed, TEXTS)).encode("ascii")), dtype=torch.int64)


def batch(source: torch.Tensor, key: tuple[int, ...], size: int) -> torch.Tensor:
    """``size`` pieces of the text, always the same for the same key."""
    chance = random.Random(str(key))
    starts = [chance.randrange(len(source) - LENGTH - 1) for _ in range(size)]
    return torch.stack([source[start : start + LENGTH + 1] for start in starts])


class Group:
    """This process: model, data, and what it tells the bench."""

    def __init__(self, channel: Channel, options: dict[str, Any]) -> None:
        self.channel, self.options = channel, options
        torch.manual_seed(options["seed"])
        self.model = Transformer()
        self.inner = torch.optim.AdamW(self.model.parameters(), lr=LEARNING_RATE)
        self.text = text(2 * options["seed"] + 1)
        self.held_out = batch(text(0), (0,), HELD_OUT)
        self.name = str(options["share"])
        self.manager = Manager(
            ProcessGroupGloo(),
            rank=0,
            world_size=1,
            lighthouse_addr=options["lighthouse"],
            replica_id=f"replica_{self.name}",
            job_id="bench",
        )
        self.position = 0
        self.refused = 0

    @property
    def committed(self) -> int:
        """Batches that all groups have committed."""
        return sum(self.manager.positions.values())

    def train_batch(self) -> None:
        """Forward and backward of the next batch, and the time that it would take elsewhere."""
        began = time.monotonic()
        fraction = self.committed / self.options["budget"]
        for group in self.inner.param_groups:
            group["lr"] = LEARNING_RATE * min(1.0, (fraction + 1e-3) / WARMUP) * max(0.05, 1.0 - fraction)
        self.inner.zero_grad()
        key = (self.options["seed"], self.options["share"], self.position)
        self.model(batch(self.text, key, BATCH)).backward()
        self.position += 1
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        time.sleep(max(0.0, self.options["step_s"] - (time.monotonic() - began)))

    def tell(self, before: int, contributors: int) -> None:
        """A commit."""
        after, every = self.committed, self.options["validate_every"]
        line: dict[str, Any] = {"batches": after, "contributors": contributors, "refused": self.refused}
        due = after // every > before // every or after >= self.options["budget"]
        if due and self.manager.participating_rank() == 0:
            with torch.no_grad():
                line["loss"] = float(self.model(self.held_out))
        self.channel.send(**line)

    def run_steps(self) -> None:
        """Gradients are averaged in each step."""
        manager = self.manager
        manager.state.register_module("model", self.model)
        manager.state.register_optimizer("optimizer", self.inner)
        manager.attach(GradientReducer(list(self.model.named_parameters())))
        level = False
        while self.committed < self.options["budget"]:
            plan = manager.start_step()
            before = self.committed
            if not plan.behind:
                self.position = manager.positions.get(self.name, 0)
                self.train_batch()
            outcome = manager.finish_step(positions={} if plan.behind else {self.name: self.position})
            if outcome.refused:
                self.refused += level
                level = False
                continue
            if outcome.applied:
                manager.record_or_step([self.inner], self.inner.step)
            level = level or outcome.contributed
            if not plan.behind:
                self.tell(before, outcome.contributors)

    def run_windows(self) -> None:
        """DiLoCo."""
        manager = self.manager
        named = list(self.model.named_parameters())
        outer = torch.optim.SGD([p for _, p in named], lr=OUTER_RATE, momentum=MOMENTUM, nesterov=True)
        window = self.options["sync_every"]
        loop = OuterLoop(manager, [Fragment(named, outer)], Schedule(window))
        loop.open()
        self.position = manager.positions.get(self.name, 0)
        while self.committed < self.options["budget"]:
            before = self.committed
            partial = loop.joined
            self.train_batch()
            self.inner.step()
            outcome = loop.inner_step_done(positions={self.name: self.position})
            if outcome is None:
                continue
            if outcome.refused or not outcome.contributed:
                self.refused += 0 if partial else window
                self.position = manager.positions.get(self.name, 0)
            if not outcome.refused:
                self.tell(before, outcome.contributors)


def main() -> None:
    """Train until the budget is used, or the channel closes."""
    channel = Channel()
    options = channel.receive()
    assert options is not None
    threading.Thread(target=end_with, args=(channel,), daemon=True).start()
    torch.set_num_threads(1)
    group = Group(channel, options)
    if options["sync_every"] > 1:
        group.run_windows()
    else:
        group.run_steps()
    group.manager.shutdown()
    channel.send(ended=True, refused=group.refused)
    threading.Event().wait()  # the bench closes the channel


if __name__ == "__main__":
    main()
