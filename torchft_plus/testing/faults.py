"""What goes wrong in a run, and when: at random times, or aimed at what a member is just doing."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from torchft_plus.testing.client import LIGHTHOUSE_ADDRESS

if TYPE_CHECKING:
    from torchft_plus.testing.group import Group
    from torchft_plus.testing.simulation import Simulation

OPERATOR_MS = 5_000
"""When the faults are over: how soon somebody looks for whom all wait."""

PROFILES: dict[str, dict[str, int]] = {
    "crash": {"crash": 8, "rank_death": 2},
    "death": {"crash": 6, "rank_death": 1, "power_loss": 3, "lighthouse_crash": 2},
    "network": {"partition": 6, "one_way": 4, "break": 6, "isolate": 4, "no_lighthouse": 4, "crash": 2},
    "slow": {"slow_link": 8, "forget": 4, "flap": 4, "break": 2, "crash": 3},
    "pause": {"pause": 8, "freeze_rank": 4, "stall": 4, "hang": 2, "crash": 2, "lighthouse_pause": 2},
    "lighthouse": {
        "lighthouse_crash": 6,
        "lighthouse_disk": 4,
        "lighthouse_store": 4,
        "lighthouse_second": 3,
        "lighthouse_pause": 3,
        "crash": 4,
        "no_lighthouse": 3,
    },
    "amnesia": {"lighthouse_disk": 6, "no_lighthouse": 4, "isolate": 3, "crash": 4, "break": 1},
    "store": {"store_fails": 8, "lighthouse_second": 3, "lighthouse_crash": 2, "crash": 6, "break": 2},
    "drift": {"deaf": 8, "crash": 6, "power_loss": 2, "lighthouse_pause": 1},
    "clock": {
        "clock_step": 6,
        "lighthouse_disk": 3,
        "lighthouse_second": 2,
        "lighthouse_pause": 2,
        "deaf": 5,
        "crash": 6,
        "power_loss": 2,
    },
    "members": {"leave": 5, "crash": 4, "power_loss": 2, "break": 2, "pause": 2, "object": 2},
    "joiners": {"crash": 8, "power_loss": 2, "break": 2},
    "transfer": {"crash": 5, "power_loss": 2, "isolate": 2, "pause": 2, "slow_link": 2, "leave": 1},
    "link": {"crash": 5, "power_loss": 1, "break": 2, "pause": 1, "lighthouse_crash": 1},
    "names": {"duplicate": 5, "crash": 5, "power_loss": 3, "lighthouse_pause": 6, "break": 1},
    "outage": {"deaf": 6, "crash": 6, "hibernate": 3, "partition": 1, "lighthouse_frozen": 2},
    "windows": {"crash": 6, "power_loss": 2, "break": 2, "isolate": 2, "pause": 2, "leave": 1},
    "all": {
        "crash": 6,
        "rank_death": 1,
        "power_loss": 2,
        "partition": 3,
        "one_way": 2,
        "isolate": 3,
        "no_lighthouse": 3,
        "break": 4,
        "flap": 1,
        "forget": 2,
        "slow_link": 3,
        "pause": 4,
        "freeze_rank": 2,
        "stall": 2,
        "leave": 2,
        "object": 1,
        "duplicate": 1,
        "deaf": 1,
        "hibernate": 1,
        "lighthouse_crash": 3,
        "lighthouse_disk": 1,
        "lighthouse_store": 2,
        "lighthouse_second": 1,
        "lighthouse_pause": 1,
        "store_fails": 2,
        "clock_step": 1,
    },
}
"""Faults of a profile, with weights."""


class Faults:
    """Chooses and injects the faults of one run."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._world = simulation.world
        weights = PROFILES[self._world.settings.profile]
        self._kinds = [kind for kind, weight in weights.items() for _ in range(weight)]
        self._hung: Group | None = None
        self._aimed: list[tuple[str, str, int]] = []
        self._undo: list[Callable[[], None]] = []

    def plan(self) -> None:
        """Choose what will happen."""
        settings = self._world.settings
        self._cut_link()
        for _ in range(settings.faults):
            kind = self._kinds[int(self._world.random.random() * len(self._kinds))]
            if self._world.chance(settings.aimed_chance):
                moment = settings.moments[int(self._world.random.random() * len(settings.moments))]
                self._aimed.append((kind, moment, self._world.between((1, 12))))
            else:
                at_ms = self._world.between((50, settings.chaos_ms))
                self._world.scheduler.after(at_ms, self._strike, kind, None)

    def saw(self, moment: str, group: Group) -> None:
        """Something happened in a group; maybe an aimed fault strikes there now."""
        if self._world.calm or not self._aimed:
            return
        for index, (kind, wanted, count) in enumerate(self._aimed):
            if wanted != moment:
                continue
            if count > 1:
                self._aimed[index] = (kind, wanted, count - 1)
            else:
                del self._aimed[index]
                delay_ms = self._world.between((0, 4)) if self._world.chance(0.6) else 0
                self._world.scheduler.after(delay_ms, self._strike, kind, group)
            return

    def end(self) -> None:
        """Everything is mended."""
        self._aimed.clear()
        for undo in self._undo:
            undo()
        self._undo.clear()
        self._simulation.network.heal()
        self._cut_link()
        self._world.scheduler.after(OPERATOR_MS, self._end_last_holder)
        self._simulation.lighthouse_disk.fails = False
        for group in self._simulation.launcher.all:
            for life in group.lives:
                life.wake()

    def _cut_link(self) -> None:
        if self._world.settings.cut_link:
            a, b = "host_replica_0", "host_replica_1"
            self._simulation.network.cut_off([(a, b), (b, a)])

    # --- kinds -----------------------------------------------------------------------------------------------------------

    def _strike(self, kind: str, group: Group | None) -> None:
        if self._world.calm:
            return
        if group is None or not group.alive:
            living = [g for g in self._simulation.launcher.groups.values() if g.alive]
            if not living:
                return
            group = living[int(self._world.random.random() * len(living))]
        self._world.trace("fault", "{} at {}", kind, group.process)
        self._world.hit(kind)
        getattr(self, f"_{kind}")(group)

    def _for_a_while(self, bounds: tuple[int, int], undo: Callable[[], None]) -> None:
        self._undo.append(undo)
        self._world.scheduler.after(self._world.between(bounds), undo)

    def _duration(self) -> tuple[int, int]:
        return (20, 400) if self._world.chance(0.6) else (300, 3_000)

    def _crash(self, group: Group) -> None:
        group.end(-9, "killed")

    def _rank_death(self, group: Group) -> None:
        group.rank_dies(self._world.between((0, group.ranks_count - 1)))

    def _power_loss(self, group: Group) -> None:
        group.end(-9, "power loss", silently=True)

    def _partition(self, group: Group) -> None:
        """Two sets of hosts cannot reach each other; the Lighthouse is on one side, or on both."""
        hosts = [f"host_{replica_id}" for replica_id in self._simulation.launcher.groups]
        left = [host for host in hosts if self._world.chance(0.5)] or [group.host]
        right = [host for host in hosts if host not in left]
        side = self._world.between((0, 2))
        if side < 2:
            (left if side == 0 else right).append(LIGHTHOUSE_ADDRESS)
        self._cut([(a, b) for a in left for b in right] + [(b, a) for a in left for b in right])

    def _one_way(self, group: Group) -> None:
        others = [f"host_{replica_id}" for replica_id in self._simulation.launcher.groups] + [
            LIGHTHOUSE_ADDRESS
        ]
        pairs = [(group.host, other) for other in others if other != group.host and self._world.chance(0.6)]
        self._cut(pairs if self._world.chance(0.5) else [(b, a) for a, b in pairs])

    def _isolate(self, group: Group) -> None:
        others = [f"host_{r}" for r in self._simulation.launcher.groups if f"host_{r}" != group.host]
        others.append(LIGHTHOUSE_ADDRESS)
        self._cut([(group.host, other) for other in others] + [(other, group.host) for other in others])

    def _no_lighthouse(self, group: Group) -> None:
        self._cut([(group.host, LIGHTHOUSE_ADDRESS), (LIGHTHOUSE_ADDRESS, group.host)])

    def _deaf(self, group: Group) -> None:
        """Nobody but one reaches the Lighthouse, for longer than the outage limit may be."""
        hosts = [f"host_{replica_id}" for replica_id in self._simulation.launcher.groups]
        pairs = [(host, LIGHTHOUSE_ADDRESS) for host in hosts if host != group.host]
        pairs += [(b, a) for a, b in pairs]
        self._simulation.network.cut_off(pairs)
        self._for_a_while(self._long(), lambda: self._simulation.network.heal(pairs))

    def _hibernate(self, group: Group) -> None:
        """All groups but one stand still, for longer than the outage limit may be."""
        duration = self._long()
        for other in self._simulation.launcher.groups.values():
            if other is not group:
                for life in other.lives:
                    life.pause()
                    self._for_a_while(duration, life.wake)

    def _long(self) -> tuple[int, int]:
        return (
            self._world.settings.timeouts.outage_limit_ms // 2,
            2 * self._world.settings.timeouts.outage_limit_ms,
        )

    def _cut(self, pairs: list[tuple[str, str]]) -> None:
        network = self._simulation.network
        network.cut_off(pairs)
        if self._world.chance(0.4):
            self._break_between(pairs)
        self._for_a_while(self._duration(), lambda: network.heal(pairs))

    def _break_between(self, pairs: list[tuple[str, str]]) -> None:
        for group in self._simulation.launcher.all:
            for life in group.lives:
                for end in list(life.ends):
                    if (
                        end.peer is not None
                        and (life.host, end.peer.life.host) in pairs
                        and self._world.chance(0.7)
                    ):
                        self._simulation.network.break_connection(end, "no answer")

    def _break(self, group: Group) -> None:
        ends = [end for life in group.lives for end in life.ends]
        if ends:
            end = ends[int(self._world.random.random() * len(ends))]
            self._simulation.network.break_connection(end, "reset by a proxy")

    def _forget(self, group: Group) -> None:
        """A router forgets a connection: both sides go on sending, and nobody reads it."""
        ends = [end for life in group.lives for end in life.ends]
        if ends:
            self._simulation.network.lose_silently(ends[int(self._world.random.random() * len(ends))])

    def _flap(self, group: Group) -> None:
        """The stream to the Lighthouse breaks again and again; what is in flight on the older ones is read late."""
        for _ in range(self._world.between((2, 5))):
            self._world.scheduler.after(self._world.between((0, 300)), self._break_stream, group)

    def _break_stream(self, group: Group) -> None:
        for end in list(group.lives[0].ends):
            if end.peer is not None and end.peer.life.host == LIGHTHOUSE_ADDRESS:
                self._simulation.network.break_connection(end, "reset by a proxy")

    def _slow_link(self, group: Group) -> None:
        """Everything to and from a host, or between two, takes long for a while."""
        others = [f"host_{r}" for r in self._simulation.launcher.groups if f"host_{r}" != group.host]
        others.append(LIGHTHOUSE_ADDRESS)
        if self._world.chance(0.5):
            others = [others[int(self._world.random.random() * len(others))]]
        pairs = [(group.host, other) for other in others] + [(other, group.host) for other in others]
        low_ms = self._world.between((50, 400))
        network = self._simulation.network
        network.slow_down(pairs, (low_ms, self._world.between((low_ms, 2_000))))
        self._for_a_while(self._duration(), lambda: network.quicken(pairs))

    def _pause(self, group: Group) -> None:
        """SIGSTOP of a whole group."""
        for life in group.lives:
            life.pause()
            self._for_a_while(self._duration(), life.wake)
        limit_ms = self._world.settings.timeouts.heartbeat_timeout_ms
        for rank in range(group.ranks_count):
            if self._world.chance(0.2):
                self._world.scheduler.after(limit_ms, group.rank_frozen, rank)

    def _freeze_rank(self, group: Group) -> None:
        """SIGSTOP of one rank."""
        rank = self._world.between((0, group.ranks_count - 1))
        group.lives[rank].pause()
        self._world.scheduler.after(
            self._world.settings.timeouts.heartbeat_timeout_ms, group.rank_frozen, rank
        )
        self._for_a_while(self._duration(), group.lives[rank].wake)

    def _stall(self, group: Group) -> None:
        """The training thread of a rank is slow for a step."""
        rank = group.ranks[self._world.between((0, group.ranks_count - 1))]
        rank.stall_ms = self._world.between((200, 4_000))

    def _hang(self, group: Group) -> None:
        """The training thread of a rank stands still for ever, while its agent goes on (rule L6, F26)."""
        settings = self._world.settings
        if self._world.absent == 0 and settings.groups > settings.min_replicas:
            self._world.absent = 1
            group.ranks[self._world.between((0, group.ranks_count - 1))].stall_ms = 10**9
            self._hung = group

    def _end_last_holder(self) -> None:
        """A group that hangs and alone has the state keeps all waiting: somebody has to end it."""
        hung = self._hung
        if hung is None or not hung.alive or hung.core is None:
            return
        head = hung.core.head
        others = [g.core for g in self._simulation.launcher.all if g.alive and g is not hung and g.core]
        if not any(c.level and (c.head == head or c.head.order > head.order) for c in others):
            hung.end(-9, "an operator has ended it")
        self._world.scheduler.after(OPERATOR_MS, self._end_last_holder)

    def _object(self, group: Group) -> None:
        group.ranks[self._world.between((0, group.ranks_count - 1))].objects = True

    def _leave(self, group: Group) -> None:
        group.leave_wanted()

    def _duplicate(self, group: Group) -> None:
        """A second process of the same name is started while the first one lives."""
        self._simulation.launcher.start(group.process.replica_id)

    def _lighthouse_crash(self, group: Group) -> None:
        del group
        self._simulation.crash_lighthouse(lose_disk=False)

    def _lighthouse_disk(self, group: Group) -> None:
        del group
        self._simulation.crash_lighthouse(lose_disk=True)

    def _lighthouse_store(self, group: Group) -> None:
        del group
        if self._simulation.lighthouse is not None:
            self._simulation.lighthouse.die_at_next_store("before" if self._world.chance(0.5) else "after")

    def _store_fails(self, group: Group) -> None:
        """The Lighthouse's disk is full, or away, for a while."""
        del group
        self._simulation.lighthouse_disk.fails = True
        self._for_a_while(self._duration(), self._store_works)

    def _store_works(self) -> None:
        self._simulation.lighthouse_disk.fails = False

    def _clock_step(self, group: Group) -> None:
        """The next Lighthouse finds its clock set back, or forward."""
        del group
        self._simulation.clock_step_seconds += self._world.between((-20, 20))
        self._simulation.crash_lighthouse(lose_disk=False)

    def _lighthouse_second(self, group: Group) -> None:
        """A new Lighthouse takes over while the old one still runs."""
        del group
        self._simulation.start_lighthouse()

    def _lighthouse_pause(self, group: Group) -> None:
        del group
        lighthouse = self._simulation.lighthouse
        if lighthouse is not None and lighthouse.alive:
            lighthouse.life.pause()
            self._for_a_while(self._duration(), lighthouse.life.wake)

    def _lighthouse_frozen(self, group: Group) -> None:
        """It stands still for longer than a silent member has until it is counted out."""
        del group
        lighthouse = self._simulation.lighthouse
        if lighthouse is not None and lighthouse.alive:
            lighthouse.life.pause()
            self._for_a_while(self._long(), lighthouse.life.wake)
