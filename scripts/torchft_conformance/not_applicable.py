"""Which of torchft's tests say nothing about torchft_plus, and why."""

from __future__ import annotations

import re

INTERNAL = "tests parts of torchft that are not public"

FILES: dict[str, str] = {
    "_test/managed_work_test.py": f"{INTERNAL} (_ManagedWork)",
    "checkpointing/rwlock_test.py": f"{INTERNAL} (_rwlock)",
    "checkpointing/transport_test.py": "holds no tests, only what the other transport tests share",
    "collectives_test.py": "needs GPUs",
    "coordination_test.py": 'imports ManagerServer and ManagerClient, which have no counterpart; looks for "Args:" in docstrings',
    "ddp_test.py": f"mocks the Manager and expects calls that torchft makes inside ({INTERNAL}: _ManagedWork)",
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
    r"::test_quorum_timeout": 'expects the words of torchft\'s Rust client ("status: Cancelled"), and starts one rank of two: '
    "here a Manager waits for the group's other ranks in its constructor",
    r"::test_checkpoint_server_locking": f"{INTERNAL} (_checkpoint_lock, _disallowed, _step)",
    r"::test_checkpoint_server_\d": "expects exceptions and words of urllib; ours are TimeoutError and StateError. The other tests "
    "of the transport make the same round trip",
    r"::test_functional_collectives": "expects str(torch.distributed.get_pg_count() - 1) as the name of a registered group; ours "
    "is made by one rank alone, which torch's counter is not meant for",
    r"_with_resiliency_\d+_(send_recv|broadcast|broadcast_one)$": "a race: the rank that is to fail takes no part in the last "
    "exchange of the others, or is done with it before them, and closes its connections at once; gloo then fails what they still "
    "have in flight. It passes where closing takes longer than their exchange",
    r"::test_reconfigure_baby_process_group": f"{INTERNAL} (the pipes and process of a Baby group: _future_pipe, _p)",
    r"::test_baby_gloo_apis": "counts what is in flight in torchft's child process (num_active_work), and expects its pipe's words",
    r"::test_managed_process_group": "mocks the Manager (with its private _pg), and expects that one of three reductions "
    "and all other collectives go past it: here what would bypass the vote is refused",
    r"::test_diloco_mocked_failure_recovery": "its golden values have a restarted group train on its initial parameters until the "
    "next sync; ours begins at the global ones",
}
"""Single tests: a regular expression for "file::class::test", and the reason."""


def reason_for(test: str) -> str | None:
    """Why ``test`` ("file::class::test") is not applicable, or None."""
    file = test.partition("::")[0]
    found = (reason for pattern, reason in TESTS.items() if re.search(pattern, test))
    return FILES.get(file) or next(found, None)
