"""LoRA written plainly: transformers' float64 model with W + alpha / rank * B A in place of W, trained by autograd.

`save_adapter` writes a PEFT folder with random A and B by the names that PEFT gives them. Shares no code with slimrl.
"""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from torch.nn.utils import parametrize

from tests.megatron import reference

RANK, ALPHA = 4, 6.0
ALL = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
LATENT = ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PREFIX = "base_model.model."


def published_weights(folder: Path) -> dict[str, Tensor]:
    """The tensors in a Hugging Face folder."""
    return {name: tensor for file in sorted(folder.glob("*.safetensors")) for name, tensor in load_file(file).items()}


def save_adapter(
    base: Path, folder: Path, *, targets: tuple[str, ...] = ALL, seed: int = 7, scale: float = 0.2
) -> Path:
    """Random A and B of standard deviation `scale`, large enough to change the model."""
    generator, tensors = torch.Generator().manual_seed(seed), {}
    sees = any("visual." in name for name in published_weights(base))
    for name, weight in published_weights(base).items():
        layer = name.removesuffix(".weight")
        if sees:  # PEFT has the names of transformers' modules, and the tower has no adapters
            layer = re.sub(r"^model\.(language_model\.)?", "model.language_model.", layer)
        if not any(part in name for part in ("visual.", "mtp_layers.")) and layer.rpartition(".")[2] in targets:
            for letter, shape in (("A", (RANK, weight.shape[1])), ("B", (weight.shape[0], RANK))):
                values = torch.randn(shape, generator=generator) * scale
                tensors[f"{PREFIX}{layer}.lora_{letter}.weight"] = values
    folder.mkdir(parents=True)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": RANK, "lora_alpha": ALPHA, "target_modules": list(targets), "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return folder


def changes(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """scale * B A, by the published name of the weight that it is added to."""
    layers = {name.removesuffix(".lora_A.weight") for name in tensors if name.endswith(".lora_A.weight")}
    return {
        f"{layer.removeprefix(PREFIX)}.weight": (ALPHA / RANK)
        * tensors[f"{layer}.lora_B.weight"]
        @ tensors[f"{layer}.lora_A.weight"]
        for layer in layers
    }


class _Change(nn.Module):
    """A parametrization: the weight plus what `change` makes of the current A and B."""

    def __init__(self, change: Callable[[], Tensor]):
        super().__init__()
        self.change = change

    def forward(self, weight: Tensor) -> Tensor:
        return weight + self.change()


def adapted_model(base: Path, masters: dict[str, nn.Parameter]) -> nn.Module:
    """The model of `base` with the adapters `masters`, of which gradients flow into A and B alone."""
    model = reference.load_model(base).requires_grad_(False)

    def change(name: str) -> Tensor:
        layer = PREFIX + name.removesuffix(".weight")
        return (ALPHA / RANK) * masters[f"{layer}.lora_B.weight"] @ masters[f"{layer}.lora_A.weight"]

    def experts(prefix: str, count: int, kinds: tuple[str, ...]) -> Callable[[], Tensor]:
        one = lambda number: torch.cat([change(f"{prefix}.{number}.{kind}.weight") for kind in kinds])  # noqa: E731
        return lambda: torch.stack([one(number) for number in range(count)])

    for name, module in list(model.named_modules()):
        if isinstance(module, nn.Linear) and f"{PREFIX}{name}.lora_A.weight" in masters:
            parametrize.register_parametrization(module, "weight", _Change(lambda name=name: change(name)))
        if f"{PREFIX}{name}.0.down_proj.lora_A.weight" in masters:  # transformers stacks the experts
            for stacked, kinds in (("gate_up_proj", ("gate_proj", "up_proj")), ("down_proj", ("down_proj",))):
                count = getattr(module, stacked).shape[0]
                parametrize.register_parametrization(module, stacked, _Change(experts(name, count, kinds)))
    return model


@dataclasses.dataclass
class Truth:
    """Per step the loss and the norm of the gradient; then A and B, and their gradients of the last step, clipped."""

    losses: list[float]
    gradient_norms: list[float]
    adapters: dict[str, Tensor]
    gradients: dict[str, Tensor]
    ref_log_probs: list[Tensor]


def train(base: Path, adapter: Path, rollout: Any, settings: reference.ReferenceSettings) -> Truth:
    """Trains A and B on the rollout; the reference is the base alone."""
    stored = load_file(adapter / "adapter_model.safetensors")
    masters = {name: nn.Parameter(tensor.double()) for name, tensor in stored.items()}
    model, anchor = adapted_model(base, masters), reference.load_model(base)
    samples, temperature = reference._split(rollout), settings.temperature
    with torch.no_grad():
        old = [reference._log_probs(model, sample, temperature)[0] for sample in samples]
        ref = [reference._log_probs(anchor, sample, temperature)[0] for sample in samples]
    adam = reference._adam(masters, settings)
    truth = Truth([], [], {}, {}, ref)
    size = len(samples) // settings.steps
    for step in range(settings.steps):
        adam.zero_grad()
        total = 0.0
        for row in range(step * size, (step + 1) * size):
            values, _, _ = reference._token_losses(model, samples[row], old[row], ref[row], settings)
            mask = samples[row]["mask"]
            loss = (values * mask).sum() / (max(float(mask.sum()), 1.0) * size)
            loss.backward()
            total += loss.item()
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), settings.clip_grad)
        adam.step()
        truth.losses.append(total)
        truth.gradient_norms.append(float(norm))
    truth.adapters = {name: tensor.detach() for name, tensor in masters.items()}
    truth.gradients = {name: tensor.grad for name, tensor in masters.items() if tensor.grad is not None}
    return truth
