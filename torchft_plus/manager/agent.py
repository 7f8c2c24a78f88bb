"""The agent thread of a rank: one asyncio loop that does everything but training.

The leader's agent owns the step core and carries out its effects: Lighthouse stream, leaders' mesh, words to the ranks. The agent
of another rank holds the link to its leader. An agent never touches a tensor.
"""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Coroutine
from typing import Any, NoReturn

import xxhash
from torch.distributed import Store

from lighthouse.client import LighthouseClient, LighthouseRefused
from lighthouse.events import EventLog
from lighthouse.messages import Down, Form, Head, Process, Progress, Quorum, Retired, Revoke, Up
from lighthouse.rpc import is_loopback
from lighthouse.security import TOKEN_VARIABLE
from torchft_plus.manager.desk import Desk
from torchft_plus.manager.effects import ConnectMesh, Effect, Emit, SendPeers, SendUp, Tell, TellEach
from torchft_plus.manager.group_link import LeaderHub, RankLink
from torchft_plus.manager.mesh import Mesh, MeshError, PeerService
from torchft_plus.manager.settings import Settings
from torchft_plus.manager.step_core import GroupInfo, StepCore
from torchft_plus.manager.transport import PeerRefused
from torchft_plus.pb import peer_pb2 as pb

logger = logging.getLogger(__name__)

EXIT_GROUP_LOST = 75
"""Exit status of a rank whose group lost another rank: a temporary failure, a restart mends it (sysexits' EX_TEMPFAIL)."""
EXIT_REFUSED = 2
"""Exit status of a rank whose token or certificate is wrong: a restart would end the same way."""


class Agent(ABC):
    """What the training thread needs of its agent, on any rank."""

    def __init__(self, settings: Settings, desk: Desk, events: EventLog) -> None:
        self._settings = settings
        self._desk = desk
        self._events = events
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None
        self._ready = threading.Event()
        self.failure: BaseException | None = None
        """What ended the thread, if it was not ``close``."""
        self._thread = threading.Thread(target=self._thread_main, name="torchft_plus-agent", daemon=True)

    def start(self, timeout_ms: int) -> None:
        """Start the thread and wait until the ranks of the group are connected.

        Raises:
            RuntimeError: they were not within ``timeout_ms``.
        """
        self._thread.start()
        if not self._ready.wait(timeout_ms / 1000):
            raise RuntimeError(f"the agent thread did not start within {timeout_ms} ms")
        if self.failure is not None:
            raise RuntimeError(
                f"the ranks of {self._settings.replica_id} did not connect: {self.failure}"
            ) from self.failure

    def report(self, frame: pb.RankFrame) -> None:
        """Tell the leader something (any thread)."""
        self._call(self._report, frame)

    def close(self, timeout_ms: int) -> None:
        """End the thread, in good order."""
        if self._stop is not None:
            self._call(self._stop.set)
        if self._thread.is_alive():
            self._thread.join(timeout_ms / 1000)

    @property
    def alive(self) -> bool:
        """True while the thread runs."""
        return self._thread.is_alive()

    def _call(self, function: Callable[..., None], *arguments: object) -> None:
        loop = self._loop
        if loop is None or loop.is_closed():
            return
        try:
            loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:
            if not loop.is_closed():
                raise

    def _thread_main(self) -> None:
        try:
            asyncio.run(self._main())
        except Exception as error:
            logger.exception("agent thread of %s failed", self._settings.replica_id)
            self.failure = error
        finally:
            self._ready.set()

    async def _main(self) -> None:
        self._loop, self._stop = asyncio.get_running_loop(), asyncio.Event()
        self._loop.set_exception_handler(self._loop_failed)
        try:
            await self._open()
            self._ready.set()
            await self._stop.wait()
        finally:
            await self._shut()
        if self.failure is not None:
            raise self.failure

    def _loop_failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, object]) -> None:
        """A callback raised: this agent's decisions can be trusted no more."""
        loop.default_exception_handler(context)
        error = context.get("exception")
        if isinstance(error, Exception) and self._stop is not None and not self._stop.is_set():
            self.failure = error
            self._stop.set()

    def group_lost(self, sentence: str) -> NoReturn:
        """A rank of this group is gone, so the group is (rule M7); the training thread may hang in a collective."""
        self._end(f"{sentence}; the group ends, its launcher restarts it", EXIT_GROUP_LOST)

    def refused(self, sentence: str) -> NoReturn:
        """Nobody lets this process in, and trying again cannot help."""
        self._end(sentence, EXIT_REFUSED)

    def _end(self, sentence: str, status: int) -> NoReturn:
        sentence = f"{self._settings.replica_id}: {sentence}"
        self._events.emit("fatal", reason=sentence)
        self._events.close()
        print(f"torchft_plus: {sentence}", file=sys.stderr, flush=True)
        os._exit(status)

    @abstractmethod
    def _report(self, frame: pb.RankFrame) -> None: ...

    @abstractmethod
    async def _open(self) -> None: ...

    @abstractmethod
    async def _shut(self) -> None: ...


