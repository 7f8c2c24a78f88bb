"""Resident memory of this process and its high-water mark (Linux). Standard library only."""

from __future__ import annotations

from pathlib import Path

_STATUS = Path("/proc/self/status")
_CLEAR = Path("/proc/self/clear_refs")
_RESET_PEAK = "5"


class PeakMemory:
    """Counts from its creation how far the resident memory rises above what it was."""

    def __init__(self) -> None:
        _CLEAR.write_text(_RESET_PEAK)
        self._before = _resident_bytes("VmRSS")

    def extra_bytes(self) -> int:
        """High-water mark above the start."""
        return max(0, _resident_bytes("VmHWM") - self._before)


def _resident_bytes(field: str) -> int:
    for line in _STATUS.read_text().splitlines():
        name, _, rest = line.partition(":")
        if name == field:
            return int(rest.split()[0]) << 10
    raise RuntimeError(f"{_STATUS} has no {field}")
