"""The reference model: a host copy of its weights, put into the training model for one forward pass."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch
from megatron.core.models.gpt import GPTModel
from torch import Tensor


class ReferenceWeights:
    """This rank's reference weights, in host memory (page-locked where there is a GPU)."""

    def __init__(self, model: GPTModel):
        """Copies the weights that `model` holds now."""
        self._reference = _host_buffers(model)
        self._own = _host_buffers(model)
        _save(model, self._reference)

    @contextlib.contextmanager
    def swapped_in(self, model: GPTModel) -> Iterator[None]:
        """Within the block `model` computes with the reference weights; afterwards its own are back, bit for bit."""
        _save(model, self._own)
        _fill(model, self._reference)
        try:
            yield
        finally:
            _fill(model, self._own)


def _host_buffers(model: GPTModel) -> dict[str, Tensor]:
    return {
        name: torch.empty_like(parameter, device="cpu", pin_memory=parameter.is_cuda, requires_grad=False)
        for name, parameter in model.named_parameters()
    }


@torch.no_grad()
def _save(model: GPTModel, buffers: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        buffers[name].copy_(parameter, non_blocking=True)
    if torch.cuda.is_available():
        torch.cuda.synchronize()


@torch.no_grad()
def _fill(model: GPTModel, buffers: dict[str, Tensor]) -> None:
    for name, parameter in model.named_parameters():
        parameter.copy_(buffers[name], non_blocking=True)
