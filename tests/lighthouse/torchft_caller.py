"""A process that speaks to the Lighthouse as a torchft replica, prints its first quorum, and then only beats: to be killed."""

from __future__ import annotations

import sys

from test_torchft_service import Caller, names, quorum_of


def main() -> None:
    address, name = sys.argv[1:]
    call = Caller(address, name).ask()
    print("asked", flush=True)
    print(" ".join(names(quorum_of(call))), flush=True)
    sys.stdin.read()


if __name__ == "__main__":
    main()
