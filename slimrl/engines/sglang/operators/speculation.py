"""Speculative decoding with a draft model on a CPU without SGLang's compiled kernels.

A draft model proposes a chain of tokens for each request (`--speculative-eagle-topk 1`), and the served model checks
the chain in one pass. SGLang's scheduler, workers and memory do this; this module has what they take from compiled
kernels and from attention for AMX: slots of the chain in the cache, the tokens that are kept, and attention of several
new tokens behind a cached prefix. `install` is called by `cpu_patches` in the server's process if it has a draft model.

SGLang checks greedily on a CPU, whatever a request asks for. Here every token of the chain is sampled from the served
model as without a draft, by SGLang's own sampler with the request's seed and the token's position, and the chain is
kept up to the first token that differs. So a request gets the tokens that it would get without a draft.
"""

from __future__ import annotations

import copy
import functools
import importlib
from collections.abc import Callable, Sequence
from typing import Any

import torch

ALGORITHM = "--speculative-algorithm"


def chain_slots(
    requests: torch.Tensor, tables: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, out: torch.Tensor, *_: Any
) -> None:
    """Writes the cache slots of the tokens [start, end) of every request into `out`, one request after another.

    `tables` [all requests, tokens]: slots of the tokens of `requests`.
    """
    places = [
        tables[row, start:end] for row, start, end in zip(*(x.tolist() for x in (requests, starts, ends)), strict=True)
    ]
    found = torch.cat(places) if places else out[:0]
    out[: len(found)] = found


def assign_slots(
    requests: torch.Tensor, tables: torch.Tensor, starts: torch.Tensor, ends: torch.Tensor, slots: torch.Tensor, *_: Any
) -> None:
    """The inverse: makes `slots` those of the tokens [start, end) of every request."""
    first = 0
    for row, start, end in zip(*(x.tolist() for x in (requests, starts, ends)), strict=True):
        tables[row, start:end] = slots[first : first + end - start].to(tables.dtype)
        first += end - start


def draft_slots(
    requests: torch.Tensor,
    tables: torch.Tensor,
    lengths: torch.Tensor,
    out: torch.Tensor,
    width: int,
    branches: int,
    steps: int,
) -> None:
    """Writes the slots of the `steps` tokens behind every request into `out`; `branches` is 1."""
    chain_slots(requests, tables, lengths, lengths + branches * steps, out)


def last_kept(tokens: torch.Tensor, counts: torch.Tensor, out: torch.Tensor, width: int) -> None:
    """Writes the last of the `counts` kept tokens of every request into `out`; `tokens` [requests x width]."""
    out.copy_(tokens.view(-1, width).gather(1, counts.long().view(-1, 1) - 1).view(-1))


def chain(
    parents: torch.Tensor,
    selected: torch.Tensor,
    lengths: torch.Tensor,
    mask: torch.Tensor,
    positions: torch.Tensor,
    index: torch.Tensor,
    next_token: torch.Tensor,
    next_sibling: torch.Tensor,
    branches: int,
    steps: int,
    tokens: int,
    *_: Any,
) -> None:
    """Writes `positions` and the links of chains of `tokens` tokens, whose first is the last that was kept.

    Raises NotImplementedError for trees.
    """
    if branches != 1:
        raise NotImplementedError(f"--speculative-eagle-topk {branches} makes trees of drafts: on a CPU give 1")
    place = torch.arange(tokens)
    positions.copy_((lengths.view(-1, 1) + place).view(-1))
    index.copy_(torch.arange(len(lengths)).view(-1, 1) * tokens + place)
    next_token.copy_(torch.where(place < tokens - 1, place + 1, -1).expand_as(next_token))
    next_sibling.fill_(-1)
    shape = (len(lengths), tokens, tokens)
    mask.view(shape).copy_((place <= place.view(-1, 1)).expand(shape))


def keep_agreed(
    predicts: torch.Tensor,
    accept_index: torch.Tensor,
    accept_token_num: torch.Tensor,
    candidates: torch.Tensor,
    target_predict: torch.Tensor,
    **links: Any,
) -> None:
    """Keeps the drafts before the first that differs from the model's token, and the model's token there.

    `candidates` [requests, tokens]: the last kept token and the drafts; `target_predict` the model's token behind each.
    Writes all of the model's tokens into `predicts` [requests x tokens], the kept ones' numbers into `accept_index`
    [requests, tokens], -1 behind them, and the number of kept drafts into `accept_token_num` [requests].
    """
    requests, tokens = candidates.shape
    agreed = (candidates[:, 1:] == target_predict[:, :-1]).int().cumprod(1).sum(1)
    numbers = torch.arange(requests * tokens).view(requests, tokens)[:, : accept_index.shape[1]]
    kept = torch.arange(accept_index.shape[1]) <= agreed.view(-1, 1)
    predicts.copy_(target_predict.reshape(-1))
    accept_index.copy_(torch.where(kept, numbers, -1))
    accept_token_num.copy_(agreed)


def move_slots(pointers: torch.Tensor, strides: torch.Tensor, targets: torch.Tensor, sources: torch.Tensor) -> None:
    """Moves nothing: the kept part of a chain is where it belongs. SGLang tries it when the cache is made."""
    if not targets.equal(sources):
        raise NotImplementedError("moving slots of a KV cache, which trees of drafts need: on a CPU give a top-k of 1")


