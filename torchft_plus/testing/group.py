"""One life of a simulated replica group: its leader's agent with the real step core, and its ranks."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from lighthouse.messages import Announce, Down, Form, Head, Process, Retired, Revoke
from torchft_plus.manager.effects import ConnectMesh, Effect, Emit, SendPeers, SendUp, Tell, TellEach
from torchft_plus.manager.step_core import GroupInfo, StepCore
from torchft_plus.pb import peer_pb2 as pb
from torchft_plus.testing.client import Client
from torchft_plus.testing.content import State
from torchft_plus.testing.mesh import Mesh, MeshService
from torchft_plus.testing.network import Life
from torchft_plus.testing.rank import Outcome, Rank
from torchft_plus.testing.scheduler import Timer

if TYPE_CHECKING:
    from torchft_plus.testing.simulation import Simulation


class Group:
    """All processes of one incarnation of a replica group, on one host."""

    def __init__(
        self,
        simulation: Simulation,
        process: Process,
        host: str,
        head: Head,
        state: State,
        disk_head: Head | None,
    ) -> None:
        self.simulation = simulation
        self.world = simulation.world
        self.network = simulation.network
        self.collectives = simulation.collectives
        self.directory = simulation.directory
        self.oracle = simulation.oracle
        self.process = process
        self.host = host
        self.ranks_count = self.world.settings.ranks
        self.core: StepCore | None = None
        self.ended: str | None = None
        self.stranded = False
        """The Lighthouse lost its store and a second run was founded without this group."""
        self.started_ms = self.world.now_ms
        self._head, self._disk_head = head, disk_head
        self._readies: dict[int, pb.RankReady] = {}
        self._gone_ranks: set[int] = set()
        self._meetings: dict[int, str] = {}
        self._timer: Timer | None = None
        self._mesh: Mesh | None = None
        self._queues: dict[tuple[int, str], deque[tuple[Callable[..., None], tuple[Any, ...]]]] = {}
        self.lives = [
            Life(self.world, host, f"{process.replica_id}/{process.incarnation}.{index}")
            for index in range(self.ranks_count)
        ]
        self.address = f"peer/{process}"
        self.service = MeshService(
            self.network, self.lives[0], self.address, self.world.settings.timeouts.configure_ms
        )
        self.client = Client(
            self.world,
            self.network,
            self.lives[0],
            process,
            self._greet,
            self._on_lighthouse,
            lambda: self.ranks[0].progress(),
        )
        self.ranks = [Rank(self, index, life, head, state) for index, life in enumerate(self.lives)]

    @property
    def name(self) -> str:
        """For traces."""
        return self.lives[0].name

    @property
    def alive(self) -> bool:
        """True until its processes are gone."""
        return self.ended is None

    def start(self) -> None:
        """Start every rank."""
        self.world.trace(self.name, "starts on {} at {}", self.host, self._head)
        for rank in self.ranks:
            rank.life.after(self.world.between((0, 20)), rank.start)

    # --- what ranks need ---------------------------------------------------------------------------------------------

    def report(self, rank: int, frame: pb.RankFrame) -> None:
        """A rank tells its leader something; ordered for each rank."""
        self._pass(rank, "up", self.lives[0], self._on_report, rank, frame)

    def meet(self, rank: int, name: str) -> None:
        """A rank has entered a collective inside the group."""
        self._meetings[rank] = name
        if len(self._meetings) < self.ranks_count:
            return
        names = set(self._meetings.values())
        self._meetings = {}
        if len(names) > 1:
            self.oracle.fail("M7", f"ranks of {self.process} are in different collectives: {sorted(names)}")
        for one in self.ranks:
            one.met()

    def outcome(self, rank: Rank, outcome: Outcome) -> None:
        """A rank has ended a step: all ranks of a group end the same steps in the same way."""
        self.oracle.outcome(self, rank, outcome)

    def is_stale(self, rank: Rank) -> bool:
        """Whether what this rank posted turns out stale."""
        del rank
        return not self.world.calm and self.world.chance(0.02)

    def is_not_finite(self, rank: Rank) -> bool:
        """Whether this rank's gradient is not finite."""
        del rank
        return not self.world.calm and self.world.chance(0.01)

    def save(self, rank: Rank) -> None:
        """A level rank stands at a boundary: maybe write a checkpoint."""
        if rank.index == 0 and self.simulation.disk.wants(rank):
            self.simulation.disk.write(
                self, rank.head, State(rank.content or "torn", tuple(sorted(rank.positions.items())))
            )

    def disk_saved(self, head: Head) -> None:
        """A checkpoint is complete on disk."""
        self._event(lambda core: core.disk_saved(head))

    def transfer_began(self, donor: str) -> None:
        """A rank has the first byte of a state from ``donor``: what strikes in mid-transfer strikes there."""
        for group in self.simulation.launcher.groups.values():
            if any(rank.address == donor for rank in group.ranks):
                self.simulation.faults.saw("transfer", group)

    def leave_wanted(self) -> None:
        """SIGTERM: every rank tells the leader."""
        for rank in range(self.ranks_count):
            self.report(rank, pb.RankFrame(leave_wanted=pb.RankLeaveWanted()))

    def leave_idle(self) -> None:
        """``Manager.shutdown`` in the leader's training thread."""
        self._pass(0, "up", self.lives[0], self._event, lambda core: core.leave_wanted(idle=True))

    def rank_left(self, rank: int) -> None:
        """A rank has ended in good order."""
        self._gone_ranks.add(rank)
        if len(self._gone_ranks) == self.ranks_count:
            self.end(0, "left in good order")

    # --- ends --------------------------------------------------------------------------------------------------------

    def end(self, status: int, reason: str, silently: bool = False) -> None:
        """All processes of the group are gone."""
        if self.ended is not None:
            return
        self.ended = reason
        self.world.trace(self.name, "ends with status {}: {}", status, reason)
        for life in self.lives:
            self.collectives.life_ended(life, silently)
            self.network.end_life(life, silently)
        self.simulation.launcher.group_ended(self, silently)

    def rank_dies(self, rank: int) -> None:
        """One process is gone; the others of its group end when they notice (rule M7)."""
        if self.ended is None and self.lives[rank].alive:
            self.world.trace(self.name, "rank {} dies", rank)
            self.collectives.life_ended(self.lives[rank], silently=False)
            self.network.end_life(self.lives[rank])
            self.world.scheduler.after(
                self.world.between((1, 60)), self.end, 75, f"rank {rank} was lost: its connection broke"
            )

    def rank_frozen(self, rank: int) -> None:
        """A rank that is frozen for too long is lost to the others of its group, and so is the group (rule M7)."""
        if self.ended is None and self.ranks_count > 1 and self.lives[rank].paused:
            self.end(75, f"rank {rank} was lost: silent")

    # --- the leader's agent ------------------------------------------------------------------------------------------

    def _pass(self, rank: int, way: str, life: Life, call: Callable[..., None], *arguments: Any) -> None:
        queue = self._queues.setdefault((rank, way), deque())
        queue.append((call, arguments))
        life.after(self.world.between((0, 2)), self._pass_next, queue)

    def _pass_next(self, queue: deque[tuple[Callable[..., None], tuple[Any, ...]]]) -> None:
        call, arguments = queue.popleft()
        call(*arguments)

    def _on_report(self, rank: int, frame: pb.RankFrame) -> None:
        body = frame.WhichOneof("body")
        if body == "ready":
            self._readies[rank] = frame.ready
            if len(self._readies) == self.ranks_count:
                self._all_ready()
            return
        now = self.lives[0].now_ms
        if body == "leave_wanted":
            self._event(lambda core: core.leave_wanted(idle=False))
        elif body == "posted":
            self._event(lambda core: core.rank_posted(rank, frame.posted, now))
        elif body == "done":
            self._event(lambda core: core.rank_done(rank, frame.done, now))
        elif body == "configured":
            self._event(lambda core: core.rank_configured(rank, frame.configured))
        elif body == "poll":
            self._event(lambda core: core.rank_poll(rank, frame.poll, now))
        elif body == "boundary":
            self._event(lambda core: core.rank_boundary(rank, frame.boundary))
        elif body == "fetch_failed":
            self._event(lambda core: core.rank_fetch_failed(rank, frame.fetch_failed))

    def _all_ready(self) -> None:
        settings = self.world.settings
        digest = self._readies[0].initial_digest
        head = self._head if self._head.step > 0 else Head(0, 0, digest)
        group = GroupInfo(
            self.process,
            "job",
            self.address,
            self.ranks_count,
            settings.min_replica_size,
            windowed=settings.window > 0,
        )
        self.core = StepCore(group, settings.timeouts, head, self._disk_head)
        self.client.start()
        self._event(lambda core: core.start())

    def _greet(self):
        assert self.core is not None
        self.core.progress = self.ranks[0].progress()
        return self.core.greet()

    def _on_lighthouse(self, message: Down) -> None:
        now = self.lives[0].now_ms
        self.world.trace(self.name, "hears {}", message)
        self._event(lambda core: core.heard(now))
        if isinstance(message, Form):
            self.oracle.told(self, message.quorum)
            self._event(lambda core: core.form(message.quorum, now))
        elif isinstance(message, Revoke):
            self._event(lambda core: core.revoke(message.quorum_id, message.now, message.reason))
        elif isinstance(message, Retired):
            self._event(lambda core: core.retired(message.reason, message.left))
        else:
            assert isinstance(message, Announce)

    def _event(self, event: Callable[[StepCore], list[Effect]]) -> None:
        core = self.core
        if core is None:
            return
        core.last_heard_ms = self.client.last_answered_ms
        effects = event(core)
        core.validate()
        self.oracle.core_changed(self, core)
        self._carry_out(effects)

    def _carry_out(self, effects: list[Effect]) -> None:
        for effect in effects:
            if isinstance(effect, SendPeers):
                self.oracle.sends_peers(self, effect.frame)
                if self._mesh is not None and self._mesh.quorum.id == effect.quorum_id:
                    self._mesh.send(effect.frame)
                    self.simulation.faults.saw(effect.frame.WhichOneof("body") or "", self)
            elif isinstance(effect, Tell):
                self._tell([effect.word] * self.ranks_count)
            elif isinstance(effect, TellEach):
                self._tell(list(effect.words))
            elif isinstance(effect, SendUp):
                self.world.trace(self.name, "sends up {}", effect.message)
                self.client.send(effect.message)
            elif isinstance(effect, Emit):
                self._emit(effect)
            else:
                self._connect_mesh(effect)
        self._arm_timer()

    def _tell(self, words: list[pb.Word]) -> None:
        for rank in range(1, len(words)):
            self._pass(rank, "down", self.lives[rank], self.ranks[rank].deliver, words[rank])
        self.ranks[0].deliver(words[0])

    def _emit(self, effect: Emit) -> None:
        self.world.trace(self.name, "{}: {}", effect.kind, effect.fields)
        if effect.kind == "commit":
            assert self.core is not None
            self.oracle.committed(self, self.core.head)
        self.simulation.faults.saw(effect.kind, self)

    def _connect_mesh(self, effect: ConnectMesh) -> None:
        if self._mesh is not None:
            self._mesh.close()
        quorum = effect.quorum
        hello = pb.PeerHello(
            quorum_id=quorum.id,
            replica_id=self.process.replica_id,
            incarnation=self.process.incarnation,
            state_addresses=[self._readies[rank].state_address for rank in sorted(self._readies)],
        )
        rank = quorum.rank_of(self.process)
        assert rank is not None
        self._mesh = Mesh(
            self.network,
            self.lives[0],
            self.service,
            quorum,
            rank,
            hello,
            timeout_ms=self.world.settings.timeouts.configure_ms,
            on_ready=lambda hellos: self._event(lambda core: core.mesh_ready(quorum.id, hellos, "")),
            on_failed=lambda reason, peer: self._event(
                lambda core: core.mesh_failed(quorum.id, reason, peer)
            ),
            on_frame=self._on_peer_frame,
            on_lost=lambda peer, reason: self._event(lambda core: core.peer_lost(quorum.id, peer, reason)),
        )
        self._mesh.connect(self.simulation.hosts)

    def _on_peer_frame(self, quorum_id: int, rank: int, frame: pb.PeerFrame) -> None:
        now = self.lives[0].now_ms
        self._event(lambda core: core.peer_frame(quorum_id, rank, frame, now))

    def _arm_timer(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None
        deadline_ms = self.core.deadline_ms() if self.core is not None else None
        if deadline_ms is not None:
            self._timer = self.lives[0].after(deadline_ms - self.lives[0].now_ms, self._tick)

    def _tick(self) -> None:
        self._timer = None
        self._event(lambda core: core.tick(self.lives[0].now_ms))
