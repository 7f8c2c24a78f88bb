"""Checks the promises after every event of a run. It sees everything; the cores do not see it."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING

from lighthouse.core.words import Record
from lighthouse.messages import Down, Form, Head, Process, Quorum
from torchft_plus.manager.step_core import StepCore
from torchft_plus.pb import peer_pb2 as pb
from torchft_plus.testing.content import Gradient, State
from torchft_plus.testing.lineage import Key, Lineage, key_of
from torchft_plus.testing.world import Violation, World

if TYPE_CHECKING:
    from torchft_plus.testing.group import Group
    from torchft_plus.testing.lighthouse_host import Lighthouse
    from torchft_plus.testing.rank import Outcome, Rank


Attempt = tuple[int, int, int]
"""Quorum id, step, round."""


@dataclass(slots=True)
class Commit:
    """A committed step, as the first rank that applied it saw it."""

    content: str
    contributions: tuple[tuple[str, int], ...]
    skipped: bool


class Oracle:
    """Knows the one lineage, and compares everybody with it."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.groups: list[Group] = []
        """All lives of all groups, for whoever looks from above."""
        self.calm_steps = 0
        """Steps that all groups committed together, level, since the last fault."""
        self.positions: dict[Key, dict[str, int]] = {}
        self.lineage = Lineage()
        """The chain that goes on."""
        self._lineage_of: dict[int, Lineage] = {}
        """In which chain each quorum commits. Older ones are those that a total loss has given up."""
        self.contents: dict[Key, str] = {}
        self.quorums: dict[int, Quorum] = {}
        self._bases: set[Key] = set()
        self.commits: dict[Key, Commit] = {}
        self.total_losses = 0
        self._highest_id = 0
        self._last_id = 0
        """Of the quorum that is stored."""
        self.disk_lost = False
        """The store was lost, and knows of no quorum yet."""
        self._rewound = False
        """A lost store came back with an older quorum, because everybody of the newer ones is away."""
        self._forgotten: set[int] = set()
        """Quorums that were lost with a store: newer than the one with which training went on."""
        self._owed: tuple[Quorum, int, Lighthouse] | None = None
        """A total loss that has to be announced before its quorum is told, the steps that it costs, and by whom."""
        self._outcomes: dict[Process, list[tuple[str, Head]]] = {}
        self._steps_of: dict[str, int] = {}
        self._floors: dict[Process, tuple[int, int]] = {}
        """Floor of each core before and after its last event."""
        self._yes: dict[tuple[int, int], set[Process]] = {}
        """Who has said yes to (step, quorum id)."""
        self._stale: set[Attempt] = set()
        self._not_finite: set[Attempt] = set()
        self.lost_gradients = 0
        """Computed by a group that lives, and refused."""

    @property
    def head_of_step(self) -> dict[int, Head]:
        """The lineage: who committed each step."""
        return self.lineage.head_of_step

    def fail(self, promise: str, sentence: str) -> None:
        """A promise is broken."""
        raise Violation(f"{promise}: {sentence}")

    # --- the Lighthouse ---------------------------------------------------------------------------------------------

    def stored(self, lighthouse: Lighthouse, record: Record, before: Quorum | None) -> None:
        """A record was written: ids grow, a quorum is written once. ``before``: the last quorum until now."""
        quorum = record.q_last
        if quorum is None:
            if self._last_id and not self.disk_lost:
                self.fail("L1", f"quorum {self._last_id} is forgotten")
            return
        if quorum.id in self.quorums:
            self._stored_again(lighthouse, quorum, before)
            return
        if quorum.id <= self._highest_id:
            self.fail("P2", f"quorum id {quorum.id} is not above {self._highest_id}")
        self._check_members(lighthouse, quorum)
        if before is None and self.disk_lost and self._highest_id:
            self._founded_again(lighthouse, quorum)
        else:
            self._check_base(lighthouse, quorum, before)
        self._highest_id = self._last_id = quorum.id
        self.quorums[quorum.id] = quorum
        self._bases.add(key_of(quorum.base))
        self._lineage_of[quorum.id] = self.lineage
        self._rewound = self.disk_lost = False

    def _stored_again(self, lighthouse: Lighthouse, quorum: Quorum, before: Quorum | None) -> None:
        """A new epoch for the same quorum, or what members report to a Lighthouse that has lost its store."""
        if self.quorums[quorum.id] != quorum:
            self.fail("P2", f"two quorums have the id {quorum.id}")
        if quorum.id < self._last_id:
            if before is not None or not self.disk_lost:
                self.fail("P2", f"the store goes back from quorum {self._last_id} to {quorum.id}")
            self._rewind(lighthouse, quorum)
        elif quorum.id > self._last_id:
            self.lineage = self._lineage_of[quorum.id]  # somebody of the newer ones came back in time (R2)
        self._last_id, self.disk_lost = quorum.id, False

    def _check_members(self, lighthouse: Lighthouse, quorum: Quorum) -> None:
        """One process a name, none that the Lighthouse counts out."""
        names = [member.process.replica_id for member in quorum.members]
        if len(set(names)) < len(names):
            self.fail("L7", f"quorum {quorum.id} has two processes of a name: {quorum.members}")
        for member in quorum.members:
            if (reason := lighthouse.core.gone_because(member.process)) is not None:
                self.fail("L7", f"quorum {quorum.id} has {member.process} as a member, and {reason}")

    def _founded_again(self, lighthouse: Lighthouse, quorum: Quorum) -> None:
        """The store was lost and nobody who is there knows of a quorum: a second run begins (F18's remainder).

        Whoever still trains under the first one is stranded, until it is told; its chain has to stay one.
        """
        self.world.hit("a second run is founded")
        self._strand(lighthouse, 0)
        self._go_back(quorum.base)

    def _rewind(self, lighthouse: Lighthouse, quorum: Quorum) -> None:
        """The store was lost and nobody of the newest quorums is there: an older one counts (rule R2)."""
        self.world.hit("a lost store is filled with an older quorum")
        self._strand(lighthouse, quorum.id)
        heads = self._lineage_of[quorum.id].head_of_step
        self.lineage = Lineage({step: h for step, h in heads.items() if h.quorum_id <= quorum.id})
        self._lineage_of[quorum.id] = self.lineage  # where a step that it had voted for is committed now
        self._forgotten.update(number for number in self.quorums if number > quorum.id)
        self.total_losses += 1
        self._rewound = True

    def _waits_for(self, lighthouse: Lighthouse, group: Group) -> bool:
        """True while a Lighthouse without its store has to give ``group`` the time to come."""
        since_ms = self.world.now_ms - lighthouse.started_ms
        return not lighthouse.replaced(group.process) and since_ms < self.world.settings.restart_grace_ms // 2

    def _strand(self, lighthouse: Lighthouse, newest_id: int) -> None:
        """Who has adopted a quorum above ``newest_id`` was not heard: it may not even be connected."""
        for group in self.groups:
            core = group.core
            if not group.alive or core is None or core.ended is not None or core.adopted is None:
                continue
            if core.adopted.id > newest_id:
                if lighthouse.connected(group.process):
                    sentence = (
                        f"{group.process} is connected, is in quorum {core.adopted.id}, and was not heard"
                    )
                    self.fail("R2", sentence)
                if newest_id and self._waits_for(lighthouse, group):
                    self.fail(
                        "R2", f"{group.process} is in quorum {core.adopted.id}, and was given no time to come"
                    )
                group.stranded = True

    def _check_base(self, lighthouse: Lighthouse, quorum: Quorum, before: Quorum | None) -> None:
        base, chain = quorum.base, self.lineage
        if chain.has(base) and base.step == chain.last_step:
            lost_steps = 0
        elif chain.follows(base) and base.quorum_id == (before.id if before is not None else 0):
            lost_steps = 0
            chain.extend(base)  # the first quorum, or a step that is rolled forward
        elif quorum.reload or self._rewound:
            lost_steps = chain.last_step - base.step
            self._total_loss(lighthouse, base, before)
        else:
            tip = chain.head_of_step.get(chain.last_step)
            self.fail("P2", f"quorum {quorum.id} goes on from {base}, the lineage is at {tip}")
            return
        if quorum.reload and "the last run has ended" not in quorum.reason:
            self._owed = (quorum, lost_steps, lighthouse)

    def _total_loss(self, lighthouse: Lighthouse, base: Head, before: Quorum | None) -> None:
        """The chain goes on from another head: only if no member of the last quorum can come back with a later one."""
        for group in self.groups:
            core = group.core
            if not group.alive or core is None or core.ended is not None:
                continue
            connected = lighthouse.connected(group.process)
            if lighthouse.replaced(group.process) or lighthouse.released(group.process):
                continue  # counted out for good, by L7 or by its own wish: what it holds is not waited for (L5)
            if self._rewound and core.adopted is None:
                continue  # only a checkpoint of a quorum that the lost store knew: announced as lost (rule R2)
            member = before is not None and before.rank_of(group.process) is not None
            awaited = connected or (member and not self._silent_for_good(group))
            if awaited and core.level and core.head.order > base.order:
                self.fail("P2", f"total loss to {base}, but {group.process} lives and holds {core.head}")
        self._go_back(base)

    def _go_back(self, base: Head) -> None:
        self.world.hit("a total loss")
        self.total_losses += 1
        chain = self._lineage_of.get(base.quorum_id, Lineage({0: base})) if base.step else Lineage({0: base})
        if not chain.has(base):
            self.fail("P2", f"training goes on from {base}, which nobody has committed")
        self.lineage = chain.until(base)

    def announced(self, lighthouse: Lighthouse, text: str) -> None:
        """The Lighthouse tells everybody something: a total loss only when it is one, and with its size."""
        if not text.startswith("total loss"):
            return
        if text.startswith("total loss: nobody holds any state"):
            for group in self.groups:
                core = group.core
                if group.alive and core is not None and core.level and lighthouse.counts(group.process):
                    self.fail("L5", f"{group.process} holds {core.head}, but: {text}")
        elif self._owed is not None:
            lost_steps, said = self._owed[1], re.search(r"(\d+) steps are lost", text)
            if said is None or int(said[1]) > max(0, lost_steps):
                self.fail("L5", f"{lost_steps} steps are lost, but: {text}")
            self._owed = None
        elif (named := re.search(r"there was a quorum (\d+)", text)) is None or int(
            named[1]
        ) not in self._forgotten:
            self.fail("L5", f"nothing is lost, but: {text}")

    def _silent_for_good(self, group: Group) -> bool:
        """By its own clock it has not been heard for so long that it decides nothing any more (rule M8)."""
        silent_ms = group.lives[0].now_ms - group.client.last_answered_ms
        return silent_ms > self.world.settings.timeouts.outage_limit_ms

    def _outside(self, group: Group) -> bool:
        """It goes on in a chain that was given up, because it was not told yet: it was out of reach when it was counted
        out (L7: another process of its name was taken; F18: a second run was founded)."""
        lighthouse = group.simulation.lighthouse
        return group.stranded or (lighthouse is not None and lighthouse.replaced(group.process))

    def sent(self, lighthouse: Lighthouse, process: Process, message: Down, record: Record | None) -> None:
        """The Lighthouse tells somebody: a quorum only to its members, and only when it is stored."""
        if isinstance(message, Form):
            quorum = message.quorum
            if quorum.rank_of(process) is None:
                self.fail("L4", f"quorum {quorum.id} is sent to {process}, who is not in it")
            if record is None or record.q_last != quorum:
                self.fail("L1", f"quorum {quorum.id} is told and not stored")
            # One that ended between the write and the announcement leaves it to the reason, which members log.
            told = self._owed is None or (
                lighthouse is not self._owed[2] and "steps are lost" in quorum.reason
            )
            if self._owed is not None and self._owed[0] == quorum and not told:
                self.fail("P2", f"quorum {quorum.id} gives {self._owed[1]} steps up, and nobody was told")

    def lost(self, process: Process, reason: str) -> None:
        """A process is counted out: not because it was silent, or another took its place, while it answers."""
        rule = "L7" if "replaced by" in reason else "L6" if "silent for more than" in reason else ""
        for group in self.groups:
            trains = group.core is not None and group.core.adopted is not None
            if rule and group.process == process and trains and self._is_well(group):
                self.fail(rule, f"{process} lives, answers, and is out: {reason}")

    def _is_well(self, group: Group) -> bool:
        """True if this group has been reachable and quick for long enough to answer a ping."""
        settings, network, life = self.world.settings, group.network, group.lives[0]
        limit_ms = settings.timeouts.heartbeat_timeout_ms
        slow_ms = settings.slow_message_ms if settings.slow_message_chance else 0
        answer_ms = 2 * max(slow_ms, settings.delay_ms[1]) + settings.settle_ms[1]
        since_ms = max(life.woken_ms, network.healed_ms, group.started_ms)
        return (
            life.alive
            and not life.paused
            and network.is_whole
            and not any(end.dead for end in life.ends)
            and answer_ms * (1 + settings.clock_drift) < limit_ms
            and self.world.now_ms - since_ms > 2 * limit_ms
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
        before = self._floors.get(group.process, (0, 0))[1]
        if core.floor < before:
            self.fail("M4", f"the floor of {group.process} fell from {before} to {core.floor}")
        self._floors[group.process] = (before, core.floor)

    def sends_peers(self, group: Group, frame: pb.PeerFrame) -> None:
        """A frame goes to the peers: nothing below or at the floor, a yes only when it is noted."""
        core = group.core
        assert core is not None
        body = frame.WhichOneof("body")
        quorum_id = frame.vote.quorum_id if body == "vote" else frame.block.quorum_id
        floor = self._floors[group.process][0]
        if body in ("vote", "block") and quorum_id <= floor:
            self.fail("M4", f"{group.process} posts a {body} of quorum {quorum_id}, and its floor is {floor}")
        if body == "vote":
            step = (frame.vote.step, quorum_id)
            self._yes.setdefault(step, set()).add(group.process)
            known = core.head.step >= frame.vote.step
            if not known and (core.voted is None or (core.voted.step, core.voted.quorum_id) != step):
                self.fail("M2", f"{group.process} posts a yes for {step} and has noted {core.voted}")

    def committed(self, group: Group, head: Head) -> None:
        """A leader has committed ``head``: once a chain, in order, and with the yes of all, or as a verdict."""
        quorum = self.quorums.get(head.quorum_id)
        if quorum is None:
            self.fail("P2", f"{group.process} commits {head} under a quorum that was never stored")
            return
        missing = {m.process for m in quorum.members} - self._yes.get((head.step, quorum.id), set())
        if missing and key_of(head) not in self._bases:
            names = sorted(str(process) for process in missing)
            self.fail("M3", f"{group.process} commits {head} without the yes of {names}")
        chain = self._lineage_of[quorum.id]
        if chain.has(head):
            return  # others did before; maybe before a total loss, of which this one learns late
        last_step = chain.last_step
        if not chain.follows(head):
            here = chain.head_of_step.get(head.step)
            self.fail(
                "P2", f"{group.process} commits {head}, the lineage has {here} and is at step {last_step}"
            )
        if chain is not self.lineage and not self._outside(group):
            self.fail("P2", f"{group.process} commits {head}, and that lineage was given up at {last_step}")
        chain.extend(head)

    # --- ranks ----------------------------------------------------------------------------------------------------------

    def computed(self, rank: Rank, gradient: Gradient) -> None:
        """A rank has computed a gradient: it must have been at the content of its head."""
        self.stands(rank)

    def stands(self, rank: Rank) -> None:
        """A level rank stands at its head: equal heads have equal contents (P1)."""
        key = key_of(rank.head)
        content = self.contents.setdefault(key, rank.content or "torn")
        if rank.content != content:
            self.fail("P1", f"{rank.name} at {rank.head} holds {rank.content}, others {content}")

    def posted(self, attempt: Attempt, stale: bool, finite: bool) -> None:
        """A rank posts data, and knows this about it."""
        if stale:
            self._stale.add(attempt)
        if not finite:
            self._not_finite.add(attempt)

    def _check_data(self, rank: Rank, outcome: Outcome) -> None:
        """Rule M1, F27: what somebody knew about its data binds all."""
        if outcome.attempt in self._stale:
            self.fail("M1", f"{rank.name} commits {outcome.head} with data that was stale")
        bad = outcome.attempt in self._not_finite
        if outcome.kind == "applied" and bad:
            self.fail("P5", f"{rank.name} applies {outcome.head} with a gradient that is not finite")
        if outcome.kind == "skipped" and not bad and outcome.total_weight > 0:
            self.fail("P10", f"{rank.name} skips {outcome.head} for no reason")

    def applied(self, rank: Rank, outcome: Outcome) -> None:
        """A rank has applied (or recorded, or skipped) a committed step."""
        contributions = tuple((g.replica_id, g.batch) for g in sorted(outcome.result))
        key = key_of(outcome.head)
        commit = self.commits.get(key)
        skipped = outcome.kind == "skipped"
        self._check_data(rank, outcome)
        if not skipped and len(contributions) != round(outcome.total_weight):
            self.fail(
                "P1",
                f"{rank.name}: step {outcome.head} has weight {outcome.total_weight} and data of {contributions}",
            )
        if self.world.calm and commit is None:
            full = len(contributions) >= self.world.settings.groups - self.world.absent
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
        waited_ms = rank.life.now_ms - rank.asked_to_go_ms
        if core is not None and core.ended is None and waited_ms < self.world.settings.timeouts.shutdown_ms:
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
            self.fail("P10", f"step {outcome.head} was committed before the step on which it stands")
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
            if self.world.settings.only_deaths:
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
