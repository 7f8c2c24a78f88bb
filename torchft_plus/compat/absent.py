"""Names of torchft that have no counterpart here, and what to do instead. docs/from-torchft.md has the same list."""

from __future__ import annotations

from typing import NoReturn

_OWN_SERVER = "each Manager has its server inside: pass lighthouse_addr and replica_id to Manager"
ABSENT = {
    "torchft_plus.coordination.ManagerClient": _OWN_SERVER,
    "torchft_plus.coordination.ManagerServer": _OWN_SERVER,
    "torchft_plus.process_group.ProcessGroupBaby": "take ProcessGroupGloo or ProcessGroupNCCL, whose lanes abort in milliseconds",
    "torchft_plus.process_group.ProcessGroupBabyXCCL": "there is no backend for XCCL: take ProcessGroupGloo",
    "torchft_plus.process_group.ProcessGroupXCCL": "there is no backend for XCCL: take ProcessGroupGloo",
    "torchft_plus.ProcessGroupBabyXCCL": "there is no backend for XCCL: take ProcessGroupGloo",
    "torchft_plus.ProcessGroupXCCL": "there is no backend for XCCL: take ProcessGroupGloo",
    "torchft_plus.process_group.trigger_nccl_fr_trace_through_pipe": "use torch's own flight recorder",
}


def absent(module: str, name: str) -> NoReturn:
    """For a module's ``__getattr__``: say what to do instead of ``name``, if it is torchft's.

    Raises:
        ImportError: it is one of torchft's names that has no counterpart.
        AttributeError: it is not known at all.
    """
    instead = ABSENT.get(f"{module}.{name}")
    if instead is not None:
        theirs = f"{module}.{name}".replace("torchft_plus", "torchft", 1)
        raise ImportError(f"{theirs} has no counterpart in torchft_plus: {instead} (docs/from-torchft.md)")
    raise AttributeError(f"module {module!r} has no attribute {name!r}")
