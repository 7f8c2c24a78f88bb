"""DiLoCo and Streaming DiLoCo for a training loop of one's own."""

from __future__ import annotations

from collections.abc import Sequence
from types import TracebackType
from typing import Any

import torch
from torch import nn

from torchft_plus.manager.manager import Manager
from torchft_plus.manager.optim import Optimizer as FaultTolerantOptimizer
from torchft_plus.reduce.codec import codec as codec_of
from torchft_plus.reduce.layout import DEFAULT_BUCKET_BYTES, MEBIBYTE
from torchft_plus.semi_sync.fragment import Fragment
from torchft_plus.semi_sync.outer_loop import OuterLoop
from torchft_plus.semi_sync.parts import register_rest, trainable_parameters
from torchft_plus.semi_sync.schedule import Schedule, timed_window


class DiLoCo:
    """Trains locally and synchronises every ``sync_every`` inner steps; torchft's constructor.

    ::

        with DiLoCo(manager, [model], inner_optimizer, outer_optimizer, sync_every=20):
            while manager.current_step() < syncs:
                inner_optimizer.zero_grad()
                loss_of(model, batch).backward()
                inner_optimizer.step()          # every 20th ends in a sync

    In a sync each group sends (global - local) parameters; the outer optimizer steps on the global copy with the average
    (arXiv 2311.08105), and the model takes over the outcome. With several fragments they take turns, and communication
    may overlap with inner steps (arXiv 2501.18512).

    What replicas share is the global copy and the outer optimizers' state. Inner optimizers stay local: a group that comes back
    begins with a fresh one, at the global parameters. It trains on until the others' next sync, and counts from the first
    window that it has trained as a whole.

    Args:
        manager: of this rank, before its first step.
        model_fragments: parts of the model, synchronised one after the other; one for plain DiLoCo.
        inner_optimizer: any ``torch.optim`` optimizer of the model; not ``torchft_plus.Optimizer``.
        outer_optimizer: one per fragment, made from the fragment's parameters; usually SGD with Nesterov momentum. It is turned
            to the global copy.
        sync_every: inner steps between two syncs of the same fragment; a multiple of the number of fragments.
        backup_device: where the global copy lies; only the device of the parameters.
        pin_memory, use_bucketization: accepted for torchft's sake; the global copy stays on the parameters' device, and
            pseudo-gradients always travel in buckets.
        bucket_cap_mb: size of a bucket in MiB.
        should_quantize: send pseudo-gradients in 8 bits: the codec "int8".
        fragment_sync_delay: inner steps between sending a pseudo-gradient and taking over the result.
        fragment_update_alpha: share of the local parameters that a sync leaves in place (0: none).
        sync_seconds: end a window after this time, too, or when others wait at their sync; pseudo-gradients are then
            averaged by tokens (``step_tokens``). For groups of different speed.
        sync_least_groups: so many groups must wait to make another one end its window,
        sync_grace_seconds: and give it so long to come by itself.
        codec: name of the codec that pseudo-gradients are sent with ("bf16", "int8", "fp8").
        error_feedback: add to a fragment's next pseudo-gradient what the codec took away.

    Raises:
        ValueError: an argument that does not fit the others; the sentence says which.
    """

    def __init__(
        self,
        manager: Manager,
        model_fragments: Sequence[nn.Module],
        inner_optimizer: torch.optim.Optimizer,
        outer_optimizer: torch.optim.Optimizer | Sequence[torch.optim.Optimizer],
        sync_every: int,
        backup_device: torch.device | None = None,
        pin_memory: bool = True,
        use_bucketization: bool = False,
        bucket_cap_mb: int | None = None,
        should_quantize: bool = False,
        fragment_sync_delay: int = 0,
        fragment_update_alpha: float = 0.0,
        *,
        sync_seconds: float | None = None,
        sync_least_groups: int = 1,
        sync_grace_seconds: float = 0.0,
        codec: str | None = None,
        error_feedback: bool = False,
    ) -> None:
        del pin_memory, use_bucketization
        if isinstance(inner_optimizer, FaultTolerantOptimizer):
            raise ValueError(
                "inner_optimizer is a torchft_plus.Optimizer, which would vote on every inner step: pass the plain optimizer"
            )
        outers = (
            [outer_optimizer] if isinstance(outer_optimizer, torch.optim.Optimizer) else list(outer_optimizer)
        )
        schedule = Schedule(sync_every, len(model_fragments), fragment_sync_delay)
        if len(outers) != len(model_fragments):
            raise ValueError(
                f"there are {len(outers)} outer optimizers for {len(model_fragments)} fragments: pass one per fragment"
            )
        named = trainable_parameters(model_fragments)
        _check_backup(backup_device, named[0][0][1].device)
        self._fragments = [
            Fragment(
                own, outer, fragment_update_alpha, [p for them in named if them is not own for _, p in them]
            )
            for own, outer in zip(named, outers, strict=True)
        ]
        chosen = codec or ("int8" if should_quantize else None)
        self._loop = OuterLoop(
            manager,
            self._fragments,
            schedule,
            timed=timed_window(sync_seconds, sync_least_groups, sync_grace_seconds),
            bucket_bytes=DEFAULT_BUCKET_BYTES if bucket_cap_mb is None else bucket_cap_mb * MEBIBYTE,
            codec=None if chosen is None else codec_of(chosen),
            error_feedback=error_feedback,
        )
        register_rest(manager.state, model_fragments)
        self._inner_optimizer = inner_optimizer
        self._parameters = [parameter for own in named for _, parameter in own]
        self._waits_for_callables = manager.has_user_state
        self._hooks: list[Any] = []
        self.step_tokens = 1.0
        """Tokens of an inner step, the same on every rank of the group; may be set before each."""
        self._loaded = False

    def __enter__(self) -> DiLoCo:
        """Take the model as it is for the global copy, and enter the run; blocks as the first ``start_quorum`` does.

        If the Manager was given callables for user state, the run is entered in the first inner step instead: they may refer to
        what this returns.
        """
        if not self._loaded:
            for fragment in self._fragments:
                fragment.copy_from_model()
        if self._waits_for_callables:
            self._hooks.append(self._inner_optimizer.register_step_pre_hook(self._before_inner_step))
        else:
            self._loop.open()
        self._hooks.append(self._inner_optimizer.register_step_post_hook(self._after_inner_step))
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        """Stop synchronising; the model keeps its local parameters."""
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def _before_inner_step(self, *arguments: Any) -> None:
        del arguments
        if self._loop.open():
            for parameter in self._parameters:
                parameter.grad = None  # of parameters that were replaced just now

    def _after_inner_step(self, *arguments: Any) -> None:
        del arguments
        self._loop.inner_step_done(tokens=self.step_tokens)
        if self._loop.spoilt:
            self._inner_optimizer.state.clear()

    @property
    def inner_steps(self) -> int:
        """Inner steps since the last sync."""
        return self._loop.inner_steps

    def state_dict(self) -> dict[str, Any]:
        """Global copy and outer optimizers, for a checkpoint on disk."""
        return {
            "fragments": [
                {
                    "parameters": {name: shared.detach() for name, shared in fragment.named_shared()},
                    "outer_optimizer": fragment.outer_optimizer.state_dict(),
                }
                for fragment in self._fragments
            ]
        }

    @torch.no_grad()
    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Inverse of ``state_dict``, before ``with``; the model takes over the global parameters.

        Raises:
            ValueError: it was saved with other fragments.
        """
        saved = state["fragments"]
        names = [set(fragment.names) for fragment in self._fragments]
        if [set(one["parameters"]) for one in saved] != names:
            raise ValueError("the checkpoint was saved with other fragments: use the same model_fragments")
        for fragment, one in zip(self._fragments, saved, strict=True):
            for name, shared in fragment.named_shared():
                shared.copy_(one["parameters"][name])
            fragment.outer_optimizer.load_state_dict(one["outer_optimizer"])
            fragment.reset()
        self._loaded = True


def _check_backup(backup: torch.device | None, device: torch.device) -> None:
    if backup is not None and torch.device(backup).type != device.type:
        raise ValueError(
            f"backup_device is {backup}, and the parameters are on {device}: the global copy stays where the parameters are, "
            "leave backup_device out"
        )
