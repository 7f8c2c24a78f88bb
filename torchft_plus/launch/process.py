"""One child process: it cannot outlive the launcher, and its death is seen at once.

Linux only. A big process dies slowly: its parent's ``wait()`` returns 0.2 s per GB after the SIGKILL, its
sockets close after 0.05 s per GB, but the flag PF_EXITING shows in ``/proc/PID/stat`` after 0.1 ms.
So (at any size) the flag is polled, and the exit status is read from the same line.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

PF_EXITING = 0x4
_FLAGS, _EXIT_CODE = 6, 49  # positions after the command name in /proc/PID/stat (proc(5): fields 9 and 52)


def parse_exiting(stat: bytes) -> int | None:
    """Exit status (negative: signal) in a line of /proc/PID/stat; None while the process lives."""
    fields = stat.rpartition(b")")[2].split()
    if not int(fields[_FLAGS]) & PF_EXITING:
        return None
    code = int(fields[_EXIT_CODE])
    return -(code & 0x7F) if code & 0x7F else code >> 8


class ChildProcess:
    """A running command in a session of its own.

    Args:
        command: program and arguments.
        env: the whole environment.
        log: file that its output is appended to.
        cwd: its working directory; None: ours.
        listens: its standard input is a pipe for ``tell``, not empty.
    """

    def __init__(
        self,
        command: Sequence[str],
        env: Mapping[str, str],
        log: Path,
        cwd: Path | None = None,
        listens: bool = False,
    ) -> None:
        wrapper = Path(__file__).with_name("exec_child.py")
        log.parent.mkdir(parents=True, exist_ok=True)
        with log.open("ab") as output:
            self._popen = subprocess.Popen(
                [sys.executable, "-I", "-S", str(wrapper), str(os.getpid()), *command],
                env=dict(env),
                cwd=cwd,
                stdin=subprocess.PIPE if listens else subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        self.pid = self._popen.pid
        self.log = log
        self._status: int | None = None
        self._reaped = False
        self._stat = os.open(f"/proc/{self.pid}/stat", os.O_RDONLY | os.O_CLOEXEC)
        self.pidfd = os.pidfd_open(self.pid)

    @property
    def reaped(self) -> bool:
        """It is gone, with everything it held."""
        return self._reaped

    def exit_status(self) -> int | None:
        """Exit status (negative: signal) as soon as it is dying; None while it lives. Never blocks."""
        if self._status is None:
            self._status = parse_exiting(os.pread(self._stat, 4096, 0))
        return self._status

    def reap(self) -> bool:
        """True once it is gone. What is left of its session is killed before its id can be used again."""
        if self._reaped:
            return True
        if os.waitid(os.P_PIDFD, self.pidfd, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None:
            return False
        self.signal(signal.SIGKILL)
        self._status = self._popen.wait()
        self._reaped = True
        os.close(self._stat)
        os.close(self.pidfd)
        if self._popen.stdin is not None:
            with contextlib.suppress(BrokenPipeError):
                self._popen.stdin.close()
        return True

    def signal(self, number: signal.Signals) -> None:
        """Send a signal to the process and everything it started in its session."""
        if not self._reaped:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self.pid, number)

    def tell(self, line: str) -> bool:
        """Write a line of less than 4 KB, which never blocks, to its input and close that; False if it is gone."""
        assert self._popen.stdin is not None, "it was not started with listens=True"
        data = line.encode() + b"\n"
        if len(data) > select.PIPE_BUF:
            raise ValueError(f"{len(data)} bytes do not fit into a pipe at once")
        try:
            self._popen.stdin.write(data)
            self._popen.stdin.close()
        except BrokenPipeError:
            return False
        return True

    def last_lines(self, count: int = 5) -> list[str]:
        """The end of its log, for a message."""
        with self.log.open("rb") as file:
            file.seek(0, os.SEEK_END)
            file.seek(max(0, file.tell() - 8192))
            text = file.read().decode("utf-8", errors="replace")
        return [line for line in text.splitlines() if line.strip()][-count:]
