"""The Manager: what a training script holds in its hand."""

from __future__ import annotations

import logging
import os
import signal
import threading
import time
from collections.abc import Callable, Mapping
from datetime import timedelta
from types import FrameType
from typing import Any

import torch
import xxhash
from torch.distributed import Store, TCPStore

from lighthouse.events import EventLog
from lighthouse.messages import Head, Progress
from lighthouse.security import Security
from torchft_plus.manager.agent import Agent, LeaderAgent, RankAgent
from torchft_plus.manager.desk import Desk
from torchft_plus.manager.fetcher import Fetcher
from torchft_plus.manager.lanes import LaneBuilder
from torchft_plus.manager.mailbox import Mailbox
from torchft_plus.manager.outcome import Left, ManagerError, StepOutcome, StepPlan
from torchft_plus.manager.pace import Pace
from torchft_plus.manager.settings import Settings, SettingsError
from torchft_plus.manager.step_loop import StepLoop
from torchft_plus.manager.torchft_names import TorchftNames, WorldSizeMode, timeout_of
from torchft_plus.manager.transport import join_address, split_address
from torchft_plus.pb import peer_pb2 as pb
from torchft_plus.process_group.wrappers import ProcessGroup
from torchft_plus.reduce.recorded import RecordedOperations
from torchft_plus.reduce.reduction import AttachedReduction
from torchft_plus.state.catch_up import CatchUp
from torchft_plus.state.errors import StateError
from torchft_plus.state.registry import StateRegistry
from torchft_plus.state.server import StateServer

logger = logging.getLogger(__name__)

DEFAULT_CATCH_UP_STEPS = 64
VALUES_SLICE_MS = 50
REPLAY_SHARE = 0.25
"""Of what the last step had to spare, for the replay at a boundary: part of that was the reduction, which all wait for."""


