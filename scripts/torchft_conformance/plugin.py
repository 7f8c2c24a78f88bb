"""Loaded into pytest: puts torchft_plus in torchft's place, and lets torchft's test modules be found in the checkout.

Two of torchft's private names are given to its tests: ``Manager._manager_state_dict`` with its entries
``StreamingDiLoCoFragment_N``, through which all tests of DiLoCo look at the outcome, and ``http_transport._time``, with which its
benchmark takes the time.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from torchft_conformance.not_applicable import reason_for
from torchft_plus.checkpointing import http_transport
from torchft_plus.compat.alias import install
from torchft_plus.manager.manager import Manager
from torchft_plus.semi_sync.diloco import DiLoCo

INNER_STEP_S = 0.1
PACKAGE = Path(os.environ["TORCHFT_CHECKOUT"]) / "torchft"


class _Tests(MetaPathFinder):
    """Finds ``torchft.something_test`` and the helpers of tests in the checkout; nothing else of torchft."""

    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        parts = fullname.split(".")
        if parts[0] != "torchft" or not (
            fullname.endswith(("_test", "_bench")) or parts[1:2] in (["_test"], ["_test_utils"])
        ):
            return None
        file = PACKAGE.joinpath(*parts[1:]).with_suffix(".py")
        if file.exists():
            return importlib.util.spec_from_file_location(fullname, file)
        if file.with_suffix("").is_dir():
            return ModuleSpec(fullname, None, is_package=True)
        return None


def _remember_diloco() -> None:
    plain = DiLoCo.__init__

    def remembering(self: DiLoCo, manager: Manager, *arguments: Any, **named: Any) -> None:
        plain(self, manager, *arguments, **named)
        manager.__dict__["diloco_of_test"] = self
        # torchft's members wait for a joiner, ours do not (P4): all 16 inner steps of 1 ms would be over before it has come.
        inner: torch.optim.Optimizer = named.get("inner_optimizer") or arguments[1]
        inner.register_step_post_hook(lambda *_: time.sleep(INNER_STEP_S))

    def manager_state_dict(self: Manager) -> dict[str, Any]:
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

    setattr(DiLoCo, "__init__", remembering)  # noqa: B010
    setattr(Manager, "_manager_state_dict", manager_state_dict)  # noqa: B010


@contextmanager
def _time(name: str) -> Generator[None]:
    del name
    yield


install()
setattr(http_transport, "_time", _time)  # noqa: B010
sys.meta_path.insert(0, _Tests())
_remember_diloco()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is not applicable, with the reason."""
    for item in items:
        reason = reason_for(f"{os.environ['TORCHFT_FILE']}::{item.nodeid.partition('::')[2]}")
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {reason}"))
