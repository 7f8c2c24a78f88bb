"""``bench compression``: what a sync of gradients costs on the wire in fp32, bf16, int8 and fp8, and how much each errs."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from datetime import timedelta
from pathlib import Path
from typing import Any

from torch.distributed import TCPStore  # pyright: ignore[reportPrivateImportUsage]

from benchmarks.children import ROOT, Worker, environment
from benchmarks.figures import summarize

MODES = ["fp32", "bf16", "int8", "fp8"]
SIZES = [2, 4]
DEADLINE_S = 300.0
MEBI = 1024 * 1024


def measure(options: Any, torchft_python: str | None) -> dict[str, Any]:
    """Measure the chosen modes with each number of groups. Returns what the report needs."""
    del torchft_python
    return {
        "groups": {str(size): _measure(options, size) for size in options.sizes},
        "modes": options.modes,
        "rounds": options.rounds,
        "width": options.width,
        "layers": options.layers,
    }


def _measure(options: Any, size: int) -> list[dict[str, Any]]:
    folder = Path(options.scratch)
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
    with ExitStack() as stack:
        workers: list[Worker] = []
        for rank in range(size):
            name = f"compression-{size}-{rank}"
            command = [sys.executable, "-m", "benchmarks.compression_worker"]
            env = environment([ROOT, ROOT / "scripts"])
            workers.append(Worker(name, command, env, folder / f"{name}.log"))
            stack.callback(workers[-1].end)
        for rank, worker in enumerate(workers):
            worker.send(
                rank=rank,
                size=size,
                store_port=store.port,
                modes=options.modes,
                rounds=options.rounds,
                width=options.width,
                layers=options.layers,
            )
        return [worker.receive(DEADLINE_S) for worker in workers]


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """One table per number of groups."""
    made: list[tuple[str, list[str], list[list[str]]]] = []
    header = [
        "mode",
        "received MiB per group",
        "of fp32",
        "ms per sync",
        "p10..p90",
        "relative error",
        "largest error",
    ]
    for size, members in result["groups"].items():
        first = members[0]
        baseline = _bytes(members, result["modes"][0])
        rows: list[list[str]] = []
        for mode in result["modes"]:
            one = first[mode]
            received = _bytes(members, mode)
            times = summarize(
                [1000 * max(round_) for round_ in zip(*(m[mode]["seconds"] for m in members), strict=True)]
            )
            rows.append(
                [
                    mode,
                    f"{received / MEBI:.2f}",
                    f"{received / baseline:.3f}",
                    f"{times.median:.1f}",
                    f"{times.p10:.1f}..{times.p90:.1f}",
                    f"{one['relative_error']:.2e}",
                    f"{one['largest_error']:.2e}",
                ]
            )
        elements = first[result["modes"][0]]["elements"]
        made.append((f"{size} groups, {elements / 1e6:.1f} M gradients", header, rows))
    return made


def failures(result: dict[str, Any]) -> list[str]:
    """Members that do not hold the same bits."""
    return [
        f"{mode} with {size} groups: the members' results differ"
        for size, members in result["groups"].items()
        for mode in result["modes"]
        if len({member[mode]["digest"] for member in members}) > 1
    ]


def _bytes(members: list[dict[str, Any]], mode: str) -> float:
    """Received by each member in a sync, in the mean."""
    each = [count for member in members for count in member[mode]["received_bytes"]]
    return sum(each) / len(each)


NOTES = [
    "gradients of one batch of a small language model, another batch on each group; one thread a process, all on this machine.",
    "received: by the kernel on the connections of the lane (TCP_INFO), flags and gloo's own headers included.",
    "time: of the slowest group, from posting to averaged gradients; over loopback it is the CPU's, not the network's.",
    "relative error: norm of the error by norm of the exact average (fp64); largest: of all elements, by the largest magnitude.",
    "the results of all groups are compared bit for bit.",
]
