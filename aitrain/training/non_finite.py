"""Skips optimizer steps whose loss or gradient is NaN or inf, and ends the run if the weights are."""

from __future__ import annotations

from collections.abc import Callable, Iterable

import torch
from accelerate import Accelerator

from aitrain.engines.sharded_tensors import own_part
from aitrain.errors import ConfigError, DivergedError

MAX_SKIPPED_IN_A_ROW = 3
"""Consecutive skipped steps after which the run ends."""
MAX_SKIPPED_IN_A_ROW_FP16 = 20
"""The same for fp16: its loss scale starts at 2**16, and every overflow halves it."""


class NonFiniteGuard:
    """Keeps NaN and inf out of the weights and the optimizer state, and counts the steps that it skipped.

    The trainer passes it every loss, and the gradient norm before each optimizer step.
    """

    def __init__(self, accelerator: Accelerator, notify: Callable[[str], None]) -> None:
        self.accelerator = accelerator
        self.notify = notify
        self.losses: list[torch.Tensor] = []
        self.skipped = 0
        self.in_a_row = 0

    def see_loss(self, loss: torch.Tensor) -> None:
        """Record the loss of one forward pass, a scalar."""
        self.losses.append(torch.isfinite(loss.detach()).all())

    def before_step(self, model: torch.nn.Module, norm: torch.Tensor | float | None, step: int) -> None:
        """Clear the gradients if they, or a loss since the last step, are not finite on any process.

        An optimizer skips parameters without a gradient: neither momentum nor weight decay applies. With fp16 the
        gradient scaler skips the step itself, for which it needs the gradients.

        Raises:
            DivergedError: too many steps in a row were skipped.
        """
        values = [torch.isfinite(torch.as_tensor(0.0 if norm is None else norm, device=self.accelerator.device))]
        is_finite, self.losses = torch.stack([*values, *self.losses]).all(), []
        if self._everywhere(is_finite):
            self.in_a_row = 0
            return
        is_scaled = self.accelerator.scaler is not None
        if not is_scaled:
            model.zero_grad()
        self.skipped += 1
        self.in_a_row += 1
        if self.skipped == 1 and not is_scaled:
            self.notify(f"Skipped optimizer step {step}: non-finite loss or gradient (skipped_steps in metrics.jsonl).")
        if self.in_a_row >= (MAX_SKIPPED_IN_A_ROW_FP16 if is_scaled else MAX_SKIPPED_IN_A_ROW):
            raise DivergedError(
                f"Loss or gradient was NaN or inf in {self.in_a_row} steps in a row, up to step {step}.\n"
                f"None of them changed the weights: model/ has those of step {step - self.in_a_row}.\n"
                "Lower --lr, or use --dtype float32 or --mixed-precision no, and inspect the episodes in rollouts/.",
                has_finite_weights=True,
            )

    def check_weights(self, model: torch.nn.Module, step: int) -> None:
        """Check the weights after a step.

        Raises:
            DivergedError: a weight is not finite.
        """
        trained = (parameter for parameter in model.parameters() if parameter.requires_grad)
        if not self._everywhere(all_finite(trained, self.accelerator.device)):
            raise DivergedError(
                f"The weights are no longer finite after step {step}: it was too large.\n"
                "Lower --lr or --max-grad-norm.",
                has_finite_weights=False,
            )

    def _everywhere(self, is_finite: torch.Tensor) -> bool:
        """Whether it is true on every process: all of them skip a step or none, so that their weights stay equal."""
        wrong = self.accelerator.reduce((~is_finite).to(torch.int32), reduction="sum")
        return not wrong.item()


def all_finite(tensors: Iterable[torch.Tensor], device: torch.device) -> torch.Tensor:
    """Whether all values of all tensors are finite, as a scalar on the device; of a sharded tensor, those of this
    process's part. Allocates no copies of them."""
    parts = (own_part(tensor.detach()) for tensor in tensors)
    extremes = [torch.stack(torch.aminmax(part)).float() for part in parts if part.numel()]
    found = [torch.isfinite(pair).all().to(device) for pair in extremes]
    return torch.stack(found).all() if found else torch.ones((), dtype=torch.bool, device=device)


def check_weights_finite(model: torch.nn.Module, name: str) -> None:
    """Check a model after loading.

    Raises:
        ConfigError: a weight is NaN or inf.
    """
    for title, parameter in model.named_parameters():
        is_plain = parameter.is_floating_point() and parameter.element_size() > 1  # quantized ones are codes
        if is_plain and not all_finite([parameter], parameter.device):
            raise ConfigError(f"model: {name} is damaged: {title} holds NaN or inf\nDownload the model again.")
