"""What the simulator found in the step core and its shell, each as the shortest schedule that shows it."""

from __future__ import annotations

from collections.abc import Mapping

from lighthouse.messages import Ask, Head, Member, Process, Quorum, Vote
from lighthouse.timeouts import Timeouts
from torchft_plus.manager.control_words import from_head
from torchft_plus.manager.effects import Effect, SendPeers, SendUp, Tell
from torchft_plus.manager.step_core import GroupInfo, StepCore
from torchft_plus.pb import peer_pb2 as pb

ME = Process("a", "1")
START = Head(0, 0, "digest")
NO_HELLOS: Mapping[int, pb.PeerHello] = {0: pb.PeerHello(), 1: pb.PeerHello()}


def make_core(ranks: int = 1, outage_limit_ms: int = 60_000) -> StepCore:
    core = StepCore(GroupInfo(ME, "job", "here:1", ranks), Timeouts(60_000, outage_limit_ms), START)
    core.start()
    return core


def quorum(number: int, base: Head, **contributor: bool) -> Quorum:
    members = tuple(Member(Process(name, "1"), "there:1", level) for name, level in contributor.items())
    return Quorum(number, members, base)


def attempt(number: int, step: int, round_: int = 0) -> pb.Attempt:
    return pb.Attempt(quorum_id=number, step=step, round=round_)


def post(
    core: StepCore, number: int, step: int, rank: int = 0, round_: int = 0, **fields: object
) -> list[Effect]:
    report = pb.RankPosted(attempt=attempt(number, step, round_), finite=True, **{"weight": 1.0, **fields})
    return core.rank_posted(rank, report, 0)


def done(core: StepCore, number: int, step: int, rank: int = 0, now_ms: int = 0) -> list[Effect]:
    return core.rank_done(rank, pb.RankDone(attempt=attempt(number, step), peer_rank=-1), now_ms)


def block_of(
    core: StepCore, number: int, step: int, rank: int, head: Head = START, **fields: object
) -> list[Effect]:
    block = pb.ControlBlock(
        quorum_id=number, step=step, head=from_head(head), finite=True, **{"weight": 1.0, **fields}
    )
    return core.peer_frame(number, rank, pb.PeerFrame(block=block), 0)


def yes_of(core: StepCore, number: int, step: int, rank: int, now_ms: int = 0) -> list[Effect]:
    return core.peer_frame(number, rank, pb.PeerFrame(vote=pb.PeerVote(quorum_id=number, step=step)), now_ms)


def asks(effects: list[Effect]) -> list[Ask]:
    return [e.message for e in effects if isinstance(e, SendUp) and isinstance(e.message, Ask)]


def words(effects: list[Effect], body: str) -> list[pb.Word]:
    return [e.word for e in effects if isinstance(e, Tell) and e.word.WhichOneof("body") == body]


def blocks(effects: list[Effect]) -> list[pb.ControlBlock]:
    return [
        e.frame.block for e in effects if isinstance(e, SendPeers) and e.frame.WhichOneof("body") == "block"
    ]


def test_an_objection_of_one_rank_binds_the_others() -> None:
    """Seed 92: rank 1 posted zeros, ranks 0 and 2 their gradients; the group counted as a contributor."""
    core = make_core(ranks=2)
    core.form(quorum(1, START, a=True, b=True), 0)
    core.mesh_ready(1, NO_HELLOS, "")
    post(core, 1, 1, rank=0)
    (first,) = blocks(post(core, 1, 1, rank=1, objects=True))
    assert first.stale and first.weight == 0
    done(core, 1, 1, rank=0)
    done(core, 1, 1, rank=1)
    (again,) = words(block_of(core, 1, 1, 1), "again")
    assert again.again.objects, "every rank has to post zeros now"
    post(core, 1, 1, rank=0, round_=1, weight=0.0, objects=True)
    (second,) = blocks(post(core, 1, 1, rank=1, round_=1, weight=0.0, objects=True))
    assert not second.stale and second.weight == 0


def vote(core: StepCore, number: int, step: int, base: Head = START) -> None:
    post(core, number, step)
    done(core, number, step)
    block_of(core, number, step, 1, base)
    assert core.voted == Vote(step, number)


