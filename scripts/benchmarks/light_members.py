"""Client process of ``bench lighthouse``: thousands of members of one job in one event loop, without training.

Each has a connection and a stream of its own. Words are serialised once for all, and of what comes down only a new
quorum is parsed, once.
"""

from __future__ import annotations

import asyncio
import random
import resource
import time
from collections.abc import Awaitable, Callable
from typing import Any

from benchmarks.channel import Channel
from benchmarks.light_session import LightSession, message_frame, opening
from lighthouse import wire
from lighthouse.client import ANSWER_EVERY, report_exit
from lighthouse.messages import Ask, Beat, Form, Head, Hello, Position, Process, Progress, Quorum
from lighthouse.rpc import SESSION
from lighthouse.timeouts import Timeouts

JOB = "bench"
REVOKE, FORM, RETIRED, PING, BEAT = b"\x0a", b"\x12", b"\x1a", b"\x2a", b"\x32"
"""First byte of a SessionDown with this body: field number << 3 | 2."""
PHASES = ("compute", "reduce", "apply")
CONNECT_BATCH = 64
SLOTS = 100
"""Heartbeats are spread over so many moments of an interval."""
DEADLINE_S = 180.0
PONG_FRAME = message_frame(wire.encode_up(wire.Pong()))
START = Position(0, Head(0, 0, "d0"), level=True)


class Member:
    """One replica group: a process and, while it lives, its stream."""

    def __init__(self, crowd: Crowd, name: str) -> None:
        self.process = Process(name, "0")
        self.quorum_id = 0
        self.floor = 0
        self._crowd = crowd
        self._life = 0
        self._session: LightSession | None = None
        self._known = asyncio.Event()

    async def connect(self) -> None:
        """Begin a new life: connect, say hello and ask. Returns when the hello was answered."""
        self._life += 1
        self.process = Process(self.process.replica_id, str(self._life))
        self.quorum_id = self.floor = 0
        self._known.clear()
        words = (wire.Open(JOB, self.process, 1, Hello(START, "127.0.0.1:9", 1)), Ask(START))
        greeting = b"".join(message_frame(wire.encode_up(word)) for word in words)
        self._session = session = LightSession(self._crowd.opening + greeting, self._on_message, self._on_end)
        loop = asyncio.get_running_loop()
        await loop.create_connection(lambda: session, self._crowd.host, self._crowd.port)
        await self._known.wait()

    def ask(self) -> None:
        """Give up the quorum and ask for the next one, unless that was done."""
        if self.floor < self.quorum_id:
            self.floor = self.quorum_id
            self.send(self._crowd.ask_frame)

    def send(self, frames: bytes) -> None:
        """Write; lost while it is dead."""
        if self._session is not None:
            self._session.send(frames)

    def die(self) -> None:
        """The stream breaks."""
        if self._session is not None:
            session, self._session = self._session, None
            session.abort()

    def _on_message(self, data: bytes) -> None:
        kind = data[:1]
        if kind == BEAT:
            self._known.set()
        elif kind == FORM:
            self._crowd.formed(self, data)
        elif kind == REVOKE:
            self.ask()
        elif kind == PING:
            self.send(PONG_FRAME)
        elif kind == RETIRED:
            self._crowd.fail(f"{self.process} got {wire.decode_down(data)}")

    def _on_end(self) -> None:
        self._crowd.fail(f"the Lighthouse ended the stream of {self.process}")


