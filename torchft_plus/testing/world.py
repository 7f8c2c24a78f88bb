"""What everything in a simulated run shares: time, chance, trace, settings and the oracle's complaint."""

from __future__ import annotations

from collections import Counter, deque
from dataclasses import dataclass, field
from random import Random

from lighthouse.core.words import CoreConfig
from lighthouse.timeouts import Timeouts
from torchft_plus.testing.scheduler import Scheduler

TRACE_LINES = 4_000
MOMENTS = (
    "quorum",
    "revoked",
    "fault",
    "commit",
    "behind",
    "level",
    "refused",
    "vote",
    "block",
    "transfer",
)
"""What an aimed fault may wait for."""


class Violation(AssertionError):
    """A promise was broken; the text says which and how."""


@dataclass(frozen=True, slots=True)
class Settings:
    """How one run is set up. Times in milliseconds of virtual time."""

    seed: int
    groups: int = 3
    ranks: int = 1
    min_replicas: int = 1
    min_replica_size: int = 1
    timeouts: Timeouts = field(default_factory=lambda: Timeouts(1_000, 4_000))
    expected_replicas: int | None = None
    join_timeout_ms: int = 1_000
    restart_timeout_ms: int = 1_000
    reconnect_grace_ms: int = 100
    restart_grace_ms: int = 1_500
    equal_start: bool = True
    """All groups start from the same initial state; else each from its own."""
    disk: str = "none"
    """Checkpoints: "none", "own" (each replica group reads its own only) or "shared"."""
    reports_exits: bool = True
    window: int = 0
    """Inner steps between two syncs (DiLoCo); 0: every step is a sync."""
    fragments: int = 1
    """Parts of the model, which take turns."""
    compute_ms: tuple[int, int] = (10, 120)
    apply_ms: tuple[int, int] = (0, 20)
    transfer_ms: tuple[int, int] = (5, 300)
    delay_ms: tuple[int, int] = (0, 8)
    slow_message_chance: float = 0.02
    slow_message_ms: int = 200
    clock_drift: float = 0.0
    """How much faster or slower than true time a clock may run, as a share."""
    settle_ms: tuple[int, int] = (0, 0)
    """How long the Lighthouse reads before it decides on all that it has read."""
    only_deaths: bool = False
    """Nothing goes wrong but deaths, so no survivor may lose a gradient (P3)."""
    cut_link: bool = False
    """The first two groups can never reach each other, also when the faults are over."""
    bad_transfer_chance: float = 0.0
    """A transfer ends with a broken connection, or with bytes that do not match their checksum."""
    profile: str = "all"
    """Which faults: see ``faults.PROFILES``."""
    faults: int = 8
    aimed_chance: float = 0.4
    """How many of them strike at a moment of the protocol, and not at a time."""
    moments: tuple[str, ...] = MOMENTS
    chaos_ms: int = 6_000
    calm_ms: int = 60_000
    """Bound of the liveness check after the last fault."""

    def core_config(self) -> CoreConfig:
        """Settings of the quorum core."""
        return CoreConfig(
            min_replicas=self.min_replicas,
            expected_replicas=self.expected_replicas,
            join_timeout_ms=self.join_timeout_ms,
            restart_timeout_ms=self.restart_timeout_ms,
            reconnect_grace_ms=self.reconnect_grace_ms,
            restart_grace_ms=self.restart_grace_ms,
            timeouts=self.timeouts,
        )


class World:
    """Time, chance and trace of one run."""

    def __init__(self, settings: Settings, trace: bool = False) -> None:
        self.settings = settings
        self.random = Random(settings.seed)
        self.scheduler = Scheduler(self.random)
        self.calm = False
        """Faults are over: everything is quick and whole."""
        self.absent = int(settings.cut_link)
        """So many groups cannot take part when the faults are over: the others have to go on without them."""
        self.hits: Counter[str] = Counter()
        """How often something happened that a schedule should bring about."""
        self.keep_trace = trace
        self._trace: deque[tuple[int, str, str, tuple[object, ...]]] = deque(maxlen=TRACE_LINES)

    @property
    def now_ms(self) -> int:
        """Virtual time."""
        return self.scheduler.now_ms

    def trace(self, who: str, sentence: str, *arguments: object) -> None:
        """Note an event; formatted only if somebody reads it."""
        if self.keep_trace:
            self._trace.append((self.now_ms, who, sentence, arguments))

    def trace_lines(self) -> list[str]:
        """The last events, one line each."""
        return [
            f"{at_ms:7d} {who:14s} {sentence.format(*arguments)}"
            for at_ms, who, sentence, arguments in self._trace
        ]

    def chance(self, probability: float) -> bool:
        """True with this probability."""
        return self.random.random() < probability

    def between(self, bounds: tuple[int, int]) -> int:
        """A whole number within ``bounds``, both included."""
        low, high = bounds
        return low + int(self.random.random() * (high - low + 1))

    def clock_rate(self) -> float:
        """How fast a new clock runs."""
        drift = self.settings.clock_drift
        return 1.0 if not drift else 1 + drift if self.chance(0.5) else 1 - drift

    def hit(self, what: str) -> None:
        """Note that it happened."""
        self.hits[what] += 1

    def delay_ms(self) -> int:
        """How long a message takes that nothing slows down."""
        if not self.calm and self.chance(self.settings.slow_message_chance):
            return self.between((0, self.settings.slow_message_ms))
        return self.between(self.settings.delay_ms)
