"""A member without training: connects, asks when it should, remembers what it was told. In a thread or a process."""

from __future__ import annotations

import asyncio
import sys
import threading
import time
from collections.abc import Callable

from lighthouse.client import LighthouseClient, fetch_status
from lighthouse.messages import (
    Ask,
    Down,
    Form,
    Head,
    Hello,
    Position,
    Process,
    Progress,
    Quorum,
    Retired,
    Revoke,
    Up,
)
from lighthouse.pb import lighthouse_pb2 as pb
from lighthouse.security import Security
from lighthouse.timeouts import Timeouts

START = Head(0, 0, "d0")


class FakeMember:
    """Runs its own event loop in a thread, as the agent of a Manager does."""

    def __init__(
        self,
        address: str,
        replica_id: str,
        incarnation: str = "1",
        job_id: str = "job",
        security: Security | None = None,
    ) -> None:
        self.process = Process(replica_id, incarnation)
        self.quorum: Quorum | None = None
        self.words: list[tuple[float, Down]] = []
        self.connections: list[bool] = []
        self.floor = 0
        self.beats = 0
        self.asked = True
        self.leaving = False
        self._changed = threading.Condition()
        self._loop = asyncio.new_event_loop()
        self.client = LighthouseClient(
            address,
            job_id=job_id,
            process=self.process,
            greet=self._greet,
            on_message=self._on_message,
            on_connected=self._on_connected,
            progress=self._progress,
            timeouts=Timeouts(),
            security=security,
        )
        self._thread = threading.Thread(target=self._run, name=f"member-{replica_id}")
        self._thread.start()

    def position(self) -> Position:
        return Position(self.floor, START, level=True)

    def leave(self) -> None:
        self._loop.call_soon_threadsafe(self._leave)

    def close(self) -> None:
        if self._thread.is_alive():
            asyncio.run_coroutine_threadsafe(self.client.close(), self._loop).result(10)
            self._thread.join(10)
        assert not self._thread.is_alive()

    def wait_for(self, what: Callable[[FakeMember], object], timeout_s: float = 20.0) -> None:
        with self._changed:
            done = self._changed.wait_for(lambda: what(self), timeout_s)
        assert done, f"{self.process} did not get there; it heard {self.words[-5:]}"

    def members(self) -> list[str]:
        return [m.process.replica_id for m in self.quorum.members] if self.quorum is not None else []

    def formed_at(self) -> float:
        return next(t for t, word in reversed(self.words) if isinstance(word, Form))

    def retired(self) -> Retired | None:
        return next((w for _, w in self.words if isinstance(w, Retired)), None)

    # --- in the loop ----------------------------------------------------------------------------------------

    def _run(self) -> None:
        asyncio.set_event_loop(self._loop)
        self._loop.run_until_complete(self._main())
        self._loop.close()

    async def _main(self) -> None:
        await self.client.run()
        others = asyncio.all_tasks() - {asyncio.current_task()}
        await asyncio.gather(*others)

    def _progress(self) -> Progress:
        self.beats += 1
        return Progress(counter=self.beats)

    def _greet(self) -> list[Up]:
        hello = Hello(self.position(), "127.0.0.1:9", 1, self.quorum)
        return [hello, Ask(self.position(), self.leaving)] if self.asked else [hello]

    def _leave(self) -> None:
        self.leaving = True
        self._fence(self.quorum.id if self.quorum is not None else 0)

    def _fence(self, quorum_id: int) -> None:
        self.floor = max(self.floor, quorum_id)
        self.asked = True
        self.client.send(Ask(self.position(), self.leaving))

    def _on_message(self, message: Down) -> None:
        with self._changed:
            self.words.append((time.monotonic(), message))
            match message:
                case Form():
                    if message.quorum.id > self.floor:
                        self.quorum, self.asked = message.quorum, False
                case Revoke():
                    self._fence(message.quorum_id)
                case _:
                    pass
            self._changed.notify_all()

    def _on_connected(self, connected: bool) -> None:
        with self._changed:
            self.connections.append(connected)
            self._changed.notify_all()


def start(members: list[FakeMember], address: str, names: str, job_id: str = "job") -> list[FakeMember]:
    """Members of these names, in a quorum."""
    new = [FakeMember(address, name, job_id=job_id) for name in names]
    members.extend(new)
    for member in new:
        member.wait_for(lambda m: m.quorum)
    return new


def until_status(
    address: str, name: str, what: Callable[[pb.PeerStatus], bool], timeout_s: float = 20.0
) -> None:
    """Until the Lighthouse says ``what`` of replica ``name``."""
    end = time.monotonic() + timeout_s
    while time.monotonic() < end:
        if any(
            what(peer)
            for peer in fetch_status(address, "job").jobs[0].peers
            if peer.process.replica_id == name
        ):
            return
        time.sleep(0.02)
    raise AssertionError(f"{name} did not get there: {fetch_status(address, 'job')}")


if __name__ == "__main__":
    member = FakeMember(sys.argv[1], sys.argv[2], sys.argv[3])
    member.wait_for(lambda m: m.quorum)
    print("in", flush=True)
    sys.stdin.read()
    member.close()
