"""The patches for machines and torch versions that torchtitan was not written for."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FSDPModule

from torchft_plus.titan import cpu
from torchft_plus.titan.mixin import refuse_unshared_buffers


def test_a_stand_in_says_what_is_missing_only_when_it_is_called(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: None)
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    name = cpu.TRITON_MODULES[0, 3]
    monkeypatch.delitem(sys.modules, name, raising=False)
    said = cpu.prepare((0, 3))
    module = sys.modules[name]
    monkeypatch.setitem(sys.modules, name, module)
    assert any("triton is not installed" in sentence for sentence in said)
    with pytest.raises(RuntimeError, match=r"any_kernel needs triton, which is not installed"):
        module.any_kernel(1, key=2)
    assert not hasattr(module, "__path__")
    cpu.prepare((0, 3))
    assert sys.modules[name] is module


def test_nothing_is_done_where_nothing_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu.importlib.util, "find_spec", lambda name: object())
    monkeypatch.setattr(torch.accelerator, "is_available", lambda: True)
    monkeypatch.setattr(dist, "set_timeout", lambda timeout, group: None, raising=False)
    before = FSDPModule.set_gradient_divide_factor
    assert cpu.prepare((0, 3)) == []
    assert FSDPModule.set_gradient_divide_factor is before


def test_only_models_whose_buffers_would_drift_apart_are_refused() -> None:
    model = nn.Module()
    model.register_buffer("rope_cache", torch.ones(1))
    refuse_unshared_buffers(model, 2)
    model.register_buffer("expert_bias_E", torch.ones(1))
    refuse_unshared_buffers(model, 1)
    with pytest.raises(ValueError, match=r"expert_bias_E follows the token counts of one replica group"):
        refuse_unshared_buffers(model, 2)
