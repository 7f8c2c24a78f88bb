"""Backends by name: one more library is one more file and one more line here."""

from __future__ import annotations

import difflib

from torchft_plus.process_group.gloo import GlooBackend
from torchft_plus.process_group.lane import Backend
from torchft_plus.process_group.nccl import NcclBackend

NAMES = ("gloo", "nccl", "rccl")


def backend(name: str) -> Backend:
    """The backend called ``name``.

    Raises:
        ValueError: there is none of that name; the sentence offers the nearest.
        RuntimeError: this torch or this machine lacks it.
    """
    if name == "gloo":
        return GlooBackend()
    if name in ("nccl", "rccl"):
        return NcclBackend(name)
    near = difflib.get_close_matches(name.lower(), NAMES, n=1, cutoff=0.4)
    hint = f"did you mean {near[0]!r}?" if near else f"known are {', '.join(NAMES)}"
    raise ValueError(f"process group backend {name!r} is unknown: {hint}")
