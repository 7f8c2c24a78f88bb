"""The wire: every word survives it, and a bad message gets one sentence."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lighthouse import wire
from lighthouse.messages import (
    Announce,
    Ask,
    Beat,
    Fault,
    Form,
    Head,
    Hello,
    Member,
    Position,
    Process,
    Progress,
    Quorum,
    Retired,
    Revoke,
    Vote,
)
from lighthouse.pb import lighthouse_pb2 as pb

numbers = st.integers(0, wire.MAX_NUMBER)
ids = st.integers(1, wire.MAX_NUMBER)
names = st.text(st.characters(exclude_categories=["Cc", "Cs"]), min_size=1, max_size=20)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=50)
addresses = st.builds("{}:{}".format, st.sampled_from(["[::1]", "10.0.0.1", "node-7"]), st.integers(1, 65535))
processes = st.builds(Process, names, names)
heads = st.builds(Head, numbers, numbers, st.text("0123456789abcdef", max_size=16))
progresses = st.builds(Progress, numbers, st.text("abc ", max_size=10), numbers)
positions = st.builds(
    Position,
    numbers,
    heads,
    st.none() | st.builds(Vote, ids, ids),
    st.booleans(),
    st.none() | heads,
    progresses,
)
members = st.lists(
    st.builds(Member, processes, addresses, st.booleans()),
    min_size=1,
    max_size=4,
    unique_by=lambda m: m.process.replica_id,
)
quorums = st.builds(Quorum, ids, members.map(tuple), heads, st.booleans(), texts)
hellos = st.builds(Hello, positions, addresses, st.integers(1, 64), st.none() | quorums)
ups = st.one_of(
    st.builds(wire.Open, names, processes, numbers, hellos),
    st.builds(Ask, positions, st.booleans()),
    st.builds(Beat, progresses, st.booleans()),
    st.builds(Fault, numbers, st.none() | names, texts),
    st.just(wire.Pong()),
)
downs = st.one_of(
    st.builds(Revoke, ids, st.booleans(), texts),
    st.builds(Form, quorums),
    st.builds(Retired, texts, st.booleans()),
    st.builds(Announce, texts),
    st.just(wire.Ping()),
    st.just(wire.BeatAnswer()),
)


@given(ups)
def test_every_word_up_survives_the_wire(message: wire.SessionUp) -> None:
    assert wire.decode_up(wire.encode_up(message)) == message


@given(downs)
def test_every_word_down_survives_the_wire(message: wire.SessionDown) -> None:
    assert wire.decode_down(wire.encode_down(message)) == message


@given(st.binary(max_size=200))
def test_arbitrary_bytes_are_refused_or_mean_something(data: bytes) -> None:
    for decode, encode in ((wire.decode_up, wire.encode_up), (wire.decode_down, wire.encode_down)):
        try:
            message = decode(data)
        except wire.WireError as error:
            assert 0 < len(str(error)) < 500
        else:
            assert decode(encode(message)) == message  # type: ignore[arg-type]


def opening() -> pb.SessionUp:
    position = Position(0, Head(digest="ab"))
    message = wire.Open("job", Process("replica_0", "a1"), 1, Hello(position, "10.0.0.1:1234", 1))
    return pb.SessionUp.FromString(wire.encode_up(message))


def two_of_a_name(up: pb.SessionUp) -> None:
    member = pb.Member(process=pb.Process(replica_id="a", incarnation="x"), address="h:1")
    up.open.hello.quorum.CopyFrom(pb.Quorum(id=1, members=[member, member], base=pb.Head()))


@pytest.mark.parametrize(
    ("spoil", "sentence"),
    [
        (lambda up: up.open.ClearField("hello"), "open.hello is missing"),
        (lambda up: setattr(up.open, "job_id", ""), "job_id is ''"),
        (lambda up: setattr(up.open, "job_id", "j" * 300), "job_id is 'jjj"),
        (lambda up: setattr(up.open.process, "replica_id", "a\nb"), "process.replica_id is"),
        (lambda up: setattr(up.open.process, "incarnation", ""), "process.incarnation is ''"),
        (lambda up: setattr(up.open, "session", 2**63), "open.session is"),
        (lambda up: setattr(up.open.hello, "address", "nowhere"), "give host:port"),
        (lambda up: setattr(up.open.hello, "address", "h:70000"), "give host:port"),
        (lambda up: setattr(up.open.hello, "group_world_size", 0), "hello.group_world_size is 0"),
        (lambda up: up.open.hello.ClearField("position"), "hello.position is missing"),
        (lambda up: setattr(up.open.hello.position, "floor", 2**64 - 1), "hello.position.floor is"),
        (lambda up: setattr(up.open.hello.position.voted, "step", 0), "voted.step is 0"),
        (lambda up: setattr(up.open.hello.position.head, "digest", "f" * 999), "digest has 999"),
        (two_of_a_name, "names a replica_id twice"),
        (lambda up: up.open.hello.quorum.SetInParent(), "hello.quorum.members has 0 entries"),
        (lambda up: up.Clear(), "no body"),
    ],
)
def test_a_bad_opening_gets_a_sentence_that_names_the_field(spoil, sentence: str) -> None:  # type: ignore[no-untyped-def]
    up = opening()
    spoil(up)
    with pytest.raises(wire.WireError) as error:
        wire.decode_up(up.SerializeToString())
    assert sentence in str(error.value)


def test_texts_for_people_are_cut_and_not_refused() -> None:
    fault = Fault(1, None, "x" * 100_000)
    received = wire.decode_up(wire.encode_up(fault))
    assert isinstance(received, Fault)
    assert len(received.reason) == wire.MAX_TEXT_CHARS
