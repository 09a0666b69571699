"""The recomputation settings passed to megatron-core when its recomputation kernels are missing."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from slimrl.megatron import config
from tests.megatron import tiny


def selective(*modules: str, **more: Any) -> Any:
    return tiny.tiny_args(recompute_granularity="selective", recompute_modules=list(modules), **more)


def test_flag_is_passed_on_and_defaults_to_core_attn():
    assert config.transformer_config(selective("mlp", "layernorm")).recompute_modules == ["mlp", "layernorm"]
    assert config.transformer_config(tiny.tiny_args(recompute_granularity="selective")).recompute_modules == [
        "core_attn"
    ]


@pytest.mark.skipif(torch.cuda.is_available(), reason="about machines without grouped products")
def test_expert_activations_without_grouped_gemm_are_kept_with_a_note():
    args = selective("moe_act", "core_attn", **tiny.MOE_FLAGS, moe_grouped_gemm=True)
    assert config.transformer_config(args).recompute_modules == ["core_attn"]
    assert "--moe-grouped-gemm" in config.kernels_without_effect(args)


@pytest.mark.parametrize("implementation", ["local", "transformer_engine"])
def test_norms_are_recomputed_by_both_layer_implementations(implementation: str):
    assert config._recomputed_modules(selective("layernorm"), implementation == "transformer_engine") == ["layernorm"]
