"""What the groups of a bench train."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Workload:
    """A model of linear layers on made-up data. The defaults are a small one, with steps of about 40 ms."""

    widths: tuple[int, ...] = (256, 512, 256, 64)
    batch: int = 32
    adam: bool = False
    """AdamW instead of SGD: twice the parameters more to fetch for a group that joins."""
    device_time_s: float = 0.03
    """Stands for the accelerator's part of the step, so that three groups fit on two cores."""
    digest_every: int = 1
    """Tell a checksum of the parameters each so many steps."""

    @property
    def parameters(self) -> int:
        """How many the model has."""
        pairs = zip(self.widths, self.widths[1:], strict=False)
        return sum(fan_in * fan_out + fan_out for fan_in, fan_out in pairs)

    @property
    def state_bytes(self) -> int:
        """Of parameters and optimizer."""
        return 4 * self.parameters * (3 if self.adam else 1)
