"""``bench state``: transfer of the state of a replica group to one that joins, and what those who train feel of it."""

from __future__ import annotations

from typing import Any

from benchmarks import state_faults, state_steps, state_transfer

PARTS = ("transfer", "steps", "faults")


def measure(options: Any, torchft_python: str | None) -> dict[str, Any]:
    """Measure the chosen parts. Returns what the report needs."""
    result: dict[str, Any] = {}
    if "transfer" in options.parts:
        result["transfer"] = state_transfer.measure(options, torchft_python)
    if "steps" in options.parts:
        result["steps"] = state_steps.measure(options, torchft_python)
    if "faults" in options.parts:
        result["faults"] = state_faults.measure(options)
    return result


def tables(result: dict[str, Any]) -> list[tuple[str, list[str], list[list[str]]]]:
    """The result as (title, header, rows)."""
    makers = {"transfer": state_transfer.table, "steps": state_steps.table, "faults": state_faults.table}
    return [makers[part](result[part]) for part in PARTS if part in result]


def failures(result: dict[str, Any]) -> list[str]:
    """What must never happen, whatever the machine does meanwhile."""
    said = [
        f"steps: {entry['system']}: {entry['steps_that_differ']} steps differ between groups"
        for entry in result.get("steps", [])
        if entry["steps_that_differ"]
    ]
    return said + (state_faults.failures(result["faults"]) if "faults" in result else [])


NOTES = [
    "transfer: between two processes over loopback, until the state is complete in the receiver's own, warm tensors;"
    " torchft's HTTPTransport cannot do that: the time of its copy into them is not counted.",
    "ours has checksums on both sides (xxh3); torchft and the raw copy have none.",
    "what a transport allocates is memory that the process did not have yet, as in a process that joins.",
    "CPU s/GB: donor and receiver together; it says more than GB/s when others use the machine.",
    "memory: how far the resident memory rose above what it was before the transfer, as a multiple of the state.",
    "steps: of the two groups that train, each step of which a part lies between the moment when the third one asks to be let"
    " in and its first commit as one of three; throttled: the donors' sockets send so fast that the download takes about 20"
    " steps (kernel pacing). *two groups* and *three groups* are 30 steps before that, and 30 after all are level. Where groups"
    " share few cores, three of them take longer than two also when nobody fetches.",
    "steps, compute: *cpu* is a model that computes on the cores that all groups share (and 30 ms of wait). *device* is an"
    " emulation of a device of each group's own: a wait of 100 ms, which takes no CPU, stands for its computing. Gradients (of"
    " one row), reduction, vote, optimizer, download, copies and catch-up are real, and on the shared cores.",
    "steps: one step of each join has the change of the quorum, and copies what readers still need. With more than 20 steps"
    " meanwhile that is less than one in twenty, so the p95 hardly sees it: look at the worst step, too.",
]
