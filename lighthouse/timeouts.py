"""One knob, ``timeout_ms``, and every deadline that follows from it (promise P6)."""

from __future__ import annotations

from dataclasses import dataclass

DEFAULT_TIMEOUT_MS = 60_000
MIN_TIMEOUT_MS = 1_000


@dataclass(frozen=True, slots=True)
class Timeouts:
    """Deadlines in milliseconds, derived from one knob.

    ``timeout_ms`` is how long a healthy member may let the others wait: a training thread that stands still
    that long while others wait for it is *overdue*. The heartbeat limit is a twelfth of it (5 s at the
    default of 60 s).
    """

    timeout_ms: int = DEFAULT_TIMEOUT_MS
    outage_limit_ms: int = 3_600_000
    heartbeat_override_ms: int | None = None
    """Heartbeat limit, if it is not to follow from ``timeout_ms``."""

    def __post_init__(self) -> None:
        if self.timeout_ms < MIN_TIMEOUT_MS:
            raise ValueError(
                f"timeout_ms is {self.timeout_ms}, below the least of {MIN_TIMEOUT_MS}: "
                "raise it to the longest time in which a healthy step makes no progress"
            )
        if self.heartbeat_override_ms is not None and not 50 <= self.heartbeat_override_ms <= self.timeout_ms:
            raise ValueError(
                f"heartbeat_timeout_ms is {self.heartbeat_override_ms}: "
                f"give 50 to timeout_ms ({self.timeout_ms}), or leave it out"
            )
        if self.outage_limit_ms < self.timeout_ms:
            raise ValueError(
                f"outage_limit_ms ({self.outage_limit_ms}) is shorter than timeout_ms ({self.timeout_ms}): "
                "raise outage_limit_ms, or lower timeout_ms"
            )

    @property
    def heartbeat_timeout_ms(self) -> int:
        """Silence after which a process counts as lost."""
        return self.heartbeat_override_ms or self.timeout_ms // 12

    @property
    def heartbeat_interval_ms(self) -> int:
        """Time between heartbeats: five of them fit into the limit.

        They only find who is frozen or cut off; a death shows at once by its broken stream.
        """
        return max(50, self.heartbeat_timeout_ms // 5)

    @property
    def configure_ms(self) -> int:
        """Building the lanes and the leaders' mesh of a new quorum."""
        return self.timeout_ms // 4

    @property
    def vote_ms(self) -> int:
        """From the own yes to the last one of the others."""
        return self.timeout_ms // 4

    @property
    def transfer_stall_ms(self) -> int:
        """A state transfer fails when no byte came for this long, however long the whole takes."""
        return self.timeout_ms // 4

    @property
    def shutdown_ms(self) -> int:
        """Leaving in good order."""
        return self.timeout_ms // 4
