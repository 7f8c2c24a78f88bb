"""One member of ``bench compression``: averages the same gradients through each codec, and says bytes, times and errors."""

from __future__ import annotations

import hashlib
import socket
import struct
import threading
import time
from collections.abc import Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import nn
from torch.distributed import PrefixStore, TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.channel import Channel
from torchft_plus.process_group.gloo import GlooBackend, GlooLane
from torchft_plus.process_group.lane import LaneSpec, Operation
from torchft_plus.reduce.codec import codec
from torchft_plus.reduce.reducer import GradientReducer

DEADLINE = timedelta(seconds=60)
_BYTES_RECEIVED = struct.Struct("=Q")
_BYTES_RECEIVED_AT = 128
"""tcpi_bytes_received in Linux's struct tcp_info."""
_VOCABULARY = 512


def gradients(
    rank: int, width: int, layers: int
) -> tuple[list[tuple[str, nn.Parameter]], list[torch.Tensor]]:
    """A small language model of the same seed on every member, and this member's gradients of one batch."""
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(width, 8, 4 * width, dropout=0.0, batch_first=True, norm_first=True)
    embedding = nn.Embedding(_VOCABULARY, width)
    body = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
    head = nn.Linear(width, _VOCABULARY)
    model = nn.ModuleDict({"embedding": embedding, "body": body, "head": head})
    generator = torch.Generator().manual_seed(1 + rank)
    tokens = torch.randint(_VOCABULARY, (4, 33), generator=generator)
    logits = head(body(embedding(tokens[:, :-1])))
    nn.functional.cross_entropy(logits.flatten(0, 1), tokens[:, 1:].flatten()).backward()
    named = list(model.named_parameters())
    return named, [torch.zeros_like(p) if p.grad is None else p.grad.clone() for _, p in named]


def bytes_received(lane: GlooLane) -> int:
    """What the kernel has received on the lane's connections."""
    total = 0
    for connection in lane._group.sockets._connections:  # pyright: ignore[reportPrivateUsage]
        info = connection.socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
        total += _BYTES_RECEIVED.unpack_from(info, _BYTES_RECEIVED_AT)[0]
    return total


def wait_ended(operations: Sequence[Operation]) -> None:
    """Block until all have ended.

    Raises:
        RuntimeError: one failed.
    """
    for operation in operations:
        over = threading.Event()
        operation.add_done_callback(over.set)
        over.wait()
        if operation.error is not None:
            raise RuntimeError(str(operation.error))


def run(setup: dict[str, Any]) -> dict[str, Any]:
    """All modes, each with a lane of its own."""
    rank, size = setup["rank"], setup["size"]
    store = TCPStore("127.0.0.1", setup["store_port"], is_master=False, timeout=DEADLINE)
    named, local = gradients(rank, setup["width"], setup["layers"])
    exact = _exact_average(size, setup, local, rank)
    answer: dict[str, Any] = {}
    for number, mode in enumerate(setup["modes"]):
        spec = LaneSpec(PrefixStore(mode, store), rank, size, number, 60_000)
        lane = GlooBackend("127.0.0.1").create(spec)
        assert isinstance(lane, GlooLane)
        answer[mode] = _measure(lane, mode, named, local, exact, setup["rounds"])
        lane.retire()
    answer["torch"] = torch.__version__
    return answer


def _exact_average(size: int, setup: dict[str, Any], local: list[torch.Tensor], rank: int) -> torch.Tensor:
    total = torch.zeros(sum(gradient.numel() for gradient in local), dtype=torch.float64)
    for peer in range(size):
        theirs = local if peer == rank else gradients(peer, setup["width"], setup["layers"])[1]
        total += torch.cat([gradient.flatten() for gradient in theirs])
    return total / size


def _measure(
    lane: GlooLane,
    mode: str,
    named: list[tuple[str, nn.Parameter]],
    local: list[torch.Tensor],
    exact: torch.Tensor,
    rounds: int,
) -> dict[str, Any]:
    reducer = GradientReducer(named, codec=None if mode == "fp32" else codec(mode))
    times: list[float] = []
    received: list[int] = []
    for _ in range(rounds + 1):  # the first one makes the staging
        for (_, parameter), gradient in zip(named, local, strict=True):
            parameter.grad = gradient.clone()
        reducer.begin(lane, 1.0)
        wait_ended([lane.allreduce(torch.zeros(1))])  # all begin together
        before, started = bytes_received(lane), time.perf_counter()
        wait_ended(reducer.post(lane).operations)
        reducer.write_back(float(lane.spec.world_size))
        times.append(time.perf_counter() - started)
        received.append(bytes_received(lane) - before)
    result = torch.cat([parameter.grad.flatten() for _, parameter in named if parameter.grad is not None])
    error = result.double() - exact
    return {
        "seconds": times[1:],
        "received_bytes": received[1:],
        "relative_error": float(error.norm() / exact.norm()),
        "largest_error": float(error.abs().max() / exact.abs().max()),
        "digest": hashlib.sha256(result.numpy().tobytes()).hexdigest(),
        "elements": result.numel(),
    }


def main() -> None:
    """Answer one command after the other."""
    channel = Channel()
    torch.set_num_threads(1)
    while (setup := channel.receive()) is not None:
        channel.send(**run(setup))


if __name__ == "__main__":
    main()
