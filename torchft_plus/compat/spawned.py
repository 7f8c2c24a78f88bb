"""Main module of processes that an aliased script spawns: puts the alias in place, then is what the script would be.

Python imports a spawned process's main module anew (``multiprocessing``, "spawn" and "forkserver"; torch's data loader and
``torch.multiprocessing``), and would find no ``torchft``, or the installed one.
"""

from __future__ import annotations

import importlib.util
import multiprocessing.spawn
import os
import runpy
import sys
from pathlib import Path
from typing import Any

from torchft_plus.compat.alias import install

_MODULE, _PATH = "TORCHFT_PLUS_COMPAT_MODULE", "TORCHFT_PLUS_COMPAT_PATH"
_spawn: Any = multiprocessing.spawn
_CHILD = "__mp_main__"


def follow(*, module: str = "", path: str = "") -> None:
    """Let processes that this one spawns run the alias before their main module.

    Args:
        module, path: what runs as the main program here; one of them.
    """
    os.environ[_MODULE], os.environ[_PATH] = module, path
    plain = _spawn.get_preparation_data

    def prepared(name: str) -> dict[str, Any]:
        sys.modules[_CHILD] = sys.modules[
            "__main__"
        ]  # what the child sends of its main module is found in ours
        data: dict[str, Any] = plain(name)
        data.pop("init_main_from_path", None)
        return {**data, "init_main_from_name": __name__}

    _spawn.get_preparation_data = prepared


def _main() -> dict[str, Any]:
    """Names of the main program; none of a package's or folder's ``__main__``, which Python does not import either."""
    module, path = os.environ[_MODULE], os.environ[_PATH]
    if module:
        spec = importlib.util.find_spec(module)
        is_package = spec is not None and spec.submodule_search_locations is not None
        return {} if is_package else runpy.run_module(module, run_name=_CHILD)
    return runpy.run_path(path, run_name=_CHILD) if Path(path).is_file() else {}


if __name__ == _CHILD:
    install()
    follow(module=os.environ[_MODULE], path=os.environ[_PATH])
    globals().update(_main())
