"""Tiny reward models with seeded weights, and the scores that transformers gives to a response."""

from __future__ import annotations

from pathlib import Path
from typing import Any


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
    """A 2-layer classifier of `family` ("Llama", "Qwen2", "Qwen3") with so many labels, and `tokenizer`."""
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
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = getattr(transformers, f"{family}For{head}")(config)
    if head == "TokenClassification":
        torch.nn.init.constant_(model.score.bias, 0.25)
    model.save_pretrained(folder, max_shard_size=shard_size)
    tokenizer.save_pretrained(folder)
    return folder


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
