"""A fake network of connections: ordered within one, delayed, held up by partitions, broken with what is in flight.

A connection is what TCP makes of it: nothing is lost, repeated or overtaken within one. What is in flight is lost with the
connection, a *dead* one (a router has forgotten it) loses all that is sent from then on and tells nobody, and connections
overtake each other: so who reconnects and says everything again is heard twice, in any order.

And *lives*: what runs on a host until it dies, and may be paused. A paused life reads nothing; what reached it waits. Each
has a clock that runs a little too fast or too slow.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Callable
from typing import Any

from torchft_plus.testing.world import World

Deliver = Callable[[Any], None]
Lost = Callable[[str], None]


class Life:
    """One process of the operating system, on a host."""

    def __init__(self, world: World, host: str, name: str) -> None:
        self.world = world
        self.host = host
        self.name = name
        self.alive = True
        self.paused = False
        self.woken_ms = 0
        """When the last pause ended."""
        self.clock_rate = world.clock_rate()
        self.ends: dict[End, None] = {}
        self.addresses: list[str] = []
        self._backlog: list[tuple[Callable[..., None], tuple[Any, ...]]] = []

    @property
    def now_ms(self) -> int:
        """Monotonic time as this host counts it."""
        return int(self.world.now_ms * self.clock_rate)

    def run(self, call: Callable[..., None], *arguments: Any) -> None:
        """Run ``call`` in this life: now, after the pause, or never."""
        if not self.alive:
            return
        if self.paused:
            self._backlog.append((call, arguments))
        else:
            call(*arguments)

    def after(self, delay_ms: float, call: Callable[..., None], *arguments: Any):
        """Run ``call`` in this life in ``delay_ms`` of its own clock."""
        return self.world.scheduler.after(math.ceil(delay_ms / self.clock_rate), self.run, call, *arguments)

    def pause(self) -> None:
        """SIGSTOP."""
        self.paused = True
        self.world.trace(self.name, "is paused")

    def wake(self) -> None:
        """SIGCONT: everything that waited happens, in any order that connections allow."""
        if not self.paused:
            return
        self.paused = False
        self.woken_ms = self.world.now_ms
        self.world.trace(self.name, "wakes")
        backlog, self._backlog = self._backlog, []
        for call, arguments in backlog:
            self.after(self.world.between((0, 3)), call, *arguments)


class End:
    """One end of a connection."""

    def __init__(self, network: Network, life: Life) -> None:
        self.network = network
        self.life = life
        self.peer: End | None = None
        self.closed = False
        self.dead = False
        """What is sent to this end from now on never arrives, and nobody is told."""
        self._on_message: Deliver | None = None
        self._on_lost: Lost | None = None
        self._queue: deque[Any] = deque()
        self._last_ms = 0
        life.ends[self] = None

    def attach(self, on_message: Deliver, on_lost: Lost) -> None:
        """Who hears what arrives from now on; what arrived before waits until the first call."""
        first = self._on_message is None
        self._on_message, self._on_lost = on_message, on_lost
        if first:
            for _ in range(len(self._queue)):
                self.life.after(0, self._deliver)

    def send(self, message: Any) -> None:
        """To the other end, in order; dropped if this end is closed."""
        if not self.closed and self.peer is not None and not self.peer.closed:
            self.peer.put(message)

    def put(self, message: Any) -> None:
        """A message is on its way to this end."""
        if self.dead:
            return
        world = self.network.world
        self._queue.append(message)
        source = self.peer.life.host if self.peer is not None else self.life.host
        delay_ms = self.network.delay_ms(source, self.life.host)
        self._last_ms = max(self._last_ms, world.now_ms + delay_ms)
        world.scheduler.after(self._last_ms - world.now_ms, self._arrive)

    def close(self) -> None:
        """End the connection after what was sent; this end hears nothing more."""
        if self.closed:
            return
        self.forget()
        if self.peer is not None and not self.peer.closed:
            self.peer.put(_Lost("closed by peer"))

    def cut(self, reason: str, silently: bool = False) -> None:
        """The connection breaks for this end: a random part of what is in flight to it is lost."""
        if self.closed:
            return
        keep = self.network.world.between((0, len(self._queue)))
        while len(self._queue) > keep:
            self._queue.pop()
        if not silently:
            self.put(_Lost(reason))

    def forget(self) -> None:
        """Nothing comes out of this end any more."""
        self.closed = True
        self._queue.clear()
        self.life.ends.pop(self, None)

    def _arrive(self) -> None:
        if self.closed:
            return
        source = self.peer.life.host if self.peer is not None else self.life.host
        if self.network.blocked(source, self.life.host):
            self.network.hold(source, self.life.host, self._arrive)
            return
        self.life.run(self._deliver)

    def _deliver(self) -> None:
        if self.closed or not self._queue or self._on_message is None or self._on_lost is None:
            return
        message = self._queue.popleft()
        if isinstance(message, _Lost):
            self.forget()
            self._on_lost(message.reason)
        else:
            self._on_message(message)


class _Lost:
    """Stands in a queue where the connection ends."""

    __slots__ = ("reason",)

    def __init__(self, reason: str) -> None:
        self.reason = reason


class Network:
    """Connections between lives on hosts, and what is wrong between the hosts."""

    def __init__(self, world: World) -> None:
        self.world = world
        self._blocked: set[tuple[str, str]] = set()
        self._slow: dict[tuple[str, str], tuple[int, int]] = {}
        self._held: dict[tuple[str, str], list[Callable[[], None]]] = {}
        self._listeners: dict[str, tuple[Life, Callable[[End], None]]] = {}
        self.healed_ms = 0
        """When the last partition healed, or the last slow link became quick again."""
        self.dark: set[str] = set()
        """Addresses whose machine lost its power: nobody answers, not even to refuse."""

    # --- partitions ------------------------------------------------------------------------------------------------

    def blocked(self, source: str, target: str) -> bool:
        """True if nothing passes from ``source`` to ``target``."""
        return (source, target) in self._blocked

    @property
    def is_whole(self) -> bool:
        """True while there is no partition and no slow link."""
        return not self._blocked and not self._slow

    def cut_off(self, pairs: list[tuple[str, str]]) -> None:
        """Block directed pairs of hosts."""
        self.world.trace("network", "blocks {}", pairs)
        self._blocked.update(pairs)

    def heal(self, pairs: list[tuple[str, str]] | None = None) -> None:
        """Let directed pairs pass again (None: all); what was held up arrives."""
        if pairs is None:
            self.quicken(list(self._slow))
        pairs = sorted(self._blocked) if pairs is None else pairs
        if pairs:
            self.world.trace("network", "heals {}", pairs)
            self.healed_ms = self.world.now_ms
        for pair in pairs:
            self._blocked.discard(pair)
            for call in self._held.pop(pair, []):
                self.world.scheduler.after(self.delay_ms(*pair), call)

    def slow_down(self, pairs: list[tuple[str, str]], delay_ms: tuple[int, int]) -> None:
        """Whatever passes between these directed pairs takes so long."""
        self.world.trace("network", "takes {} ms between {}", delay_ms, pairs)
        self._slow.update(dict.fromkeys(pairs, delay_ms))

    def quicken(self, pairs: list[tuple[str, str]]) -> None:
        """These are as quick as ever again."""
        last_ms = max((self._slow.pop(pair)[1] for pair in pairs if pair in self._slow), default=0)
        self.healed_ms = self.world.now_ms + last_ms  # what is on its way still takes its time

    def delay_ms(self, source: str, target: str) -> int:
        """How long something takes from ``source`` to ``target``."""
        slow = self._slow.get((source, target))
        return self.world.delay_ms() if slow is None else self.world.between(slow)

    def hold(self, source: str, target: str, call: Callable[[], None]) -> None:
        """Keep an arrival until the partition heals."""
        self._held.setdefault((source, target), []).append(call)

    # --- connections -----------------------------------------------------------------------------------------------

    def listen(self, address: str, life: Life, accept: Callable[[End], None]) -> None:
        """``accept`` gets the own end of each connection."""
        self._listeners[address] = (life, accept)
        life.addresses.append(address)

    def dial(
        self,
        life: Life,
        host: str,
        address: str,
        on_open: Callable[[End], None],
        on_refused: Callable[[str], None],
    ) -> None:
        """Connect to ``address`` on ``host``. Without an answer nothing is called: bring a deadline."""
        self._pass(life.host, host, self._knock, life, host, address, on_open, on_refused)

    def _knock(
        self,
        life: Life,
        host: str,
        address: str,
        on_open: Callable[[End], None],
        on_refused: Callable[[str], None],
    ) -> None:
        listener = self._listeners.get(address)
        if listener is None or not listener[0].alive:
            if address not in self.dark:
                self._pass(host, life.host, life.run, on_refused, "connection refused")
            return
        if not life.alive:
            return
        mine, theirs = End(self, life), End(self, listener[0])
        mine.peer, theirs.peer = theirs, mine
        listener[0].run(listener[1], theirs)
        self._pass(host, life.host, life.run, on_open, mine)

    def _pass(self, source: str, target: str, call: Callable[..., None], *arguments: Any) -> None:
        def arrive() -> None:
            if self.blocked(source, target):
                self.hold(source, target, arrive)
            else:
                call(*arguments)

        self.world.scheduler.after(self.delay_ms(source, target), arrive)

    def break_connection(self, end: End, reason: str) -> None:
        """A proxy or switch resets a connection: both ends learn of it, not at once."""
        for one in (end, end.peer):
            if one is not None:
                one.cut(reason)

    def lose_silently(self, end: End) -> None:
        """A router forgets a connection: nothing passes any more, and neither end is told."""
        for one in (end, end.peer):
            if one is not None:
                one.dead = True

    def end_life(self, life: Life, silently: bool = False) -> None:
        """A process ends; its kernel closes its connections, unless the machine lost its power (``silently``)."""
        life.alive = False
        if silently:
            self.dark.update(life.addresses)
        for address in life.addresses:
            listener = self._listeners.get(address)
            if listener is not None and listener[0] is life:
                del self._listeners[address]
        for end in list(life.ends):
            peer = end.peer
            end.forget()
            if peer is None:
                continue
            if silently:
                peer.cut("", silently=True)
            elif self.world.chance(0.5):
                peer.cut("connection reset")
            else:
                peer.put(_Lost("closed by peer"))
