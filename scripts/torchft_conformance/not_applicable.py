"""Which of torchft's tests say nothing about torchft_plus, and why."""

from __future__ import annotations

import re

INTERNAL = "tests parts of torchft that are not public"

FILES: dict[str, str] = {
    "_test/managed_work_test.py": f"{INTERNAL} (_ManagedWork)",
    "checkpointing/rwlock_test.py": f"{INTERNAL} (_rwlock)",
    "checkpointing/transport_test.py": "holds no tests, only what the other transport tests share",
    "collectives_test.py": "needs GPUs",
    "coordination_test.py": "looks at docstrings, also of ManagerServer and ManagerClient, which have no counterpart",
    "ddp_test.py": f"mocks the Manager and expects calls that torchft makes inside ({INTERNAL}: _ManagedWork)",
    "diloco_regression_test.py": "moves torchft's step on by hand inside DiLoCo (start_quorum, twice should_commit), and its "
    "golden values count from there",
    "fsdp_test.py": "needs GPUs",
    "futures_test.py": f"{INTERNAL} (_TIMEOUT_MANAGER)",
    "local_sgd_test.py": f"mocks the Manager and reads torchft's private fragments ({INTERNAL})",
    "manager_test.py": f"replaces torchft's ManagerClient and reads private attributes ({INTERNAL})",
    "multiprocessing_test.py": f"{INTERNAL} (_MonitoredPipe)",
    "optim_test.py": f"mocks the Manager ({INTERNAL}: the calls between the two)",
    "quantization_test.py": "needs GPUs",
    "torchcomms_test.py": "needs torchcomms",
}
"""Whole files, by their path in the package."""

TESTS: dict[str, str] = {
    r"::test_quorum_timeout": "expects the words of torchft's Rust client, and starts one rank of two: here a Manager waits for "
    "the group's other ranks in its constructor",
    r"::test_checkpoint_server_locking": f"{INTERNAL} (_checkpoint_lock, _disallowed, _step)",
    r"::test_checkpoint_server_\d": "expects urllib's exceptions",
    r"::test_heartbeat_round_trip": "expects that a stranger takes over at once when the only member has gone silent: here nobody "
    "does while that may live (docs/design.md, L6)",
    r"::test_functional_collectives": "expects torch's numbering as the name of a group; ours is made by one rank alone",
    r"_with_resiliency_\d+_(send_recv|broadcast|broadcast_one)$": "a member shuts its group down while the others still work on "
    "it: here it ends for all; theirs passes when the others are quick",
    r"::test_reconfigure_baby_process_group": f"{INTERNAL} (the child process of a Baby group)",
    r"::test_baby_gloo_timeout": "expects the words of torchft's child process",
    r"::test_baby_gloo_apis": "expects the words of torchft's child process",
    r"::test_managed_process_group": "expects that a coalesced reduction bypasses the Manager",
}
"""Single tests: a regular expression for "file::class::test", and the reason."""


def reason_for(test: str) -> str | None:
    """Why ``test`` ("file::class::test") is not applicable, or None."""
    file = test.partition("::")[0]
    found = (reason for pattern, reason in TESTS.items() if re.search(pattern, test))
    return FILES.get(file) or next(found, None)
