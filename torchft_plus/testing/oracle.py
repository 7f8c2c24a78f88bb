"""Checks the promises after every event of a run. It sees everything; the cores do not see it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from lighthouse.core.words import Record
from lighthouse.messages import Down, Form, Head, Process, Quorum
from torchft_plus.manager.step_core import StepCore
from torchft_plus.pb import peer_pb2 as pb
from torchft_plus.testing.content import Gradient, State
from torchft_plus.testing.world import Violation, World

if TYPE_CHECKING:
    from torchft_plus.testing.group import Group
    from torchft_plus.testing.lighthouse_host import Lighthouse
    from torchft_plus.testing.rank import Outcome, Rank

Key = tuple[int, int, str]


def key_of(head: Head) -> Key:
    """A head as a whole; the digest counts at step 0 only."""
    return (head.step, head.quorum_id, head.digest if head.step == 0 else "")


@dataclass(slots=True)
class Commit:
    """A committed step, as the first rank that applied it saw it."""

    content: str
    contributions: tuple[tuple[str, int], ...]
    skipped: bool


class Oracle:
    """Knows the one lineage, and compares everybody with it."""

    def __init__(self, world: World) -> None:
        self._world = world
        self.groups: list[Group] = []
        """All lives of all groups, for whoever looks from above."""
        self.calm_steps = 0
        """Steps that all groups committed together, level, since the last fault."""
        self.positions: dict[Key, dict[str, int]] = {}
        self.head_of_step: dict[int, Head] = {}
        """The lineage: who committed each step."""
        self._parents: dict[Key, Head | None] = {}
        self._given_up: set[Key] = set()
        """Heads that were in the lineage before a total loss."""
        self.contents: dict[Key, str] = {}
        self.quorums: dict[int, Quorum] = {}
        self.commits: dict[Key, Commit] = {}
        self.total_losses = 0
        self._highest_stored = 0
        self.disk_lost = False
        """The store was lost since the last quorum was formed."""
        self._rewound = False
        """A lost store came back with an older quorum, because everybody of the newer ones is away."""
        self._outcomes: dict[Process, list[tuple[str, Head]]] = {}
        self._steps_of: dict[str, int] = {}
        self._core_heads: dict[Process, tuple[int, Head]] = {}
        self._yes: dict[Process, tuple[int, int]] = {}
        self.lost_gradients = 0
        """Computed by a group that lives, and refused."""

    def fail(self, promise: str, sentence: str) -> None:
        """A promise is broken."""
        raise Violation(f"{promise}: {sentence}")

    # --- the Lighthouse ---------------------------------------------------------------------------------------------

    def stored(self, lighthouse: Lighthouse, record: Record, before: Quorum | None) -> None:
        """A record was written: ids grow, a quorum is written once. ``before``: the last quorum until now."""
        first = before is None
        quorum = record.q_last
        if quorum is None or quorum.id in self.quorums:
            if quorum is not None and self.quorums[quorum.id] != quorum:
                self.fail("P2", f"two quorums have the id {quorum.id}")
            if quorum is not None and first and self.disk_lost and quorum.id < self._highest_stored:
                self._strand(lighthouse, quorum)
                self._rewound = True
            return
        if quorum.id <= self._highest_stored:
            self.fail("P2", f"quorum id {quorum.id} is not above {self._highest_stored}")
        self._highest_stored = quorum.id
        self.quorums[quorum.id] = quorum
        if first and self.disk_lost and self._highest_step() > 0:
            self._founded_again(lighthouse, quorum)
        else:
            self._check_base(lighthouse, quorum, before)
        self._rewound = self.disk_lost = False

    def _highest_step(self) -> int:
        return max(self.head_of_step, default=0)

    def _founded_again(self, lighthouse: Lighthouse, quorum: Quorum) -> None:
        """The store was lost and nobody who is there knows of a quorum: a second run begins (F18's remainder).

        Whoever still trains under the first one is stranded, until it is told.
        """
        self._strand(lighthouse, quorum)
        self._go_back(quorum.base)

    def _strand(self, lighthouse: Lighthouse, quorum: Quorum) -> None:
        for group in self.groups:
            core = group.core
            if not group.alive or core is None or core.ended is not None or core.adopted is None:
                continue
            if core.adopted.id != quorum.id and quorum.rank_of(group.process) is None:
                if lighthouse.connected(group.process) and core.adopted.id == self._highest_stored:
                    self.fail(
                        "R2",
                        f"{group.process} is connected, is in quorum {core.adopted.id}, and was not heard",
                    )
                group.stranded = True

    def _check_base(self, lighthouse: Lighthouse, quorum: Quorum, before: Quorum | None) -> None:
        base = quorum.base
        last_step = self._highest_step()
        here = self.head_of_step.get(base.step)
        known = base.step == 0 or here is None or key_of(here) == key_of(base)
        if known and last_step <= base.step <= last_step + 1:
            self._extend(base)
        elif quorum.reload or self._rewound:
            self._total_loss(lighthouse, base, before)
        else:
            self.fail(
                "P2",
                f"quorum {quorum.id} goes on from {base}, the lineage is at {self.head_of_step[last_step]}",
            )

    def _extend(self, head: Head) -> None:
        if head.step > 0 and head.step not in self.head_of_step:
            self.head_of_step[head.step] = head
            self._parents[key_of(head)] = self.head_of_step.get(head.step - 1)

    def _total_loss(self, lighthouse: Lighthouse, base: Head, before: Quorum | None) -> None:
        """The chain goes on from another head: only if no member of the last quorum can come back with a later one."""
        for group in self.groups:
            core = group.core
            if not group.alive or core is None or core.ended is not None or self._outside(group):
                continue
            if lighthouse.released(group.process):
                continue
            if self._rewound and core.adopted is None:
                continue  # only a checkpoint of a quorum that the lost store knew: announced as lost (rule R2)
            member = before is not None and before.rank_of(group.process) is not None
            awaited = lighthouse.connected(group.process) or (member and not self._silent_for_good(group))
            if awaited and core.level and core.head.order > base.order:
                self.fail("P2", f"total loss to {base}, but {group.process} lives and holds {core.head}")
        self._go_back(base)

    def _go_back(self, base: Head) -> None:
        self.total_losses += 1
        self._given_up.update(key_of(head) for head in self.head_of_step.values())
        self.head_of_step.clear()
        head: Head | None = base
        while head is not None and head.step > 0:
            self.head_of_step[head.step] = head
            self._given_up.discard(key_of(head))
            head = self._parents.get(key_of(head))

    def _silent_for_good(self, group: Group) -> bool:
        silent_ms = self._world.now_ms - group.heard_ms
        return silent_ms > self._world.settings.timeouts.outage_limit_ms

    def _outside(self, group: Group) -> bool:
        """What this group does binds nobody any more: the Lighthouse rightly counts it out."""
        lighthouse = group.simulation.lighthouse
        return group.stranded or (lighthouse is not None and lighthouse.replaced(group.process))

    def sent(self, process: Process, message: Down, record: Record | None) -> None:
        """The Lighthouse tells somebody: a quorum only to its members, and only when it is stored."""
        if isinstance(message, Form):
            quorum = message.quorum
            if quorum.rank_of(process) is None:
                self.fail("L4", f"quorum {quorum.id} is sent to {process}, who is not in it")
            if record is None or record.q_last != quorum:
                self.fail("L1", f"quorum {quorum.id} is told and not stored")

    def replaced(self, process: Process) -> None:
        """The Lighthouse takes another process of the name in place of one that it did not count as lost (rule L7)."""
        for group in self.groups:
            trains = group.core is not None and group.core.adopted is not None
            if group.process == process and trains and self._is_well(group):
                self.fail("L7", f"{process} lives, answers, and was replaced")

    def _is_well(self, group: Group) -> bool:
        """True if this group has been reachable and quick for long enough to answer a ping."""
        limit_ms = self._world.settings.timeouts.heartbeat_timeout_ms
        network, life = group.network, group.lives[0]
        return (
            life.alive
            and not life.paused
            and not network.is_blocked
            and self._world.settings.slow_message_chance == 0
            and self._world.now_ms - max(life.woken_ms, network.healed_ms, group.started_ms) > 2 * limit_ms
        )

    # --- step cores ---------------------------------------------------------------------------------------------------

    def started(self, group: Group, head: Head, state: State) -> None:
        """A new life of a group."""
        self.contents.setdefault(key_of(head), state.content)

    def told(self, group: Group, quorum: Quorum) -> None:
        """A member is told of a quorum."""
        group.stranded = False
        if quorum.rank_of(group.process) is None:
            self.fail("L4", f"{group.process} got quorum {quorum.id} and is not in it")

    def core_changed(self, group: Group, core: StepCore) -> None:
        """A step core has handled an event: its floor only grows."""
        before = self._core_heads.get(group.process)
        if before is not None and core.floor < before[0]:
            self.fail("M4", f"the floor of {group.process} fell from {before[0]} to {core.floor}")
        self._core_heads[group.process] = (core.floor, core.head)

    def sends_peers(self, group: Group, frame: pb.PeerFrame) -> None:
        """A frame goes to the peers: nothing below or at the floor, a yes only when it is noted."""
        core = group.core
        assert core is not None
        if frame.WhichOneof("body") == "vote":
            voted = core.voted
            step = (frame.vote.step, frame.vote.quorum_id)
            known = core.head.step >= frame.vote.step
            if not known and (voted is None or (voted.step, voted.quorum_id) != step):
                self.fail("M2", f"{group.process} posts a yes for {step} and has noted {voted}")

    def committed(self, group: Group, head: Head) -> None:
        """A leader has committed ``head``."""
        if head.quorum_id not in self.quorums:
            self.fail("P2", f"{group.process} commits {head} under a quorum that was never stored")
        if self._outside(group):
            return
        here = self.head_of_step.get(head.step)
        last_step = self._highest_step()
        if key_of(head) in self._given_up:
            return  # it learns late of a step that was committed before a total loss
        if here is None and head.step == last_step + 1:
            self._extend(head)
        elif here is None or key_of(here) != key_of(head):
            self.fail(
                "P2", f"{group.process} commits {head}, the lineage has {here} and is at step {last_step}"
            )

    # --- ranks ----------------------------------------------------------------------------------------------------------

    def computed(self, rank: Rank, gradient: Gradient) -> None:
        """A rank has computed a gradient: it must have been at the content of its head."""
        self.stands(rank)

    def stands(self, rank: Rank) -> None:
        """A level rank stands at its head: equal heads have equal contents (P1)."""
        key = key_of(rank.head)
        content = self.contents.setdefault(key, rank.content or "torn")
        if rank.content != content and not self._outside(rank.group):
            self.fail("P1", f"{rank.name} at {rank.head} holds {rank.content}, others {content}")

    def applied(self, rank: Rank, outcome: Outcome) -> None:
        """A rank has applied (or recorded, or skipped) a committed step."""
        if self._outside(rank.group):
            return
        contributions = tuple((g.replica_id, g.batch) for g in sorted(outcome.result))
        key = key_of(outcome.head)
        commit = self.commits.get(key)
        skipped = outcome.kind == "skipped"
        if not skipped and len(contributions) != round(outcome.total_weight):
            self.fail(
                "P1",
                f"{rank.name}: step {outcome.head} has weight {outcome.total_weight} and data of {contributions}",
            )
        if self._world.calm and commit is None:
            full = len(contributions) == self._world.settings.groups
            self.calm_steps = self.calm_steps + 1 if full else 0
        if commit is None:
            self._check_accounts(rank, outcome, contributions)
            self.commits[key] = commit = Commit("", contributions, skipped)
        elif (commit.contributions, commit.skipped) != (contributions, skipped):
            self.fail(
                "P1", f"{rank.name}: {outcome.head} has {contributions} {skipped}, others have {commit}"
            )
        if rank.behind or rank.content is None:
            return
        contents = {(g.computed_at, g.fragment) for g in outcome.result}
        if len(contents) > 1:
            self.fail(
                "P1",
                f"{rank.name}: step {outcome.head} averages gradients of different states or parts {outcome.result}",
            )
        self.stands(rank)

    def leaves(self, rank: Rank) -> None:
        """F35: who leaves was let go, or waited in vain for an answer."""
        core = rank.group.core
        waited_ms = self._world.now_ms - rank.asked_to_go_ms
        if core is not None and core.ended is None and waited_ms < self._world.settings.timeouts.shutdown_ms:
            self.fail("F35", f"{rank.name} leaves at {rank.head} before the Lighthouse has let it go")

    def _check_accounts(
        self, rank: Rank, outcome: Outcome, contributions: tuple[tuple[str, int], ...]
    ) -> None:
        """P10: each batch of each replica is committed once, in order."""
        moved = {replica_id: batch + 1 for replica_id, batch in contributions}
        if outcome.kind != "skipped" and moved != outcome.positions:
            self.fail(
                "P10", f"step {outcome.head} commits {contributions}, its positions say {outcome.positions}"
            )
        quorum = self.quorums[outcome.head.quorum_id]
        previous = outcome.head.step - 1
        key = self._parent(quorum, outcome.head)
        before = self.positions.get(key) if previous else {}
        if before is None:
            return
        for replica_id, position in outcome.positions.items():
            if before.get(replica_id, 0) != position - 1:
                self.fail(
                    "P10",
                    f"step {outcome.head} commits batch {position - 1} of {replica_id}, expected {before.get(replica_id, 0)}",
                )
        self.positions[key_of(outcome.head)] = {**before, **outcome.positions}

    def _parent(self, quorum: Quorum, head: Head) -> Key:
        if quorum.base.step == head.step - 1:
            return key_of(quorum.base)
        return (head.step - 1, quorum.id, "")

    def refused(self, rank: Rank, gradient: Gradient | None) -> None:
        """A step was refused on a rank. If all that went wrong are deaths, no survivor loses a gradient (P3)."""
        if gradient is not None:
            self.lost_gradients += 1
            if self._world.settings.profile == "crash":
                self.fail("P3", f"{rank.name} lives, and its gradient {gradient} is lost at {rank.head}")

    def outcome(self, group: Group, rank: Rank, outcome: Outcome) -> None:
        """M7: all ranks of a group end the same steps in the same way."""
        mine = self._outcomes.setdefault(group.process, [])
        number = self._steps_of.get(rank.name + rank.life.name, 0)
        self._steps_of[rank.name + rank.life.name] = number + 1
        entry = (outcome.kind, outcome.head)
        if number < len(mine):
            if mine[number] != entry:
                self.fail("M7", f"{rank.name} ended step {number} as {entry}, another rank as {mine[number]}")
        else:
            mine.append(entry)