def sampled(own: Callable[..., Any], sample: Callable[..., torch.Tensor]) -> Callable[..., Any]:
    """SGLang's `eagle_sample`, whose greedy choice it leads to the tokens that `sample` draws.

    `sample(probabilities, sampling parameters, positions, tokens per request)` returns a token per row.
    """

    def eagle_sample(verify: Any, batch: Any, output: Any, *rest: Any, **named: Any) -> Any:
        info = batch.sampling_info
        if batch.forward_mode.is_idle() or info.is_all_greedy:
            return own(verify, batch, output, *rest, **named)
        logits = output.next_token_logits
        repeated = info.temperatures.repeat_interleave(verify.draft_token_num, 0)
        chosen = sample((logits / repeated).softmax(-1), info, verify.positions, verify.draft_token_num)
        only = copy.copy(output)
        only.next_token_logits = torch.full_like(logits, float("-inf")).scatter_(1, chosen.long().view(-1, 1), 0.0)
        return own(verify, batch, only, *rest, **named)

    return eagle_sample


def draw(probabilities: torch.Tensor, info: Any, positions: torch.Tensor, tokens: int) -> torch.Tensor:
    """A token for each row of `probabilities` [requests x tokens, vocabulary], by SGLang's sampler."""
    from sglang.srt.layers import sampler

    def of_rows(values: Any) -> Any:
        return None if values is None else values.repeat_interleave(tokens, 0)

    seed = of_rows(info.sampling_seed)
    if not (info.need_top_p_sampling or info.need_top_k_sampling or info.need_min_p_sampling):
        return sampler.sampling_from_probs_torch(probabilities, sampling_seed=seed, positions=positions)
    limits = (of_rows(info.top_ks), of_rows(info.top_ps), of_rows(info.min_ps))
    return sampler.top_k_top_p_min_p_sampling_from_probs_torch(
        probabilities, *limits, info.need_min_p_sampling, seed, positions
    )


def with_verification(own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    """`forward_extend` of the torch-native backend, to which a batch that checks drafts does not tell its lengths."""

    @functools.wraps(own)
    def forward_extend(
        self: Any, q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **named: Any
    ) -> Any:
        if forward_batch.forward_mode.is_target_verify():
            tokens = forward_batch.spec_info.draft_token_num
            prefix, forward_batch = forward_batch.seq_lens, copy.copy(forward_batch)
            forward_batch.extend_prefix_lens = prefix
            forward_batch.extend_seq_lens = torch.full_like(prefix, tokens)
            forward_batch.seq_lens = prefix + tokens
        return own(self, q, k, v, layer, forward_batch, *rest, **named)

    return forward_extend


class DraftSteps:
    """The attention of a draft model that proposes one token after another: of all steps but the last.

    The token of the last one is not read. `make` returns a torch-native backend.
    """

    def __init__(self, make: Callable[[], Any], steps: int) -> None:
        self.attn_backends = [_named(make()) for _ in range(steps - 1)]
        self._lengths: list[torch.Tensor] = []  # of the requests, with the drafts before each step
        for step, backend in enumerate(self.attn_backends):
            backend.forward_decode = self._with_drafts(step, backend.forward_decode)

    def init_forward_metadata(self, forward_batch: Any) -> None:
        """For the drafts of a batch, as SGLang calls it."""
        self._lengths = [forward_batch.seq_lens + step + 1 for step in range(len(self.attn_backends))]
        for backend in self.attn_backends:
            backend.init_forward_metadata(forward_batch)

    def _with_drafts(self, step: int, own: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
        def forward_decode(q: Any, k: Any, v: Any, layer: Any, forward_batch: Any, *rest: Any, **named: Any) -> Any:
            batch = copy.copy(forward_batch)
            batch.seq_lens = self._lengths[step]
            return own(q, k, v, layer, batch, *rest, **named)

        return forward_decode


def install(words: Sequence[str]) -> None:
    """Gives SGLang these functions, and torch-native attention to draft models, if `words` of its flags ask for drafts.

    Before SGLang's modules are imported, which take the kernels by name.
    """
    if not any(word.startswith(ALGORITHM) for word in words):
        return
    kernels = importlib.import_module("sgl_kernel")  # a placeholder, whose names SGLang's modules import

    for name, function in (
        ("assign_req_to_token_pool_cpu", assign_slots),
        ("assign_extend_cache_locs_cpu", chain_slots),
        ("assign_draft_cache_locs_contiguous_cpu", draft_slots),
        ("fill_bonus_tokens_cpu", last_kept),
        ("build_tree_kernel_efficient_cpu", chain),
        ("verify_tree_greedy_cpu", keep_agreed),
        ("copy_all_layer_kv_cache_cpu", move_slots),
    ):
        setattr(kernels, name, function)
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
    from sglang.srt.speculative import eagle_worker_common
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    TorchNativeAttnBackend.forward_extend = with_verification(TorchNativeAttnBackend.forward_extend)

    def of_decoding(self: Any) -> Any:
        if self.speculative_num_steps == 1:  # the draft is that of the last pass over kept tokens
            return None
        return DraftSteps(lambda: TorchNativeAttnBackend(self.draft_model_runner), self.speculative_num_steps)

    # SGLang's tables of the attention of draft models lack its torch-native one
    DraftBackendFactory.create_decode_backend = of_decoding
    DraftBackendFactory.create_draft_extend_backend = lambda self: _named(
        TorchNativeAttnBackend(self.draft_model_runner)
    )
    eagle_worker_common.eagle_sample = sampled(eagle_worker_common.eagle_sample, draw)


def _named(backend: Any) -> Any:
    """The attention with the names under which SGLang looks it up."""
    backend.prefill_attention_backend_str = backend.decode_attention_backend_str = "torch_native"
    return backend
