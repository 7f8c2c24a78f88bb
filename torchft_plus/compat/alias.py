"""Makes ``import torchft`` find torchft_plus: an import hook, in force from ``install()`` on."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from collections.abc import Sequence
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from types import ModuleType

THEIRS = "torchft"
OURS = "torchft_plus"
_RENAMED = {"torchft._torchft": "torchft_plus.coordination"}


class AliasError(ImportError):
    """The alias came too late."""


class _Loader(Loader):
    """Hands out a module of ours under torchft's name, unchanged: both names are one module."""

    def __init__(self, target: str) -> None:
        self._target = target
        self._spec: ModuleSpec | None = None

    def create_module(self, spec: ModuleSpec) -> ModuleType:
        del spec
        module = importlib.import_module(self._target)
        self._spec = module.__spec__
        return module

    def exec_module(self, module: ModuleType) -> None:
        module.__spec__ = self._spec  # the import machinery has put the alias's there


class _Finder(MetaPathFinder):
    def find_spec(
        self, fullname: str, path: Sequence[str] | None = None, target: ModuleType | None = None
    ) -> ModuleSpec | None:
        del path, target
        if fullname != THEIRS and not fullname.startswith(THEIRS + "."):
            return None
        ours = _RENAMED.get(fullname, OURS + fullname.removeprefix(THEIRS))
        found = importlib.util.find_spec(ours)
        if found is None:
            return None
        is_package = found.submodule_search_locations is not None
        return ModuleSpec(fullname, _Loader(ours), origin=found.origin, is_package=is_package)


def install() -> None:
    """From now on ``torchft`` and its submodules are ours, in this process. Repeatable; an installed torchft is hidden.

    Raises:
        AliasError: torchft itself was imported before.
    """
    loaded = sys.modules.get(THEIRS)
    if loaded is not None and loaded is not sys.modules.get(OURS):
        raise AliasError(
            "torchft is imported already: import torchft_plus.compat.install before anything that uses it"
        )
    if not any(isinstance(finder, _Finder) for finder in sys.meta_path):
        sys.meta_path.insert(0, _Finder())
