"""Which parameters belong to which fragment, and what of the model is not synchronised but has to reach a joiner."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn
from torch.nn import Parameter

from torchft_plus.state.registry import StateRegistry


def trainable_parameters(modules: Sequence[nn.Module]) -> list[list[tuple[str, Parameter]]]:
    """Names and trainable parameters of each module; a tied parameter belongs to the first that has it.

    Raises:
        ValueError: a module is left without any.
    """
    seen: set[int] = set()
    fragments: list[list[tuple[str, Parameter]]] = []
    for index, module in enumerate(modules):
        own: list[tuple[str, Parameter]] = []
        for name, parameter in module.named_parameters():
            if parameter.requires_grad and id(parameter) not in seen:
                seen.add(id(parameter))
                own.append((f"{index}.{name}", parameter))
        if not own:
            raise ValueError(
                f"fragment {index} of the model has no trainable parameter of its own: leave it out"
            )
        fragments.append(own)
    return fragments


def register_rest(state: StateRegistry, modules: Sequence[nn.Module]) -> None:
    """Register frozen parameters, and persistent buffers, which stay local and are given to a joiner as they are."""
    frozen: dict[str, torch.Tensor] = {}
    buffers: dict[str, torch.Tensor] = {}
    for index, module in enumerate(modules):
        kept = module.state_dict(keep_vars=True).keys()
        for name, parameter in module.named_parameters():
            if not parameter.requires_grad:
                frozen[f"{index}.{name}"] = parameter
        for name, buffer in module.named_buffers():
            if name in kept:
                buffers[f"{index}.{name}"] = buffer
    if frozen:
        state.register_tensors("frozen_parameters", lambda: frozen, advanced_by_optimizer=True)
    if buffers:
        state.register_tensors("local_buffers", lambda: buffers, shared=False, changes_in_forward=True)
