"""DiLoCo as people write it for torchft 0.2.0; see train_ddp.py."""

import hashlib
import os
import time
from datetime import timedelta
from pathlib import Path

import torch
from torch import nn
from torchft import Manager, ProcessGroupGloo
from torchft.local_sgd import DiLoCo

GROUP = int(os.environ["REPLICA_GROUP_ID"])
STOP = Path(os.environ["SCRIPT_STOP"])


def main():
    torch.set_num_threads(1)

    def load_state_dict(state_dict):
        model.load_state_dict(state_dict["model"])
        inner_optimizer.load_state_dict(state_dict["inner_optim"])
        outer_optimizer.load_state_dict(state_dict["outer_optim"])

    def state_dict():
        return {
            "model": model.state_dict(),
            "inner_optim": inner_optimizer.state_dict(),
            "outer_optim": outer_optimizer.state_dict(),
        }

    manager = Manager(
        pg=ProcessGroupGloo(timeout=timedelta(seconds=10)),
        use_async_quorum=False,
        min_replica_size=1,
        load_state_dict=load_state_dict,
        state_dict=state_dict,
        replica_id=f"script_{GROUP}",
        timeout=timedelta(seconds=20),
    )
    torch.manual_seed(os.getpid())
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 1))
    inner_optimizer = torch.optim.AdamW(model.parameters(), lr=4e-4, weight_decay=0.1, betas=(0.9, 0.95))
    outer_optimizer = torch.optim.SGD(model.parameters(), lr=0.7, momentum=0.9, nesterov=True)

    with DiLoCo(
        manager,
        [model],
        inner_optimizer,
        outer_optimizer,
        backup_device=torch.device("cpu"),
        sync_every=10,
        should_quantize=False,
    ):
        generator = torch.Generator().manual_seed(GROUP)
        while True:
            inputs = torch.randn(8, 16, generator=generator)
            inner_optimizer.zero_grad()
            loss = (model(inputs) - inputs.sum(dim=1, keepdim=True)).square().mean()
            loss.backward()
            before = manager.current_step()
            inner_optimizer.step()
            time.sleep(0.01)
            synced = manager.current_step() > before
            if synced and STOP.exists() and manager.current_step() >= int(STOP.read_text()):
                digest = hashlib.sha256()
                for value in model.state_dict().values():
                    digest.update(value.numpy().tobytes())
                print(f"result 0 {manager.current_step()} {digest.hexdigest()} {manager.batches_committed()}")
                manager.shutdown()
                return


if __name__ == "__main__":
    main()
