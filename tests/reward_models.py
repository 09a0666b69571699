"""Tiny reward models with seeded weights, and the scores that transformers gives to a response."""

from __future__ import annotations

from pathlib import Path
from typing import Any

EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 64, "norm_topk_prob": True}


def write_reward_model(
    folder: Path,
    tokenizer: Any,
    family: str,
    *,
    shard_size: str = "5GB",
    seed: int = 0,
    head: str = "SequenceClassification",
    labels: int = 1,
) -> Path:
    """A 2-layer classifier of `family` ("Llama", "Qwen2", "Qwen3", "Qwen3Moe") with so many labels, and `tokenizer`."""
    import torch
    import transformers

    config = getattr(transformers, f"{family}Config")(
        vocab_size=len(tokenizer),
        hidden_size=64,
        intermediate_size=128,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        max_position_embeddings=1024,
        initializer_range=0.2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=tokenizer.eos_token_id,
        bos_token_id=None,
        num_labels=labels,
        **(EXPERTS if family == "Qwen3Moe" else {}),
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}For{head}")(config)
    if head == "TokenClassification":
        torch.nn.init.constant_(model.score.bias, 0.25)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    return folder


def write_process_reward_model(folder: Path, tokenizer: Any) -> Path:
    """A 2-layer Qwen2 with a head of two linear layers and 2 labels, as Qwen2.5-Math-PRM is published."""
    import json

    import torch
    from safetensors.torch import load_file, save_file

    write_reward_model(folder, tokenizer, "Qwen2", labels=2)
    weights = load_file(folder / "model.safetensors")
    weights.pop("score.weight")
    generator = torch.Generator().manual_seed(3)
    for name, shape in {"0.weight": (64, 64), "0.bias": (64,), "2.weight": (2, 64), "2.bias": (2,)}.items():
        weights[f"score.{name}"] = 0.2 * torch.randn(shape, generator=generator)
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((folder / "config.json").read_text())
    for name in ("id2label", "label2id", "num_labels"):
        config.pop(name, None)
    config["architectures"] = ["Qwen2ForProcessRewardModel"]
    config["auto_map"] = {"AutoModel": "modeling_qwen2_rm.Qwen2ForProcessRewardModel"}
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def two_layer_logits(folder: Path, row: list[int]) -> list[list[float]]:
    """The outputs at each token id: transformers' Qwen2 and the head by its formula, float32, in one pass."""
    import torch
    from safetensors.torch import load_file
    from transformers import Qwen2Config, Qwen2Model

    weights = load_file(folder / "model.safetensors")
    body = Qwen2Model(Qwen2Config.from_pretrained(folder)).float().eval()
    body.load_state_dict({name.removeprefix("model."): t for name, t in weights.items() if name.startswith("model.")})
    with torch.no_grad():
        hidden = body(torch.tensor([row])).last_hidden_state[0]
        inner = (hidden @ weights["score.0.weight"].T + weights["score.0.bias"]).clamp(min=0)
        return (inner @ weights["score.2.weight"].T + weights["score.2.bias"]).tolist()


def token_logits(folder: Path, row: list[int]) -> list[list[float]]:
    """The outputs at each of the token ids by transformers' own token classifier, float32, in one pass."""
    import torch
    from transformers import AutoModelForTokenClassification

    model = AutoModelForTokenClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return model(torch.tensor([row])).logits[0].tolist()


def logits(folder: Path, rows: list[list[int]]) -> list[float]:
    """The score of each row of token ids by transformers' own classifier, float32."""
    import torch
    from transformers import AutoModelForSequenceClassification

    model = AutoModelForSequenceClassification.from_pretrained(folder, dtype=torch.float32).eval()
    with torch.no_grad():
        return [float(model(torch.tensor([row])).logits) for row in rows]