class Crowd:
    """All members, and what they have in common."""

    def __init__(self, address: str, count: int) -> None:
        self.address = address
        self.host, _, port = address.rpartition(":")
        self.port = int(port)
        self.opening = opening(address, SESSION)
        self.members = [Member(self, f"group_{index}") for index in range(count)]
        self.ask_frame = b""
        """Gives up the newest quorum, with its step committed."""
        self._form = b""
        self._quorum: Quorum | None = None
        self._missing: set[Process] = set()
        self._wanted = count
        self._done: asyncio.Future[float] | None = None
        self._failure = ""

    def formed(self, member: Member, data: bytes) -> None:
        """A quorum has reached ``member``."""
        if data != self._form:
            word = wire.decode_down(data)
            assert isinstance(word, Form)
            quorum = self._quorum = word.quorum
            self._form, self._missing = data, {m.process for m in quorum.members}
            position = Position(quorum.id, Head(quorum.base.step + 1, quorum.id), level=True)
            self.ask_frame = message_frame(wire.encode_up(Ask(position)))
        assert self._quorum is not None
        member.quorum_id = self._quorum.id
        self._missing.discard(member.process)
        complete = not self._missing and len(self._quorum.members) == self._wanted
        if complete and self._done is not None and not self._done.done():
            self._done.set_result(time.perf_counter())

    def fail(self, text: str) -> None:
        """Something that voids the measurement."""
        self._failure = self._failure or text
        if self._done is not None and not self._done.done():
            self._done.set_exception(RuntimeError(text))

    async def until_all_have_a_quorum(self, of: int, begin: Callable[[], Awaitable[object]]) -> float:
        """Milliseconds from ``begin`` until every one of ``of`` members has a new quorum of them.

        Raises:
            RuntimeError: a stream ended unasked.
            TimeoutError: it took longer than DEADLINE_S.
        """
        if self._failure:
            raise RuntimeError(self._failure)
        self._done, self._wanted = asyncio.get_running_loop().create_future(), of
        started = time.perf_counter()
        async with asyncio.timeout(DEADLINE_S):
            await begin()
            ended = await self._done
        return 1000 * (ended - started)

    async def connect(self) -> None:
        """All, some at a time: thousands at once would each wait longer than a stream may take to open."""
        for first in range(0, len(self.members), CONNECT_BATCH):
            await asyncio.gather(*(m.connect() for m in self.members[first : first + CONNECT_BATCH]))

    async def ask(self) -> None:
        """All give up the quorum at once."""
        for member in self.members:
            member.ask()

    async def beat_forever(self) -> None:
        """Heartbeats of all at the default interval, evenly spread; training moves on between two of them."""
        pause_s = Timeouts().heartbeat_interval_ms / 1000 / SLOTS
        due_s, turn = time.perf_counter(), 0
        while True:
            lap = turn // SLOTS
            beat = Beat(Progress(lap, PHASES[lap % len(PHASES)], turn), quiet=lap % ANSWER_EVERY != 0)
            frames = message_frame(wire.encode_up(beat))
            for member in self.members[turn % SLOTS :: SLOTS]:
                member.send(frames)
            turn, due_s = turn + 1, due_s + pause_s
            await asyncio.sleep(max(0.0, due_s - time.perf_counter()))


class Bench:
    """Carries out commands. Each answers with milliseconds, and the CPU seconds that this process spent."""

    def __init__(self, crowd: Crowd, seed: int) -> None:
        self._crowd = crowd
        self._random = random.Random(seed)

    async def connect(self) -> dict[str, float]:
        """All connect; until everybody has the first quorum."""
        crowd = self._crowd
        return {"ms": await crowd.until_all_have_a_quorum(len(crowd.members), crowd.connect)}

    async def rest(self, seconds: float) -> dict[str, float]:
        """Nothing but heartbeats."""
        await asyncio.sleep(seconds)
        return {"ms": 1000 * seconds}

    async def round(self) -> dict[str, float]:
        """All ask at once; until everybody has the next quorum."""
        crowd = self._crowd
        return {"ms": await crowd.until_all_have_a_quorum(len(crowd.members), crowd.ask)}

    async def loss(self, reported: bool) -> dict[str, float]:
        """One dies; until all others have the next quorum. Then a new one takes its place (``join_ms``)."""
        crowd, victim = self._crowd, self._random.choice(self._crowd.members)

        async def die() -> None:
            victim.die()
            if reported:
                await asyncio.to_thread(report_exit, crowd.address, JOB, victim.process)

        lost_ms = await crowd.until_all_have_a_quorum(len(crowd.members) - 1, die)
        joined_ms = await crowd.until_all_have_a_quorum(len(crowd.members), victim.connect)
        return {"ms": lost_ms, "join_ms": joined_ms}


def cpu_s() -> float:
    """CPU seconds of this process so far."""
    usage = resource.getrusage(resource.RUSAGE_SELF)
    return usage.ru_utime + usage.ru_stime


async def serve(channel: Channel, options: dict[str, Any]) -> None:
    """Carry out commands until the channel closes."""
    crowd = Crowd(options["address"], options["count"])
    bench = Bench(crowd, options["seed"])
    commands = {"connect": bench.connect, "rest": bench.rest, "round": bench.round, "loss": bench.loss}
    beats = asyncio.create_task(crowd.beat_forever())
    while (command := await asyncio.to_thread(channel.receive)) is not None:
        name, before_s = command.pop("do"), cpu_s()
        answer = await commands[name](**command)
        channel.send(**answer, cpu_s=cpu_s() - before_s)
    beats.cancel()
    for member in crowd.members:
        member.die()


def main() -> None:
    """The first command says where the Lighthouse is and how many members there are."""
    channel = Channel()
    options = channel.receive()
    assert options is not None
    asyncio.run(serve(channel, options))


if __name__ == "__main__":
    main()