class RankAgent(Agent):
    """The agent of a rank that is not the leader."""

    def __init__(self, settings: Settings, desk: Desk, events: EventLog, store: Store) -> None:
        super().__init__(settings, desk, events)
        self._store = store
        self._closing = False
        timeouts = settings.timeouts
        self._link = RankLink(
            pb.RankHello(
                job_id=settings.job_id,
                replica_id=settings.replica_id,
                group_rank=settings.group_rank,
                group_world_size=settings.group_world_size,
            ),
            timeouts.heartbeat_interval_ms,
            timeouts.heartbeat_timeout_ms,
            self._deliver,
            self._lost,
            self._refused,
            settings.security,
        )

    def _deliver(self, word: pb.Word) -> None:
        if word.WhichOneof("body") == "left":
            self._closing = True  # the leader may be gone before this rank is
        self._desk.deliver(word)

    def _report(self, frame: pb.RankFrame) -> None:
        if frame.WhichOneof("body") == "bye":
            self._closing = True
        self._link.send(frame)

    async def _open(self) -> None:
        loop = asyncio.get_running_loop()
        key = f"{self._settings.store_prefix}/leader"
        address = (await loop.run_in_executor(None, self._store.get, key)).decode()
        try:
            await self._link.connect(address, self._settings.timeouts.timeout_ms)
        except PeerRefused as error:
            self._refused(str(error))

    async def _shut(self) -> None:
        self._closing = True
        self._link.close()

    def _refused(self, reason: str) -> None:
        self.refused(f"the leader (rank 0) cannot be talked to: {reason}")

    def _lost(self, reason: str) -> None:
        if not self._closing:
            self.group_lost(f"the leader (rank 0) was lost: {reason}")


