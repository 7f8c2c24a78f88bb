"""A training script as people write them for torchft 0.2.0: it knows nothing of torchft_plus.

``SCRIPT_STOP``: a file with the number of the last step, which appears some time.
"""

import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn, optim
from torchft import DistributedDataParallel, DistributedSampler, Manager, Optimizer, ProcessGroupGloo
from torchft.checkpointing.http_transport import HTTPTransport

GROUP = int(os.environ["REPLICA_GROUP_ID"])
RANK, RANKS = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
STOP = Path(os.environ["SCRIPT_STOP"])


class Numbers(torch.utils.data.Dataset):
    def __len__(self):
        return 1024

    def __getitem__(self, index):
        inputs = torch.randn(16, generator=torch.Generator().manual_seed(index))
        return inputs, inputs.sum().reshape(1)


def main():
    torch.set_num_threads(1)
    numbers = Numbers()
    sampler = DistributedSampler(
        numbers, replica_rank=GROUP, num_replica_groups=2, group_rank=RANK, num_replicas=RANKS, shuffle=True
    )
    loader = torch.utils.data.DataLoader(numbers, batch_size=8, sampler=sampler)

    def load_state_dict(state_dict):
        model.load_state_dict(state_dict["model"])
        optimizer.load_state_dict(state_dict["optim"])

    def state_dict():
        return {"model": model.state_dict(), "optim": optimizer.state_dict()}

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=5)),
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"script_{GROUP}",
        timeout=timedelta(seconds=20),
        checkpoint_transport=HTTPTransport(timeout=timedelta(seconds=10), num_chunks=0),
    )
    torch.manual_seed(os.getpid())  # every life starts elsewhere: what is equal at the end was sent
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    model = DistributedDataParallel(manager, model)
    optimizer = Optimizer(manager, optim.AdamW(model.parameters()))

    while True:
        for inputs, targets in loader:
            optimizer.zero_grad()
            loss = (model(inputs) - targets).square().mean()
            loss.backward()
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            time.sleep(0.02)
            if STOP.exists() and manager.current_step() >= int(STOP.read_text()):
                digest = hashlib.sha256()
                for value in model.state_dict().values():
                    digest.update(value.numpy().tobytes())
                print(
                    f"result {RANK} {manager.current_step()} {digest.hexdigest()} {manager.batches_committed()}"
                )
                manager.shutdown()
                return


if __name__ == "__main__":
    main()
