"""A two-layer Qwen3 for tests: Hugging Face folders, matching flags, recorded rollouts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch

from slimrl.arguments import Arguments
from slimrl.data.train_batch import RolloutBatch

VOCAB_SIZE = 117  # padded to 128: eleven columns that must not count


def save_qwen3(folder: Path, *, seed: int, tied: bool = True, layers: int = 2) -> Path:
    """A randomly initialised model as a Hugging Face folder; weights large enough to make logits matter."""
    from transformers import Qwen3ForCausalLM

    torch.manual_seed(seed)
    return _save(Qwen3ForCausalLM(config_of_qwen3(layers=layers, tied=tied)), folder)


def config_of_qwen3(*, layers: int, tied: bool) -> Any:
    """The configuration of that model."""
    from transformers import Qwen3Config

    return Qwen3Config(**_SHAPE, num_hidden_layers=layers, tie_word_embeddings=tied)


def save_qwen3_moe(folder: Path, *, seed: int, layers: int = 2) -> Path:
    """The same with layers of four experts, two per token; `MOE_FLAGS` describes them."""
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(seed)
    config = Qwen3MoeConfig(
        **_SHAPE,
        num_hidden_layers=layers,
        tie_word_embeddings=True,
        num_experts=4,
        num_experts_per_tok=2,
        moe_intermediate_size=32,
        norm_topk_prob=True,
    )
    return _save(Qwen3MoeForCausalLM(config), folder)


def save_deepseek(folder: Path, *, seed: int, layers: int = 2) -> Path:
    """A DeepSeek-V3: latent attention; after the first layer shared and grouped experts with a routing bias.

    `LATENT_FLAGS` describes it.
    """
    from transformers import DeepseekV3Config, DeepseekV3ForCausalLM

    torch.manual_seed(seed)
    shape = {name: value for name, value in _SHAPE.items() if name not in ("head_dim", "num_key_value_heads")}
    config = DeepseekV3Config(
        **shape,
        num_hidden_layers=layers,
        num_key_value_heads=4,
        tie_word_embeddings=False,
        rope_parameters={"rope_theta": 10000.0, "rope_type": "default"},
        first_k_dense_replace=1,
        moe_intermediate_size=32,
        kv_lora_rank=32,
        q_lora_rank=48,
        qk_nope_head_dim=16,
        qk_rope_head_dim=8,
        v_head_dim=16,
        n_routed_experts=8,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        n_shared_experts=1,
        routed_scaling_factor=1.5,
        norm_topk_prob=True,
    )
    model = DeepseekV3ForCausalLM(config)
    with torch.no_grad():
        for name, bias in model.named_buffers():
            if name.endswith("e_score_correction_bias"):  # large enough to change the routing
                bias.copy_(0.2 * torch.randn_like(bias))
    return _save(model, folder)


_SHAPE: dict[str, Any] = dict(
    vocab_size=VOCAB_SIZE,
    hidden_size=64,
    intermediate_size=128,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=16,
    max_position_embeddings=512,
    rms_norm_eps=1e-6,
    initializer_range=0.1,
)
MOE_FLAGS: dict[str, Any] = dict(
    num_experts=4,
    moe_layer_freq=[1, 1],
    moe_ffn_hidden_size=32,
    moe_router_topk=2,
    moe_router_load_balancing_type=["none"],
    moe_aux_loss_coeff=[0.0],
    moe_token_dispatcher_type="alltoall",
)
LATENT_FLAGS: dict[str, Any] = dict(
    multi_latent_attention=True,
    group_query_attention=False,
    num_query_groups=None,
    q_lora_rank=48,
    kv_lora_rank=32,
    qk_head_dim=16,
    qk_pos_emb_head_dim=8,
    v_head_dim=16,
    rope_type="rope",
    untie_embeddings_and_output_weights=True,
    num_experts=8,
    moe_layer_freq=[0, 1],
    moe_ffn_hidden_size=32,
    moe_shared_expert_intermediate_size=32,
    moe_router_topk=2,
    moe_router_num_groups=2,
    moe_router_group_topk=1,
    moe_router_topk_scaling_factor=1.5,
    moe_router_score_function="sigmoid",
    moe_router_pre_softmax=True,
    moe_router_enable_expert_bias=True,
    moe_router_bias_update_rate=1e-3,
    moe_router_dtype="fp32",
    moe_router_load_balancing_type=["none"],
    moe_aux_loss_coeff=[0.0],
    moe_token_dispatcher_type="alltoall",
)


def _save(model: torch.nn.Module, folder: Path) -> Path:
    with torch.no_grad():  # norms of exactly 1 would hide a norm that is not applied
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.add_(0.2 * torch.randn_like(parameter))
    model.save_pretrained(folder)
    return folder


def tiny_args(**changes: Any) -> Arguments:
    """Flags of the model of `save_qwen3`, with these fields changed."""
    values: dict[str, Any] = dict(
        num_layers=2,
        hidden_size=64,
        ffn_hidden_size=128,
        num_attention_heads=4,
        group_query_attention=True,
        num_query_groups=2,
        kv_channels=16,
        vocab_size=VOCAB_SIZE,
        padded_vocab_size=128,
        normalization="RMSNorm",
        norm_epsilon=1e-6,
        qk_layernorm=True,
        swiglu=True,
        add_bias_linear=False,
        rotary_base=10000,
        max_position_embeddings=512,
        expert_tensor_parallel_size=1,
        use_distributed_optimizer=False,
        data_pad_size_multiplier=1,
        num_rollout=2,
        num_steps_per_rollout=2,
        lr=2e-3,
        lr_decay_style="constant",
        weight_decay=0.1,
        adam_beta2=0.95,
        adam_eps=1e-6,  # far above rounding: a gradient of pure noise must not become a full step
        clip_grad=0.5,
    )
    return Arguments(**(values | changes))


def recorded_rollout(seed: int, samples: int = 8, multiple: int = 1) -> RolloutBatch:
    """Random samples of uneven length, without a schedule: masked tokens, one sample wholly masked.

    Lengths are multiples of `multiple` tokens.
    """
    generator = torch.Generator().manual_seed(seed)

    def integers(low: int, high: int, count: int) -> torch.Tensor:
        return torch.randint(low, high, (count,), generator=generator)

    prompts, responses = integers(1, 9, samples), integers(1, 21, samples)
    prompts += -(prompts + responses) % multiple
    total = int((prompts + responses).sum())
    mask = (torch.rand(int(responses.sum()), generator=generator) > 0.2).float()
    mask[: int(responses[0])] = 0.0
    rewards = torch.randn(samples, generator=generator)
    return RolloutBatch(
        tokens=integers(0, VOCAB_SIZE, total),
        total_lengths=prompts + responses,
        response_lengths=responses,
        loss_mask=mask,
        rollout_log_probs=-3 - torch.rand(mask.numel(), generator=generator),
        raw_rewards=rewards,
        rewards=rewards,
        group_ids=torch.arange(samples) // 4,
        sample_ids=torch.arange(samples),
        truncated=torch.zeros(samples, dtype=torch.bool),
    )
