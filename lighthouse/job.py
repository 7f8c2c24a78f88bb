"""One job on the Lighthouse: its quorum core, its open sessions, and the carrying out of effects."""

from __future__ import annotations

import asyncio
import logging
from typing import Protocol

from lighthouse import wire
from lighthouse.core.words import Close, Effect, Event, JobView, Note, Send, SendPing, Store
from lighthouse.events import EventLog
from lighthouse.messages import Down, Process
from lighthouse.storage import Storage

logger = logging.getLogger(__name__)

MAX_OUTBOX = 4096
BEAT_ANSWER = wire.encode_down(wire.BeatAnswer())
PING = wire.encode_down(wire.Ping())


class Core(Protocol):
    """What a job needs of its core: ``QuorumCore``, or one around it that speaks another language."""

    @property
    def epoch(self) -> int:
        """See QuorumCore."""
        ...

    @property
    def stored_epoch(self) -> int | None:
        """See QuorumCore."""
        ...

    def start(self) -> list[Effect]:
        """See QuorumCore."""
        ...

    def handle(self, event: Event, now_ms: int) -> list[Effect]:
        """See QuorumCore."""
        ...

    def note(self, event: Event, now_ms: int) -> bool:
        """See QuorumCore."""
        ...

    def tick(self, now_ms: int) -> list[Effect]:
        """See QuorumCore."""
        ...

    def deadline(self) -> int | None:
        """See QuorumCore."""
        ...

    def view(self, now_ms: int) -> JobView:
        """See QuorumCore."""
        ...

    def knows(self, process: Process) -> bool:
        """See QuorumCore."""
        ...


class Superseded(RuntimeError):
    """Another Lighthouse has taken over the store: this one has no say any more (protocol-rationale F19)."""


class Session:
    """One open stream: what is still to be written, and whether it is to end."""

    def __init__(self, process: Process, number: int) -> None:
        self.process = process
        self.number = number
        self.end_reason = ""
        self._outbox: asyncio.Queue[bytes | None] = asyncio.Queue()

    def put(self, data: bytes) -> None:
        """Queue a message. Who does not read for so long that the queue overflows is cut off."""
        if self._outbox.qsize() >= MAX_OUTBOX:
            self.end("it does not read what the Lighthouse sends")
        elif not self.end_reason:
            self._outbox.put_nowait(data)

    def end(self, reason: str) -> None:
        """End the stream after what was queued before."""
        if not self.end_reason:
            self.end_reason = reason
            self._outbox.put_nowait(None)

    async def next(self) -> bytes | None:
        """The next message to write; None: the stream is to end."""
        return await self._outbox.get()


class Job:
    """Gives events to the core of one job and carries out what it decides, in order."""

    def __init__(self, job_id: str, core: Core, storage: Storage, events: EventLog) -> None:
        self.job_id = job_id
        self.core = core
        self.sessions: dict[tuple[Process, int], Session] = {}
        self._storage = storage
        self._events = events
        self._encoded: tuple[Down, bytes] | None = None
        self._unanswered: list[Session] = []
        self.unsettled = False
        """Events were noted on which the core has not decided yet: ``settle`` is due."""
        self.settle_cpu_s = 0.0
        """CPU time of the last ``settle``."""

    def start(self) -> None:
        """Claim the epoch; raises Superseded, StorageError."""
        self.carry_out(self.core.start())

    def handle(self, event: Event, now_ms: int) -> None:
        """Take an event and decide; raises Superseded, StorageError."""
        self.carry_out(self.core.handle(event, now_ms))

    def note(self, event: Event, now_ms: int) -> None:
        """Take an event; what came together is decided together, by ``settle``."""
        if self.core.note(event, now_ms):
            self.unsettled = True

    def answer(self, session: Session) -> None:
        """Tell a member that it is heard, after what the core has to say.

        The answer ends an outage for the member (rule M8), and it must not act under its quorum between the answer
        and a revocation.
        """
        if self.unsettled:
            self._unanswered.append(session)
        else:
            session.put(BEAT_ANSWER)

    def settle(self, now_ms: int) -> None:
        """Decide on what was noted; raises Superseded, StorageError."""
        self.unsettled = False
        self.carry_out(self.core.tick(now_ms))
        for session in self._unanswered:
            session.put(BEAT_ANSWER)
        self._unanswered.clear()

    def tick(self, now_ms: int) -> None:
        """Let time pass, if something is due; raises Superseded, StorageError."""
        deadline_ms = self.core.deadline()
        if deadline_ms is not None and deadline_ms <= now_ms:
            self.carry_out(self.core.tick(now_ms))

    def check_owner(self) -> None:
        """Notice a newer Lighthouse; raises Superseded, StorageError.

        Without this, one that has nothing to store would go on for ever: it answers heartbeats of members that the
        newer one has not heard for so long that it counts them out (rules L5, M8).
        """
        if self._storage.epoch(self.job_id) != self.core.stored_epoch:
            raise self._superseded()

    def carry_out(self, effects: list[Effect]) -> None:
        """Do what the core decided, in order; raises Superseded, StorageError."""
        for effect in effects:
            match effect:
                case Store():
                    self._store(effect)
                case Send():
                    session = self.sessions.get((effect.process, effect.session))
                    if session is not None:
                        session.put(self._encode(effect.message))
                case SendPing():
                    session = self.sessions.get((effect.process, effect.session))
                    if session is not None:
                        session.put(PING)
                case Close():
                    session = self.sessions.get((effect.process, effect.session))
                    if session is not None:
                        session.end(effect.reason)
                case Note():
                    logger.info("[%s] %s", self.job_id, effect.text)
                    if effect.kind:
                        self._events.emit(effect.kind, job_id=self.job_id, **effect.fields)

    def _store(self, effect: Store) -> None:
        if not self._storage.store(self.job_id, effect.expected_epoch, effect.record):
            raise self._superseded()

    def _superseded(self) -> Superseded:
        return Superseded(
            f"another Lighthouse has taken over job {self.job_id!r} in the same store: this one stops"
        )

    def _encode(self, message: Down) -> bytes:
        """Serialise once what goes to many: the core sends the same object to all."""
        if self._encoded is None or self._encoded[0] is not message:
            self._encoded = (message, wire.encode_down(message))
        return self._encoded[1]
