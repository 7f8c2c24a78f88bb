"""Names of torchft that have no counterpart here, and what to do instead. docs/from-torchft.md has the same list."""

from __future__ import annotations

from functools import cache
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


@cache
def absent(module: str, name: str) -> type:
    """For a module's ``__getattr__``: what stands in for ``name``, if it is torchft's and has no counterpart.

    Scripts import such names for a branch that they do not take (torchft's own ``train_ddp.py``: XCCL): only who makes one
    learns that it is not there.

    Returns:
        A class of which there are no instances: making one raises RuntimeError with what to do instead.

    Raises:
        AttributeError: it is not known at all.
    """
    instead = ABSENT.get(f"{module}.{name}")
    if instead is None:
        raise AttributeError(f"module {module!r} has no attribute {name!r}")
    theirs = f"{module}.{name}".replace("torchft_plus", "torchft", 1)
    sentence = f"{theirs} has no counterpart in torchft_plus: {instead} (docs/from-torchft.md)"

    def refuse(cls: type, *arguments: object, **named: object) -> NoReturn:
        del cls, arguments, named
        raise RuntimeError(sentence)

    return type(name, (), {"__new__": refuse, "__doc__": sentence, "__module__": module})
