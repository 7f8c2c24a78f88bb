"""The pure adapter between torchft's questions and the quorum core: events in, effects and outcomes out.

A torchft replica asks at every step. While its quorum stands, its question is no ask of the core (which would give the quorum
up): it waits until all members have asked, because the answer names everybody's step and torchft's managers conclude
from these who takes part and who heals. Only when the core revokes the quorum, the questions become asks.

What the core wants to know of a member follows from its step: a member of the last quorum has the head (step, id of that
quorum), anybody else (step, 0). So the base of the next quorum is the greatest step, as torchft's managers choose it.
Safety of the states is theirs: they vote within a group only. P1 and P2 are not promised for this job.
"""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from lighthouse.core.quorum_core import QuorumCore
from lighthouse.core.words import (
    Close,
    Connected,
    Disconnected,
    Effect,
    Event,
    JobView,
    Received,
    Send,
    SendPing,
)
from lighthouse.messages import (
    Ask,
    Beat,
    Fault,
    Form,
    Head,
    Hello,
    Position,
    Process,
    Progress,
    Retired,
    Revoke,
)
from lighthouse.torchft.words import (
    Answer,
    Asked,
    Beaten,
    Broken,
    Outcome,
    Participant,
    Refusal,
    TorchftEvent,
    Withdrawn,
)
from lighthouse.wire import is_address

INCARNATION = "-"
"""torchft's replica_id is new at every start, so that a process needs no other name."""
UNKNOWN_ADDRESS = "unknown:1"
"""In the core's words only: the others are told what the replica said."""
MAX_REMEMBERED = 4096

WAITING, TRAINING = "reduce", "train"
"""Phases of the core's ``Progress``: in the first one the replica waits for others."""


@dataclass(slots=True, eq=False)
class Replica:
    """One torchft replica that was heard."""

    process: Process
    session: int = 0
    connected: bool = False
    """The core has an open session for it."""
    participant: Participant | None = None
    """As it was at its last question."""
    ticket: int | None = None
    """Its question, while it waits."""
    asked: bool = False
    """The core was asked for the next quorum on its behalf."""
    revoked: bool = False
    """The core wants it to give its quorum up: its next question is an ask."""
    question: int = 0
    """Number of its last question."""
    beat: int = 0
    retired: str = ""
    """Why its words are not taken any more."""

    @property
    def progress(self) -> Progress:
        """What its training does, as far as that can be seen from here."""
        step = self.participant.step if self.participant is not None else 0
        return Progress(step, WAITING if self.ticket is not None else TRAINING, self.question)


