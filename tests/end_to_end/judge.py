"""A reward function that asks the frozen model `judge` of --sglang-config, as functions for slime do."""

from __future__ import annotations

from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import post


async def reward(args, sample, **kwargs):
    """1 for the right answer; the judge's continuation and weight version are kept in the sample's metadata."""
    payload = {"input_ids": sample.tokens[:4], "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}
    answer = await post(get_model_url(args, "judge"), payload)
    sample.metadata["judge"] = answer["output_ids"]
    sample.metadata["judge_version"] = answer["meta_info"]["weight_version"]
    return float(sample.response.strip() == str(sample.label))
