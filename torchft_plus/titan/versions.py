"""Which torchtitan and torch this plugin works with, found out without importing either."""

from __future__ import annotations

import importlib.metadata
import re

from torchft_plus.strict_table import ConfigError

LEAST_TORCHTITAN, BELOW_TORCHTITAN = (0, 2, 2), (0, 4, 0)
LEAST_TORCH = (2, 13, 0)


def numbers(version: str) -> tuple[int, int, int]:
    """The first three numbers of a version; what follows them ("+cpu", "rc1", ".dev2026") does not count."""
    match = re.match(r"(\d+)\.(\d+)(?:\.(\d+))?", version)
    if match is None:
        raise ConfigError(f"{version!r} is not a version number: reinstall the package.")
    major, minor, patch = match.groups()
    return int(major), int(minor), int(patch or 0)


def check(torchtitan: str | None, torch: str | None) -> tuple[int, int]:
    """Refuse versions that have no adapter.

    Args:
        torchtitan: installed version, None if it is not installed.
        torch: the same.

    Returns:
        (major, minor) of torchtitan.

    Raises:
        ConfigError: one of them is missing, too old or too new.
    """
    if torchtitan is None:
        raise ConfigError('torchtitan is not installed: pip install "torchft-plus[titan]".')
    if torch is None:
        raise ConfigError("torch is not installed: see pytorch.org for the wheel of your platform.")
    if not LEAST_TORCHTITAN <= numbers(torchtitan) < BELOW_TORCHTITAN:
        raise ConfigError(
            f"torchtitan {torchtitan} is not supported, its trainer differs from those of 0.2.2 to 0.3.x: "
            'pip install "torchtitan>=0.2.2,<0.4".'
        )
    if numbers(torch) < LEAST_TORCH:
        raise ConfigError(f'torch {torch} is too old for this plugin: pip install "torch>=2.13".')
    major, minor, _ = numbers(torchtitan)
    return major, minor


def installed(package: str) -> str | None:
    """Installed version of ``package``, or None."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
