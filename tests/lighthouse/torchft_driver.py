"""Drives the adapter for torchft's managers by hand: replicas by name, time by milliseconds, what each question came to."""

from __future__ import annotations

import itertools
from dataclasses import dataclass

from lighthouse.core.quorum_core import QuorumCore
from lighthouse.core.words import CoreConfig, Effect, ExitSeen, Record, Resumed, Store
from lighthouse.messages import Process, Quorum
from lighthouse.timeouts import Timeouts
from lighthouse.torchft.core import TorchftCore
from lighthouse.torchft.words import (
    Answer,
    Asked,
    Beaten,
    Broken,
    Participant,
    Refusal,
    TorchftEvent,
    Withdrawn,
    core_config,
)

BEAT_MS = 1_100
"""How often heartbeats come with the limit of 5 s: held for a second, and 0.1 s later the next."""
CLOCK_SECONDS = 1_000


@dataclass
class Question:
    """An open or ended call of Quorum."""

    ticket: int
    participant: Participant
    outcome: Answer | Refusal | None = None
    withdrawn: bool = False

    @property
    def open(self) -> bool:
        return self.outcome is None and not self.withdrawn

    @property
    def answer(self) -> Answer:
        assert isinstance(self.outcome, Answer), f"no answer: {self}"
        return self.outcome

    @property
    def members(self) -> str:
        return " ".join(p.replica_id for p in self.answer.participants)

    @property
    def steps(self) -> list[int]:
        return [p.step for p in self.answer.participants]


class TorchftDriver:
    """A Lighthouse with torchft's job."""

    def __init__(
        self, min_replicas: int = 1, join_timeout_ms: int = 60_000, heartbeat_ms: int = 5_000
    ) -> None:
        timeouts = Timeouts(heartbeat_override_ms=heartbeat_ms)
        self.config = core_config(
            CoreConfig(min_replicas, join_timeout_ms=join_timeout_ms, timeouts=timeouts)
        )
        self.record: Record | None = None
        self.now_ms = 0
        self.questions: dict[int, Question] = {}
        self.answers: list[Answer] = []
        self._numbers = itertools.count(1)
        self._last_beat: dict[str, int] = {}
        self.start()

    def start(self, *, lost_store: bool = False) -> None:
        """The Lighthouse starts, or starts again: open calls have failed."""
        if lost_store:
            self.record = None
        for question in self.questions.values():
            question.withdrawn |= question.open
        inner = QuorumCore(self.config, self.record, CLOCK_SECONDS + self.now_ms / 1000, self.now_ms)
        self.core = TorchftCore(inner)
        self._carry_out(self.core.start())

    # --- words ------------------------------------------------------------------------------------------------

    def ask(
        self, name: str, step: int = 0, *, failures: int = 0, shrink: bool = False, address: str = ""
    ) -> Question:
        participant = Participant(
            name, address or f"http://{name}:9", f"{name}:8", step, 1, shrink, "", failures
        )
        question = Question(next(self._numbers), participant)
        self.questions[question.ticket] = question
        self.event(Asked(question.ticket, participant))
        return question

    def ask_all(self, names: str, step: int) -> list[Question]:
        return [self.ask(name, step) for name in names.split()]

    def withdraw(self, question: Question) -> None:
        question.withdrawn = question.open
        self.event(Withdrawn(question.ticket))

    def beat(self, name: str) -> None:
        self._last_beat[name] = next(self._numbers)
        self.event(Beaten(name, self._last_beat[name]))

    def die(self, name: str) -> None:
        """The process ends: all its connections break."""
        for question in self.questions.values():
            if question.open and question.participant.replica_id == name:
                self.withdraw(question)
        self.event(Broken(name, self._last_beat.get(name, 0)))

    def exit_seen(self, name: str) -> None:
        self._carry_out(self.core.handle(ExitSeen(Process(name, "")), self.now_ms))

    def resume(self) -> None:
        self._carry_out(self.core.handle(Resumed(), self.now_ms))

    def event(self, event: TorchftEvent) -> None:
        self._carry_out(self.core.handle(event, self.now_ms))

    def wait(self, ms: int, beats: str = "") -> None:
        """Let time pass; those named in ``beats`` are heard all the while."""
        end_ms = self.now_ms + ms
        for name in beats.split():
            self.beat(name)
        beat_ms = self.now_ms + BEAT_MS
        while self.now_ms < end_ms:
            due_ms = self.core.deadline()
            due_ms = end_ms if due_ms is None else due_ms
            self.now_ms = min(end_ms, beat_ms, max(self.now_ms + 1, due_ms))
            if self.now_ms == beat_ms:
                beat_ms += BEAT_MS
                for name in beats.split():
                    self.beat(name)
            self._carry_out(self.core.tick(self.now_ms))

    # --- short forms --------------------------------------------------------------------------------------------

    def form(self, names: str, step: int = 0) -> Quorum:
        """The first quorum, of these."""
        for name in names.split():
            self.beat(name)
        questions = self.ask_all(names, step)
        assert all(q.members == names for q in questions)
        return self.quorum

    @property
    def quorum(self) -> Quorum:
        assert self.record is not None and self.record.q_last is not None
        return self.record.q_last

    @property
    def waiting(self) -> str:
        return self.core.view(self.now_ms).waiting

    # --- effects --------------------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        self.core.validate()
        for effect in effects:
            if isinstance(effect, Store):
                stored = self.record.epoch if self.record is not None else None
                assert effect.expected_epoch == stored, "the core knows what it has stored"
                self.record = effect.record
        for outcome in self.core.take_outcomes():
            tickets = (outcome.ticket,) if isinstance(outcome, Refusal) else outcome.tickets
            for ticket in tickets:
                question = self.questions[ticket]
                assert question.open, "a call ends once"
                question.outcome = outcome
            if isinstance(outcome, Answer):
                self._check(outcome)
                self.answers.append(outcome)

    def _check(self, answer: Answer) -> None:
        """What torchft's managers conclude from an answer must hold."""
        asked = sorted((self.questions[t].participant for t in answer.tickets), key=lambda p: p.replica_id)
        assert list(answer.participants) == asked, (
            "each as it was at its open question, ordered by replica_id"
        )
        assert self.quorum.id == answer.quorum_id, "stored before anyone is told (L1)"
        assert {m.process.replica_id for m in self.quorum.members} == {p.replica_id for p in asked}
        if self.answers:
            before = self.answers[-1]
            assert answer.quorum_id >= before.quorum_id
            same = [p.replica_id for p in before.participants] == [p.replica_id for p in asked]
            assert same or answer.quorum_id > before.quorum_id, "other members, other id"
            failed = any(p.commit_failures for p in asked)
            assert not failed or answer.quorum_id > before.quorum_id, "a failed commit wants a new id"
