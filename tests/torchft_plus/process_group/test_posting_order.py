from __future__ import annotations

import threading

from hypothesis import example, given
from hypothesis import strategies as st

from torchft_plus.process_group.lane import LaneError
from torchft_plus.process_group.operation import LaneOperation, ended
from torchft_plus.process_group.posting_order import AHEAD, Place, PostingOrder

Call = str
"""p: a plain collective, s: a reduction in stages, l: such a one that is the last."""


class Tape:
    """One member: what it posted, in which order."""

    def __init__(self, calls: list[Call]) -> None:
        self.order = PostingOrder()
        self.posted: list[str] = []
        self.names = [f"{call}{number}" for number, call in enumerate(calls)]
        self.calls = list(enumerate(calls))
        self.places: dict[int, Place] = {}

    def start(self, name: str) -> LaneOperation:
        self.posted.append(name)
        return ended()

    def call_next(self) -> None:
        number, call = self.calls.pop(0)
        self.order.post(lambda: self.start(f"{call}{number}"))
        if call != "p":
            self.places[number] = self.order.reserve(last=call == "l")

    def fillable(self) -> list[int]:
        """Reductions whose first stage has been posted, and so may have ended."""
        return [number for number in sorted(self.places) if self.names[number] in self.posted]

    def fill(self, which: int) -> None:
        ready = self.fillable()
        number = ready[which % len(ready)]
        self.places.pop(number).take(lambda: self.start(f"second{number}"))


@given(st.lists(st.sampled_from("psl"), max_size=12), st.lists(st.integers(0, 30), max_size=60))
@example(["s"] * 6, [0, 1] * 6)
def test_the_order_depends_on_the_calls_alone_and_nobody_waits_for_ever(
    calls: list[Call], schedule: list[int]
) -> None:
    calls = [*calls, "l"]
    other, one = Tape(calls), Tape(calls)
    while one.calls:
        one.call_next()
    while one.places:
        one.fill(0)  # fails if no first stage is posted
    for choice in [*schedule, *[0] * 40]:
        if other.fillable() and (choice % 2 or not other.calls):
            other.fill(choice)
        elif other.calls:
            other.call_next()
    assert not other.calls and not other.places
    assert one.posted == other.posted
    assert sum(name.startswith("second") for name in one.posted) == sum(call != "p" for call in calls)
    firsts = [name for name in one.posted if name[0] in "sl" and not name.startswith("second")]
    assert firsts == [f"{call}{number}" for number, call in enumerate(calls) if call != "p"]
    for number, call in enumerate(calls):
        if call == "p":
            continue
        between = one.posted[one.posted.index(f"{call}{number}") : one.posted.index(f"second{number}")]
        assert sum(name in firsts for name in between) <= AHEAD + 1


def test_a_last_second_stage_holds_back_what_comes_after_it() -> None:
    tape = Tape(["l"])
    tape.call_next()
    waiting = tape.order.post(lambda: tape.start("after"))
    assert tape.posted == ["l0"] and not waiting.poll()
    tape.fill(0)
    assert tape.posted == ["l0", "second0", "after"] and waiting.poll() and waiting.error is None


def test_when_the_lane_breaks_nothing_waits_any_more() -> None:
    order, broken = PostingOrder(), LaneError("gone")
    failed = lambda: ended(broken)  # noqa: E731
    order.post(lambda: ended())
    ready = order.reserve(last=False).take(failed)  # but nothing has called for its place yet
    order.post(lambda: ended())
    first = order.reserve(last=True)
    assert ready.error is broken  # posted, now that its place is known
    ready = order.reserve(last=False).take(failed)
    waiting = [ready, *[order.post(failed) for _ in range(2)]]
    assert not any(operation.poll() for operation in waiting)
    order.abandon()
    assert [operation.error for operation in waiting] == [broken] * 3
    assert first.take(failed).error is broken
    assert order.post(failed).error is broken
    assert order.reserve(last=False).take(failed).error is broken


def test_an_operation_that_ends_at_once_may_post_the_next_one() -> None:
    order, posted = PostingOrder(), list[int]()

    def start(number: int) -> LaneOperation:
        posted.append(number)
        return ended()

    def chain() -> None:
        order.post(lambda: start(3)).add_done_callback(lambda: posted.append(4))

    order.post(lambda: start(0))
    place = order.reserve(last=True)
    order.post(lambda: start(2)).add_done_callback(chain)
    place.take(lambda: start(1))
    assert posted == [0, 1, 2, 3, 4]


def test_threads_that_post_at_once_lose_nothing() -> None:
    order, posted = PostingOrder(), list[int]()

    def start(number: int) -> LaneOperation:
        posted.append(number)
        return ended()

    def run(base: int) -> None:
        for number in range(300):
            order.post(lambda number=number: start(base + number))
            if number % 3 == 0:
                order.reserve(last=number % 2 == 0).take(lambda: ended())

    threads = [threading.Thread(target=run, args=(1000 * index,)) for index in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    order.post(ended)
    order.reserve(last=True).take(ended)
    for index in range(4):
        own = [number for number in posted if number // 1000 == index]
        assert own == [1000 * index + number for number in range(300)]
