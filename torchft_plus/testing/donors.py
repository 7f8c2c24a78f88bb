"""State servers and fetches of simulated ranks, with the shell's habits: versions by head, one fetch at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from lighthouse.messages import Head
from torchft_plus.testing.content import State
from torchft_plus.testing.network import Life, Network
from torchft_plus.testing.world import World

POLL_MS = 20


@dataclass(slots=True)
class Server:
    """Versions of one rank's state (``StateServer``): captured when somebody wants them, immutable."""

    read: Callable[[], State]
    published: Head | None = None
    changing: bool = False
    withdrawn: bool = False
    pins: set[Head] = field(default_factory=set[Head])
    versions: dict[Head, State] = field(default_factory=dict[Head, State])

    def publish(self, head: Head) -> None:
        """The state is that of ``head``."""
        self.published, self.changing, self.withdrawn = head, False, False
        self._serve_point()

    def before_update(self) -> None:
        """The state is about to change."""
        if not self.changing:
            self._serve_point()
        self.changing = True

    def pin(self, head: Head) -> None:
        """Somebody will come for ``head``."""
        self.pins.add(head)

    def unpin(self, head: Head) -> None:
        """Nobody will come any more."""
        self.pins.discard(head)
        self.versions.pop(head, None)

    def withdraw(self) -> None:
        """Nothing is served until the next ``publish``."""
        self.pins.clear()
        self.versions.clear()
        self.withdrawn = True

    def acquire(self, head: Head) -> State | str | None:
        """The version, None if it may come yet, or a sentence why it will not."""
        if head in self.versions:
            return self.versions[head]
        if self.withdrawn:
            return "this replica serves nothing at the moment"
        published = self.published
        if published is not None and head != published and head.order <= published.order:
            return "nobody had asked for it when training went on"
        if published is not None and head == published and self.changing:
            return "nobody had asked for it when training went on"
        self.pins.add(head)
        return None

    def _serve_point(self) -> None:
        if self.published is not None and self.published in self.pins:
            self.versions.setdefault(self.published, self.read())


class Directory:
    """All state servers, by address."""

    def __init__(self, network: Network) -> None:
        self.network = network
        self.servers: dict[str, tuple[Life, Server]] = {}

    def add(self, address: str, life: Life, server: Server) -> None:
        """A rank serves its state at ``address``."""
        self.servers[address] = (life, server)

    def reachable(self, reader: Life, address: str) -> Server | None:
        """The server, if an answer can come from it now."""
        life, server = self.servers[address]
        blocked = self.network.blocked(life.host, reader.host) or self.network.blocked(reader.host, life.host)
        return server if life.alive and not life.paused and not blocked else None


class Fetch:
    """One running fetch of one rank: any donor will do; it fails when all have refused or stalled."""

    def __init__(
        self,
        world: World,
        directory: Directory,
        reader: Life,
        head: Head,
        donors: list[str],
        on_first_byte: Callable[[str], None],
        on_end: Callable[[Fetch, State | None, str], None],
    ) -> None:
        self.head = head
        self.donors = donors
        """The newest list; a fetch that fails with an older one turns to it."""
        self.tried = donors
        self.cancelled = False
        self._world = world
        self._directory = directory
        self._reader = reader
        self._left = list(donors)
        self._waited_ms = 0
        self._on_first_byte = on_first_byte
        self._on_end = on_end
        reader.after(world.delay_ms(), self._try)

    def again(self) -> None:
        """Turn to the newest donors."""
        self.tried, self._left, self._waited_ms = self.donors, list(self.donors), 0
        self._reader.after(0, self._try)

    def _try(self) -> None:
        if self.cancelled:
            return
        if not self._left:
            self._world.hit("a fetch fails")
            self._on_end(self, None, "no donor serves it")
            return
        donor = self._left[int(self._world.random.random() * len(self._left))]
        server = self._directory.reachable(self._reader, donor)
        answer = server.acquire(self.head) if server is not None else None
        timeouts = self._world.settings.timeouts
        if isinstance(answer, State):
            self._on_first_byte(donor)
            host = self._directory.servers[donor][0].host
            delay_ms = self._directory.network.delay_ms(host, self._reader.host)
            transfer_ms = self._world.between(self._world.settings.transfer_ms)
            self._reader.after(delay_ms + transfer_ms, self._got, donor, answer)
            return
        limit_ms = timeouts.transfer_stall_ms * (1 if server is None else 4)
        if isinstance(answer, str) or self._waited_ms > limit_ms:
            self._left.remove(donor)
            self._waited_ms = 0
        self._waited_ms += POLL_MS
        self._reader.after(POLL_MS, self._try)

    def _got(self, donor: str, state: State) -> None:
        if self.cancelled:
            return
        server = self._directory.reachable(self._reader, donor)
        bad = not self._world.calm and self._world.chance(self._world.settings.bad_transfer_chance)
        if server is None or self.head not in server.versions or bad:
            self._world.hit("a transfer is bad" if bad else "a donor is lost in mid-transfer")
            self._left.remove(donor)
            self._reader.after(POLL_MS, self._try)
        else:
            self._on_end(self, state, "")
