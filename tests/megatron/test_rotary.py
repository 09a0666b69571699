"""Rotary tables built once per micro-batch equal those that each megatron-core layer builds itself."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch
from torch import Tensor

from slimrl.arguments import Arguments
from tests.megatron import tiny
from tests.megatron.launch import RankPool
from tests.megatron.layouts import CP2, FULL, TP2_SP, selective

LENGTHS = [12, 4, 20, 8]  # multiples of four: each of two ranks holds two chunks
LATENT = {name: value for name, value in tiny.LATENT_FLAGS.items() if not name.startswith(("moe_", "num_experts"))}
YARN = LATENT | {
    "rope_type": "yarn",
    "rotary_scaling_factor": 4.0,
    "original_max_position_embeddings": 8,
    "mscale": 1.0,
    "mscale_all_dim": 0.5,  # the two differ, so that cosine and sine are scaled
}
VARIANTS: dict[str, dict[str, Any]] = {
    "rope": {},
    "rope in bfloat16": {"bf16": True},
    "rope stretched as Llama 3's": {"use_rope_scaling": True, "rope_scaling_factor": 8.0},
    "half of the channels": {"rotary_percent": 0.5},
    "interleaved": {"rotary_interleaved": True},
    "half of the channels, interleaved": {"rotary_percent": 0.5, "rotary_interleaved": True},
    "latent": LATENT,
    "latent, YaRN": YARN,
    "latent, YaRN, in bfloat16": YARN | {"bf16": True},
}
RECOMPUTED: dict[str, dict[str, Any]] = {
    "rope, full": FULL,
    "rope, core_attn": selective("core_attn"),
    "latent, YaRN, full": YARN | FULL,
    "latent, YaRN, mla_up_proj": YARN | selective("mla_up_proj"),
}


@dataclasses.dataclass
class Comparison:
    """One model's two passes over the same pack."""

    differing: list[str]  # the outputs and gradients that are not bit-identical
    asked: tuple[int, int]  # calls of megatron-core's own path: with slimrl's layout, with boundaries only
    gathered: int  # how often token frequencies were computed with slimrl's layout


def compare(rank: int, world_size: int, init_method: str, models: dict[str, Arguments]) -> dict[str, Comparison]:
    from megatron.core.models.common.embeddings import rope_utils
    from megatron.core.packed_seq_params import PackedSeqParams

    from slimrl.megatron import parallel
    from slimrl.megatron.model import micro_batch
    from slimrl.megatron.model.micro_batch import local_rows
    from slimrl.megatron.model.model_builder import build_model

    args = next(iter(models.values()))
    state = parallel.initialize(args, rank=rank, world_size=world_size, local_rank=rank, init_method=init_method)
    lengths = torch.tensor(LENGTHS)
    generator = torch.Generator().manual_seed(7)
    tokens = torch.randint(0, tiny.VOCAB_SIZE, (sum(LENGTHS),), generator=generator)
    tokens = tokens[local_rows(lengths, state.cp_rank, state.cp_size)].unsqueeze(0)
    own = micro_batch.packed_sequences(lengths, state.cp_size, state.device, rank=state.cp_rank)
    boundaries = {field.name: getattr(own, field.name) for field in dataclasses.fields(PackedSeqParams)}
    calls = {"asked": 0, "gathered": 0}

    def counted(name: str, function: Any) -> Any:
        def call(*inputs: Any, **settings: Any) -> Any:
            calls[name] += 1
            return function(*inputs, **settings)

        return call

    rope_utils._apply_rotary_pos_emb_thd = counted("asked", rope_utils._apply_rotary_pos_emb_thd)
    gather = micro_batch.TokenFrequencies.of
    micro_batch.TokenFrequencies.of = lambda self, positions, make: gather(self, positions, counted("gathered", make))

    def run(model: torch.nn.Module, packed: PackedSeqParams) -> tuple[dict[str, Tensor], dict[str, int]]:
        calls.update(asked=0, gathered=0)
        model.zero_grad()
        logits = model(tokens, None, None, packed_seq_params=packed)
        (logits.float() * torch.linspace(-1, 1, logits.numel()).view_as(logits)).sum().backward()
        found = {name: parameter.grad.clone() for name, parameter in model.named_parameters()}
        return found | {"logits": logits.detach().clone()}, dict(calls)

    comparisons = {}
    for name, model_args in models.items():
        model = build_model(model_args, state).train()
        ours, our_calls = run(model, own)
        theirs, their_calls = run(model, PackedSeqParams(**boundaries))
        comparisons[name] = Comparison(
            differing=[key for key, value in theirs.items() if not torch.equal(value, ours[key])],
            asked=(our_calls["asked"], their_calls["asked"]),
            gathered=our_calls["gathered"],
        )
    parallel.shutdown()
    return comparisons


