"""Tensors and config.json of DeepSeek-V3, of the families with its attention or its experts, and of GLM-4.

DeepSeek-V3, R1 and Moonlight (`deepseek_v3`) have latent attention; the first layers are dense, the others have experts
selected by biased scores. Kimi-K2 (`kimi_k2`) has the same architecture under another model_type, and GLM-4.7-Flash
(`glm4_moe_lite`) the same tensors. GLM-4.5 and 4.6 (`glm4_moe`) have such experts with a shared one behind plain
attention; config.json says whether there are query and key norms and attention biases. GLM-4 (`glm4`) is dense, with
norms after attention and MLP too; gate and up projection are stored as one tensor. MTP layers after the last one are
not trained: their tensors are copied from the original folder.
"""

from __future__ import annotations

import dataclasses

from slimrl.models import config_rows
from slimrl.models.config_rows import always, switched
from slimrl.models.families import config_mapping, param_mapping
from slimrl.models.families.config_mapping import (
    ONE_DENSE_LAYER,
    TOY_GROUPED,
    TOY_LATENT,
    TOY_ROUTED,
    TOY_SIGMOID,
    ToyConfig,
    rope,
    yarn,
)
from slimrl.models.families.param_mapping import (
    HF_LAYER,
    MEGATRON_LAYER,
    HfTensor,
    Layout,
    ModelMapping,
    MTPLayers,
    ParamMapping,
)

