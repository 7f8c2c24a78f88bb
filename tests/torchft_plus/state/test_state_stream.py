"""Streams over real sockets: how they wait for much, and what they do with little."""

from __future__ import annotations

import os
import socket
import threading
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_plus.state.http import ProtocolError, Stream, Views

MB = 1 << 20


def _streams(timeout_s: float) -> tuple[Stream, Stream]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        reader = socket.create_connection(listener.getsockname(), timeout_s)
        sender, _ = listener.accept()
    return Stream(reader, timeout_s), Stream(sender, timeout_s)


def _sender(stream: Stream, *parts: bytes) -> threading.Thread:
    thread = threading.Thread(target=lambda: stream.write(list(parts)))
    thread.start()
    return thread


def test_after_fast_parts_small_ones_are_read_as_soon_as_they_are_there() -> None:
    """A reader that waits for a megabyte at a time must not wait for one that will not come."""
    reader, sender = _streams(10.0)
    sizes = [8 * MB, 8 * MB, 1, MB - 1, MB, MB + 1, 8 * MB + 7, 3]
    for size_bytes in sizes:
        content = os.urandom(size_bytes)
        thread = _sender(sender, content)
        reader.expect(size_bytes)
        assert reader.read(size_bytes) == content
        assert reader.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT) == 1
        thread.join()
    thread = _sender(sender, bytes(8 * MB), b"HTTP/1.1 200 OK\r\n\r\n")
    reader.expect(8 * MB)
    reader.read(8 * MB)
    assert reader.read_head() == b"HTTP/1.1 200 OK\r\n\r\n"
    thread.join()
    reader.close()
    sender.close()


@pytest.mark.parametrize("arrived_bytes", [0, 1, MB - 1, MB + 1])
def test_after_fast_parts_an_end_is_noticed_at_once_and_silence_in_time(arrived_bytes: int) -> None:
    for ends in (True, False):
        reader, sender = _streams(1.0)
        for _ in range(2):
            thread = _sender(sender, bytes(8 * MB))
            reader.expect(8 * MB)
            reader.read(8 * MB)
            thread.join()
        reader.expect(8 * MB)
        sender.write([bytes(arrived_bytes)])
        if ends:
            sender.close()
        with pytest.raises(ProtocolError if ends else TimeoutError):
            reader.read(8 * MB)
        reader.close()
        sender.close()


def test_between_answers_that_are_on_the_way_a_megabyte_is_waited_for_and_behind_them_no_more() -> None:
    reader, sender = _streams(10.0)

    def low_water_bytes() -> int:
        return reader.socket.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT)

    for _ in range(3):
        reader.expect(4 * MB)
    thread = _sender(sender, bytes(12 * MB))
    seen: list[int] = []
    for _ in range(3):
        seen.append(low_water_bytes())
        reader.read(4 * MB)
    thread.join()
    assert seen == [MB, MB, MB]
    assert low_water_bytes() == 1
    reader.close()
    sender.close()


def test_a_refusal_in_place_of_much_is_read_within_a_tick() -> None:
    refusal = b"HTTP/1.1 410 Gone\r\nContent-Length: 0\r\n\r\n"

    def delay_s() -> float:
        reader, sender = _streams(10.0)
        reader.expect(64 * MB)
        sender.write([refusal])
        start = time.monotonic()
        assert reader.read_head() == refusal
        seconds = time.monotonic() - start
        reader.close()
        sender.close()
        return seconds

    assert min(delay_s() for _ in range(5)) < 1.0


def _delay_s(first_bytes: int, then_bytes: int) -> float:
    """How long after the last bytes are sent a read of all ends, that has most times taken the first ones before."""
    reader, sender = _streams(10.0)
    ended: list[float] = []
    reader.expect(first_bytes + then_bytes)

    def read() -> None:
        reader.read(first_bytes + then_bytes)
        ended.append(time.monotonic())

    thread = threading.Thread(target=read)
    thread.start()
    sender.write([bytes(first_bytes)])
    threading.Event().wait(0.01)
    sent = time.monotonic()
    sender.write([bytes(then_bytes)])
    thread.join(10)
    reader.close()
    sender.close()
    return ended[0] - sent


@pytest.mark.parametrize(
    ("first_kb", "then_kb"), [(600, 900), (900, 500), (500, 500), (1100, 1000), (1900, 500)]
)
def test_the_end_of_an_answer_is_not_slept_through(first_kb: int, then_kb: int) -> None:
    """A read that has taken a part before it waits must not be woken for a megabyte that does not come."""
    assert min(_delay_s(1024 * first_kb, 1024 * then_kb) for _ in range(10)) < 0.05


def test_a_slow_connection_tells_of_every_byte() -> None:
    reader, sender = _streams(10.0)
    told: list[int] = []
    failed: list[BaseException] = []
    reader.expect(8 * MB)

    def read() -> None:
        try:
            reader.read_into([memoryview(bytearray(8 * MB))], lambda part: told.append(len(part)))
        except OSError as error:
            failed.append(error)

    late = threading.Thread(target=read)
    late.start()
    sender.write([bytes(100)])
    end = time.monotonic() + 10
    while sum(told) < 100 and time.monotonic() < end:
        threading.Event().wait(0.01)
    assert sum(told) == 100
    reader.abort()
    late.join()
    assert failed
    reader.close()
    sender.close()


@given(st.lists(st.binary(max_size=20)), st.integers(1, 7))
def test_memory_is_gone_through_in_full_parts_and_in_order(memory: list[bytes], most_bytes: int) -> None:
    views = Views([memoryview(one) for one in memory])
    parts = [[bytes(view) for view in part] for part in iter(lambda: views.advance(most_bytes), [])]
    assert views.done
    assert b"".join(b"".join(part) for part in parts) == b"".join(memory)
    assert all(view for part in parts for view in part)
    sizes = [sum(map(len, part)) for part in parts]
    assert all(size == most_bytes for size in sizes[:-1])
    assert all(0 < size <= most_bytes for size in sizes[-1:])
