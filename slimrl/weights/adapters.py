"""LoRA adapters beside the weights of a model: their tensors in a linear layer, the merged weight, first values.

Works on any module built like GPTModel; megatron-core is not imported. `slimrl.megatron.model.lora` has the layers.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterator, Sequence

import torch
import xxhash
from torch import Tensor, nn

from slimrl.models.adapters import PART_OF_NAME
from slimrl.weights.reshard import global_name, global_tensors

Stages = nn.Module | Sequence[nn.Module]


class Adapter(nn.Module):
    """A and B of one projection, this rank's part: `lora_A` [rank, inputs], `lora_B` [outputs, rank]."""

    def __init__(self, rank: int, inputs: int, outputs: int, like: Tensor):
        """Both zero, in the dtype and on the device of `like`."""
        super().__init__()
        self.lora_A = nn.Parameter(like.new_zeros(rank, inputs))
        self.lora_B = nn.Parameter(like.new_zeros(outputs, rank))

    def forward(self) -> tuple[Tensor, Tensor]:
        """A and B; megatron-core's hooks of this call wait until both are gathered (--overlap-param-gather)."""
        return self.lora_A, self.lora_B


class AdaptedLinear(nn.Module):
    """A linear layer with a `weight` [outputs, inputs] and the adapters of some of its projections.

    The projections without an adapter have only a width. `join` puts the outputs of all projections, [..., width]
    each, in the order of the weight's rows.
    """

    weight: nn.Parameter
    adapters: nn.ModuleDict
    widths: dict[str, int]  # of all projections in the weight, in order
    scale: float
    enabled = True

    def join(self, outputs: Sequence[Tensor]) -> Tensor:
        """[..., outputs] from [..., width] of each projection."""
        return torch.cat(list(outputs), dim=-1)

    @torch.no_grad()
    def merged_weight(self) -> Tensor:
        """`weight` + scale * B A in its dtype, added in float32 or in the weight's dtype if that is wider."""
        weight, found = self.weight, []
        wide = torch.promote_types(weight.dtype, torch.float32)
        for name, width in self.widths.items():
            if name in self.adapters:
                a, b = self.adapters[name]()
                found.append((b.to(wide) @ a.to(wide)).mul_(self.scale))
            else:
                found.append(weight.new_zeros(width, weight.shape[1], dtype=wide))
        change = self.join([one.t() for one in found]).t()
        return weight.detach().to(wide).add(change).to(weight.dtype)


def adapted_layers(model: Stages) -> Iterator[AdaptedLinear]:
    """Every linear layer with adapters of a model, or of all its chunks."""
    for chunk in (model,) if isinstance(model, nn.Module) else model:
        yield from (module for module in chunk.modules() if isinstance(module, AdaptedLinear))


def merged_weights(model: Stages) -> dict[str, Callable[[], Tensor]]:
    """A function that merges each weight with adapters, by the weight's global name."""
    return {
        global_name(chunk, f"{name}.weight"): module.merged_weight
        for chunk in ((model,) if isinstance(model, nn.Module) else model)
        for name, module in chunk.named_modules()
        if isinstance(module, AdaptedLinear)
    }


@contextlib.contextmanager
def without_adapters(model: Stages) -> Iterator[None]:
    """Within the block the model computes as its base."""
    layers = list(adapted_layers(model))
    for layer in layers:
        layer.enabled = False
    try:
        yield
    finally:
        for layer in layers:
            layer.enabled = True


@torch.no_grad()
def initialize_adapters(model: Stages, seed: int, tp_rank: int, tp_size: int) -> None:
    """A as PEFT draws it, uniform within 1 / sqrt(inputs) of 0, and B zero: the model computes as its base.

    The draw of a tensor depends only on `seed` and its name, so that it is the same in every layout.
    """
    for name, tensor in global_tensors(model, adapters=True).items():
        if name.endswith("lora_B"):
            tensor.zero_()
            continue
        divided = ".linear_proj" + PART_OF_NAME in name or ".linear_fc2" + PART_OF_NAME in name
        size = 1 if ".experts." in name or not divided else tp_size
        rank, inputs = tensor.shape[0], tensor.shape[1] * size
        generator = torch.Generator().manual_seed(xxhash.xxh3_64_intdigest(f"lora_A {seed} {name}".encode()) >> 1)
        whole = (2 * torch.rand(rank, inputs, generator=generator) - 1) / math.sqrt(inputs)
        first = tp_rank * tensor.shape[1] if size > 1 else 0
        tensor.copy_(whole[:, first : first + tensor.shape[1]])
