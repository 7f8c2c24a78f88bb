"""Run as a script between launcher and child: ties the child's life to the launcher's, then execs it.

``python -I -S exec_child.py PARENT_PID PROGRAM ARGUMENT...``. A hook between fork and exec inside the
launcher would run Python code in a forked copy of a process with threads; a script of its own cannot
dead-lock.
"""

import ctypes
import os
import signal
import sys

PR_SET_PDEATHSIG = 1


def main(parent_pid: int, command: list[str]) -> None:
    """Ask the kernel for SIGKILL when the launcher dies, however it dies; then exec ``command``."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        sys.exit(f"prctl(PR_SET_PDEATHSIG) failed: {os.strerror(ctypes.get_errno())}")
    if os.getppid() != parent_pid:  # it died before we asked
        sys.exit("the launcher is gone")
    try:
        os.execvp(command[0], command)
    except OSError as error:
        print(f"{command[0]} cannot be run: {error.strerror}.", file=sys.stderr)
        sys.exit(2)


if __name__ == "__main__":
    main(int(sys.argv[1]), sys.argv[2:])
