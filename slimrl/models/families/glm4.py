"""Tensors and config.json of GLM-4 (`glm4`), GLM-4.5 and 4.6 (`glm4_moe`) and GLM-4.7-Flash (`glm4_moe_lite`).

GLM-4 is dense, with norms after attention and MLP too; gate and up projection are stored as one tensor.

GLM-4.5 and 4.6 have dense layers first, then experts with a selection bias and a shared expert. config.json says
whether there are query and key norms and attention biases. GLM-4.7-Flash adds DeepSeek-V3's latent attention and has
DeepSeek-V3's tensors. MTP layers of both are not trained: their tensors are copied from the original folder.
"""

from __future__ import annotations

import dataclasses

from slimrl.models import config_rows
from slimrl.models.config_rows import always, switched
from slimrl.models.families import config_mapping, deepseek_v3, param_mapping
from slimrl.models.families.config_mapping import ONE_DENSE_LAYER, TOY_GROUPED, TOY_LATENT, TOY_ROUTED, ToyConfig, rope
from slimrl.models.families.param_mapping import (
    HF_LAYER,
    MEGATRON_LAYER,
    HfTensor,
    Layout,
    ModelMapping,
    MTPLayers,
    ParamMapping,
)

POST_ATTENTION_NORM = ParamMapping(
    megatron=(MEGATRON_LAYER + "post_self_attn_layernorm.weight",),
    hf=(HfTensor(HF_LAYER + "post_self_attn_layernorm.weight", ("hidden",)),),
)
GATE_UP = ParamMapping(
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
        GATE_UP,
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
    deepseek_v3.DEEPSEEK_V3,
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
