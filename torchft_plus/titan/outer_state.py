"""Global copy and outer momentum on disk: what a run with windows of inner steps has beside torchtitan's own states."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from torchft_plus.semi_sync.fragment import Fragment


class OuterState:
    """For a torch checkpoint: tensors by name, so that DTensors are saved and loaded by their shards.

    Args:
        fragments: whose outer optimizers are plain SGD; each keeps its momentum from the beginning.
    """

    def __init__(self, fragments: Sequence[Fragment]) -> None:
        self._fragments = list(fragments)
        self.loaded = False
        """There was such a state in the checkpoint."""
        for fragment in self._fragments:
            _make_momentum(fragment)

    def state_dict(self) -> dict[str, Any]:
        """``global`` and ``momentum``, each by the name of the parameter."""
        return {"global": self._global(), "momentum": self._momentum()}

    @torch.no_grad()
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Inverse of ``state_dict``; torch may have loaded into these very tensors."""
        for kind, own in (("global", self._global()), ("momentum", self._momentum())):
            for name, tensor in own.items():
                loaded = state_dict[kind][name]
                if loaded is not tensor:
                    tensor.copy_(loaded)
        self.loaded = True

    def _global(self) -> dict[str, torch.Tensor]:
        return {n: p.detach() for fragment in self._fragments for n, p in fragment.named_shared()}

    def _momentum(self) -> dict[str, torch.Tensor]:
        return {
            name: fragment.outer_optimizer.state[parameter]["momentum_buffer"]
            for fragment in self._fragments
            for name, parameter in fragment.named_shared()
            if fragment.outer_optimizer.defaults["momentum"]
        }


def _make_momentum(fragment: Fragment) -> None:
    """SGD makes it in its first step; zeros come to the same, and give every group the same tensors from the start."""
    if fragment.outer_optimizer.defaults["momentum"]:
        for parameter in fragment.shared:
            fragment.outer_optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(
                parameter, requires_grad=False
            )
