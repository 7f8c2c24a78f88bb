"""Simulated Lighthouses: the real quorum core with the habits of ``LighthouseDaemon`` and ``Job``, and its store."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from lighthouse.core.clock import RunningClock, tick_and_gap_ms
from lighthouse.core.quorum_core import QuorumCore
from lighthouse.core.words import (
    Close,
    Connected,
    Disconnected,
    Effect,
    Event,
    ExitSeen,
    Note,
    Ponged,
    Received,
    Record,
    Resumed,
    Send,
    SendPing,
    Store,
)
from lighthouse.messages import Ask, Beat, Fault, Process
from torchft_plus.testing.client import LIGHTHOUSE_ADDRESS, BeatAnswer, Open, Ping, Pong
from torchft_plus.testing.network import End, Life

if TYPE_CHECKING:
    from torchft_plus.testing.simulation import Simulation

TICK_MS = 100
OWNER_CHECKS = 200
"""In an outage limit: far more often than a real one (3,600), and still within the margin of rule L5."""


class Disk:
    """What survives a Lighthouse."""

    def __init__(self, fails: bool = False) -> None:
        self.record: Record | None = None
        self.fails = fails
        """It is full, or away: nothing can be read or written, and who tried does not know what was."""

    def accepts(self, expected_epoch: int | None) -> bool:
        """True if the stored epoch is ``expected_epoch``."""
        return (self.record.epoch if self.record is not None else None) == expected_epoch


class Lighthouse:
    """One life of a Lighthouse."""

    def __init__(self, simulation: Simulation, number: int, disk: Disk, clock_seconds: float) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.disk = disk
        self.life = Life(self.world, LIGHTHOUSE_ADDRESS, f"lighthouse.{number}")
        heartbeat_ms = self.world.settings.timeouts.heartbeat_timeout_ms
        self.started_ms = self.world.now_ms
        self._unsettled = False
        self._unanswered: list[End] = []
        self._tick_ms, gap_ms = tick_and_gap_ms(heartbeat_ms, TICK_MS)
        self._clock = RunningClock(gap_ms)
        self._sessions: dict[tuple[Process, int], End] = {}
        self._die_at_store = ""
        self._q_stored = disk.record.q_last if disk.record is not None else None
        self.core = QuorumCore(
            self.world.settings.core_config(), disk.record, clock_seconds, self._read_clock()
        )
        simulation.network.listen(LIGHTHOUSE_ADDRESS, self.life, self._accept)

    @property
    def alive(self) -> bool:
        """True until it ended."""
        return self.life.alive

    def start(self) -> None:
        """Claim the epoch and serve."""
        self.world.trace(self.life.name, "starts, epoch {}, stored {}", self.core.epoch, self.disk.record)
        self._carry_out(self.core.start())
        self.life.after(self._tick_ms, self._tick)
        self.life.after(self.world.settings.timeouts.outage_limit_ms // OWNER_CHECKS, self._check_owner)

    def replaced(self, process: Process) -> bool:
        """True if a newer process of the same name was accepted here."""
        reason = self.core.gone_because(process) or ""
        return "replaced by" in reason or "another incarnation" in reason

    def released(self, process: Process) -> bool:
        """True if ``process`` was let go in good order: what it holds is its own affair now."""
        return "left in good order" in (self.core.gone_because(process) or "")

    def counts(self, process: Process) -> bool:
        """True if ``process`` is here and gives up the last quorum."""
        return any(view.process == process and view.asked for view in self.core.view(0).peers)

    def connected(self, process: Process) -> bool:
        """True if ``process`` has an open session here."""
        return any(key[0] == process for key in self._sessions)

    def die(self, reason: str) -> None:
        """Crash or stop."""
        if self.alive:
            self.world.trace(self.life.name, "ends: {}", reason)
            self.simulation.network.end_life(self.life)

    def die_at_next_store(self, when: str) -> None:
        """Crash "before" the next quorum is stored, or "after" it was stored and before anybody is told."""
        self._die_at_store = when

    def exit_seen(self, process: Process) -> bool:
        """A launcher's report; False if it has to come again."""
        if not self.alive or self.life.paused:
            return False
        if self.core.gone_because(process) is not None:
            self.world.hit("an exit is reported again")
        self.world.trace(self.life.name, "is told that {} has exited", process)
        self._handle(ExitSeen(process))
        return True

    # --- sessions ------------------------------------------------------------------------------------------------------

    def _accept(self, end: End) -> None:
        key: list[tuple[Process, int]] = []

        def read(message: Any) -> None:
            if isinstance(message, Open):
                if (message.process, message.session) in self._sessions:
                    end.close()
                    return
                if any(process == message.process for process, _ in self._sessions):
                    self.world.hit("a process is heard on two streams")
                key.append((message.process, message.session))
                self._sessions[key[0]] = end
                self.world.trace(
                    self.life.name, "session {} of {}: {}", message.session, message.process, message.hello
                )
                self._handle(Connected(message.process, message.session, message.hello))
                self._answer(end)
            elif not key:
                end.close()
            elif isinstance(message, Beat):
                self._handle(Received(*key[0], message))
                if not message.quiet:
                    self._answer(end)
            elif isinstance(message, Ask | Fault):
                self.world.trace(self.life.name, "hears from {}: {}", key[0][0], message)
                self._handle(Received(*key[0], message))
            elif isinstance(message, Pong):
                self._handle(Ponged(*key[0]))

        def lost(reason: str) -> None:
            if key and self._sessions.pop(key[0], None) is not None:
                self.world.trace(self.life.name, "lost session {} of {}: {}", key[0][1], key[0][0], reason)
                self._handle(Disconnected(*key[0]))

        end.attach(read, lost)

    def _close(self, process: Process, session: int) -> None:
        end = self._sessions.pop((process, session), None)
        if end is not None:
            end.close()
            self.life.after(0, self._handle, Disconnected(process, session))

    # --- the core ------------------------------------------------------------------------------------------------------

    def _answer(self, end: End) -> None:
        """After what the core has to say: see ``Job.answer``."""
        if self._unsettled:
            self._unanswered.append(end)
        else:
            end.send(BeatAnswer())

    def _read_clock(self) -> int:
        now_ms, paused = self._clock.read(self.life.now_ms)
        if paused:
            self._run(self.core.handle(Resumed(), now_ms))
        return now_ms

    def _handle(self, event: Event) -> None:
        """What comes together is decided together."""
        if not self.alive:
            return
        now_ms = self._read_clock()
        if self.alive and self.core.note(event, now_ms):
            if self._unsettled:
                self.world.hit("events are decided together")
            else:
                self._unsettled = True
                self.life.after(self.world.between(self.world.settings.settle_ms), self._settle)

    def _settle(self) -> None:
        now_ms = self._read_clock()
        self._unsettled = False
        if self.alive:
            self._run(self.core.tick(now_ms))
        unanswered, self._unanswered = self._unanswered, []
        for end in unanswered:
            if self.alive:
                end.send(BeatAnswer())

    def _tick(self) -> None:
        now_ms = self._read_clock()
        deadline_ms = self.core.deadline()
        if deadline_ms is not None and deadline_ms <= now_ms:
            self._run(self.core.tick(now_ms))
        deadline_ms = self.core.deadline()
        wait_ms = self._tick_ms if deadline_ms is None else min(self._tick_ms, max(1, deadline_ms - now_ms))
        self.life.after(wait_ms, self._tick)

    def _check_owner(self) -> None:
        record = self.disk.record
        if self.disk.fails:
            self.die("the store cannot be read")
        elif record is not None and record.epoch != self.core.stored_epoch:
            self.die("another Lighthouse has taken over the store")
        self.life.after(self.world.settings.timeouts.outage_limit_ms // OWNER_CHECKS, self._check_owner)

    def _run(self, effects: list[Effect]) -> None:
        self.core.validate()
        self._carry_out(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if not self.alive:
                return
            if isinstance(effect, Store):
                self._store(effect)
            elif isinstance(effect, Send):
                self.simulation.oracle.sent(self, effect.process, effect.message, self.disk.record)
                end = self._sessions.get((effect.process, effect.session))
                if end is not None:
                    end.send(effect.message)
            elif isinstance(effect, SendPing):
                end = self._sessions.get((effect.process, effect.session))
                if end is not None:
                    end.send(Ping())
            elif isinstance(effect, Close):
                self._close(effect.process, effect.session)
            else:
                assert isinstance(effect, Note)
                self.world.trace(self.life.name, "{}", effect.text)
                if effect.kind == "announce":
                    self.simulation.oracle.announced(self, effect.fields["text"])
                if effect.kind == "lost":
                    fields = effect.fields
                    process = Process(fields["replica_id"], fields["incarnation"])
                    self.simulation.oracle.lost(process, fields["reason"])

    def _store(self, effect: Store) -> None:
        forms = effect.record.q_last is not None
        if forms and self._die_at_store == "before":
            self.die("crashed before the write")
            return
        if not self.disk.accepts(effect.expected_epoch):
            self.die("another Lighthouse has taken over the store")
            return
        if self.disk.fails and self.world.chance(0.7):
            self._store_failed()
            return
        self.disk.record = effect.record
        self.simulation.oracle.stored(self, effect.record, self._q_stored)
        self._q_stored = effect.record.q_last
        if self.disk.fails:
            self._store_failed()
        elif forms and self._die_at_store == "after":
            self.die("crashed after the write")

    def _store_failed(self) -> None:
        """Whether the record was written or not: this Lighthouse has no say any more."""
        self.world.hit("the store fails")
        self.die("the store cannot be written")
