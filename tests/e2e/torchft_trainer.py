"""One replica group of torchft (its wheel, not ours) on CPU: a line an attempt at a step, as JSON on standard output.

    torchft_trainer.py NAME STEPS LIGHTHOUSE

Ends when ``STEPS`` are committed. ``crc``: CRC-32 of the parameters, after a commit.
"""

from __future__ import annotations

import importlib
import json
import sys
import time
import zlib
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import TCPStore

STEP_S = 0.03


def main() -> None:
    name, steps, lighthouse = sys.argv[1], int(sys.argv[2]), sys.argv[3]
    torchft: Any = importlib.import_module("torchft")
    torch.set_num_threads(1)
    torch.manual_seed(zlib.crc32(name.encode()))
    model = nn.Sequential(nn.Linear(16, 32), nn.ReLU(), nn.Linear(32, 4))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)

    def load(state: dict[str, Any]) -> None:
        model.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])

    manager = torchft.Manager(
        pg=torchft.ProcessGroupGloo(timeout=timedelta(seconds=5)),
        load_state_dict=load,
        state_dict=lambda: {"model": model.state_dict(), "optimizer": optimizer.state_dict()},
        min_replica_size=2,
        replica_id=name,
        lighthouse_addr=lighthouse,
        store_addr="127.0.0.1",
        store_port=store.port,
        rank=0,
        world_size=1,
        hostname="127.0.0.1",
        timeout=timedelta(seconds=30),
    )
    while manager.current_step() < steps:
        manager.start_quorum()
        optimizer.zero_grad()
        model(torch.randn(8, 16)).square().mean().backward()
        for parameter in model.parameters():
            manager.allreduce(parameter.grad).wait()
        time.sleep(STEP_S)
        committed = manager.should_commit()
        if committed:
            optimizer.step()
        crc = zlib.crc32(b"".join(p.detach().numpy().tobytes() for p in model.parameters()))
        line = {
            "time": time.monotonic(),
            "step": manager.current_step(),
            "committed": committed,
            "participants": manager.num_participants(),
            "crc": crc if committed else None,
        }
        print(json.dumps(line), flush=True)
    manager.shutdown(wait=False)


if __name__ == "__main__":
    main()
