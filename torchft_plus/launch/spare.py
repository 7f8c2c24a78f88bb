"""A warm spare: a process that has imported what a training rank needs and waits to become one.

``python -m torchft_plus.launch.spare MODULE ARGUMENT...``. Most of a restart is imports (torch and torchtitan:
7-9 s). A spare has done them already. It is no fork: no thread, lock or device context is copied.

MODULE may be a package with a submodule ``preload``, which imports what a rank will need and starts nothing;
without one only torch is imported. Then the spare reads one line, its order, {"environment": {...}, "log": path},
and goes on as ``python -m MODULE ARGUMENT...`` in that environment. At the end of its input it ends.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import runpy
import sys
from typing import Any


def main(module: str, arguments: list[str]) -> None:
    """Import, wait, become ``module``."""
    sys.argv = [module, *arguments]
    importlib.import_module(_preload_of(module))
    line = sys.stdin.readline()
    if not line:
        return
    order: dict[str, Any] = json.loads(line)
    _take_place(order["environment"], order["log"])
    runpy.run_module(module, run_name="__main__", alter_sys=True)


def _preload_of(module: str) -> str:
    try:
        found = importlib.util.find_spec(f"{module}.preload")
    except ModuleNotFoundError:  # it is no package
        found = None
    return "torch" if found is None else found.name


def _take_place(environment: dict[str, str], log: str) -> None:
    """Environment, output and input of the rank."""
    os.environ.update(environment)
    sys.stdout.flush()
    sys.stderr.flush()
    output = os.open(log, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_CLOEXEC, 0o644)
    empty = os.open(os.devnull, os.O_RDONLY | os.O_CLOEXEC)
    for source, target in ((empty, 0), (output, 1), (output, 2)):
        os.dup2(source, target)
    os.close(output)
    os.close(empty)


if __name__ == "__main__":
    main(sys.argv[1], sys.argv[2:])
