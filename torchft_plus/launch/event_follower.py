"""Follows the event logs of a run: the only channel from training processes to the launcher."""

from __future__ import annotations

import json
import os
import re
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast


@dataclass(frozen=True, slots=True)
class Event:
    """One line of an event log.

    ``replica_id`` and ``group_rank`` say whose log it stood in ("lighthouse" and "launcher" have rank 0).
    """

    replica_id: str
    group_rank: int
    time: float
    kind: str
    process: str = ""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])

    def number(self, name: str, default: float = 0.0) -> float:
        """A field that should be a number."""
        value = self.fields.get(name)
        return value if isinstance(value, int | float) else default

    def integer(self, name: str, default: int = 0) -> int:
        """A field that should be a whole number."""
        value = self.fields.get(name)
        return value if isinstance(value, int) else default

    def text(self, name: str) -> str:
        """A field that should be a string."""
        value = self.fields.get(name)
        return value if isinstance(value, str) else ""


def parse_event(replica_id: str, group_rank: int, line: bytes) -> Event | None:
    """Read one line; None if it is no event (a torn line of a killed process)."""
    try:
        value: object = json.loads(line)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    fields = cast(dict[str, Any], value)
    moment, kind, process = fields.pop("time", None), fields.pop("kind", None), fields.pop("process", "")
    if not isinstance(moment, int | float) or not isinstance(kind, str):
        return None
    return Event(replica_id, group_rank, float(moment), kind, str(process), fields)


class EventFollower:
    """Reads what was appended to the ``*.jsonl`` files of a folder since the last call."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._files: dict[str, int] = {}
        self._rest: dict[str, bytes] = {}

    def read(self) -> list[Event]:
        """New events of all files, oldest first."""
        with os.scandir(self._folder) as entries:
            for name in (e.name for e in entries if e.name.endswith(".jsonl")):
                if name not in self._files:
                    self._files[name] = os.open(self._folder / name, os.O_RDONLY | os.O_CLOEXEC)
        events = [event for name in self._files for event in self._read_file(name)]
        return sorted(events, key=lambda event: event.time)

    def close(self) -> None:
        """Close the files."""
        for descriptor in self._files.values():
            os.close(descriptor)
        self._files.clear()

    def _read_file(self, name: str) -> list[Event]:
        chunks = [self._rest.pop(name, b"")]
        while chunk := os.read(self._files[name], 1 << 20):
            chunks.append(chunk)
        *lines, rest = b"".join(chunks).split(b"\n")
        if rest:
            self._rest[name] = rest
        match = re.fullmatch(r"(.+)\.(\d+)", name.removesuffix(".jsonl"))
        source = (match[1], int(match[2])) if match else (name.removesuffix(".jsonl"), 0)
        events = [parse_event(*source, line) for line in lines]
        return [event for event in events if event is not None]
