"""What torchtitan needs that this machine or this torch lacks.

torchtitan is written for GPUs, triton and the newest torch. Each patch is applied only where its reason is;
on a GPU machine with triton and a new torch ``prepare`` does nothing. Call it before importing torchtitan.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
import sys
from collections.abc import Callable
from types import ModuleType, SimpleNamespace
from typing import Any, NoReturn, cast
from unittest import mock

import torch
import torch.distributed as dist
from torch.distributed.fsdp import FSDPModule

TRITON_MODULES = {
    (0, 2): "torchtitan.models.moe.kernels",
    (0, 3): "torchtitan.distributed.minimal_async_ep.kernels",
}
"""The one module of each torchtitan version that imports triton when it is itself imported."""


def prepare(torchtitan: tuple[int, int]) -> list[str]:
    """Apply what is missing, once; call it before ``import torchtitan``.

    Args:
        torchtitan: (major, minor) of the installed torchtitan.

    Returns:
        One short sentence for each patch that was applied.
    """
    applied: list[str] = []
    if importlib.util.find_spec("triton") is None:
        name = TRITON_MODULES[torchtitan]
        if name not in sys.modules:
            # A stand-in for triton itself would be found by torch._inductor, which then wants all of it.
            sys.modules[name] = _Missing(name, "triton")
        applied.append(f"{name} is a stand-in, because triton is not installed")
    if not hasattr(dist, "set_timeout"):
        # torchtitan 0.3.0 lowers its timeouts with a function that is public since torch 2.14.
        private = cast(Callable[..., None], dist.distributed_c10d._set_pg_timeout)  # pyright: ignore[reportPrivateUsage]
        setattr(dist, "set_timeout", private)  # noqa: B010 (the attribute is unknown to type checkers)
        applied.append("torch.distributed.set_timeout is made of its private forerunner")
    if not torch.accelerator.is_available():
        _import_utilities_for_cpu()
        _sum_without_premultiplication()
        applied.append("no accelerator: torchtitan's device is the CPU")
    return applied


class _Missing(ModuleType):
    """A module whose every function says what is missing when it is called."""

    def __init__(self, name: str, needs: str) -> None:
        super().__init__(name, f"Stand-in: {needs} is not installed.")
        self._needs = needs

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)

        def missing(*_: Any, **__: Any) -> NoReturn:
            raise RuntimeError(f"{self.__name__}.{name} needs {self._needs}, which is not installed.")

        return missing


class _CpuDevice(ModuleType):
    """``torch.cpu`` with the calls of ``torch.cuda`` that torchtitan makes on its device module."""

    def __init__(self) -> None:
        super().__init__("torchft_plus.titan.cpu_device")

    def __getattr__(self, name: str) -> Any:
        return getattr(torch.cpu, name)

    def current_device(self) -> int:
        """0: torch.cpu says "cpu", but ``barrier(device_ids=...)``, which gets it, wants a number."""
        return 0

    def device_count(self) -> int:
        """1: every rank of this machine uses the one CPU device."""
        return 1

    def get_device_name(self, device: Any = None) -> str:
        """Shown in the log."""
        return "CPU"

    def get_device_properties(self, device: Any = None) -> Any:
        """``total_memory`` in bytes."""
        return SimpleNamespace(
            name="CPU", total_memory=os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        )

    def memory_stats(self, device: Any = None) -> dict[str, int]:
        """Nothing is measured: zeros."""
        return {
            "active_bytes.all.peak": 0,
            "reserved_bytes.all.peak": 0,
            "num_alloc_retries": 0,
            "num_ooms": 0,
        }

    def reset_peak_memory_stats(self, device: Any = None) -> None:
        """Nothing is measured."""

    def empty_cache(self) -> None:
        """Nothing is cached."""


def _import_utilities_for_cpu() -> None:
    """Import torchtitan.tools.utils while torch says "cpu": without a GPU torchtitan assumes "cuda"."""
    device = _CpuDevice()
    with (
        mock.patch("torch._utils._get_available_device_type", lambda: "cpu"),
        mock.patch("torch._utils._get_device_module", lambda _: device),
    ):
        importlib.import_module("torchtitan.tools.utils")


def _sum_without_premultiplication() -> None:
    """torchtitan sets FSDP2's gradient divisor to 1; FSDP2 makes a PREMUL_SUM of it, which gloo lacks."""
    original = FSDPModule.set_gradient_divide_factor
    if hasattr(original, "__wrapped__"):
        return

    def set_gradient_divide_factor(self: FSDPModule, factor: float) -> None:
        self.set_force_sum_reduction_for_comms(True)
        original(self, factor)

    set_gradient_divide_factor.__wrapped__ = original  # type: ignore[attr-defined]
    FSDPModule.set_gradient_divide_factor = set_gradient_divide_factor
