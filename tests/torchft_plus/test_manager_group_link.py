"""Links between a leader and its ranks over real sockets: reports, words, silence, loss."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

from lighthouse.security import Security
from torchft_plus.manager.group_link import LeaderHub, RankLink
from torchft_plus.pb import peer_pb2 as pb


class Group:
    def __init__(self, world_size: int, limit_ms: int = 5_000, security: Security | None = None) -> None:
        self.reports: list[tuple[int, pb.RankFrame]] = []
        self.lost: list[tuple[int, str]] = []
        self.words: dict[int, list[pb.Word]] = {rank: [] for rank in range(1, world_size)}
        self.leader_lost: list[tuple[int, str]] = []
        self.refused: list[tuple[int, str]] = []
        self.security = security
        self.changed = asyncio.Event()
        self.world_size, self.limit_ms = world_size, limit_ms
        self.hub = LeaderHub(
            "job", "r0", world_size, limit_ms // 10, limit_ms, self._report, self._rank_lost, security
        )
        self.links: dict[int, RankLink] = {}
        self.address = ""

    async def open(self, connect: list[int]) -> None:
        self.address = await self.hub.listen("127.0.0.1")
        for rank in connect:
            await self.link(rank, "r0")

    async def link(self, rank: int, replica_id: str) -> RankLink:
        hello = pb.RankHello(
            job_id="job", replica_id=replica_id, group_rank=rank, group_world_size=self.world_size
        )
        link = RankLink(
            hello,
            self.limit_ms // 10,
            self.limit_ms,
            lambda word: (self.words[rank].append(word), self.changed.set()),
            lambda reason: (self.leader_lost.append((rank, reason)), self.changed.set()),
            lambda reason: (self.refused.append((rank, reason)), self.changed.set()),
            self.security,
        )
        await link.connect(self.address, 5_000)
        self.links[rank] = link
        return link

    def _report(self, rank: int, frame: pb.RankFrame) -> None:
        self.reports.append((rank, frame))
        self.changed.set()

    def _rank_lost(self, rank: int, reason: str) -> None:
        self.lost.append((rank, reason))
        self.changed.set()

    async def until(self, condition: Callable[[], bool]) -> None:
        async with asyncio.timeout(10):
            while not condition():
                await self.changed.wait()
                self.changed.clear()


def run(test: Callable[[], Awaitable[None]]) -> None:
    async def bounded() -> None:
        async with asyncio.timeout(30):
            await test()

    asyncio.run(bounded())


def test_reports_go_up_and_words_go_down() -> None:
    async def test() -> None:
        group = Group(3)
        await group.open([1, 2])
        assert await group.hub.wait_complete(5_000) == []
        group.links[2].send(pb.RankFrame(fetch_failed=pb.RankFetchFailed(reason="x")))
        await group.until(lambda: bool(group.reports))
        assert [(rank, frame.fetch_failed.reason) for rank, frame in group.reports] == [(2, "x")]
        group.hub.send(1, pb.Word(left=pb.WordLeft()))
        await group.until(lambda: bool(group.words[1]))
        assert group.words[2] == []

    run(test)


def test_missing_ranks_are_named() -> None:
    async def test() -> None:
        group = Group(4)
        await group.open([2])
        assert await group.hub.wait_complete(200) == [1, 3]

    run(test)


def test_a_rank_of_another_group_is_not_let_in() -> None:
    async def test() -> None:
        group = Group(2)
        await group.open([])
        await group.link(1, "other")
        await group.until(lambda: bool(group.leader_lost))
        assert await group.hub.wait_complete(100) == [1]

    run(test)


def test_a_broken_link_is_news_on_both_sides() -> None:
    async def test() -> None:
        group = Group(3)
        await group.open([1, 2])
        await group.hub.wait_complete(5_000)
        group.links[1].close()
        await group.until(lambda: bool(group.lost))
        assert [rank for rank, _ in group.lost] == [1]
        group.hub.close()
        await group.until(lambda: bool(group.leader_lost))
        assert [rank for rank, _ in group.leader_lost] == [2]

    run(test)


def test_a_silent_rank_is_lost_and_a_beating_one_is_not() -> None:
    async def test() -> None:
        group = Group(3, limit_ms=600)
        await group.open([1, 2])
        await group.hub.wait_complete(5_000)
        silenced = group.links[2]._task  # pyright: ignore[reportPrivateUsage]
        assert silenced is not None
        silenced.cancel()
        await group.until(lambda: bool(group.lost))
        assert [rank for rank, _ in group.lost] == [2] and "silent" in group.lost[0][1]

    run(test)
