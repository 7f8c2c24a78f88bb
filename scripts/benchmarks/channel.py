"""JSON lines between the bench and a process that it measures: the process's side. Standard library only."""

from __future__ import annotations

import json
import os
import sys
from typing import Any


class Channel:
    """Takes commands from stdin and answers on what was stdout; from now on prints go to stderr.

    The end of stdin means that the bench is gone.
    """

    def __init__(self) -> None:
        sys.stdout.flush()
        self._answers = os.fdopen(os.dup(1), "w", buffering=1, encoding="utf-8")
        os.dup2(2, 1)

    def send(self, **fields: Any) -> None:
        """Write one line."""
        self._answers.write(json.dumps(fields) + "\n")

    def receive(self) -> dict[str, Any] | None:
        """Block for the next command; None when the bench has closed the channel."""
        line = sys.stdin.readline()
        return json.loads(line) if line else None
