"""The supervisor: carries out the restart policy and the injected faults with real processes.

One thread, one loop: look at the children, read the event logs, ask the policy, act. Reports of exits to the
Lighthouse go through a thread of their own, so that nothing here waits for a network.
"""

from __future__ import annotations

import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Protocol

from lighthouse.events import EventLog
from lighthouse.messages import Process
from lighthouse.security import Security
from torchft_plus.config import RunFile
from torchft_plus.launch.chaos import ChaosSchedule, Injection
from torchft_plus.launch.event_follower import Event, EventFollower
from torchft_plus.launch.exit_reporter import ExitReporter
from torchft_plus.launch.group import ReplicaGroup
from torchft_plus.launch.lighthouse_keeper import LISTEN_DEADLINE_S, LighthouseKeeper
from torchft_plus.launch.policy import Effect, End, Kill, Limits, RestartPolicy, Say, Start, Terminate
from torchft_plus.launch.ports import PortPicker
from torchft_plus.launch.progress import RunProgress
from torchft_plus.launch.rank_environment import (
    Place,
    common_environment,
    module_arguments,
    rank_command,
    rank_environment,
)
from torchft_plus.launch.spare_pool import SparePool

POLL_MS = 10
_END_BY_FORCE_S = 10.0

_SIGNALS = {
    "kill": signal.SIGKILL,
    "stop": signal.SIGSTOP,
    "terminate": signal.SIGTERM,
    "resume": signal.SIGCONT,
}


class Observer(Protocol):
    """Who shows the run to people."""

    def say(self, text: str) -> None:
        """A sentence."""
        ...

    def see(self, event: Event) -> None:
        """An event of any log, in order of time as far as known."""
        ...

    def refresh(self, progress: RunProgress) -> None:
        """Called in every turn of the loop, about a hundred times a second."""
        ...


class LighthouseFailed(RuntimeError):
    """The Lighthouse did not come up."""


@dataclass(slots=True)
class Outcome:
    """How a run ended."""

    end: End
    events: list[Event]
    signal: int = 0
    """The signal that ended it, or 0."""
    last_lines: dict[str, list[str]] = field(default_factory=dict[str, list[str]])
    """Ends of the logs of ranks that failed without having been asked to, by "replica_1.0"."""


