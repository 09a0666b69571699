"""Full rollouts over real servers, for the tests of this folder."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.rollout.dataset.data_source import RolloutDataSource
from slimrl.rollout.rollout_function import RolloutOutput
from slimrl.rollout.rollout_generator import RolloutGenerator

PROMPTS = 24


def rollout_args(folder: Path, **changes: Any) -> Arguments:
    """Partial rollouts of 4 out of 16 groups in flight, over prompts of the tiny model's characters."""
    data = folder / "prompts.jsonl"
    data.write_text("".join(json.dumps({"prompt": f"{i}+{i + 1}*3"}) + "\n" for i in range(PROMPTS)))
    values = {
        "prompt_data": str(data),
        "input_key": "prompt",
        "custom_rm_path": "tests.rollout.scripted_engine.score",
        "rollout_batch_size": 4,
        "over_sampling_batch_size": 16,
        "n_samples_per_prompt": 2,
        "rollout_max_response_len": 250,
        "partial_rollout": True,
        "sglang_options": {"enable_deterministic_inference": True},
    }
    return Arguments(**{**values, **changes})


async def roll(client, args: Arguments, tokenizer: Any, rollouts: int) -> tuple[list[RolloutOutput], RolloutDataSource]:
    """Runs `count` rollouts in sequence."""
    source = RolloutDataSource(args, tokenizer)
    generator = RolloutGenerator.from_args(args, tokenizer, client)
    outputs = [await generator.generate_rollout(number, source) for number in range(rollouts)]
    generator.close()
    return outputs, source


def samples_of(outputs: list[RolloutOutput]) -> list[Sample]:
    return [sample for output in outputs for group in output.groups for sample in group]


def largest_difference(model: torch.nn.Module, sample: Sample) -> float:
    """Between the sample's log-probabilities and those of a transformers model, over the trained tokens."""
    with torch.no_grad():
        scores = model(torch.tensor([sample.tokens])).logits[0].log_softmax(-1)
    rows = torch.arange(sample.prompt_length - 1, len(sample.tokens) - 1)
    expected = scores[rows, torch.tensor(sample.tokens[sample.prompt_length :])]
    difference = (torch.tensor(sample.rollout_log_probs) - expected).abs()
    return difference[torch.tensor(sample.loss_mask).bool()].max().item()
