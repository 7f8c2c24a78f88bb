"""Words that Lighthouse and members exchange, as plain values.

The wire form is in ``protos/torchft_plus/v1/lighthouse.proto``; ``lighthouse.wire`` converts and validates.
Everything here is immutable, holds *state* and not *events*, and may therefore be repeated or arrive after a
reconnect (docs/design.md, "Protocol").
"""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, slots=True, order=True)
class Process:
    """One life of a replica group: a stable name and an incarnation that is new at every start."""

    replica_id: str
    incarnation: str

    def __str__(self) -> str:
        return f"{self.replica_id}/{self.incarnation[:6]}"


@dataclass(frozen=True, slots=True)
class Head:
    """A point of the lineage: ``step`` optimizer steps are committed, the last of them under ``quorum_id``.

    At step 0 nothing is committed: ``quorum_id`` is 0 and ``digest`` names the initial state (hex). Heads are
    compared as a whole, never by step alone (protocol-rationale F5, F13).
    """

    step: int = 0
    quorum_id: int = 0
    digest: str = ""

    @property
    def order(self) -> tuple[int, int]:
        """Age of the head: the later quorum wins, then the later step (rule L5)."""
        return (self.quorum_id, self.step)


@dataclass(frozen=True, slots=True)
class Vote:
    """A yes that may have left this group and whose result it does not know (rule M2)."""

    step: int
    quorum_id: int


@dataclass(frozen=True, slots=True)
class Member:
    """A replica group in a quorum, reached through its leader at ``address`` ("host:port", peer service)."""

    process: Process
    address: str
    contributor: bool
    """True if it held the state of the base when the quorum was formed (a joiner is False)."""


@dataclass(frozen=True, slots=True)
class Quorum:
    """An ordered list of members under one id; the index is the replica rank."""

    id: int
    members: tuple[Member, ...]
    base: Head
    reload: bool = False
    """Total loss: whoever is not at ``base`` loads its disk head or initial state before it fetches (L5)."""
    reason: str = ""
    """Why it was formed, one sentence for people."""

    def rank_of(self, process: Process) -> int | None:
        """Replica rank of ``process``, or None if it is not a member."""
        for rank, member in enumerate(self.members):
            if member.process == process:
                return rank
        return None


WAITING_PHASES = frozenset({"start", "reduce"})
"""Values of ``Progress.phase`` in which a training thread waits for a quorum or for other groups.

Whoever stands still in any other phase while somebody waits is *overdue* after ``timeout_ms`` (rule L6).
"""


@dataclass(frozen=True, slots=True)
class Progress:
    """What a group's leader last saw its training thread do; ``counter`` moves whenever it does anything."""

    step: int = 0
    phase: str = ""
    counter: int = 0


@dataclass(frozen=True, slots=True)
class Position:
    """Where a member stands: the part that hello and ask have in common."""

    floor: int
    head: Head
    voted: Vote | None = None
    level: bool = False
    disk_head: Head | None = None
    progress: Progress = field(default_factory=Progress)


# --- up: from a member's leader to the Lighthouse -----------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Hello:
    """First on every stream: the whole state of the member, including its last adopted quorum."""

    position: Position
    address: str
    group_world_size: int
    quorum: Quorum | None = None


@dataclass(frozen=True, slots=True)
class Ask:
    """ "I am free": fenced at ``position.floor``, wants to be in the next quorum (``leaving``: out of it)."""

    position: Position
    leaving: bool = False


@dataclass(frozen=True, slots=True)
class Beat:
    """Heartbeat with progress; never an ask."""

    progress: Progress
    quiet: bool = False
    """It needs no answer: an answer is nearly as dear for the Lighthouse as the heartbeat itself."""


@dataclass(frozen=True, slots=True)
class Fault:
    """A failure of ``quorum_id`` that the sender met; ``peer`` is a replica_id where it is known."""

    quorum_id: int
    peer: str | None
    reason: str


Up = Hello | Ask | Beat | Fault


# --- down: from the Lighthouse to a member's leader ---------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Revoke:
    """Promise never to act under ``quorum_id`` again: at once (``now``) or at the next step boundary."""

    quorum_id: int
    now: bool
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Form:
    """A quorum that is in force (sent again after a reconnect of a member that has not adopted it)."""

    quorum: Quorum


@dataclass(frozen=True, slots=True)
class Retired:
    """This process is out: it left in good order (``left``), or it was replaced or refused, and why."""

    reason: str
    left: bool = False


@dataclass(frozen=True, slots=True)
class Announce:
    """A sentence that every member's log must show (a total loss with its size, whom we wait for)."""

    text: str


Down = Revoke | Form | Retired | Announce
