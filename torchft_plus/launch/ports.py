"""A TCP port for a child's rendezvous, chosen so that nobody takes it before the child binds it."""

from __future__ import annotations

import random
import socket
from pathlib import Path

_LOWEST = 15_000


def ephemeral_start() -> int:
    """First port that the kernel gives to outgoing connections and to ``bind(0)``."""
    return int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])


class PortPicker:
    """Hands out free ports below the ephemeral range, no port twice."""

    def __init__(self) -> None:
        below = range(_LOWEST, ephemeral_start())
        self._candidates = list(below if len(below) >= 1_000 else range(_LOWEST, 65_536))
        random.SystemRandom().shuffle(self._candidates)

    def pick(self) -> int:
        """A port that nobody listens on at present.

        Raises:
            OSError: none is left.
        """
        while self._candidates:
            port = self._candidates.pop()
            with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
                try:
                    probe.bind(("127.0.0.1", port))
                except OSError:
                    continue
                return port
        raise OSError("no free TCP port is left for a replica group's rendezvous")
