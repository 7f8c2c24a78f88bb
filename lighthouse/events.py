"""The event log: one JSON object a line, written by every process, read by the launcher, tests and people.

A process writes when ``TORCHFT_PLUS_EVENTS`` names a folder; the file is ``{replica_id}.{group_rank}.jsonl``
(the Lighthouse: ``lighthouse.jsonl``). Every line has ``time`` (Unix seconds, float), ``kind``, ``process``;
the rest depends on the kind. Lines are appended and flushed whole, so that a reader may follow the file of a
process that was killed.
"""

from __future__ import annotations

import json
import os
import threading
import time
from pathlib import Path
from typing import Any

ENVIRONMENT_VARIABLE = "TORCHFT_PLUS_EVENTS"


class EventLog:
    """Appends events to a file; without a path it swallows them."""

    def __init__(self, path: Path | None, process: str) -> None:
        self._process = process
        self._lock = threading.Lock()
        self._file = None
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
            self._file = path.open("a", buffering=1, encoding="utf-8")

    @classmethod
    def from_environment(cls, name: str, process: str) -> EventLog:
        """Log into ``$TORCHFT_PLUS_EVENTS/{name}.jsonl``, or nowhere if the variable is unset."""
        folder = os.environ.get(ENVIRONMENT_VARIABLE)
        return cls(Path(folder) / f"{name}.jsonl" if folder else None, process)

    def emit(self, kind: str, **fields: Any) -> None:
        """Write one event. ``fields`` are plain JSON values."""
        if self._file is None:
            return
        line = json.dumps({"time": time.time(), "kind": kind, "process": self._process, **fields})
        with self._lock:
            if not self._file.closed:
                self._file.write(line + "\n")

    def close(self) -> None:
        """Close the file; later events are dropped."""
        with self._lock:
            if self._file is not None:
                self._file.close()