class LeaderAgent(Agent):
    """The agent of group rank 0."""

    def __init__(
        self,
        settings: Settings,
        desk: Desk,
        events: EventLog,
        store: Store | None,
        lane_store_address: str,
        progress: Callable[[], Progress],
    ) -> None:
        super().__init__(settings, desk, events)
        self._store = store
        self._lane_store_address = lane_store_address
        self._progress = progress
        self._head = Head()
        self._disk_head: Head | None = None
        self.process = Process(settings.replica_id, settings.incarnation)
        self._readies: dict[int, pb.RankReady] = {}
        self._leave_ranks: set[int] = set()
        self._gone_ranks: set[int] = set()
        self._core: StepCore | None = None
        self._client: LighthouseClient | None = None
        self._mesh: Mesh | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._timer_ms = 0
        self._tasks: set[asyncio.Task[None]] = set()
        self._closing = False
        self._address = ""
        self._had_mesh = False
        timeouts = settings.timeouts
        self._service = PeerService(
            settings.job_id, timeouts.configure_ms, timeouts.heartbeat_timeout_ms, settings.security
        )
        self._hub = LeaderHub(
            settings.job_id,
            settings.replica_id,
            settings.group_world_size,
            timeouts.heartbeat_interval_ms,
            timeouts.heartbeat_timeout_ms,
            self._on_report,
            self._rank_lost,
            settings.security,
        )

    def set_head(self, head: Head, disk_head: Head | None) -> None:
        """Where this group stands before its first step (training thread, before any report)."""
        self._head, self._disk_head = head, disk_head

    def disk_saved(self, head: Head) -> None:
        """A checkpoint is complete on disk (any thread)."""
        self._call(self._with_core, lambda core: core.disk_saved(head))

    def leave_idle(self) -> None:
        """Leave at once: no step is under way (any thread)."""
        self._call(self._with_core, lambda core: core.leave_wanted(idle=True))

    def story(self) -> list[str]:
        """The last decisions of the step core."""
        return self._core.story() if self._core is not None else []

    def _with_core(self, event: Callable[[StepCore], list[Effect]]) -> None:
        if self._core is not None:
            self._carry_out(event(self._core))

    # --- start and end ---------------------------------------------------------------------------------------

    async def _open(self) -> None:
        settings = self._settings
        self._address = await self._service.listen(settings.bind_host)
        self._tell_address()
        if self._store is not None:
            address = await self._hub.listen(settings.bind_host)
            self._store.set(f"{settings.store_prefix}/leader", address)
        missing = await self._hub.wait_complete(settings.timeouts.timeout_ms)
        if missing:
            raise TimeoutError(
                f"group ranks {missing} did not connect within {settings.timeouts.timeout_ms} ms"
            )

    def _tell_address(self) -> None:
        security = self._settings.security
        logger.info(
            "%s tells others that it is at %s (%s)",
            self._settings.replica_id,
            self._address,
            security.describe(),
        )
        if not security.guarded and not is_loopback(self._settings.bind_host):
            logger.warning(
                "whoever reaches %s can send words to this run and read its state: set %s",
                self._settings.bind_host,
                TOKEN_VARIABLE,
            )

    async def _shut(self) -> None:
        self._closing = True
        if self._timer is not None:
            self._timer.cancel()
        if self._client is not None:
            await self._client.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)
        if self._mesh is not None:
            self._mesh.close()
        self._service.close()
        self._hub.close()

    def _all_ready(self) -> None:
        """Every rank has registered everything: meet the Lighthouse."""
        settings = self._settings
        readies = [self._readies[rank] for rank in sorted(self._readies)]
        digest = xxhash.xxh3_128("|".join(ready.initial_digest for ready in readies).encode()).hexdigest()
        head = self._head if self._head.step > 0 else Head(0, 0, digest)
        group = GroupInfo(
            self.process,
            settings.job_id,
            self._address,
            settings.group_world_size,
            settings.min_replica_size,
            windowed=any(ready.windowed for ready in readies),
        )
        self._core = StepCore(group, settings.timeouts, head, self._disk_head)
        self._client = LighthouseClient(
            settings.lighthouse_address,
            job_id=settings.job_id,
            process=self.process,
            greet=self._greet,
            on_message=self._on_lighthouse,
            on_connected=self._on_connected,
            progress=self._progress,
            timeouts=settings.timeouts,
            security=settings.security,
        )
        self._spawn(self._client.run())
        self._carry_out(self._core.start())

    def _greet(self) -> list[Up]:
        assert self._core is not None
        self._core.progress = self._progress()
        return self._core.greet()

    def _spawn(self, coroutine: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._task_ended)

    def _task_ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled() and (error := task.exception()) is not None:
            if isinstance(error, LighthouseRefused):
                self.refused(str(error))
            self._loop_failed(
                asyncio.get_running_loop(), {"message": "agent task failed", "exception": error}
            )

    # --- events ----------------------------------------------------------------------------------------------

    def _on_connected(self, connected: bool) -> None:
        logger.info(
            "%s the Lighthouse at %s", "reached" if connected else "lost", self._settings.lighthouse_address
        )

    def _on_lighthouse(self, message: Down) -> None:
        core = self._core
        assert core is not None
        now = self._now_ms()
        self._carry_out(core.heard(now))
        if isinstance(message, Form):
            self._carry_out(core.form(message.quorum, now))
        elif isinstance(message, Revoke):
            self._carry_out(core.revoke(message.quorum_id, message.now, message.reason))
        elif isinstance(message, Retired):
            self._carry_out(core.retired(message.reason, message.left))
        else:
            logger.warning("Lighthouse: %s", message.text)
            self._events.emit("announce", text=message.text)

    def _report(self, frame: pb.RankFrame) -> None:
        self._on_report(0, frame)

    def _on_report(self, rank: int, frame: pb.RankFrame) -> None:
        body = frame.WhichOneof("body")
        if body == "ready":
            self._readies[rank] = frame.ready
            if len(self._readies) == self._settings.group_world_size:
                self._all_ready()
        elif body == "bye":
            self._gone_ranks.add(rank)
        elif body == "leave_wanted":
            self._leave_ranks.add(rank)
            self._with_core(lambda core: core.leave_wanted(idle=False))
        elif self._core is not None:
            self._carry_out(self._core_event(self._core, rank, frame, body))

    def _core_event(self, core: StepCore, rank: int, frame: pb.RankFrame, body: str | None) -> list[Effect]:
        now = self._now_ms()
        if body == "posted":
            return core.rank_posted(rank, frame.posted, now)
        if body == "done":
            return core.rank_done(rank, frame.done, now)
        if body == "configured":
            return core.rank_configured(rank, frame.configured)
        if body == "boundary":
            return core.rank_boundary(rank, frame.boundary)
        if body == "poll":
            return core.rank_poll(rank, frame.poll, now)
        if body == "fetch_failed":
            return core.rank_fetch_failed(rank, frame.fetch_failed)
        return []

    def _rank_lost(self, rank: int, reason: str) -> None:
        if not self._closing and rank not in self._gone_ranks:
            self.group_lost(f"rank {rank} was lost: {reason}")

    def _on_peer_frame(self, quorum_id: int, rank: int, frame: pb.PeerFrame) -> None:
        self._with_core(lambda core: core.peer_frame(quorum_id, rank, frame, self._now_ms()))

    def _on_peer_lost(self, quorum_id: int, rank: int, reason: str) -> None:
        self._with_core(lambda core: core.peer_lost(quorum_id, rank, reason))

    def _tick(self) -> None:
        self._timer = None
        self._with_core(lambda core: core.tick(self._now_ms()))

    # --- effects ---------------------------------------------------------------------------------------------

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendPeers):
                if self._mesh is not None and self._mesh.quorum.id == effect.quorum_id:
                    self._mesh.send(effect.frame)
            elif isinstance(effect, Tell):
                self._tell([effect.word] * self._settings.group_world_size)
            elif isinstance(effect, TellEach):
                self._tell(list(effect.words))
            elif isinstance(effect, SendUp):
                if self._client is not None:
                    self._client.send(effect.message)
            elif isinstance(effect, Emit):
                self._emit(effect)
            else:
                self._connect_mesh(effect)
        self._arm_timer()

    def _tell(self, words: list[pb.Word]) -> None:
        for rank in range(1, len(words)):
            self._hub.send(rank, words[rank])
        self._desk.deliver(words[0])

    def _emit(self, effect: Emit) -> None:
        if effect.kind in ("quorum", "fault", "revoked", "refused", "behind", "level", "fatal"):
            logger.info("%s: %s", effect.kind, ", ".join(f"{k}={v}" for k, v in effect.fields.items()))
        self._events.emit(effect.kind, **effect.fields)

    def _connect_mesh(self, effect: ConnectMesh) -> None:
        if self._mesh is not None:
            self._mesh.close()
        quorum = effect.quorum
        rank = quorum.rank_of(self.process)
        assert rank is not None
        silence_limit_ms, security = self._settings.timeouts.heartbeat_timeout_ms, self._settings.security
        mesh = self._mesh = Mesh(
            quorum, rank, self._on_peer_frame, self._on_peer_lost, silence_limit_ms, security
        )
        self._spawn(self._build_mesh(mesh, quorum))

    async def _build_mesh(self, mesh: Mesh, quorum: Quorum) -> None:
        core = self._core
        assert core is not None
        layout = xxhash.xxh3_64(
            "|".join(self._readies[rank].layout_digest for rank in sorted(self._readies)).encode()
        ).hexdigest()
        hello = pb.PeerHello(
            job_id=self._settings.job_id,
            quorum_id=quorum.id,
            replica_id=self.process.replica_id,
            incarnation=self.process.incarnation,
            store_address=self._lane_store_address,
            state_addresses=[self._readies[rank].state_address for rank in sorted(self._readies)],
            layout_digest=layout,
        )
        # Before the core's deadline for lanes and mesh together: that one cannot name who is missing.
        timeout_ms = self._settings.timeouts.configure_ms * 3 // 4
        try:
            hellos = await mesh.connect(self._service, hello, timeout_ms)
        except MeshError as error:
            if error.refused and not self._had_mesh:  # later it is the other one that must go
                self.refused(str(error))
            self._carry_out(core.mesh_failed(quorum.id, str(error), error.peer_rank))
            return
        self._had_mesh = True
        self._carry_out(core.mesh_ready(quorum.id, hellos, layout))

    def _arm_timer(self) -> None:
        """Have the core's deadlines looked after.

        A timer that rings too early is left alone, as its tick sets the next: deadlines move in each step, but hardly
        ever come.
        """
        deadline_ms = self._core.deadline_ms() if self._core is not None else None
        if deadline_ms is None or (self._timer is not None and self._timer_ms <= deadline_ms):
            return
        if self._timer is not None:
            self._timer.cancel()
        delay = max(0.0, (deadline_ms - self._now_ms()) / 1000)
        self._timer = asyncio.get_running_loop().call_later(delay, self._tick)
        self._timer_ms = deadline_ms

    def _now_ms(self) -> int:
        """Monotonic time; the core also learns until when the Lighthouse has certainly heard this process (rule M8)."""
        if self._core is not None and self._client is not None:
            self._core.last_heard_ms = int(self._client.last_answered * 1000)
        return time.monotonic_ns() // 1_000_000
