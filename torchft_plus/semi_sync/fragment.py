"""A part of the model that is synchronised as a whole: its global copy and its outer optimizer."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import torch
from torch.nn import Parameter

from torchft_plus.reduce.local_tensors import local_part, set_gradient

Named = Sequence[tuple[str, Parameter]]


class Fragment:
    """The global copy of some parameters, which moves only when a sync is committed, and what happens in a sync.

    The outer optimizer is turned to the global copy: what it was given as the model's parameters, it steps on the copies,
    with the averaged pseudo-gradient in their ``.grad``. So it is an optimizer like any other for those who bring a
    joiner up to date.

    Args:
        named: the model's parameters that belong to this fragment; of a DTensor the local shard counts.
        outer_optimizer: holds exactly these parameters.
        alpha: share of the local parameters that stays after a sync; 0 takes the global ones (DiLoCo), 1 keeps the local.
        elsewhere: parameters of other fragments; those that are tied to this one's module are theirs to step.

    Raises:
        ValueError: the outer optimizer holds other parameters, or ``alpha`` is not within 0 and 1.
    """

    def __init__(
        self,
        named: Named,
        outer_optimizer: torch.optim.Optimizer,
        alpha: float = 0.0,
        elsewhere: Sequence[Parameter] = (),
    ) -> None:
        if not 0 <= alpha <= 1:
            raise ValueError(f"fragment_update_alpha is {alpha}: it must be between 0 and 1")
        self.names = [name for name, _ in named]
        self.local = [parameter for _, parameter in named]
        self.shared = [Parameter(parameter.detach().clone()) for parameter in self.local]
        """The global copy."""
        self.outer_optimizer = outer_optimizer
        self._alpha = alpha
        _turn_to(outer_optimizer, named, self.shared, elsewhere)

    def named_shared(self) -> list[tuple[str, Parameter]]:
        """Names and tensors of the global copy."""
        return list(zip(self.names, self.shared, strict=True))

    @torch.no_grad()
    def save_pseudo_gradient(self) -> bool:
        """Set ``.grad`` of the global copy to (global - local). What a retry reduces again is this, not a later one.

        Returns:
            True if all of it is finite.
        """
        finite = True
        for shared, local in zip(self.shared, self.local, strict=True):
            difference = local_part(shared.detach()) - local_part(local.detach())
            finite = finite and bool(torch.isfinite(difference).all())
            set_gradient(shared, difference)
        return finite

    def clear_pseudo_gradient(self) -> None:
        """Free it."""
        for shared in self.shared:
            shared.grad = None

    @torch.no_grad()
    def merge(self) -> None:
        """Bring the outcome of a sync into the model: ``alpha`` of the local parameters, the rest from the global copy."""
        for shared, local in zip(self.shared, self.local, strict=True):
            if self._alpha == 0:
                local_part(local.detach()).copy_(local_part(shared.detach()))
            elif self._alpha < 1:
                local_part(local.detach()).lerp_(local_part(shared.detach()), 1 - self._alpha)

    @torch.no_grad()
    def reset(self) -> None:
        """Take over the global copy as it is: local progress is dropped."""
        for shared, local in zip(self.shared, self.local, strict=True):
            local_part(local.detach()).copy_(local_part(shared.detach()))

    @torch.no_grad()
    def copy_from_model(self) -> None:
        """Take the model's parameters for the global ones: before the first step, when the model was loaded."""
        for shared, local in zip(self.shared, self.local, strict=True):
            local_part(shared.detach()).copy_(local_part(local.detach()))


def _turn_to(
    optimizer: torch.optim.Optimizer,
    named: Named,
    shared: Sequence[Parameter],
    elsewhere: Sequence[Parameter],
) -> None:
    """Let ``optimizer`` step on the global copies of what it holds."""
    copies: dict[int, torch.Tensor] = {
        id(parameter): copy for (_, parameter), copy in zip(named, shared, strict=True)
    }
    theirs = {id(parameter) for parameter in elsewhere}
    held: set[int] = set()
    for group in optimizer.param_groups:
        parameters = [
            p for p in cast("list[torch.Tensor]", group["params"]) if p.requires_grad and id(p) not in theirs
        ]
        strangers = sum(id(parameter) not in copies for parameter in parameters)
        if strangers:
            raise ValueError(
                f"an outer optimizer holds {strangers} parameters that are not in its fragment: "
                "make one per fragment, from the parameters of that fragment"
            )
        held.update(map(id, parameters))
        group["params"] = [copies[id(parameter)] for parameter in parameters]
    missing = [name for name, parameter in named if id(parameter) not in held]
    if missing:
        raise ValueError(
            f"parameter {missing[0]!r} and {len(missing) - 1} others of a fragment are not in its outer optimizer: "
            "make it from the parameters of that fragment"
        )
    state = dict(optimizer.state)
    optimizer.state.clear()
    optimizer.state.update(
        {copies.get(id(parameter), parameter): value for parameter, value in state.items()}
    )