def test_a_yes_that_is_read_after_the_outage_limit_commits_nothing() -> None:
    """Profile outage: the others were counted out meanwhile, and training went on from an older state."""
    core = make_core(outage_limit_ms=60_000)
    core.last_heard_ms = 0
    core.form(quorum(1, START, a=True, b=True), 0)
    vote(core, 1, 1)
    assert not words(yes_of(core, 1, 1, 1, now_ms=60_001), "commit")
    assert core.head == START and core.voted == Vote(1, 1)
    core.last_heard_ms = 70_000
    assert words(core.heard(70_000), "commit"), "the quorum is still in force: the Lighthouse has answered"


def joiner() -> StepCore:
    core = make_core()
    core.form(quorum(2, Head(5, 1), b=True, a=False), 0)
    assert not core.level
    return core


def test_who_becomes_level_says_so_while_its_ask_stands() -> None:
    """Seed 3015: a total loss was declared although a joiner had become level after its ask."""
    core = joiner()
    (ask,) = asks(core.revoke(2, now=True, reason="b is lost"))
    assert not ask.position.level
    (ask,) = asks(core.rank_boundary(0, pb.RankBoundary(fetched=True, epoch=1, step=5, visit=1)))
    assert ask.position.level and ask.position.floor == 2


def test_a_checkpoint_that_is_complete_is_said_while_the_ask_stands() -> None:
    core = make_core()
    (ask,) = asks(core.disk_saved(Head(3, 1)))
    assert ask.position.disk_head == Head(3, 1)


def test_a_failed_fetch_ends_no_quorum() -> None:
    """Seed 53, crash: each failed fetch revoked the quorum of all, and a level group was left out for it."""
    core = joiner()
    core.mesh_ready(2, NO_HELLOS, "")
    assert asks(core.rank_fetch_failed(0, pb.RankFetchFailed(reason="no donor"))) == []
    assert core.in_force()
    (block,) = blocks(post(core, 2, 6, weight=0.0))
    assert block.change_wanted, "it starts over at the next boundary"


def test_a_failed_fetch_is_not_forgotten_when_the_step_is_rolled_forward() -> None:
    """Seed 20721, network: it committed the base from its vote and waited for ever for a fetch that had failed."""
    core = make_core()
    core.form(quorum(2, Head(5, 1), b=True, a=False), 0)
    post(core, 2, 6, weight=0.0)
    done(core, 2, 6)
    block_of(core, 2, 6, 0, Head(5, 1))
    assert core.voted == Vote(6, 2)
    core.rank_fetch_failed(0, pb.RankFetchFailed(reason="no donor"))
    core.revoke(2, now=True, reason="c is lost")
    (join,) = words(core.form(quorum(3, Head(6, 2), b=True, a=False), 0), "join")
    assert (join.join.head.step, join.join.epoch) == (6, 2)


def test_the_last_holder_that_has_to_stay_lets_the_joiners_fetch() -> None:
    """Seed 3335: it ended each quorum after one step, and no joiner's fetch lived long enough."""
    core = make_core()
    core.form(quorum(1, START, a=True), 0)
    core.leave_wanted(idle=False)
    core.mesh_ready(1, {0: pb.PeerHello()}, "")
    post(core, 1, 1)
    (commit,) = words(done(core, 1, 1), "commit")
    assert commit.commit.leaving
    head = core.head
    core.form(quorum(2, head, a=True, b=False), 0)  # it is kept: nobody else holds the state
    core.mesh_ready(2, NO_HELLOS, "")
    (block,) = blocks(post(core, 2, 2))
    assert not block.change_wanted
    done(core, 2, 2)
    block_of(core, 2, 2, 1, head, weight=0.0)
    yes_of(core, 2, 2, 1)
    (block,) = blocks(post(core, 2, 3))
    assert not block.change_wanted
    done(core, 2, 3)
    block_of(core, 2, 3, 1, core.head)  # b is level now
    yes_of(core, 2, 3, 1)
    (block,) = blocks(post(core, 2, 4))
    assert block.change_wanted, "now it may go"


def test_who_is_out_has_no_deadline_left() -> None:
    """Seed 620, names: the agent of a retired group ticked without end."""
    core = make_core()
    core.form(quorum(1, START, a=True, b=True), 0)
    assert core.deadline_ms() is not None
    core.retired("it was replaced", left=False)
    assert core.deadline_ms() is None
