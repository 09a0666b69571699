"""Policy-gradient training written plainly: transformers, one sample at a time, autograd and torch's AdamW, float64.

As the peer of bfloat16 training, only the model computes in bfloat16. Shares no code with slimrl, so that agreement is
meaningful.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import re
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from slimrl.data.images.batch import NO_VIDEO, BatchImages
from slimrl.data.train_batch import RolloutBatch


@dataclasses.dataclass
class ReferenceSettings:
    """The hyper-parameters, in plain numbers."""

    steps: int
    per_token: bool
    eps_clip: float
    eps_clip_high: float
    kl_coef: float  # of the k3 loss
    entropy_coef: float
    temperature: float
    lr: float
    weight_decay: float
    betas: tuple[float, float]
    eps: float
    clip_grad: float
    balance_coef: float = 0.0  # of the routers' losses, a mean over samples weighted by their tokens
    frozen: str | None = None  # regular expression for the names of frozen weights in transformers' model
    bias_rate: float = 0.0  # step size of the expert bias
    rounded: bool = False  # whether the weights are rounded to bfloat16 first
    tokens_per_sample: int | None = None  # constant divisor of a sample's sum; None: its trained tokens
    objective: str = "ppo"  # or "gspo", "cispo", and "likelihood" of supervised training
    teacher_coef: float = 0.0  # of the sampled reverse KL to a teacher, within the advantage
    compute_dtype: torch.dtype = torch.float64  # of weights and activations; sums over samples and Adam are float64


@dataclasses.dataclass
class ReferenceResult:
    """Per step: loss, gradient norm, fraction clipped (weighted like the loss); then the final state."""

    losses: list[float]
    gradient_norms: list[float]
    clip_fractions: list[float]
    weights: dict[str, Tensor]
    gradients: dict[str, Tensor]  # of the last step, clipped


def load_model(folder: Path) -> nn.Module:
    """The Hugging Face model in float64 with plain attention and one expert at a time."""
    from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForImageTextToText

    plain = {"attn_implementation": "eager", "experts_implementation": "eager"}
    sees = hasattr(AutoConfig.from_pretrained(folder), "vision_config")
    kind = AutoModelForImageTextToText if sees else AutoModelForCausalLM
    return kind.from_pretrained(folder, dtype=torch.float64, **plain)


def _split(batch: RolloutBatch) -> list[dict[str, Any]]:
    samples: list[dict[str, Any]] = []
    start, response_start = 0, 0
    for total, response, reward in zip(
        batch.total_lengths.tolist(), batch.response_lengths.tolist(), batch.rewards.tolist(), strict=True
    ):
        samples.append(
            {
                "tokens": batch.tokens[start : start + total],
                "mask": batch.loss_mask[response_start : response_start + response].double(),
                "reward": torch.tensor(reward, dtype=torch.float64),
            }
        )
        if batch.routed_experts is not None:
            samples[-1]["routes"] = batch.routed_experts[start : start + total].long()
        start, response_start = start + total, response_start + response
    if batch.images is not None:
        of_image, grids = batch.images.pixel_values.split(batch.images.grids.prod(1).tolist()), batch.images.grids
        for sample, own in zip(samples, batch.images.index.split(batch.images.counts.tolist()), strict=True):
            if len(own):
                sample["images"] = _as_transformers(batch.images, [of_image[image] for image in own], grids[own], own)
    return samples


def _as_transformers(images: BatchImages, patches: list[Tensor], grids: Tensor, own: Tensor) -> dict[str, Tensor]:
    """The arguments of transformers' model: its videos have all of their frames, also where these are apart."""
    seconds = torch.full((len(own),), NO_VIDEO) if images.seconds is None else images.seconds[own]
    still = [at for at, time in enumerate(seconds.tolist()) if time == NO_VIDEO]
    moving = [at for at in range(len(own)) if at not in still]
    found: dict[str, Tensor] = {}
    if still:
        found["pixel_values"] = torch.cat([patches[at] for at in still]).double()
        found["image_grid_thw"] = grids[still]
    if moving:
        found["pixel_values_videos"] = torch.cat([patches[at] for at in moving]).double()
        sizes = grids[moving].tolist()
        if bool((seconds[moving] > 0).any()):
            found |= {"video_grid_thw": grids[moving], "second_per_grid_ts": seconds[moving]}
        else:
            videos = [(len(list(frames)), *size[1:]) for size, frames in itertools.groupby(sizes)]
            found["video_grid_thw"] = torch.tensor(videos)
    return found


