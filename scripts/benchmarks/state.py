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
    "steps: time between commits of the two groups that train, until the third one takes part, from its first step on;"
    " throttled: the donors' sockets send so fast that the download takes about 20 steps (kernel pacing). Where three"
    " groups share fewer cores, their steps are longer than those of two also when nobody fetches: *three groups*, 60 steps"
    " after all are level, tells that from the download.",
    "steps: one step of each join copies what readers still need, with the change of the quorum before it. With more than 20"
    " steps meanwhile that is less than one in twenty, so the p95 hardly sees it: look at the worst step, too.",
]
