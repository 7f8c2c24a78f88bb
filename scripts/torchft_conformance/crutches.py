"""What torchft's own tests are given beyond torchft's public API, so that they can run on torchft_plus."""

from __future__ import annotations

import time
from collections.abc import Generator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any

INNER_STEP_S = 0.1
CRUTCHES = (
    "`Manager._manager_state_dict` with its entries `StreamingDiLoCoFragment_N`: a private name, through which all tests of DiLoCo "
    "look at the outcome",
    "`http_transport._time`: a private name, with which the transport's benchmark takes the time",
    f"an inner step of DiLoCo takes {INNER_STEP_S} s: torchft's members wait for a joiner, ours do not, and a run of 16 steps of "
    "a millisecond is over before it has come",
    "`should_commit` without a `start_quorum` before it is a step of its own, in which nothing is reduced: diloco_regression_test "
    'calls it twice in a row, which torchft\'s documentation forbids ("once per step") and ours refuses',
)
"""Each as a sentence, for ``--help`` and docs/from-torchft.md."""


def give() -> None:
    """Put them in place, in this process."""
    from torchft_plus.checkpointing import http_transport
    from torchft_plus.manager.manager import Manager
    from torchft_plus.semi_sync.diloco import DiLoCo

    setattr(http_transport, "_time", _time)  # noqa: B010
    setattr(Manager, "_manager_state_dict", _manager_state_dict)  # noqa: B010
    setattr(Manager, "should_commit", _commit_again(Manager.should_commit))  # noqa: B010
    setattr(DiLoCo, "__init__", _remembering(DiLoCo.__init__))  # noqa: B010


@contextmanager
def _time(name: str) -> Generator[None]:
    del name
    yield


def _manager_state_dict(self: Any) -> dict[str, Any]:
    saved = self.__dict__["diloco_of_test"].state_dict()["fragments"]
    fragments = {
        f"StreamingDiLoCoFragment_{index}": {
            "original_parameters": {
                name.partition(".")[2]: tensor for name, tensor in fragment["parameters"].items()
            },
            "outer_optimizer": fragment["outer_optimizer"],
        }
        for index, fragment in enumerate(saved)
    }
    return {"user": fragments, "torchft": self.state_dict()}


def _remembering(plain: Any) -> Any:
    def remembering(self: Any, manager: Any, *arguments: Any, **named: Any) -> None:
        plain(self, manager, *arguments, **named)
        manager.__dict__["diloco_of_test"] = self
        inner = named.get("inner_optimizer") or arguments[1]
        inner.register_step_post_hook(lambda *_: time.sleep(INNER_STEP_S))

    return remembering


def _commit_again(plain: Any) -> Any:
    def should_commit(self: Any, timeout: timedelta | None = None) -> bool:
        try:
            return plain(self, timeout)
        except ManagerError:
            self.start_step()
            return plain(self, timeout)

    from torchft_plus.manager.outcome import ManagerError

    return should_commit