class TorchftCore:
    """Same interface as ``QuorumCore``, around one; takes torchft's words besides.

    Args:
        core: the quorum core of the job, made with ``words.core_config``.
    """

    def __init__(self, core: QuorumCore) -> None:
        self._core = core
        self._replicas: dict[str, Replica] = {}
        self._tickets: dict[int, Replica] = {}
        self._effects: list[Effect] = []
        self._outcomes: list[Outcome] = []
        self._numbers = itertools.count(1)
        """Of sessions and questions: of all replicas, since the core may remember whom this adapter has forgotten."""
        self._members: tuple[int, dict[str, None]] = (0, {})
        """Id of the last quorum, and its replica_ids."""

    # --- what the shell asks --------------------------------------------------------------------------------

    @property
    def epoch(self) -> int:
        """See QuorumCore."""
        return self._core.epoch

    @property
    def stored_epoch(self) -> int | None:
        """See QuorumCore."""
        return self._core.stored_epoch

    def start(self) -> list[Effect]:
        """See QuorumCore."""
        return self._core.start()

    def deadline(self) -> int | None:
        """See QuorumCore."""
        return self._core.deadline()

    def view(self, now_ms: int) -> JobView:
        """See QuorumCore."""
        return self._core.view(now_ms)

    def knows(self, process: Process) -> bool:
        """See QuorumCore."""
        return self._core.knows(process)

    def handle(self, event: Event | TorchftEvent, now_ms: int) -> list[Effect]:
        """Take an event; returns what to do, in order. Outcomes are to be carried out after these effects."""
        return self.tick(now_ms) if self.note(event, now_ms) else []

    def note(self, event: Event | TorchftEvent, now_ms: int) -> bool:
        """Take an event, and leave the decisions to the next ``tick``; False if there is nothing to decide."""
        match event:
            case Asked():
                return self._asked(event, now_ms)
            case Withdrawn():
                return self._withdrawn(event, now_ms)
            case Beaten():
                return self._beaten(event, now_ms)
            case Broken():
                return self._broken(event, now_ms)
            case _:
                return self._core.note(event, now_ms)

    def tick(self, now_ms: int) -> list[Effect]:
        """Decide; time may have passed."""
        busy = True
        while busy:
            self._place(now_ms)
            effects = self._core.tick(now_ms)
            busy = any([self._digest(effect, now_ms) for effect in effects])
            busy = self._meet(now_ms) or busy
        self._forget()
        effects, self._effects = self._effects, []
        return effects

    def take_outcomes(self) -> list[Outcome]:
        """How questions have ended since the last call."""
        outcomes, self._outcomes = self._outcomes, []
        return outcomes

    def validate(self) -> None:
        """Raise AssertionError if the state breaks an invariant."""
        self._core.validate()
        for ticket, replica in self._tickets.items():
            assert replica.ticket == ticket
            assert self._replicas[replica.process.replica_id] is replica
        for replica in self._replicas.values():
            assert replica.ticket is None or replica.ticket in self._tickets
            assert not replica.asked or replica.connected, "an ask stands only on an open session"
            assert not (replica.retired and replica.ticket is not None), "who is out waits for nothing"

    # --- events ---------------------------------------------------------------------------------------------

    def _asked(self, event: Asked, now_ms: int) -> bool:
        participant = event.participant
        replica = self._replica(participant.replica_id)
        if replica.retired:
            self._outcomes.append(Refusal(event.ticket, replica.retired))
            return True
        if replica.ticket is not None:
            self._end(replica, "the same replica asks again")
        known_address = replica.participant.address if replica.participant is not None else None
        replica.participant, replica.ticket, replica.asked = participant, event.ticket, False
        replica.question = next(self._numbers)
        self._tickets[event.ticket] = replica
        if replica.connected and participant.address != known_address:
            self._disconnect(replica, now_ms)
        self._connect(replica, now_ms)
        self._say(replica, Beat(replica.progress), now_ms)
        return True

    def _withdrawn(self, event: Withdrawn, now_ms: int) -> bool:
        replica = self._tickets.pop(event.ticket, None)
        if replica is None:
            return False
        replica.ticket = None
        if replica.connected:
            self._take_back(replica, now_ms)
            self._say(replica, Beat(replica.progress), now_ms)
        return True

    def _beaten(self, event: Beaten, now_ms: int) -> bool:
        replica = self._replica(event.replica_id)
        replica.beat = event.number
        if replica.retired:
            return False
        if not replica.connected:
            self._connect(replica, now_ms)
            return True
        return self._say(replica, Beat(replica.progress), now_ms)

    def _broken(self, event: Broken, now_ms: int) -> bool:
        replica = self._replicas.get(event.replica_id)
        if replica is None or replica.beat != event.number or not replica.connected:
            return False  # it has beaten on another connection since
        self._disconnect(replica, now_ms)
        return True

    # --- words to the core ------------------------------------------------------------------------------------

    def _replica(self, replica_id: str) -> Replica:
        replica = self._replicas.get(replica_id)
        if replica is None:
            replica = self._replicas[replica_id] = Replica(Process(replica_id, INCARNATION))
        return replica

    def _connect(self, replica: Replica, now_ms: int) -> None:
        if replica.connected:
            return
        replica.session = next(self._numbers)
        replica.connected, replica.asked = True, False
        participant = replica.participant
        address = participant.address if participant is not None else ""
        size = participant.world_size if participant is not None else 1
        known = address if is_address(address) else UNKNOWN_ADDRESS
        hello = Hello(self._position(replica, 0), known, size)
        self._core.note(Connected(replica.process, replica.session, hello), now_ms)
        self._say(replica, Beat(replica.progress), now_ms)  # its connection is in use

    def _disconnect(self, replica: Replica, now_ms: int) -> None:
        replica.connected = replica.asked = False
        self._core.note(Disconnected(replica.process, replica.session), now_ms)

    def _take_back(self, replica: Replica, now_ms: int) -> None:
        """The core knows no other word for it: an ask stands on a session."""
        if replica.asked:
            self._disconnect(replica, now_ms)
            self._connect(replica, now_ms)

    def _say(self, replica: Replica, message: Ask | Beat | Fault, now_ms: int) -> bool:
        return self._core.note(Received(replica.process, replica.session, message), now_ms)

    def _position(self, replica: Replica, floor: int) -> Position:
        quorum_id = self._last_id() if self._is_member(replica) else 0
        step = replica.participant.step if replica.participant is not None else 0
        level = replica.participant is not None
        return Position(floor, Head(step, quorum_id), level=level, progress=replica.progress)

    # --- decisions ------------------------------------------------------------------------------------------

    def _place(self, now_ms: int) -> None:
        """Ask the core on behalf of those whose questions wait and who have no standing quorum."""
        shrinking = self._shrinking()
        for replica in self._tickets.values():
            member = self._is_member(replica)
            if not replica.connected or (member and not replica.revoked):
                continue
            if shrinking and not member:
                self._take_back(replica, now_ms)
            elif not replica.asked:
                replica.asked = True
                self._say(replica, Ask(self._position(replica, self._last_id())), now_ms)

    def _shrinking(self) -> bool:
        """True while a member that is there said at its last question that nobody new may join."""
        members = (self._replicas.get(replica_id) for replica_id in self._member_ids())
        return any(r and r.connected and r.participant and r.participant.shrink_only for r in members)

    def _digest(self, effect: Effect, now_ms: int) -> bool:
        """Carry out what is meant for a replica, hand out the rest; True if it may change a decision."""
        match effect:
            case Send(message=Revoke()) | Send(message=Form()) | Send(message=Retired()) | Close():
                replica = self._replicas.get(effect.process.replica_id)
                if replica is None or replica.session != effect.session:
                    return False
                return self._told(replica, effect.message if isinstance(effect, Send) else None, now_ms)
            case Send() | SendPing():
                return False  # announcements are in the log; there is never a second incarnation to be pinged for
            case _:
                self._effects.append(effect)
                return False

    def _told(self, replica: Replica, message: object, now_ms: int) -> bool:
        match message:
            case Revoke():
                replica.revoked, replica.asked = True, False
            case Form():
                replica.revoked = False
                if replica.asked:  # else it is the standing one again, said to whoever came back
                    self._answer(now_ms)
            case Retired(reason):
                replica.retired, replica.connected, replica.asked = reason, False, False
                if replica.ticket is not None:
                    self._end(replica, reason)
            case _:
                replica.connected = replica.asked = False
        return True

    def _meet(self, now_ms: int) -> bool:
        """Answer under the standing quorum when all its members wait; True if they are to get a new one instead."""
        member_ids = self._member_ids()
        if not member_ids or len(self._tickets) < len(member_ids):
            return False
        members = (self._replicas.get(replica_id) for replica_id in member_ids)
        waiting = [r for r in members if r and r.ticket is not None and not r.revoked and not r.asked]
        if len(waiting) < len(member_ids):
            return False
        failed = [r for r in waiting if r.participant and r.participant.commit_failures > 0]
        if not failed:
            self._answer(now_ms)
            return False
        for replica in failed:
            self._say(replica, Fault(self._last_id(), None, "it could not commit its last step"), now_ms)
        for replica in waiting:
            replica.revoked = True
        return True

    def _answer(self, now_ms: int) -> None:
        """The last quorum, for the questions of all its members."""
        members = [self._replicas[replica_id] for replica_id in sorted(self._member_ids())]
        tickets = tuple(r.ticket for r in members if r.ticket is not None)
        participants = tuple(r.participant for r in members if r.participant is not None)
        self._outcomes.append(Answer(tickets, self._last_id(), participants))
        for replica in members:
            self._release(replica)
            replica.asked = False
            if replica.connected:
                self._say(replica, Beat(replica.progress), now_ms)  # it trains now

    def _end(self, replica: Replica, reason: str) -> None:
        assert replica.ticket is not None
        self._outcomes.append(Refusal(replica.ticket, reason))
        self._release(replica)

    def _release(self, replica: Replica) -> None:
        if replica.ticket is not None:
            del self._tickets[replica.ticket]
            replica.ticket = None

    def _forget(self) -> None:
        """Drop replicas that are not there, and of those that are out the oldest when they are too many."""
        for replica_id, replica in list(self._replicas.items()):
            away = not replica.connected and replica.ticket is None
            if away and (not replica.retired or len(self._replicas) > MAX_REMEMBERED):
                del self._replicas[replica_id]

    # --- the last quorum --------------------------------------------------------------------------------------

    def _last_id(self) -> int:
        return self._core.q_last.id if self._core.q_last is not None else 0

    def _member_ids(self) -> dict[str, None]:
        last = self._core.q_last
        if last is not None and last.id != self._members[0]:
            self._members = (last.id, {m.process.replica_id: None for m in last.members})
        return self._members[1]

    def _is_member(self, replica: Replica) -> bool:
        return replica.process.replica_id in self._member_ids()
