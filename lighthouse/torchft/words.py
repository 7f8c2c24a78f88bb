"""What torchft's managers ask, and what they are told: plain values."""

from __future__ import annotations

from dataclasses import dataclass, replace

from lighthouse.core.words import CoreConfig
from lighthouse.timeouts import MIN_TIMEOUT_MS, Timeouts

JOB_ID = "torchft"
"""The job of torchft's managers, which know no jobs. Nobody else may use it."""

RETURN_GRACE_MS = 300
"""A manager whose connection breaks comes back 100 ms later by itself: only then it is no death."""


@dataclass(frozen=True, slots=True)
class Participant:
    """A replica at one question, in torchft's words; only the first and ``step`` to ``commit_failures`` mean something here."""

    replica_id: str
    address: str = ""
    store_address: str = ""
    step: int = 0
    world_size: int = 1
    shrink_only: bool = False
    data: str = ""
    commit_failures: int = 0


# --- events ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Asked:
    """A call of Quorum is open and waits for an answer; ``ticket`` names the call."""

    ticket: int
    participant: Participant


@dataclass(frozen=True, slots=True)
class Withdrawn:
    """The call has ended without an answer: its deadline is over, or its connection broke."""

    ticket: int


@dataclass(frozen=True, slots=True)
class Beaten:
    """A heartbeat came; ``number`` grows with every one."""

    replica_id: str
    number: int


@dataclass(frozen=True, slots=True)
class Broken:
    """The connection broke while this heartbeat was held."""

    replica_id: str
    number: int


TorchftEvent = Asked | Withdrawn | Beaten | Broken


# --- outcomes of questions --------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Answer:
    """The quorum, for the calls of all its members; each participant as it was at this question."""

    tickets: tuple[int, ...]
    quorum_id: int
    participants: tuple[Participant, ...]


@dataclass(frozen=True, slots=True)
class Refusal:
    """The call ends with one sentence."""

    ticket: int
    reason: str


Outcome = Answer | Refusal


def core_config(config: CoreConfig) -> CoreConfig:
    """The Lighthouse's settings as the quorum core of torchft's job needs them.

    A member that beats and does not ask holds the others up for ``join_timeout_ms``, as in torchft: that is what makes it
    overdue. No state is waited for, because torchft's managers choose the greatest step of those who are there.
    """
    heartbeat_ms = config.timeouts.heartbeat_timeout_ms
    patience_ms = max(MIN_TIMEOUT_MS, config.join_timeout_ms, heartbeat_ms)
    return replace(
        config,
        restart_timeout_ms=0,
        reconnect_grace_ms=max(RETURN_GRACE_MS, config.reconnect_grace_ms),
        alone_at_once=True,
        lost_is_gone=True,
        timeouts=Timeouts(patience_ms, outage_limit_ms=patience_ms, heartbeat_override_ms=heartbeat_ms),
    )
