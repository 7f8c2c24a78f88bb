"""Loaded into pytest: puts torchft_plus in torchft's place, and lets torchft's test modules be found in the checkout."""

from __future__ import annotations

import importlib.util
import os
import sys
from collections.abc import Sequence
from importlib.abc import MetaPathFinder
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType

import pytest

from torchft_conformance.crutches import give
from torchft_conformance.not_applicable import reason_for
from torchft_plus.compat.alias import install

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


install()
sys.meta_path.insert(0, _Tests())
give()


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip what is not applicable, with the reason."""
    for item in items:
        reason = reason_for(f"{os.environ['TORCHFT_FILE']}::{item.nodeid.partition('::')[2]}")
        if reason is not None:
            item.add_marker(pytest.mark.skip(reason=f"not applicable: {reason}"))
