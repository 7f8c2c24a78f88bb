"""The leaders' mesh of a simulated group, with the habits of ``PeerService`` and ``Mesh``."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from lighthouse.messages import Process, Quorum
from torchft_plus.pb import peer_pb2 as pb
from torchft_plus.testing.network import End, Life, Network


class MeshService:
    """Accepts connections of other leaders and keeps them until their quorum is adopted here."""

    def __init__(self, network: Network, life: Life, address: str, keep_ms: int) -> None:
        self._life = life
        self._keep_ms = keep_ms
        self.waiting: dict[tuple[int, Process], tuple[End, pb.PeerHello, list[pb.PeerFrame]]] = {}
        self._wanted: dict[tuple[int, Process], Callable[[], None]] = {}
        network.listen(address, life, self._accept)

    def take(self, quorum_id: int, process: Process, arrived: Callable[[], None]) -> None:
        """Call ``arrived`` when ``process`` is connected for ``quorum_id`` (then it is in ``waiting``)."""
        key = (quorum_id, process)
        if key in self.waiting:
            arrived()
        else:
            self._wanted[key] = arrived

    def _accept(self, end: End) -> None:
        key: list[tuple[int, Process]] = []
        early: list[pb.PeerFrame] = []

        def frame(message: pb.PeerFrame) -> None:
            if key:
                early.append(message)
                return
            hello = message.hello
            key.append((hello.quorum_id, Process(hello.replica_id, hello.incarnation)))
            self.waiting[key[0]] = (end, hello, early)
            arrived = self._wanted.pop(key[0], None)
            if arrived is not None:
                arrived()

        def expire() -> None:
            if not key or self.waiting.get(key[0], (None,))[0] is end:
                lost("expired")
                end.close()

        def lost(reason: str) -> None:
            del reason
            if key and self.waiting.get(key[0], (None,))[0] is end:
                del self.waiting[key[0]]

        end.attach(frame, lost)
        self._life.after(self._keep_ms, expire)


class Mesh:
    """Connections of one leader to the others of one quorum."""

    def __init__(
        self,
        network: Network,
        life: Life,
        service: MeshService,
        quorum: Quorum,
        rank: int,
        hello: pb.PeerHello,
        *,
        timeout_ms: int,
        on_ready: Callable[[Mapping[int, pb.PeerHello]], None],
        on_failed: Callable[[str, int | None], None],
        on_frame: Callable[[int, int, pb.PeerFrame], None],
        on_lost: Callable[[int, str], None],
    ) -> None:
        self.quorum = quorum
        self._network = network
        self._life = life
        self._service = service
        self._rank = rank
        self._hello = hello
        self._timeout_ms = timeout_ms
        self._on_ready = on_ready
        self._on_failed = on_failed
        self._on_frame = on_frame
        self._on_lost = on_lost
        self.ends: dict[int, End] = {}
        self._hellos: dict[int, pb.PeerHello] = {rank: hello}
        self._closed = False
        self._settled = False

    def connect(self, hosts: Mapping[str, str]) -> None:
        """Call lower ranks, and be called by higher ones; ``hosts`` gives the host of a peer address."""
        for rank, member in enumerate(self.quorum.members):
            if rank < self._rank:
                self._call(rank, hosts[member.address], member.address)
            elif rank > self._rank:
                self._answer(rank, member.process)
        self._life.after(self._timeout_ms, self._expired)
        self._life.after(0, self._check)

    def send(self, frame: pb.PeerFrame) -> None:
        """To all others."""
        for end in self.ends.values():
            end.send(frame)

    def close(self) -> None:
        """End all connections, after what is queued has been sent."""
        self._closed = self._settled = True
        for end in self.ends.values():
            end.close()

    def _call(self, rank: int, host: str, address: str) -> None:
        def opened(end: End) -> None:
            if self._closed:
                end.close()
                return
            self.ends[rank] = end
            end.attach(lambda frame: self._first(rank, end, frame), lambda reason: self._lost(rank, reason))
            end.send(pb.PeerFrame(hello=self._hello))

        self._network.dial(self._life, host, address, opened, lambda reason: self._failed(reason, rank))

    def _first(self, rank: int, end: End, frame: pb.PeerFrame) -> None:
        end.attach(lambda later: self._frame(rank, later), lambda reason: self._lost(rank, reason))
        self._hellos[rank] = frame.hello
        self._check()

    def _answer(self, rank: int, process: Process) -> None:
        def arrived() -> None:
            if self._closed:
                return
            end, hello, early = self._service.waiting.pop((self.quorum.id, process))
            self.ends[rank] = end
            end.attach(lambda frame: self._frame(rank, frame), lambda reason: self._lost(rank, reason))
            end.send(pb.PeerFrame(hello=self._hello))
            self._hellos[rank] = hello
            for frame in early:
                self._frame(rank, frame)
            self._check()

        self._service.take(self.quorum.id, process, arrived)

    def _frame(self, rank: int, frame: pb.PeerFrame) -> None:
        if not self._closed:
            self._on_frame(self.quorum.id, rank, frame)

    def _lost(self, rank: int, reason: str) -> None:
        if not self._closed:
            self._on_lost(rank, reason)
            if rank not in self._hellos:
                self._failed(reason, rank)

    def _check(self) -> None:
        if not self._settled and len(self._hellos) == len(self.quorum.members):
            self._settled = True
            self._on_ready(self._hellos)

    def _failed(self, reason: str, rank: int) -> None:
        if not self._settled:
            self._settled = True
            self._on_failed(reason, rank)

    def _expired(self) -> None:
        missing = sorted(set(range(len(self.quorum.members))) - set(self._hellos))
        if missing:
            self._failed("did not connect in time", missing[0])
