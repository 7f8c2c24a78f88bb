"""A simulated member's stream to the Lighthouse, with the habits of ``LighthouseClient``."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lighthouse.client import ANSWER_EVERY
from lighthouse.messages import Beat, Down, Hello, Process, Progress, Up
from torchft_plus.testing.network import End, Life, Network
from torchft_plus.testing.world import World

LIGHTHOUSE_ADDRESS = "lighthouse"
FIRST_BACKOFF_MS = 20
MAX_BACKOFF_MS = 1_000
STABLE_SESSION_MS = 1_000
MIN_SILENCE_MS = 1_000


@dataclass(frozen=True, slots=True)
class Open:
    """First word of a stream."""

    process: Process
    session: int
    hello: Hello


@dataclass(frozen=True, slots=True)
class BeatAnswer:
    """The Lighthouse has read a heartbeat."""


@dataclass(frozen=True, slots=True)
class Ping:
    """The Lighthouse asks whether this process is alive."""


@dataclass(frozen=True, slots=True)
class Pong:
    """It is."""


class Client:
    """Keeps one stream open, and greets on each new one."""

    def __init__(
        self,
        world: World,
        network: Network,
        life: Life,
        process: Process,
        greet: Callable[[], list[Up]],
        on_message: Callable[[Down], None],
        progress: Callable[[], Progress],
    ) -> None:
        self.last_heard_ms = self.last_answered_ms = life.now_ms
        self._unanswered: deque[int] = deque()
        self._beats = 0
        self._answered = False
        self.end: End | None = None
        self._world = world
        self._network = network
        self._life = life
        self._process = process
        self._greet = greet
        self._on_message = on_message
        self._progress = progress
        self._session = 0
        self._outbox: list[Any] | None = None
        self._backoff_ms = FIRST_BACKOFF_MS
        self._started_ms = 0
        self._silence_ms = max(world.settings.timeouts.heartbeat_timeout_ms, MIN_SILENCE_MS)

    def start(self) -> None:
        """Open the first stream."""
        self._connect()

    def send(self, message: Up) -> None:
        """On the current stream; without one it is dropped, the next greeting says it again."""
        if self.end is not None:
            self.end.send(message)
        elif self._outbox is not None:
            self._outbox.append(message)

    def _connect(self) -> None:
        self._session += 1
        session = self._session
        self._started_ms = self._life.now_ms
        self._outbox = []
        self._unanswered = deque([self._life.now_ms])
        self._beats = 0
        self._answered = False
        for message in self._greet():
            self._outbox.append(
                Open(self._process, session, message) if isinstance(message, Hello) else message
            )
        self._network.dial(
            self._life,
            LIGHTHOUSE_ADDRESS,
            LIGHTHOUSE_ADDRESS,
            lambda end: self._opened(session, end),
            lambda reason: self._ended(session, reason),
        )
        self._life.after(self._silence_ms, self._watch, session)

    def _opened(self, session: int, end: End) -> None:
        if session != self._session or self._outbox is None:
            end.close()
            return
        end.attach(lambda message: self._read(session, message), lambda reason: self._ended(session, reason))
        self.end, outbox, self._outbox = end, self._outbox, None
        for message in outbox:
            end.send(message)

    def _read(self, session: int, message: Any) -> None:
        if session != self._session:
            return
        self.last_heard_ms = self._life.now_ms
        if not self._answered:
            self._answered = True
            self._life.after(0, self._beat, session)
        if isinstance(message, Ping):
            if self.end is not None:
                self.end.send(Pong())
        elif isinstance(message, BeatAnswer):
            self.last_answered_ms = self._unanswered.popleft()
        else:
            self._on_message(message)

    def _beat(self, session: int) -> None:
        if session == self._session and self.end is not None:
            self._beats += 1
            quiet = self._beats % ANSWER_EVERY != 0
            if not quiet:
                self._unanswered.append(self._life.now_ms)
            self.end.send(Beat(self._progress(), quiet))
            self._life.after(self._world.settings.timeouts.heartbeat_interval_ms, self._beat, session)

    def _watch(self, session: int) -> None:
        """The Lighthouse is silent for too long: try another stream."""
        if session != self._session or (self.end is None and self._outbox is None):
            return
        heard_ms = max(self.last_heard_ms, self._started_ms)
        left_ms = heard_ms + self._silence_ms - self._life.now_ms
        if left_ms > 0:
            self._life.after(left_ms, self._watch, session)
        else:
            self._ended(session, "it is silent")

    def _ended(self, session: int, reason: str) -> None:
        if session != self._session or (self.end is None and self._outbox is None):
            return
        self._world.trace(self._life.name, "lost the Lighthouse: {}", reason)
        if self.end is not None:
            self.end.close()
        self.end, self._outbox = None, None
        lasted_ms = self._life.now_ms - self._started_ms
        stable = lasted_ms >= STABLE_SESSION_MS and self.last_heard_ms >= self._started_ms
        self._backoff_ms = FIRST_BACKOFF_MS if stable else min(2 * self._backoff_ms, MAX_BACKOFF_MS)
        self._life.after(self._world.between((self._backoff_ms // 2, self._backoff_ms)), self._connect)
