"""A user's agent written for slime: it sends text to the router and assembles tokens and masks by hand."""

import asyncio

from answer_format import last_digit
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_TURNS = 3
LOOKING_UP = asyncio.Semaphore(8)


async def look_up(text):
    async with LOOKING_UP:
        await asyncio.sleep(0)
        return f"({last_digit(text)})"


async def generate(args, sample: Sample, sampling_params) -> Sample:
    assert not args.partial_rollout
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    response, ids, mask, log_probs = "", [], [], []
    budget = sampling_params["max_new_tokens"]
    for _ in range(MAX_TURNS):
        payload = {
            "text": sample.prompt + response,
            "sampling_params": {**sampling_params, "max_new_tokens": max(budget // MAX_TURNS, 1)},
            "return_logprob": True,
        }
        output = await post(url, payload)
        reason = output["meta_info"]["finish_reason"]["type"]
        if reason == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        scored = output["meta_info"]["output_token_logprobs"]
        ids += [entry[1] for entry in scored]
        log_probs += [entry[0] for entry in scored]
        mask += [1] * len(scored)
        response += output["text"]
        if last_digit(output["text"]) is None:
            break
        found = await look_up(output["text"])
        found_ids = state.tokenizer(found, add_special_tokens=False)["input_ids"]
        ids += found_ids
        log_probs += [0.0] * len(found_ids)
        mask += [0] * len(found_ids)
        response += found
    sample.tokens = prompt_ids + ids
    sample.response_length = len(ids)
    sample.response = response
    sample.loss_mask = mask
    sample.rollout_log_probs = log_probs
    match reason:
        case "length":
            sample.status = Sample.Status.TRUNCATED
        case "stop":
            sample.status = Sample.Status.COMPLETED
    return sample


async def reward_func(args, sample, **kwargs):
    if not isinstance(sample, Sample):
        raise TypeError("no Sample")
    return 1.0 if last_digit(sample.response) == last_digit(str(sample.label)) else 0.0