def _log_probs(model: nn.Module, sample: dict[str, Any], temperature: float) -> tuple[Tensor, Tensor, Tensor]:
    """Log-probabilities and entropies of the response; the balance loss of all routers over the whole sample."""
    tokens, length = sample["tokens"], sample["mask"].numel()
    model.routes = sample.get("routes")
    routed = {"output_router_logits": True} if hasattr(model.config, "num_experts") else {}
    seen = {name: value.to(model.dtype) if value.is_floating_point() else value for name, value in _seen(sample, model)}
    output = model(tokens[None], **routed, **seen)
    logits = output.logits[0, -length - 1 : -1].double() / temperature
    distribution = torch.distributions.Categorical(logits=logits)
    balance = sum(_balance(layer, model.config.num_experts_per_tok) for layer in output.router_logits) if routed else 0
    return distribution.log_prob(tokens[-length:]), distribution.entropy(), torch.as_tensor(balance)


def _seen(sample: dict[str, Any], model: nn.Module) -> Iterable[tuple[str, Tensor]]:
    """The arguments that describe the sample's images."""
    if "images" not in sample:
        return ()
    tokens, config = sample["tokens"], model.config
    kinds = (tokens == config.image_token_id).int() + 2 * (tokens == config.video_token_id).int()
    return {**sample["images"], "mm_token_type_ids": kinds[None]}.items()


def _replay_routes(policy: nn.Module) -> None:
    """Makes the routers of Qwen3-MoE take `policy.routes` [tokens, layers, experts per token]; -1: their own choice."""
    for number, layer in enumerate(policy.model.layers):
        layer.mlp.gate.forward = functools.partial(_replayed_gate, layer.mlp.gate, policy, number)


