"""The virtual environment that torchft is measured in: its own, so that nothing of ours depends on it.

``python -m benchmarks.torchft_environment`` makes it at need, and prints its Python.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from benchmarks.children import ROOT

FOLDER = ROOT / ".venv-torchft"
PACKAGES = ("torch==2.13.0", "torchft==0.2.0", "numpy")
"""In this order: torchft by itself would bring whichever torch is newest. Its PGTransport needs NumPy, which neither brings."""
VARIABLE = "TORCHFT_PYTHON"


def torchft_python(given: str | None) -> str:
    """A Python that can import torchft: the given one, ``$TORCHFT_PYTHON``, or that of ``.venv-torchft``, made at need.

    Raises:
        RuntimeError: the given Python lacks torchft, or the environment could not be made.
    """
    python = given or os.environ.get(VARIABLE)
    if python:
        if not _has_torchft(python):
            raise RuntimeError(f"{python} cannot import torchft: install {' '.join(PACKAGES)} there")
        return python
    own = FOLDER / "bin" / "python"
    if not (own.exists() and _has_torchft(str(own))):
        _make(own)
    return str(own)


def lighthouse_command(python: str) -> str:
    """torchft's Lighthouse program, which lies beside the Python."""
    return str(Path(python).parent / "torchft_lighthouse")


def _has_torchft(python: str) -> bool:
    command = [python, "-c", "import importlib.util as u; raise SystemExit(u.find_spec('torchft') is None)"]
    return subprocess.run(command, check=False).returncode == 0


def _make(python: Path) -> None:
    print(
        f"making {FOLDER.name} with {' and '.join(PACKAGES)} (only for the comparison)",
        file=sys.stderr,
        flush=True,
    )
    commands = [[sys.executable, "-m", "venv", str(FOLDER)]]
    commands += [[str(python), "-m", "pip", "install", "--quiet", package] for package in PACKAGES]
    # Without our own path, on which pip would find this package and miss its dependencies.
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    for command in commands:
        if subprocess.run(command, check=False, env=environment).returncode != 0:
            raise RuntimeError(f"{FOLDER.name} could not be made: {' '.join(command)} failed, see above")


if __name__ == "__main__":
    print(torchft_python(None))