class Supervisor:
    """Runs one run file to its end.

    Args:
        run: the checked run file, with a [launch] table.
        folder: the run folder, new and empty.
        environment: of the launcher.
        observer: who shows it.
        security: of the run; ``environment`` has it, too.
    """

    def __init__(
        self,
        run: RunFile,
        folder: Path,
        environment: Mapping[str, str],
        observer: Observer,
        security: Security | None = None,
    ) -> None:
        self._run = run
        self._environment = dict(environment)
        self._observer = observer
        self._events_folder = folder / "events"
        self._events_folder.mkdir(parents=True, exist_ok=True)
        self._log = EventLog(self._events_folder / "launcher.jsonl", "launcher")
        self._follower = EventFollower(self._events_folder)
        self._events: list[Event] = []
        self._progress = RunProgress.of(run.replica_ids)
        self._ports = PortPicker()
        self._groups = {
            replica_id: ReplicaGroup(replica_id, index, folder / "logs")
            for index, replica_id in enumerate(run.replica_ids)
        }
        limits = Limits(
            max_restarts=run.launch.max_restarts,
            restart_delay_s=run.launch.restart_delay_ms / 1000,
            restart_delay_max_s=run.launch.restart_delay_max_ms / 1000,
            stop_grace_s=run.launch.stop_grace_s,
            min_replicas=run.fault_tolerance.min_replica_size,
        )
        self._policy = RestartPolicy(run.replica_ids, run.launch.ranks_per_replica, limits)
        external = run.fault_tolerance.lighthouse
        self._keeper = None if external else LighthouseKeeper(run, folder, environment)
        self._external = external
        self._spares = SparePool(
            run.launch.warm_spares,
            run.launch.module,
            module_arguments(run),
            common_environment(environment, run),
            folder / "logs" / "spares.log",
        )
        self._chaos = ChaosSchedule((), 0.0)
        self._signals: list[int] = []
        self._last_lines: dict[str, list[str]] = {}
        self._end: End | None = None
        self._reported: set[str] = set()
        self._reporter = ExitReporter(self._lighthouse_address, run.fault_tolerance.job_id, security)

    def run(self) -> Outcome:
        """Start everything, keep it running, end everything. Must be called on the main thread.

        Raises:
            LighthouseFailed: the Lighthouse did not come up; nothing else was started.
        """
        previous = {n: signal.signal(n, self._on_signal) for n in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._start_lighthouse()
            self._loop()
        finally:
            self._reporter.close()
            self._end_all()
            self._read_events(time.monotonic())
            self._follower.close()
            self._log.close()
            for number, handler in previous.items():
                signal.signal(number, handler)
        end = self._end or End(False, "The run was interrupted before it began.")
        return Outcome(end, self._events, self._signals[0] if self._signals else 0, self._last_lines)

    def _lighthouse_address(self) -> str:
        return self._keeper.address if self._keeper is not None else self._external

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._signals.append(number)

    # --- the loop -------------------------------------------------------------------------------------------

    def _loop(self) -> None:
        now = time.monotonic()
        self._chaos = ChaosSchedule(self._run.chaos, now, self._run.fault_tolerance.steps_per_commit)
        deadline_s = self._run.launch.deadline_s
        deadline = now + deadline_s if deadline_s else None
        handled_signals = 0
        if not self._signals:
            self._carry_out(self._policy.begin(now), now)
        while self._end is None:
            self._wait()
            now = time.monotonic()
            if len(self._signals) > handled_signals:
                handled_signals += 1
                name = signal.Signals(self._signals[0]).name
                self._carry_out(self._policy.stop(now, f"{name}: everything is being ended."), now)
            if deadline is not None and now >= deadline:
                deadline = None
                text = f"The run did not end within launch.deadline_s = {deadline_s:g}."
                self._carry_out(self._policy.stop(now, text), now)
            self._watch_groups(now)
            self._inject(now)
            self._carry_out(self._policy.tick(now), now)
            self._watch_lighthouse(now)
            self._spares.refill(now, calm=len(self._progress.training) == len(self._groups))
            self._observer.refresh(self._progress)

    def _wait(self) -> None:
        """Until a child is gone or the next look at /proc is due."""
        poller = select.poll()
        for group in self._groups.values():
            for descriptor in group.descriptors:
                poller.register(descriptor, select.POLLIN)
        for descriptor in self._keeper.descriptors if self._keeper is not None else []:
            poller.register(descriptor, select.POLLIN)
        poller.poll(POLL_MS)

    def _read_events(self, now: float) -> None:
        for event in self._follower.read():
            self._events.append(event)
            self._progress.apply(event)
            self._chaos.feed(event, now)
            if event.kind == "commit" and self._progress.is_current(event):
                self._policy.progressed(event.replica_id)
            if self._keeper is not None and event.replica_id == "lighthouse":
                self._keeper.feed(event)
            self._observer.see(event)

    # --- replica groups -------------------------------------------------------------------------------------

    def _watch_groups(self, now: float) -> None:
        exits = {replica_id: group.new_exits() for replica_id, group in self._groups.items()}
        self._read_events(
            now
        )  # after the exits: what a dead rank wrote last is known when its exit is judged
        for replica_id, group in self._groups.items():
            for rank, status in exits[replica_id]:
                self._on_exit(group, rank, status, now)
            if group.take_gone():
                self._report(group)
                self._carry_out(self._policy.group_gone(replica_id, now, injected=group.injected), now)

    def _on_exit(self, group: ReplicaGroup, rank: int, status: int, now: float) -> None:
        steps = self._run.commits
        step = self._progress.replicas[group.replica_id].step
        done = not group.told_to_leave if steps is None else step >= steps
        first = not group.failed
        if status != 0:
            group.failed = True
        effects = self._policy.rank_exited(
            group.replica_id, rank, now, status=status, finished=done, injected=group.injected
        )
        self._carry_out(effects, now)  # the rest of the group is killed before it is reported gone
        if status != 0:
            self._report(group)
        self._log.emit(
            "exit",
            replica_id=group.replica_id,
            rank=rank,
            incarnation=group.incarnation,
            status=max(status, 0),
            signal=signal.Signals(-status).name if status < 0 else "",
            injected=group.injected,
            first=first and status != 0 and not group.asked,
        )
        if first and status != 0 and not group.injected and not group.asked:
            self._last_lines[f"{group.replica_id}.{rank}"] = group.last_lines(rank)

    def _report(self, group: ReplicaGroup) -> None:
        if group.incarnation not in self._reported:
            self._reported.add(group.incarnation)
            self._reporter.report(Process(group.replica_id, group.incarnation))

    def _carry_out(self, effects: list[Effect], now: float) -> None:
        for effect in effects:
            match effect:
                case Start(replica_id):
                    self._start(self._groups[replica_id])
                case Terminate(replica_id):
                    self._groups[replica_id].asked = True
                    self._groups[replica_id].signal(signal.SIGTERM)
                    self._groups[replica_id].signal(signal.SIGCONT)  # a frozen one must wake to obey
                case Kill(replica_id):
                    self._groups[replica_id].signal(signal.SIGKILL)
                case Say(text):
                    self._observer.say(text)
                case End():
                    self._end = effect

    def _start(self, group: ReplicaGroup) -> None:
        place = Place(
            replica_index=group.index,
            incarnation=group.new_incarnation(),
            master_port=self._ports.pick(),
            lighthouse_address=self._lighthouse_address(),
            events_folder=self._events_folder,
        )
        environments = [
            rank_environment(self._environment, self._run, place, rank)
            for rank in range(self._run.launch.ranks_per_replica)
        ]
        warm = group.start(rank_command(self._run), environments, self._spares.take)
        self._log.emit(
            "spawn",
            replica_id=group.replica_id,
            pids=group.pids,
            incarnation=group.incarnation,
            life=group.lives,
            warm=warm,
        )

    # --- faults ---------------------------------------------------------------------------------------------

    def _inject(self, now: float) -> None:
        for injection in self._chaos.tick(now, self._progress.training):
            group = self._groups.get(injection.replica_id)
            if group is not None and not group.alive:
                self._observer.say(
                    f"{injection.action} {injection.target}: it is not running, nothing is done."
                )
                continue
            self._log.emit("chaos", action=injection.action, target=injection.target, step=injection.step)
            self._signal(injection, group)

    def _signal(self, injection: Injection, group: ReplicaGroup | None) -> None:
        number = _SIGNALS[injection.action]
        if group is not None:
            group.injected = True
            group.told_to_leave = group.told_to_leave or injection.action == "terminate"
            group.signal(number, injection.rank)
        elif self._keeper is not None:
            self._keeper.signal(number)

    # --- the Lighthouse -------------------------------------------------------------------------------------

    def _start_lighthouse(self) -> None:
        if self._keeper is None:
            return
        self._log.emit("spawn", replica_id="lighthouse", pids=[self._keeper.start()])
        deadline = time.monotonic() + LISTEN_DEADLINE_S
        while not self._keeper.address and not self._signals:
            now = time.monotonic()
            self._read_events(now)
            if self._keeper.stopped() or now >= deadline:
                said = " ".join(self._keeper.last_lines(3)) or "it said nothing"
                raise LighthouseFailed(f"The Lighthouse did not come up: {said}")
            self._wait()

    def _watch_lighthouse(self, now: float) -> None:
        status = self._keeper.poll(now) if self._keeper is not None else None
        if status is not None:
            name = signal.Signals(-status).name if status < 0 else ""
            self._log.emit("exit", replica_id="lighthouse", status=max(status, 0), signal=name)
            self._observer.say("The Lighthouse died and is restarted; training goes on without it.")

    # --- the end --------------------------------------------------------------------------------------------

    def _end_all(self) -> None:
        """Nothing that was started is left: the groups are ended already, except after an exception here."""
        for group in self._groups.values():
            group.signal(signal.SIGKILL)
        if self._keeper is not None:
            self._keeper.signal(signal.SIGTERM)
            self._keeper.signal(signal.SIGCONT)
        deadline = time.monotonic() + self._run.launch.stop_grace_s
        while self._anything_left() and time.monotonic() < deadline:
            self._wait()
        if self._keeper is not None:
            self._keeper.signal(signal.SIGKILL)
        deadline = time.monotonic() + _END_BY_FORCE_S
        while self._anything_left() and time.monotonic() < deadline:
            self._wait()

    def _anything_left(self) -> bool:
        for group in self._groups.values():
            group.take_gone()
        spares_left = not self._spares.close()
        lighthouse_left = self._keeper is not None and not self._keeper.stopped()
        return spares_left or lighthouse_left or any(group.alive for group in self._groups.values())
