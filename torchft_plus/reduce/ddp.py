"""The data-parallel wrapper for a loop of one's own."""

from __future__ import annotations

from collections.abc import Generator, Mapping
from contextlib import contextmanager
from typing import Any, Literal, Protocol

import torch
from torch import nn
from torch.utils._pytree import tree_leaves

from torchft_plus.reduce.codec import Codec
from torchft_plus.reduce.layout import DEFAULT_BUCKET_BYTES, FIRST_BUCKET_BYTES, MEBIBYTE
from torchft_plus.reduce.reducer import GradientReducer
from torchft_plus.reduce.reduction import AttachedReduction

_TORCH_OPTIONS = {
    "broadcast_buffers",
    "check_reduction",
    "device_ids",
    "dim",
    "find_unused_parameters",
    "gradient_as_bucket_view",
    "init_sync",
    "output_device",
    "static_graph",
}


class AttachingManager(Protocol):
    """What is needed of a Manager."""

    def attach(self, reduction: AttachedReduction) -> None: ...

    def backward_ended(self) -> None:
        """Finish the step, so that clipping after the backward sees the averages."""
        ...


class DistributedDataParallel(nn.Module):
    """Averages the gradients of ``module`` over the replicas of the quorum.

    Gradients are posted while backward computes them. Forward, ``state_dict`` and attribute access are those of a
    wrapper in torchft's and torch's manner: the inner module is ``.module`` and its keys start with "module.".

    Args:
        manager: the group's Manager.
        module: not yet used in a backward; parameters may be DTensors (FSDP2).
        bucket_cap_mb: size of a bucket in MiB.
        buffers: "reduce": persistent buffers (BatchNorm statistics) are averaged with each step; "local": they stay
            each replica's own, and are only put back if a step is refused.
        check_finite: have steps with infinite or NaN gradients skipped by all replicas; costs one pass over them.
        codec, error_feedback: send gradients in fewer bytes; see ``GradientReducer``.
        ignored: options of torch's class that have nothing to decide here (``find_unused_parameters``, ``static_graph`` ...):
            accepted for torchft's sake.

    Raises:
        ValueError: an argument is wrong, or a tensor cannot be reduced.
        TypeError: an argument is unknown.
    """

    def __init__(
        self,
        manager: AttachingManager,
        module: nn.Module,
        *,
        bucket_cap_mb: float = DEFAULT_BUCKET_BYTES / MEBIBYTE,
        buffers: Literal["reduce", "local"] = "reduce",
        check_finite: bool = False,
        codec: Codec | None = None,
        error_feedback: bool = False,
        **ignored: Any,
    ) -> None:
        super().__init__()
        unknown = sorted(ignored.keys() - _TORCH_OPTIONS)
        if unknown:
            raise TypeError(f"DistributedDataParallel has no argument {unknown[0]!r}")
        if buffers not in ("reduce", "local"):
            raise ValueError(f'buffers is {buffers!r}: it must be "reduce" or "local"')
        if bucket_cap_mb <= 0:
            raise ValueError(f"bucket_cap_mb is {bucket_cap_mb}: it must be above 0")
        self.module = module
        persistent = _persistent_buffers(module)
        self.reducer = GradientReducer(
            list(module.named_parameters()),
            bucket_bytes=max(1, round(bucket_cap_mb * MEBIBYTE)),
            first_bucket_bytes=FIRST_BUCKET_BYTES,
            check_finite=check_finite,
            buffers=persistent if buffers == "reduce" else (),
            local_buffers=persistent if buffers == "local" else (),
            codec=codec,
            error_feedback=error_feedback,
        )
        self._manager = manager
        self._last_backward = True
        self._callback_queued = False
        manager.attach(self.reducer)

    def forward(self, *inputs: Any, **named: Any) -> Any:
        """As the inner module's."""
        output = self.module(*inputs, **named)
        self._callback_queued = False
        if torch.is_grad_enabled():
            for leaf in tree_leaves(output):
                if isinstance(leaf, torch.Tensor) and leaf.requires_grad:
                    leaf.register_hook(self._backward_started)
        return output

    @contextmanager
    def no_sync(self) -> Generator[None]:
        """Within the block backwards only accumulate: further micro-batches of the step follow."""
        before, self._last_backward = self._last_backward, False
        try:
            with self.reducer.held():
                yield
        finally:
            self._last_backward = before

    def load_state_dict(self, state_dict: Mapping[str, Any], *arguments: Any, **named: Any) -> Any:
        """As ``nn.Module.load_state_dict``; also takes the keys of the inner module, without "module."."""
        if state_dict and not any(key.startswith("module.") for key in state_dict):
            return self.module.load_state_dict(state_dict, *arguments, **named)
        return super().load_state_dict(state_dict, *arguments, **named)

    def _backward_started(self, gradient: torch.Tensor) -> None:
        """Runs in the outermost backward, before any parameter's hook.

        A callback queued from here runs when that backward ends; queued from a parameter's hook it would belong to the
        innermost one, which ends too early under reentrant checkpointing and chunked losses.
        """
        del gradient
        if self._last_backward and not self._callback_queued:
            self._callback_queued = True
            engine: Any = torch.autograd.Variable._execution_engine  # pyright: ignore
            engine.queue_callback(self._backward_ended)

    def _backward_ended(self) -> None:
        self._callback_queued = False
        self.reducer.flush()
        self._manager.backward_ended()


def _persistent_buffers(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    saved = module.state_dict(keep_vars=True)
    return [(name, buffer) for name, buffer in module.named_buffers() if name in saved]
