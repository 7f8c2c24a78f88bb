"""Imports what a training process needs and starts nothing: the longest part of a restart, done ahead of time.

``launch.warm_spares`` imports this module in processes that wait to become a rank.
"""

import importlib

from torchft_plus.titan import cpu, versions

_torchtitan = versions.check(versions.installed("torchtitan"), versions.installed("torch"))
cpu.prepare(_torchtitan)
importlib.import_module(
    "torchft_plus.titan.trainer_v02" if _torchtitan == (0, 2) else "torchft_plus.titan.trainer_v03"
)
importlib.import_module("torchft_plus.manager.manager")