class Manager(TorchftNames):
    """Runs one rank of a replica group through steps that commit in a quorum.

    The names are torchft's where it has them. One step is::

        manager.start_quorum()            # Optimizer.zero_grad does it
        loss = model(batch).sum()
        loss.backward()                   # DistributedDataParallel(manager, model) posts gradients meanwhile
        if manager.should_commit():       # Optimizer.step does it
            optimizer.step()

    A peer's death costs no computed gradient: ``should_commit`` reduces it again among those who are left. A group that
    lacks the state takes part with zeros until it has fetched it from the others and replayed what they did meanwhile.

    Args:
        pg: process group between replicas, for example ``ProcessGroupGloo()``.
        load_state_dict, state_dict: torchft's callables for user state (tensors and plain values, nested); state can
            also be registered at ``manager.state``.
        min_replica_size: fewest replica groups that may train.
        use_async_quorum: accepted for torchft's sake; a running quorum is never asked again, so there is nothing to wait for.
        timeout: the one knob: how long a healthy group may keep the others waiting. Default 60 s.
            ``TORCHFT_TIMEOUT_SEC`` goes before it.
        quorum_timeout, connect_timeout, heartbeat_interval, quorum_retries: accepted for torchft's sake; all follows from
            ``timeout``.
        rank, world_size: inside the group; default ``RANK`` and ``WORLD_SIZE``.
        world_size_mode: only ``DYNAMIC``.
        store_addr, store_port: the group's store; default ``MASTER_ADDR`` and ``MASTER_PORT``.
        lighthouse_addr: "host:port"; default ``TORCHFT_LIGHTHOUSE``.
        replica_id: stable name of this group; default ``REPLICA_ID``, else a random one.
        port: accepted for torchft's sake; free ports are taken.
        hostname: address to bind and to advertise; default the interface that leads to the Lighthouse.
        checkpoint_transport: accepted for torchft's sake; state goes over the Manager's own server.
        init_sync: accepted for torchft's sake; groups that begin with equal state copy nothing, others do.
        max_retries: so many steps in a row may be refused before ``should_commit`` raises.
        job_id: several jobs may share a Lighthouse.
        outage_limit: how long training goes on without a word from the Lighthouse. Default 1 h.
        catch_up_max_steps: how many steps a joiner may record while it fetches.
        digest_every: emit a digest of the state each so many steps (0: never).
        handle_sigterm: SIGTERM finishes the step and leaves in good order.
        security: token and TLS of the run; default ``TORCHFT_PLUS_TOKEN``, ``TORCHFT_PLUS_TLS_CERT`` and so on.

    Raises:
        SettingsError: an argument or a variable is missing or wrong.
    """

    def __init__(
        self,
        pg: ProcessGroup,
        load_state_dict: Callable[[Any], None] | None = None,
        state_dict: Callable[[], Any] | None = None,
        min_replica_size: int = 1,
        use_async_quorum: bool = True,
        timeout: timedelta | None = None,
        quorum_timeout: timedelta | None = None,
        connect_timeout: timedelta | None = None,
        rank: int | None = None,
        world_size: int | None = None,
        world_size_mode: WorldSizeMode = WorldSizeMode.DYNAMIC,
        store_addr: str | None = None,
        store_port: int | None = None,
        lighthouse_addr: str | None = None,
        replica_id: str | None = None,
        port: int | None = None,
        hostname: str | None = None,
        heartbeat_interval: timedelta | None = None,
        checkpoint_transport: object = None,
        init_sync: bool = True,
        max_retries: int | None = None,
        quorum_retries: int = 0,
        *,
        job_id: str | None = None,
        outage_limit: timedelta | None = None,
        catch_up_max_steps: int = DEFAULT_CATCH_UP_STEPS,
        digest_every: int = 0,
        handle_sigterm: bool = True,
        security: Security | None = None,
    ) -> None:
        super().__init__()
        del use_async_quorum, quorum_timeout, connect_timeout, port, heartbeat_interval
        del checkpoint_transport, init_sync, quorum_retries
        if world_size_mode is not WorldSizeMode.DYNAMIC:
            raise SettingsError(
                f"world_size_mode is {world_size_mode.name}: only DYNAMIC is offered; for spare processes that take over "
                "see launch.spares in docs/configuration.md"
            )
        settings = Settings.resolve(
            min_replica_size=min_replica_size,
            replica_id=replica_id,
            lighthouse_address=lighthouse_addr,
            job_id=job_id,
            group_rank=rank,
            group_world_size=world_size,
            store_host=store_addr,
            store_port=store_port,
            bind_host=hostname,
            timeout_ms=_to_ms(timeout_of(timeout)),
            outage_limit_ms=_to_ms(outage_limit),
            security=security,
        )
        self._settings = settings
        self._pg = pg
        self._digest_every = digest_every
        self._counter = 0
        self._phase = "start"
        self._started = False
        self._in_step = False
        self._last: StepOutcome | None = None
        self._early: StepOutcome | None = None
        """How the running step ended, if its backward finished it."""
        self._batches = self._refusals = 0
        self._max_retries = max_retries
        self._weight = 1.0
        self._positions: dict[str, int] = {}
        self._recording = False
        self._overflows = 0
        self._obstacles: tuple[str, ...] = ()
        self._shut = False
        self._windowed = False
        self._digested: Head | None = None
        name = f"{settings.replica_id}.{settings.group_rank}"
        self._events = EventLog.from_environment(name, name)
        self._events.emit(
            "start",
            pid=os.getpid(),
            group_rank=settings.group_rank,
            group_world_size=settings.group_world_size,
            incarnation=settings.incarnation,
        )
        self.state = StateRegistry(shard=f"rank {settings.group_rank} of {settings.group_world_size}")
        """Everything that a joiner must receive."""
        self.state.register_values("torchft_plus", self._get_values, self._set_values)
        if state_dict is not None and load_state_dict is not None:
            self.set_state_dict_fns(load_state_dict, state_dict)
        timeouts = settings.timeouts
        self._mailbox = Mailbox()
        self._server = StateServer(
            self.state,
            bind=join_address(settings.bind_host, 0),
            transfer_stall_ms=timeouts.transfer_stall_ms,
            security=settings.security,
        )
        logger.info("%s serves its state at %s", name, self._server.address)
        self.catch_up = CatchUp(self.state, catch_up_max_steps)
        self._pace = Pace()
        self._recorded = RecordedOperations()
        self._attached: list[AttachedReduction] = []
        self._lanes = LaneBuilder(
            pg.backend(),
            settings.job_id,
            settings.group_rank,
            timeouts.configure_ms,
            2 * timeouts.timeout_ms,  # the core's deadline comes first and names the culprit
            lambda report: self._agent.report(pb.RankFrame(configured=report)),
            self._mailbox.wake,
        )
        self._fetcher = Fetcher(
            self.state,
            timeouts.transfer_stall_ms,
            self._events,
            lambda reason: self._agent.report(pb.RankFrame(fetch_failed=pb.RankFetchFailed(reason=reason))),
            self._mailbox.wake,
            settings.security,
        )
        desk = Desk(self._mailbox, self._lanes, self._server)
        self._agent = self._make_agent(desk)
        self._loop = StepLoop(
            self._agent, self._mailbox, self._lanes, self._fetcher, self.catch_up, self._server
        )
        self._loop.reductions.append(self._recorded)
        self._agent.start(2 * timeouts.timeout_ms)
        if handle_sigterm and threading.current_thread() is threading.main_thread():
            self._install_sigterm()

    # --- the step --------------------------------------------------------------------------------------------------

    def attach(self, reduction: AttachedReduction) -> None:
        """Make ``reduction`` part of every step. Before the first step."""
        if self._started:
            raise ManagerError("attach() after the first step: wrap the model before training starts")
        if self._attached:
            reduction.follow(self._attached[-1])
        self._recorded.follow(reduction)
        self._attached.append(reduction)
        self._loop.reductions.append(reduction)

    def backward_ended(self) -> None:
        """The step's last backward has ended: finish the step, so that whoever clips next sees the averages.

        ``DistributedDataParallel`` calls it at the end of a backward outside ``no_sync``; ``should_commit`` then tells
        how the step ended.

        Raises:
            ManagerError: a second backward in one step, whose gradients would stay local.
        """
        if self._in_step:
            self._early = self.finish_step()
        elif self._early is not None:
            raise ManagerError(
                "a second backward in one step would add local gradients to averaged ones: "
                "run all but the last backward of a step within no_sync()"
            )

    # --- windows of inner steps (DiLoCo, LocalSGD) -----------------------------------------------------------------

    def use_windows(self) -> None:
        """A step is a window of many inner steps. Before the first one.

        A change of membership then happens at once, and not only at the end of the window; a group that is behind waits
        for its state between two syncs, and takes part in one only if the others have come there.
        """
        if self._started:
            raise ManagerError("use_windows() after the first step: decide before training starts")
        self._windowed = True

    def inner_step_done(self) -> None:
        """This process moves: nobody takes it for one that stands still. A joiner may read the state of the last sync."""
        self._touch("compute")
        if not self._loop.behind:
            self._server.publish(self._loop.head)

    def window_is_due(
        self, inner_steps: int, ready: bool = False, least_peers: int = 1, grace_ms: int = 0
    ) -> bool:
        """Does this window end here, because a rank is ``ready`` or others wait at their sync?

        Collective over the ranks of this group; costs a round trip inside it, and asks nobody else.

        Args:
            inner_steps: of this window so far; the same on every rank.
            ready: this rank wants it to end.
            least_peers: so many other groups must wait,
            grace_ms: for so long.

        Raises:
            ManagerError: another rank of this group did not come here within ``timeout_ms``.
        """
        timeout_ms = self._settings.timeouts.timeout_ms
        return self._loop.poll(inner_steps, ready, least_peers, grace_ms, timeout_ms)

    def launch_step(self, weight: float) -> None:
        """The window's inputs are complete: begin to reduce them. ``finish_step`` waits for the result.

        Args:
            weight: contribution of this group; 0 contributes nothing.
        """
        if not self._in_step:
            raise ManagerError("launch_step() without start_step()")
        self._loop.launch(weight)

    # --- contribution ----------------------------------------------------------------------------------------------

    def set_weight(self, weight: float) -> None:
        """Contribution weight of this group from the next step on (default 1): averages are weighted by it."""
        if not weight >= 0:
            raise ValueError(f"weight is {weight}: it must be 0 or more")
        self._weight = weight

    def start_step(self) -> StepPlan:
        """A step starts: before the forward. Blocks only for the first quorum, and in lock-step while behind."""
        self._touch("start")
        self._pace.step_begins(time.monotonic())
        if self._loop.leaving and self._loop.may_leave(self._settings.timeouts.shutdown_ms):
            self._leave()
        if not self._started:
            self._first_start()
        if self._loop.quorum is None:
            self._loop.wait_first_quorum(self._first_quorum_timeout_s)
        elif self._in_step:
            self._loop.start_over()
        else:
            self._emit_digest()
        caught_up = False
        if self._loop.behind:
            caught_up = self._catch_up()
        self._early = None
        self._loop.begin(self._weight)
        self._install_lane()
        self._in_step = True
        self._touch("compute")
        self._pace.compute_begins(time.monotonic())
        return StepPlan(self._loop.head.step + 1, self._loop.behind, caught_up)

    def finish_step(
        self, scalars: Mapping[str, float] | None = None, positions: Mapping[str, int] | None = None
    ) -> StepOutcome:
        """All gradients are computed: average them in the quorum, vote, and learn what to do.

        Args:
            scalars: plain numbers to be summed over the ranks of all contributing groups (a loss, token counts).
            positions: this group's data positions after this step, by a name that is unique to its data.

        Raises:
            ManagerError: this group cannot go on.
        """
        if not self._in_step:
            raise ManagerError("finish_step() without start_step()")
        self._touch("reduce")
        self._pace.compute_ends(time.monotonic())
        outcome = self._loop.finish(scalars or {}, positions or {})
        self._in_step = False
        self._last = outcome
        self._touch("apply")
        if outcome.refused:
            self._refusals += 1
            return outcome
        if outcome.behind:
            # Plain values of the base come before anything is recorded; they never come again.
            self._recording = self._take_values()
            if outcome.skipped and self._recording:
                self._record([])
        self._positions.update(outcome.positions)
        self._batches += outcome.contributors
        return outcome

    def record_or_step(self, optimizers: list[torch.optim.Optimizer], step: Callable[[], Any]) -> Any:
        """Run ``step``, or record it if this group is behind and has no state to apply it to."""
        if not self._loop.behind:
            return step()
        if self._recording:
            self._record(optimizers)
        return None

    # --- where this group stands -------------------------------------------------------------------------------------

    def quorum_id(self) -> int:
        """Id of the current quorum, 0 before the first."""
        return 0 if self._loop.quorum is None else self._loop.quorum.quorum_id

    def refusals(self) -> int:
        """Steps of this process that were not committed."""
        return self._refusals

    def head(self) -> Head:
        """Where this group stands: step and the quorum that committed it."""
        return self._loop.head

    def restore_head(self, head: Head, positions: Mapping[str, int] | None = None) -> None:
        """The state of ``head`` was loaded from disk. Before the first step.

        Args:
            head: whose state it is.
            positions: data positions as of then, by name.
        """
        if self._started:
            raise ManagerError("restore_head() after the first step")
        self._loop.head = head
        self._positions.update(positions or {})
        if isinstance(self._agent, LeaderAgent):
            self._agent.set_head(head, head)

    def disk_saved(self, head: Head) -> None:
        """A checkpoint of ``head`` is complete on disk: it counts if all groups are lost."""
        if isinstance(self._agent, LeaderAgent):
            self._agent.disk_saved(head)

    def story(self) -> list[str]:
        """The last decisions of this group's leader, one sentence each (empty on other ranks)."""
        return self._agent.story() if isinstance(self._agent, LeaderAgent) else []

    def shutdown(self, wait: bool = True) -> None:
        """Leave the quorum in good order and end everything that this Manager started."""
        if self._shut:
            return
        self._shut = True
        timeout_ms = self._settings.timeouts.shutdown_ms if wait else 0
        if self._started and not self._loop.behind:
            self._emit_digest(final=True)
        if isinstance(self._agent, LeaderAgent):
            self._agent.leave_idle()
        if self._started and wait and not self._loop.wait_left(timeout_ms):
            logger.warning("the Lighthouse did not confirm that %s left", self._settings.replica_id)
        self._agent.report(pb.RankFrame(bye=pb.RankBye()))
        self._agent.close(max(timeout_ms, 1_000))
        self._fetcher.close(max(timeout_ms, 1_000))
        self._lanes.close()
        self._server.close()
        self._pg.shutdown()
        self._events.close()

    # --- inside ------------------------------------------------------------------------------------------------------

    def _make_agent(self, desk: Desk) -> Agent:
        settings = self._settings
        wait = timedelta(milliseconds=settings.timeouts.timeout_ms)
        store: Store | None = None
        if settings.group_world_size > 1:
            host, port = split_address(settings.store_address)
            store = TCPStore(host, port, is_master=False, timeout=wait)
        if settings.group_rank > 0:
            assert store is not None
            return RankAgent(settings, desk, self._events, store)
        self._lane_store = TCPStore(
            settings.bind_host, 0, is_master=True, wait_for_workers=False, timeout=wait
        )
        address = join_address(settings.bind_host, self._lane_store.port)
        return LeaderAgent(settings, desk, self._events, store, address, self._progress)

    def _first_start(self) -> None:
        self._register_user_state()
        self._refuse_unregistered()
        self._started = True
        self._obstacles = self.state.obstacles_to_catch_up()
        for obstacle in self._obstacles:
            logger.info("a joiner will let the others wait for its download, because %s", obstacle)
        if not self._obstacles:
            size_bytes = self.state.gradient_bytes()
            logger.info(
                "while this group is behind it keeps up to catch_up_max_steps=%d steps of gradients: %.1f MB of host"
                " memory each, %.1f MB in all",
                self.catch_up.max_steps,
                size_bytes / 1e6,
                self.catch_up.max_steps * size_bytes / 1e6,
            )
        ready = pb.RankReady(
            initial_digest=self.state.digest(),
            layout_digest=self._layout_digest(),
            state_address=self._server.address,
            windowed=self._windowed,
        )
        self._agent.report(pb.RankFrame(ready=ready))

    def _refuse_unregistered(self) -> None:
        """A group that comes back would be level with parameters of its own, and nobody would see it."""
        for reduction in self._attached:
            missing = self.state.missing(reduction.reduced_parameters())
            if missing:
                raise ManagerError(
                    f"parameter {missing[0]!r} and {len(missing) - 1} others are averaged but not registered, so a group "
                    'that comes back would not receive them: call manager.state.register_module("model", model) '
                    "before the first step"
                )

    def _layout_digest(self) -> str:
        """One word for all that replicas must have in common besides the state itself."""
        parts = [f"{name}={value}" for name, value in sorted(self.state.signature().items())]
        parts += [reduction.digest() for reduction in self._loop.reductions]
        return xxhash.xxh3_64("\n".join(parts).encode()).hexdigest()

    def _catch_up(self) -> bool:
        """At a boundary while behind. True if this group became level."""
        self._replay_ahead()
        if not self._loop.boundary(bool(self._obstacles), patient=self._windowed):
            return False
        report = self._fetcher.report
        if report is None or not self._take_values() or not self.catch_up.replay(report):
            raise ManagerError("the state was fetched, but the recorded steps could not be replayed")
        for reduction in self._attached:
            reduction.caught_up()
        steps, size_bytes = self.catch_up.peak
        if self._user_state and steps == 0:
            # The callables may load options that were saved at the start (TorchTitan caches them): those of now count.
            values = report.plan.manifest.values
            self.state.apply_values({name: values[name] for name in self._wrapped if name in values})
        self._events.emit("caught_up", step=self._loop.head.step, recorded_steps=steps, size_bytes=size_bytes)
        self._fetcher.reset()
        self.catch_up.reset()
        self._overflows = 0
        self._emit_digest(final=True)
        return True

    def _replay_ahead(self) -> None:
        """With the state here, bring it up to date as far as the others do not wait for it."""
        report = self._fetcher.report
        if (
            report is not None
            and not self._windowed
            and not self.catch_up.nearly_level
            and self._take_values()
        ):
            self.catch_up.replay(report, REPLAY_SHARE * self._pace.spare_ms)

    def _record(self, optimizers: list[torch.optim.Optimizer]) -> None:
        """Queue the step that was just committed; a queue that overflows twice is too short."""
        try:
            self.catch_up.record(optimizers, self._loop.head)
        except StateError as error:
            self._recording = False
            self._overflows += 1
            if self._overflows > 1:
                raise ManagerError(str(error)) from error
            logger.warning("%s; starting over once", error)
            self._fetcher.reset()
            self._agent.report(pb.RankFrame(fetch_failed=pb.RankFetchFailed(reason=str(error))))

    def _take_values(self) -> bool:
        """Plain values of the base, as soon as a donor has sent them; False if the fetch came to nothing."""
        for _ in range(4 * self._settings.timeouts.transfer_stall_ms // VALUES_SLICE_MS):
            if self.catch_up.take_values(VALUES_SLICE_MS):
                return True
            if self._fetcher.failed:
                break
        return False

    def _install_lane(self) -> None:
        lane = self._lanes.current()
        if lane is not None and self._pg.lane is not lane:
            self._pg.install(lane)

    def _emit_digest(self, final: bool = False) -> None:
        head = self._loop.head
        due = self._digest_every > 0 and (final or head.step % self._digest_every == 0)
        if due and head.step > 0 and not self._loop.behind and self._digested != head:
            self._digested = head
            self._events.emit("digest", step=head.step, quorum_id=head.quorum_id, digest=self.state.digest())

    def _get_values(self) -> dict[str, Any]:
        return {"batches": self._batches, "positions": dict(sorted(self._positions.items()))}

    def _set_values(self, values: dict[str, Any]) -> None:
        self._batches = int(values["batches"])
        self._positions = {str(name): int(position) for name, position in values["positions"].items()}

    @property
    def positions(self) -> dict[str, int]:
        """Data positions of all groups that ever contributed, as of the last committed step."""
        return dict(self._positions)

    def _touch(self, phase: str) -> None:
        self._counter += 1
        self._phase = phase

    def _progress(self) -> Progress:
        return Progress(self._loop.head.step, self._phase, self._counter)

    def _install_sigterm(self) -> None:
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL:
            signal.signal(signal.SIGTERM, self._on_sigterm)

    def _on_sigterm(self, signum: int, frame: FrameType | None) -> None:
        del signum, frame
        logger.info("SIGTERM: %s finishes its step and leaves", self._settings.replica_id)
        self._agent.report(pb.RankFrame(leave_wanted=pb.RankLeaveWanted()))

    def _leave(self) -> None:
        self._emit_digest(final=True)
        self.shutdown(wait=False)
        raise Left


def _to_ms(time: timedelta | None) -> int | None:
    return None if time is None else int(time.total_seconds() * 1000)