DEEPSEEK_TOY = ToyConfig(
    "DeepseekV3ForCausalLM",
    TOY_LATENT
    | TOY_ROUTED
    | {"n_routed_experts": 16, "num_experts_per_tok": 4, "n_group": 4, "topk_group": 2, "n_shared_experts": 1}
    | {"first_k_dense_replace": 1, "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.5}
    | yarn(10000.0, factor=40.0, beta_fast=32.0),
    published=TOY_SIGMOID,
)
MOONLIGHT_TOY = ToyConfig(
    "DeepseekV3ForCausalLM",
    TOY_LATENT
    | TOY_ROUTED
    | {"q_lora_rank": None, "first_k_dense_replace": 1, "n_shared_experts": 2, "rms_norm_eps": 1e-5}
    | {"routed_scaling_factor": 2.446}
    | rope(50000.0),
    published=TOY_SIGMOID,
)
KIMI_TOY = ToyConfig(
    "DeepseekV3ForCausalLM",
    TOY_LATENT
    | TOY_ROUTED
    | {"first_k_dense_replace": 1, "n_shared_experts": 1, "rms_norm_eps": 1e-6, "routed_scaling_factor": 2.827}
    | yarn(50000.0, factor=32.0, beta_fast=1.0),
    # Published configs have model_type kimi_k2 and include code for it; that class derives from DeepSeek-V3's.
    published=TOY_SIGMOID,
)

DEEPSEEK_V3 = ModelMapping(
    model_type="deepseek_v3",
    config=config_mapping.latent_table(dense_layers=3),
    embedding=param_mapping.EMBEDDING,
    layer=(
        param_mapping.ATTENTION_NORM,
        *param_mapping.LATENT_ATTENTION,
        param_mapping.MLP_NORM,
        param_mapping.GATE_UP,
        param_mapping.DOWN,
        param_mapping.ROUTER,
        param_mapping.EXPERT_BIAS,
        param_mapping.EXPERT_GATE_UP,
        param_mapping.EXPERT_DOWN,
        *param_mapping.shared_experts("shared_experts"),
    ),
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
    extra_layers=MTPLayers("model.layers.{layer}.", after_decoder=True),
    fixed_config=(
        ("attention_bias", False),
        ("moe_layer_freq", 1),
        ("rope_interleave", True),
        ("topk_method", "noaux_tc"),
    ),
    toys={"deepseek_v3": DEEPSEEK_TOY, "moonlight": MOONLIGHT_TOY},
)


KIMI_K2: ModelMapping = dataclasses.replace(DEEPSEEK_V3, model_type="kimi_k2", toys={"kimi_k2": KIMI_TOY})


POST_ATTENTION_NORM = ParamMapping(
    megatron=(MEGATRON_LAYER + "post_self_attn_layernorm.weight",),
    hf=(HfTensor(HF_LAYER + "post_self_attn_layernorm.weight", ("hidden",)),),
)
GLM4_GATE_UP = ParamMapping(
    megatron=param_mapping.GATE_UP.megatron,
    hf=(HfTensor(HF_LAYER + "mlp.gate_up_proj.weight", ("twice_ffn", "hidden")),),
    layout=Layout.PACKED_GATE_UP,
    shard_dim=0,
)
POST_MLP_NORM = ParamMapping(
    megatron=(MEGATRON_LAYER + "post_mlp_layernorm.weight",),
    hf=(HfTensor(HF_LAYER + "post_mlp_layernorm.weight", ("hidden",)),),
)

GLM4 = ModelMapping(
    model_type="glm4",
    config=config_mapping.table(
        config_mapping.head_width(128),
        config_rows.percent(0.5),
        config_mapping.qkv_bias(True),
        always("rotary_interleaved", "--rotary-interleaved", True),
        always("post_self_attn_layernorm", "--post-self-attn-layernorm", True),
        always("post_mlp_layernorm", "--post-mlp-layernorm", True),
    ),
    embedding=param_mapping.EMBEDDING,
    layer=(
        param_mapping.ATTENTION_NORM,
        param_mapping.QKV,
        param_mapping.QKV_BIAS,
        param_mapping.ATTENTION_OUTPUT,
        POST_ATTENTION_NORM,
        param_mapping.MLP_NORM,
        GLM4_GATE_UP,
        param_mapping.DOWN,
        POST_MLP_NORM,
    ),
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
    toys={
        "glm4": ToyConfig(
            "Glm4ForCausalLM",
            TOY_GROUPED | {"rms_norm_eps": 1e-5, "attention_bias": True} | rope(10000.0, partial_rotary_factor=0.5),
        )
    },
)


GLM4_MOE = ModelMapping(
    model_type="glm4_moe",
    config=config_mapping.table(
        *config_mapping.EXPERTS,
        *config_mapping.SIGMOID,
        config_mapping.layers_after(1),
        config_rows.percent(0.5),
        switched("qk_layernorm", "--qk-layernorm", "use_qk_norm", default=False),
        unserved=(*config_mapping.PLAIN_ATTENTION, *config_mapping.SIGMOID_ROUTING),
    ),
    float32_router=True,
    embedding=param_mapping.EMBEDDING,
    layer=(
        param_mapping.ATTENTION_NORM,
        param_mapping.QKV,
        param_mapping.QKV_BIAS,
        param_mapping.QUERY_NORM,
        param_mapping.KEY_NORM,
        param_mapping.ATTENTION_OUTPUT,
        param_mapping.MLP_NORM,
        param_mapping.GATE_UP,
        param_mapping.DOWN,
        param_mapping.ROUTER,
        param_mapping.EXPERT_BIAS,
        param_mapping.EXPERT_GATE_UP,
        param_mapping.EXPERT_DOWN,
        *param_mapping.shared_experts("shared_experts"),
    ),
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
    extra_layers=MTPLayers("model.layers.{layer}.", after_decoder=True),
    toys={
        "glm4_moe": ToyConfig(
            "Glm4MoeForCausalLM",
            TOY_GROUPED
            | TOY_ROUTED
            | {"rms_norm_eps": 1e-5, "attention_bias": True, "use_qk_norm": True, "n_shared_experts": 1}
            | {"first_k_dense_replace": 1, "routed_scaling_factor": 2.5, "norm_topk_prob": True}
            | rope(1e6, partial_rotary_factor=0.5),
            published={"num_nextn_predict_layers": 0},
        )
    },
)


GLM4_MOE_LITE: ModelMapping = dataclasses.replace(
    DEEPSEEK_V3,
    model_type="glm4_moe_lite",
    config=config_mapping.latent_table(dense_layers=1),
    float32_router=True,
    toys={
        "glm4_moe_lite": ToyConfig(
            "Glm4MoeLiteForCausalLM",
            TOY_LATENT
            | TOY_ROUTED
            | {"rms_norm_eps": 1e-5, "n_shared_experts": 1, "routed_scaling_factor": 1.8}
            | rope(1e6),
            published={**ONE_DENSE_LAYER, "topk_method": "noaux_tc"},
        )
    },
)