def check(pool: RankPool, variants: dict[str, dict[str, Any]], changes: dict[str, Any]) -> None:
    models = {name: tiny.tiny_args(**(flags | changes)) for name, flags in variants.items()}
    for found in pool.run(compare, models):
        for name, comparison in found.items():
            again = 2 if name in RECOMPUTED and "core_attn" not in name else 1
            # queries and keys of two layers
            expected = Comparison(differing=[], asked=(0, 4 * again), gathered=1)
            assert comparison == expected, name


@pytest.mark.slow
def test_full_sequences_on_one_rank(one_rank: RankPool):
    check(one_rank, VARIANTS | RECOMPUTED, {})


@pytest.mark.slow
def test_sequences_split_over_two_ranks(two_ranks: RankPool):
    check(two_ranks, VARIANTS | RECOMPUTED, CP2)


@pytest.mark.slow
def test_tokens_split_over_two_tensor_parallel_ranks(two_ranks: RankPool):
    chosen = {name: VARIANTS[name] for name in ("rope", "half of the channels, interleaved", "latent, YaRN")}
    check(two_ranks, chosen | {"rope, full": FULL}, TP2_SP)


def test_frequencies_are_freed_after_the_pass_and_boundaries_are_kept():
    from slimrl.megatron.model.micro_batch import for_one_pass, packed_sequences

    own = packed_sequences(torch.tensor(LENGTHS), 2, torch.device("cpu"), rank=1)
    # the second and third quarter of each sequence
    assert own.positions.tolist() == [*range(3, 9), *range(1, 3), *range(5, 15), *range(2, 6)]
    table = torch.arange(20.0).view(20, 1, 1, 1)
    made = []

    def make() -> tuple[Tensor, float]:
        made.append(1)
        return table, 0.5

    for_pass = for_one_pass(own)
    assert for_pass.cu_seqlens_q is own.cu_seqlens_q and for_pass.lengths == own.lengths
    for _ in range(3):
        rows, scale = for_pass.token_frequencies(make)
        assert (rows.flatten().tolist(), scale) == (own.positions.tolist(), 0.5)
    assert (len(made), own.frequencies) == (1, None)


def test_layers_with_the_fused_kernel_keep_megatron_core_attention():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.attention import SelfAttention
    from megatron.core.transformer.multi_latent_attention import MLASelfAttention

    from slimrl.megatron.config import transformer_config
    from slimrl.megatron.model.layers import PackedLatentSelfAttention, PackedSelfAttention, with_token_frequencies

    for flags, latent, plain, own in (
        ({}, False, SelfAttention, PackedSelfAttention),
        (LATENT, True, MLASelfAttention, PackedLatentSelfAttention),
    ):
        config = transformer_config(tiny.tiny_args(**flags))
        for fused, expected in ((True, plain), (False, own)):
            config.apply_rope_fusion = fused
            layer = get_gpt_layer_local_spec(multi_latent_attention=latent, normalization="RMSNorm")
            assert with_token_frequencies(layer, config).submodules.self_attention.module is expected


def test_fused_kernel_is_not_used_for_interleaved_rotary(
    monkeypatch: pytest.MonkeyPatch,
):
    from slimrl.megatron import config

    monkeypatch.setattr(config, "transformer_impl", lambda _: "transformer_engine")
    for flags, fused in (({}, True), ({"rotary_interleaved": True}, False), (LATENT, False), (YARN, True)):
        assert config._model_overrides(tiny.tiny_args(**flags))["apply_rope_fusion"] is fused
