"""Which failures of a donor are forgiven, and for how long."""

from __future__ import annotations

import errno
import ssl

import pytest
from hypothesis import given
from hypothesis import strategies as st

from torchft_plus.state import StateError
from torchft_plus.state.donor_connection import DonorRefusal
from torchft_plus.state.http import BrokenOff, ProtocolError
from torchft_plus.state.retries import MAX_FAILURES, Retries

BROKEN = [
    BrokenOff("x"),
    ConnectionResetError(),
    BrokenPipeError(),
    ConnectionAbortedError(),
    OSError(errno.EHOSTUNREACH, "x"),
    OSError(errno.ENETUNREACH, "x"),
]
ITS_OWN = [
    TimeoutError(),
    ConnectionRefusedError(),
    ProtocolError("x"),
    ssl.SSLError("x"),
    DonorRefusal(503, "x"),
]


@pytest.mark.parametrize("error", [StateError("x"), DonorRefusal(404, "x"), DonorRefusal(410, "x")])
def test_a_refusal_is_final(error: Exception) -> None:
    assert Retries(10.0).failed(error, 0.0) is None


@pytest.mark.parametrize("error", ITS_OWN, ids=repr)
def test_what_is_its_own_doing_is_forgiven_once(error: Exception) -> None:
    retries = Retries(10.0)
    for _ in range(3):
        for _ in range(MAX_FAILURES - 1):
            assert retries.failed(error, 0.0) == 0.0
        retries.succeeded()
    assert retries.failed(error, 0.0) == 0.0
    assert retries.failed(error, 0.0) is None


@given(st.lists(st.tuples(st.sampled_from(BROKEN), st.floats(0, 1)), min_size=1), st.floats(0.1, 20))
def test_connections_that_break_are_made_again_for_a_while(
    failures: list[tuple[Exception, float]], patience_s: float
) -> None:
    """At once, then at intervals that grow and are no longer than a second; never beyond the patience and a pause."""
    retries, now, first, pauses = Retries(patience_s), 100.0, 100.0, []
    for error, took_s in failures:
        pause_s = retries.failed(error, now)
        if now >= first + patience_s:
            assert pause_s is None
            return
        assert pause_s is not None
        pauses.append(pause_s)
        now += pause_s + took_s
    assert pauses[0] == 0.0
    assert pauses == sorted(pauses)
    assert pauses[-1] <= 1.0
    retries.succeeded()
    assert retries.failed(BROKEN[0], now + 1000) == 0.0
