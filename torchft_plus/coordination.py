"""torchft's module of this name."""

from __future__ import annotations

from typing import Any

import lighthouse.server
from torchft_plus.compat.absent import absent

DEFAULT_JOIN_TIMEOUT_MS = 100
"""As in torchft's class. The command ``torchft-plus lighthouse`` waits longer for the first quorum, unless it is told how
many replicas to expect."""


class LighthouseServer(lighthouse.server.LighthouseServer):
    """A Lighthouse in a thread of this process, with torchft's defaults; see ``lighthouse.server``.

    Args:
        bind: "host:port"; port 0 chooses a free one.
        min_replicas: no quorum has fewer members.
        join_timeout_ms: how long the first quorum waits for more than ``min_replicas``.
        quorum_tick_ms: at most so long between two looks at the clock.
        heartbeat_timeout_ms: silence after which a process is lost.
        options: further ones of ``lighthouse.server.LighthouseServer``.
    """

    def __init__(
        self,
        bind: str,
        min_replicas: int,
        join_timeout_ms: int | None = None,
        quorum_tick_ms: int | None = None,
        heartbeat_timeout_ms: int | None = None,
        **options: Any,
    ) -> None:
        join = DEFAULT_JOIN_TIMEOUT_MS if join_timeout_ms is None else join_timeout_ms
        super().__init__(bind, min_replicas, join, quorum_tick_ms, heartbeat_timeout_ms, **options)


__all__ = ["LighthouseServer"]


def __getattr__(name: str) -> Any:
    return absent(__name__, name)
