from __future__ import annotations

import os
import select
import signal
import sys
import time
from pathlib import Path

import pytest

from torchft_plus.launch.ports import PortPicker, ephemeral_start
from torchft_plus.launch.process import ChildProcess, parse_exiting


def wait_gone(child: ChildProcess) -> None:
    poller = select.poll()
    poller.register(child.pidfd, select.POLLIN)
    assert poller.poll(20_000), "it did not end"


@pytest.mark.parametrize(
    ("flags", "code", "status"),
    [(0x400040, 0, None), (0x40004C, 9, -9), (0x40004C, 0x0300, 3), (0x40004C, 0x8B, -11), (0x40004C, 0, 0)],
)
def test_the_line_of_proc_is_read_whatever_the_command_is_called(
    flags: int, code: int, status: int | None
) -> None:
    fields = ["R", "1", "2", "2", "0", "-1", str(flags), *["0"] * 42, str(code)]
    assert parse_exiting(f"77 (a) b (c)) {' '.join(fields)}\n".encode()) == status


def test_death_shows_before_a_big_process_is_gone(tmp_path: Path) -> None:
    code = "import time; b = bytearray(b'x') * (1 << 29); print('big', flush=True); time.sleep(600)"
    child = ChildProcess([sys.executable, "-c", code], os.environ, tmp_path / "log")
    deadline = time.monotonic() + 60
    while child.last_lines() != ["big"]:
        assert time.monotonic() < deadline
    child.signal(signal.SIGKILL)
    while child.exit_status() is None:
        assert time.monotonic() < deadline
    assert not child.reap()  # half a gigabyte takes some 100 ms to be freed
    wait_gone(child)
    assert child.reap()


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV])
def test_the_status_seen_while_dying_is_the_final_one(tmp_path: Path, number: signal.Signals) -> None:
    child = ChildProcess(["sleep", "60"], os.environ, tmp_path / "log")
    assert child.exit_status() is None and not child.reap()
    child.signal(number)
    deadline = time.monotonic() + 20
    while (early := child.exit_status()) is None:
        assert time.monotonic() < deadline
    wait_gone(child)
    assert child.reap() and child.reaped
    assert early == child.exit_status() == -number


def test_the_rest_of_its_session_dies_with_it(tmp_path: Path) -> None:
    child = ChildProcess(["sh", "-c", "sleep 600 & echo $!; exit 3"], os.environ, tmp_path / "log")
    wait_gone(child)
    assert child.reap() and child.exit_status() == 3
    (line,) = child.last_lines()
    stat = Path(f"/proc/{line}/stat")
    deadline = time.monotonic() + 20
    while stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z":
        assert time.monotonic() < deadline, "the grandchild lives"


def test_output_is_appended_and_stdin_is_empty(tmp_path: Path) -> None:
    for _ in range(2):
        child = ChildProcess(
            ["sh", "-c", "cat; echo out; echo err >&2"], os.environ, tmp_path / "sub" / "log"
        )
        wait_gone(child)
        assert child.reap()
    assert (tmp_path / "sub" / "log").read_text().split() == ["out", "err"] * 2


def test_ports_are_below_the_ephemeral_range_and_never_the_same() -> None:
    picker = PortPicker()
    ports = [picker.pick() for _ in range(50)]
    assert len(set(ports)) == 50
    assert max(ports) < ephemeral_start()
