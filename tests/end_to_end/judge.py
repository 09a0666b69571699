"""Reward functions that ask single servers and the frozen model `judge` of --sglang-config, as slime's do."""

from __future__ import annotations

from slime.rollout.sglang_rollout import get_model_url
from slime.utils.http_utils import get, post

from slimrl.compatibility.rollout_helpers import RequestFailedError
from slimrl.models.adapters import ADAPTER_NAME
from tests.sglang.draft_chains import ASKED_FOR, CHAIN

SCORED = 8  # every 8th sample is scored by every server of the policy


async def reward(args, sample, **kwargs):
    """1 for the right answer; the judge's continuation and weight version are kept in the sample's metadata."""
    payload = {"input_ids": sample.tokens[:4], "sampling_params": {"max_new_tokens": 4, "temperature": 0.0}}
    answer = await post(get_model_url(args, "judge"), payload)
    sample.metadata["judge"] = answer["output_ids"]
    sample.metadata["judge_version"] = answer["meta_info"]["weight_version"]
    return float(sample.response.strip() == str(sample.label))


async def reward_and_scores(args, sample, **kwargs):
    """`reward`; of some samples the log-probabilities by each server of the policy are kept, by its address."""
    if (sample.index or 0) % SCORED == 0:
        scores = {url: await _score(args, sample, url) for url in await _servers(args)}
        sample.metadata["scores"] = {url: score for url, score in scores.items() if score is not None}
    return await reward(args, sample, **kwargs)


async def reward_and_drafts(args, sample, **kwargs):
    """1 for the right answer; of some samples the answer and the drafts of each server of the policy are kept."""
    if (sample.index or 0) % SCORED == 0:
        sample.metadata["answers"] = [await _answer(args, sample, url) for url in await _servers(args)]
    return float(sample.response.strip() == str(sample.label))


async def _answer(args, sample, url):
    """A server's greedy answer, CHAIN tokens longer than ASKED_FOR, and the right and all drafts of ASKED_FOR."""
    told = []
    for tokens in (ASKED_FOR, ASKED_FOR + CHAIN):
        options = {"max_new_tokens": tokens, "temperature": 0.0, "ignore_eos": True}
        payload = {"input_ids": sample.tokens[: -sample.response_length], "sampling_params": options}
        told.append(await post(f"{url}/generate", payload, max_retries=1, headers=_key(args)))
    drafts = [told[0]["meta_info"].get(f"spec_num_{name}_drafts", 0) for name in ("correct", "proposed")]
    return told[1]["output_ids"], *drafts


def _key(args):
    """The servers' key, which `post` sends to routers only."""
    return {"Authorization": f"Bearer {args.sglang_options['api_key']}"}


async def _servers(args):
    """The addresses of the policy's servers, from their router."""
    found = await get(get_model_url(args, "actor", "/workers"))
    return sorted(worker["url"] for worker in found["workers"])


async def _score(args, sample, url):
    """The weight version of one server, and its log-probabilities of the response; None if the server was lost."""
    payload = {
        "input_ids": sample.tokens,
        "sampling_params": {"max_new_tokens": 1, "temperature": 0.0},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    if args.engines_have_adapters:
        payload["lora_path"] = ADAPTER_NAME
    try:
        told = (await post(f"{url}/generate", payload, max_retries=1, headers=_key(args)))["meta_info"]
    except RequestFailedError:
        return None
    log_probs = [entry[0] for entry in told["input_token_logprobs"]]
    return told["weight_version"], log_probs[-sample.response_length :]
