"""A plain PyTorch training loop that survives: the same few lines as with torchft, and nothing else.

torchft-plus run configs/plain_pytorch.toml
"""

from __future__ import annotations

import torch
from torch import nn

from torchft_plus import DistributedDataParallel, Manager, Optimizer, ProcessGroupGloo

STEPS = 2500


def batch(replica: int, step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This group's share of the data: a pure function of the step, so that a step can be taken again."""
    generator = torch.Generator().manual_seed(1_000 * step + replica)
    inputs = torch.randn(32, 16, generator=generator)
    return inputs, inputs.sum(dim=1, keepdim=True)


def main() -> None:
    torch.set_num_threads(1)
    torch.manual_seed(0)  # every group starts with the same parameters
    manager = Manager(ProcessGroupGloo(), min_replica_size=1, digest_every=1)
    model = nn.Sequential(nn.Linear(16, 256), nn.ReLU(), nn.Linear(256, 1))
    manager.state.register_module("model", model)  # what a group that comes back must receive
    replicated = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, torch.optim.AdamW(model.parameters(), lr=1e-3))
    replica = int(manager.replica_id().rpartition("_")[2])

    while manager.current_step() < STEPS:
        inputs, targets = batch(replica, manager.current_step())
        optimizer.zero_grad()  # starts the step
        loss = (replicated(inputs) - targets).square().mean()
        loss.backward()  # gradients are averaged with the other groups meanwhile
        optimizer.step()  # only if the quorum commits the step
    manager.shutdown()


if __name__ == "__main__":
    main()
