"""Another agent written for slime: it sends token ids to the router, and the sample tracks its own tokens."""

from answer_format import last_digit
from slime.rollout.rm_hub.math_dapo_utils import compute_score
from slime.rollout.sglang_rollout import GenerateState
from slime.utils.http_utils import post
from slime.utils.types import Sample

MAX_CALLS = 2


async def generate(args, sample: Sample, sampling_params, evaluation=False) -> Sample:
    sample.rollout_log_probs = None
    sample.response = ""
    sample.response_length = 0
    sample.loss_mask = []
    masks = sample.loss_mask
    state = GenerateState(args)
    url = f"http://{args.sglang_router_ip}:{args.sglang_router_port}/generate"
    prompt_ids = state.tokenizer(sample.prompt, add_special_tokens=False)["input_ids"]
    sample.tokens = list(prompt_ids)
    ids, calls, response = [], 0, ""
    if args.rollout_max_context_len is not None:
        room = args.rollout_max_context_len
    else:
        room = args.context_parallel_size * args.max_tokens_per_gpu
    while True:
        left = room - len(prompt_ids) - len(ids)
        params = {**sampling_params, "max_new_tokens": min(sampling_params["max_new_tokens"], left)}
        output = await post(url, {"input_ids": prompt_ids + ids, "sampling_params": params, "return_logprob": True})
        if output["meta_info"]["finish_reason"]["type"] == "abort":
            sample.status = Sample.Status.ABORTED
            return sample
        scored = output["meta_info"]["output_token_logprobs"]
        new = [entry[1] for entry in scored]
        ids += new
        response += state.tokenizer.decode(new)
        sample.append_response_tokens(
            args,
            tokens=new,
            log_probs=[entry[0] for entry in scored],
            trainable=True,
            meta_info=output["meta_info"],
        )
        if calls == MAX_CALLS or (digit := last_digit(state.tokenizer.decode(new))) is None:
            break
        said = state.tokenizer(f"({digit})", add_special_tokens=False)["input_ids"]
        if len(prompt_ids) + len(ids) + len(said) >= room:
            break
        ids += said
        response += f"({digit})"
        calls += 1
        sample.append_response_tokens(args, tokens=said, trainable=False)
        assert len(ids) == len(sample.rollout_log_probs)
    sample.tokens = prompt_ids + ids
    sample.response_length = len(ids)
    sample.response = response
    sample.loss_mask = masks
    sample.tool_call_count = calls
    return sample


async def reward_func(args, sample, **kwargs):
    result = compute_score(f"Answer: {last_digit(sample.response)}", str(sample.label)[-1], strict_box_verify=False)
    return result["score"] + 0.1 * min(getattr(sample, "tool_call_count", 0), args.most_calls_that_count)
