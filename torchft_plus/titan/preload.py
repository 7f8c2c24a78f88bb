"""Importing this module imports what a rank will need, and starts nothing (for ``torchft_plus.launch.spare``).

What is to come is taken from ``sys.argv``. A mistake in it is left for ``__main__`` to tell.
"""

from __future__ import annotations

import contextlib
import importlib
import sys

from torchft_plus.strict_table import ConfigError
from torchft_plus.titan import versions
from torchft_plus.titan.adapters import load_adapter
from torchft_plus.titan.config import read

with contextlib.suppress(ConfigError):
    _version = versions.check(versions.installed("torchtitan"), versions.installed("torch"))
    load_adapter(_version)
    for _name in ("torchft_plus.manager.manager", "torchft_plus.reduce.reducer"):
        importlib.import_module(_name)
    _config = read(sys.argv[1:], {"TORCHFT_LIGHTHOUSE": "localhost:1", "REPLICA_ID": "0"})
    with contextlib.suppress(ImportError):
        importlib.import_module(f"torchtitan.models.{_config.tables.get('model', {}).get('name', 'llama3')}")
