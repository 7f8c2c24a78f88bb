"""Settings, events and effects of the quorum core: plain values."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from lighthouse.messages import Ask, Beat, Down, Fault, Hello, Position, Process, Quorum
from lighthouse.timeouts import Timeouts


@dataclass(frozen=True, slots=True)
class CoreConfig:
    """What an operator may set. All times in milliseconds.

    Raises:
        ValueError: with one sentence, if a value makes no sense.
    """

    min_replicas: int = 1
    """No quorum has fewer members."""
    expected_replicas: int | None = None
    """The first quorum forms at once when so many have asked. Unset: ``min_replicas``, if that is 2 or more."""
    join_timeout_ms: int = 60_000
    """How long a round waits for those who are there and have not asked, counted from the first ask."""
    restart_timeout_ms: int = 60_000
    """After a total loss: how long to wait for all known replicas before going on without some."""
    reconnect_grace_ms: int = 100
    """A broken stream that is back so soon was no loss."""
    restart_grace_ms: int = 3_000
    """The same after a start or a pause of the Lighthouse: longer than the largest backoff of a client."""
    boundary_grace_ms: int = 200
    """From the first ask of a member at a step boundary to the revocation of those who missed the boundary."""
    alone_at_once: bool = False
    """With ``min_replicas`` 1, too, the first quorum forms when all who are there have asked."""
    lost_is_gone: bool = False
    """Whoever is lost or overdue is not waited for, though it may hold the only state, and members of whom none is heard
    keep out nobody who asks: the members answer for their states themselves, and P1 and P2 are not promised to them."""
    timeouts: Timeouts = field(default_factory=Timeouts)

    def __post_init__(self) -> None:
        if self.min_replicas < 1:
            raise ValueError(f"min_replicas is {self.min_replicas}: give 1 or more")
        if self.expected_replicas is not None and self.expected_replicas < self.min_replicas:
            raise ValueError(
                f"expected_replicas ({self.expected_replicas}) is less than min_replicas ({self.min_replicas}): "
                "raise expected_replicas, or lower min_replicas"
            )
        for name in ("join_timeout_ms", "restart_timeout_ms", "reconnect_grace_ms", "boundary_grace_ms"):
            if getattr(self, name) < 0:
                raise ValueError(f"{name} is {getattr(self, name)}: give 0 or more")

    @property
    def certainly_gone_ms(self) -> int:
        """Silence after which a member has stopped by its own clock, one percent of drift included (rule L5)."""
        return self.timeouts.outage_limit_ms + self.timeouts.outage_limit_ms // 100


@dataclass(frozen=True, slots=True)
class Record:
    """What survives a restart of the Lighthouse (rule L1)."""

    epoch: int
    q_last: Quorum | None
    ended: bool = False
    """All members of ``q_last`` have left in good order: the next run of this job need not wait for them."""
    gone: tuple[tuple[Process, str], ...] = ()
    """Members of ``q_last`` that will never act again, and why."""


# --- events ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Connected:
    """A stream was opened and said hello. ``session`` grows with every connection of a process."""

    process: Process
    session: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class Received:
    """A word came on a stream."""

    process: Process
    session: int
    message: Ask | Beat | Fault


@dataclass(frozen=True, slots=True)
class Ponged:
    """A process answered a ping."""

    process: Process
    session: int


@dataclass(frozen=True, slots=True)
class Disconnected:
    """A stream broke or ended."""

    process: Process
    session: int


@dataclass(frozen=True, slots=True)
class ExitSeen:
    """A launcher saw this process exit, or an operator vouches for it (empty incarnation: the current one)."""

    process: Process


@dataclass(frozen=True, slots=True)
class Resumed:
    """The Lighthouse itself was paused: streams may have broken meanwhile through no fault of theirs."""


Event = Connected | Received | Ponged | Disconnected | ExitSeen | Resumed


# --- effects, to be carried out in order ------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Store:
    """Write the record if the stored epoch is ``expected_epoch`` (None: nothing is stored), else stop for good.

    No later effect may be carried out before the write is safe on disk.
    """

    expected_epoch: int | None
    record: Record


@dataclass(frozen=True, slots=True)
class Send:
    """A word for one process, on this session only."""

    process: Process
    session: int
    message: Down


@dataclass(frozen=True, slots=True)
class SendPing:
    """Ask whether the process is alive; a pong answers."""

    process: Process
    session: int


@dataclass(frozen=True, slots=True)
class Close:
    """End this session after what was sent before."""

    process: Process
    session: int
    reason: str


@dataclass(frozen=True, slots=True)
class Note:
    """For the log (``text``) and, if ``kind`` is not empty, for the event log."""

    text: str
    kind: str = ""
    fields: dict[str, Any] = field(default_factory=dict[str, Any])


Effect = Store | Send | SendPing | Close | Note


# --- status ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class PeerView:
    """One process as the Lighthouse sees it."""

    process: Process
    connected: bool
    asked: bool
    state: str
    position: Position | None
    address: str
    silent_ms: int


@dataclass(frozen=True, slots=True)
class JobView:
    """One job as the Lighthouse sees it."""

    epoch: int
    quorum: Quorum | None
    round: str
    waiting: str
    peers: tuple[PeerView, ...]
    story: tuple[str, ...]