def _replayed_gate(gate: nn.Module, policy: nn.Module, layer: int, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    logits = torch.nn.functional.linear(hidden.reshape(-1, hidden.shape[-1]), gate.weight)
    probabilities, given = logits.softmax(-1), policy.routes[:, layer]
    chosen = torch.where(given < 0, probabilities.topk(gate.top_k).indices, given)
    weights = probabilities.gather(1, chosen)
    return logits, weights / weights.sum(-1, keepdim=True), chosen


def _balance(logits: Tensor, chosen: int) -> Tensor:
    """Experts x sum over experts of (fraction of choices) x (mean probability): arXiv:2101.03961, equation 4."""
    probabilities = logits.double().softmax(-1)
    experts = logits.shape[-1]
    choices = torch.nn.functional.one_hot(probabilities.topk(chosen).indices, experts).sum(1).double()
    return experts * (choices.mean(0) / chosen * probabilities.mean(0)).sum()


def train(
    policy_dir: Path,
    reference_dir: Path,
    batch: RolloutBatch,
    settings: ReferenceSettings,
    teacher_dir: Path | None = None,
    factors: list[Tensor] | None = None,
    make_optimizer: Callable[[dict[str, nn.Parameter], ReferenceSettings], torch.optim.Optimizer] | None = None,
    advantages: list[Tensor] | None = None,
) -> ReferenceResult:
    """Trains the policy on the rollout's samples, in `settings.steps` equal steps in order; by default with AdamW.

    `factors` of each sample's tokens multiply the policy loss; `advantages` of its tokens replace its reward.
    """
    policy, samples = _prepare(policy_dir, settings), _split(batch)
    if advantages is not None:
        samples = [{**sample, "reward": own} for sample, own in zip(samples, advantages, strict=True)]
    masters = {name: nn.Parameter(p.detach().double()) for name, p in policy.named_parameters()}
    _prepare_compute(policy, settings)
    if any("routes" in sample for sample in samples):
        _replay_routes(policy)
    anchor = _prepare(reference_dir, settings)
    _prepare_compute(anchor, settings)
    with torch.no_grad():
        old = [_log_probs(policy, sample, settings.temperature)[0] for sample in samples]
        ref = [_log_probs(anchor, sample, settings.temperature)[0] for sample in samples]
        if teacher_dir is not None:
            teacher = _prepare(teacher_dir, settings)
            for sample, log_probs in zip(samples, old, strict=True):
                gap = log_probs - _log_probs(teacher, sample, settings.temperature)[0]
                sample["reward"] = sample["reward"] - settings.teacher_coef * gap  # a value for each token
    for name, parameter in policy.named_parameters():
        parameter.requires_grad_(settings.frozen is None or re.search(settings.frozen, name) is None)
    optimizer = (make_optimizer or _adam)(masters, settings)
    load = _ExpertLoad(policy)
    result = ReferenceResult([], [], [], {}, {})
    size = len(samples) // settings.steps
    for step in range(settings.steps):
        rows = range(step * size, (step + 1) * size)
        trained = sum(float(samples[row]["mask"].sum()) for row in rows)
        total, clipped = 0.0, 0.0
        tokens = sum(samples[row]["tokens"].numel() for row in rows)
        optimizer.zero_grad()
        for row in rows:
            own = 1.0 if factors is None else factors[row]
            values, was_clipped, own_balance = _token_losses(policy, samples[row], old[row], ref[row], settings, own)
            balance = settings.balance_coef * own_balance * samples[row]["tokens"].numel() / tokens
            mask = samples[row]["mask"]
            divisor = trained if settings.per_token else max(float(mask.sum()), 1.0) * size
            constant = settings.tokens_per_sample
            loss = (values * mask).sum() / (divisor if constant is None else constant * size)
            (loss + balance).backward()
            _move_gradients(policy, masters)
            total += loss.item()
            clipped += float((was_clipped * mask).sum() / divisor)
        norm = torch.nn.utils.clip_grad_norm_(masters.values(), settings.clip_grad)
        optimizer.step()
        with torch.no_grad():
            for name, parameter in policy.named_parameters():
                parameter.copy_(masters[name])
        load.move_biases(settings.bias_rate)
        result.losses.append(total)
        result.gradient_norms.append(float(norm))
        result.clip_fractions.append(clipped)
    result.weights, result.gradients = final_state(masters, load)
    if policy.config.model_type == "qwen2_5_vl":  # in memory it has both parts one level deeper
        result.weights, result.gradients = (
            {
                name.replace("model.language_model.", "model.").replace("model.visual.", "visual."): tensor
                for name, tensor in tensors.items()
            }
            for tensors in (result.weights, result.gradients)
        )
    return result


def _prepare(folder: Path, settings: ReferenceSettings) -> nn.Module:
    """The model in float64, with weights rounded to bfloat16 if the settings say so."""
    model = load_model(folder)
    if settings.rounded:
        for parameter in model.parameters():
            parameter.data = parameter.data.bfloat16().double()
    return model


def _prepare_compute(model: nn.Module, settings: ReferenceSettings) -> None:
    for parameter in model.parameters():  # not the buffers: rotary frequencies and biases of experts stay exact
        parameter.data = parameter.data.to(settings.compute_dtype)


def _adam(masters: dict[str, nn.Parameter], settings: ReferenceSettings) -> torch.optim.AdamW:
    matrices = [p for p in masters.values() if p.dim() > 1]
    vectors = [p for p in masters.values() if p.dim() == 1]
    groups = [
        {"params": matrices, "weight_decay": settings.weight_decay},
        {"params": vectors, "weight_decay": 0.0},
    ]
    return torch.optim.AdamW(groups, lr=settings.lr, betas=settings.betas, eps=settings.eps)


def _move_gradients(policy: nn.Module, masters: dict[str, nn.Parameter]) -> None:
    for name, parameter in policy.named_parameters():
        if parameter.grad is not None:
            before = masters[name].grad
            masters[name].grad = parameter.grad.double() + (0 if before is None else before)
            parameter.grad = None


class _ExpertLoad:
    """Number of tokens of a step per expert, in models with an expert bias (arXiv:2408.15664)."""

    def __init__(self, policy: nn.Module):
        self._biases = {n: b for n, b in policy.named_buffers() if n.endswith("e_score_correction_bias")}
        self._chosen = {name: torch.zeros(bias.numel()) for name, bias in self._biases.items()}
        for name in self._biases:
            experts = policy.get_submodule(name.replace("gate.e_score_correction_bias", "experts"))
            experts.register_forward_pre_hook(functools.partial(self._count, name))

    def _count(self, name: str, _: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        if torch.is_grad_enabled():
            self._chosen[name] += torch.bincount(inputs[1].flatten(), minlength=self._chosen[name].numel())

    def move_biases(self, rate: float) -> None:
        """Moves biases towards experts with fewer tokens than the average."""
        for name, bias in self._biases.items():
            chosen = self._chosen[name]
            bias.add_(rate * torch.sign(chosen.mean() - chosen))
            chosen.zero_()

    def biases(self) -> dict[str, Tensor]:
        """The current biases, by name."""
        return {name: bias.double() for name, bias in self._biases.items()}


def final_state(masters: dict[str, nn.Parameter], load: _ExpertLoad) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """Weights, with the routers' biases, and gradients, by their names in published checkpoints."""
    gradients = {name: p.grad for name, p in masters.items() if p.grad is not None}
    return _as_published({name: p.detach() for name, p in masters.items()} | load.biases()), _as_published(gradients)


def _as_published(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Splits the experts into single tensors, as in checkpoints; transformers stacks them in memory."""
    result = {}
    for name, tensor in tensors.items():
        prefix, experts, kind = name.rpartition(".experts.")
        if not experts:
            result[name] = tensor
            continue
        for number, own in enumerate(tensor):
            parts = (
                {"gate_proj": own.chunk(2)[0], "up_proj": own.chunk(2)[1]} if kind == "gate_up_proj" else {kind: own}
            )
            result |= {f"{prefix}.experts.{number}.{part}.weight": value for part, value in parts.items()}
    return result


def _token_losses(
    policy: nn.Module,
    sample: dict[str, Any],
    old: Tensor,
    ref: Tensor,
    settings: ReferenceSettings,
    factors: Tensor | float = 1.0,
) -> tuple[Tensor, Tensor, Tensor]:
    log_probs, entropy, balance = _log_probs(policy, sample, settings.temperature)
    ratio, advantage = (log_probs - old).exp(), sample["reward"]
    if settings.objective == "gspo":  # one ratio of the whole response
        trained = sample["mask"].sum().clamp(min=1)
        ratio = ((((log_probs - old) * sample["mask"]).sum() / trained).exp()).expand_as(log_probs)
    bounded = torch.clamp(ratio, 1 - settings.eps_clip, 1 + settings.eps_clip_high)
    policy_loss, clipped = (
        -torch.minimum(ratio * advantage, bounded * advantage),
        bounded * advantage < ratio * advantage,
    )
    if settings.objective == "likelihood":
        policy_loss, clipped = -log_probs, torch.zeros_like(log_probs)
    if settings.objective == "cispo":
        policy_loss, clipped = -bounded.detach() * advantage * log_probs, bounded != ratio
    gap = ref - log_probs
    values = factors * policy_loss + settings.kl_coef * (gap.exp() - 1 - gap) - settings.entropy_coef * entropy
    return values, clipped.double(), balance
