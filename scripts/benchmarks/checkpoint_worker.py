"""One rank of row *checkpoint-restart* of ``bench goodput``: plain DDP under torchrun, which goes on from the last checkpoint.

A rank's stdin and stdout are torchrun's, and so shared by all ranks and all their restarts: options come as an argument, and
the end of stdin ends everybody. First a line with ``ready`` and the step that it goes on from, then one a step.

Rank 0 copies the state each ``checkpoint_every`` steps, and writes the copy from a thread of its own while training goes on;
if the last one is still being written then, it waits for that.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from pathlib import Path
from typing import Any

import torch
from torch import distributed, nn
from torch.nn.parallel import DistributedDataParallel

from benchmarks.channel import Channel
from benchmarks.recovery_worker import checksum, end_with, made_up, model_of
from benchmarks.workload import Workload

State = dict[str, Any]


class Checkpoint:
    """The file with the last state.

    Args:
        path: of the file; a new one replaces it as a whole.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._writer: threading.Thread | None = None

    def load(self) -> State | None:
        """The last state; None before the first."""
        if not self._path.exists():
            return None
        return torch.load(self._path, weights_only=True)

    def save(self, state: State) -> None:
        """Copy ``state`` and have it written."""
        if self._writer is not None:
            self._writer.join()
        copy = _copied(state)
        self._writer = threading.Thread(target=self._write, args=(copy,), name="checkpoint", daemon=True)
        self._writer.start()

    def _write(self, state: State) -> None:
        partial = self._path.with_suffix(".partial")
        torch.save(state, partial)
        os.replace(partial, self._path)


def _copied(value: Any) -> Any:
    if isinstance(value, torch.Tensor):
        return value.clone()
    if isinstance(value, dict):
        return {key: _copied(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_copied(one) for one in value]
    return value


def main() -> None:
    """Train until stdin ends."""
    options = json.loads(sys.argv[1])
    channel = Channel()
    threading.Thread(target=end_with, args=(channel,), daemon=True).start()
    torch.set_num_threads(1)
    workload = Workload(**options["workload"])
    module, optimizer = model_of(workload)
    checkpoint = Checkpoint(Path(options["checkpoint"]))
    state = checkpoint.load()
    step = 0
    if state is not None:
        module.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        step = state["step"]
    rank = int(os.environ["RANK"])
    channel.send(rank=rank, pid=os.getpid(), ready=time.monotonic(), step=step)
    distributed.init_process_group("gloo")
    train(channel, module, optimizer, checkpoint, workload, step, options["checkpoint_every"])


def train(
    channel: Channel,
    module: nn.Module,
    optimizer: torch.optim.Optimizer,
    checkpoint: Checkpoint,
    workload: Workload,
    step: int,
    checkpoint_every: int,
) -> None:
    """The loop; ``step`` steps are done."""
    model = DistributedDataParallel(module)
    rank, size = distributed.get_rank(), distributed.get_world_size()
    torch.manual_seed(os.getpid())
    while True:
        inputs, targets = made_up(workload)
        optimizer.zero_grad()
        loss = nn.functional.mse_loss(model(inputs), targets)
        time.sleep(workload.device_time_s)
        loss.backward()
        optimizer.step()
        step += 1
        if rank == 0 and step % checkpoint_every == 0:
            checkpoint.save({"model": module.state_dict(), "optimizer": optimizer.state_dict(), "step": step})
        due = step % workload.digest_every == 0
        channel.send(
            rank=rank,
            time=time.monotonic(),
            step=step,
            committed=True,
            participants=size,
            crc=checksum(module) if due else None,
        )


if __name__ == "__main__":
    main()
