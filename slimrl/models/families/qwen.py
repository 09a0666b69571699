"""Tensors and config.json of Qwen2, Qwen2.5, Qwen2.5-VL, Qwen3 and Qwen3-VL (dense and with experts), and MiMo.

Qwen2 and Qwen2.5 have biases on queries, keys and values only, and a gated shared expert in MoE models. Qwen2.5-VL is
Qwen2.5 with multimodal rotary positions behind a vision tower. Qwen3 has query and key norms and no biases. Qwen3-VL is
Qwen3 with such positions and a tower; files of its MoE models stack the experts of a layer. MiMo is dense with Qwen2's
layers; its MTP layers are not trained: their tensors are copied from the original folder.
"""

from __future__ import annotations

from slimrl.models import config_rows
from slimrl.models.config_rows import Config, Unsupported, always, switched, value, wrong
from slimrl.models.families import param_mapping, vision
from slimrl.models.families.config_mapping import (
    EXPERTS,
    MULTIMODAL_POSITIONS,
    NO_BIASES,
    PLAIN_ATTENTION,
    SOFTMAX,
    TOY_EXPERTS,
    TOY_GROUPED,
    TOY_LEVELS,
    TOY_TOWER,
    ToyConfig,
    head_width,
    rope,
    table,
)
from slimrl.models.families.param_mapping import ModelMapping, MTPLayers

QWEN2_ATTENTION = (
    param_mapping.ATTENTION_NORM,
    param_mapping.QKV,
    param_mapping.QKV_BIAS,
    param_mapping.ATTENTION_OUTPUT,
    param_mapping.MLP_NORM,
)

QWEN2 = ModelMapping(
    model_type="qwen2",
    config=table(always("add_qkv_bias", "--add-qkv-bias", True)),
    embedding=param_mapping.EMBEDDING,
    layer=(*QWEN2_ATTENTION, param_mapping.GATE_UP, param_mapping.DOWN),
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
    toys={"qwen2": ToyConfig("Qwen2ForCausalLM", {"num_key_value_heads": 2, "rms_norm_eps": 1e-6} | rope(1e6))},
)
QWEN2_5_VL = ModelMapping(
    model_type="qwen2_5_vl",
    config=table(
        always("add_qkv_bias", "--add-qkv-bias", True),
        *MULTIMODAL_POSITIONS,
        unserved=(config_rows.only("default", "mrope"), wrong("use_sliding_window", False)),
    ),
    embedding=param_mapping.EMBEDDING,
    layer=QWEN2.layer,
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
    tower=vision.QWEN2_5_VL,
    toys={
        "qwen2_5_vl": ToyConfig(
            "Qwen2_5_VLForConditionalGeneration",
            {"num_key_value_heads": 2, "rms_norm_eps": 1e-6, "vision_config": TOY_TOWER}
            | rope(1e6, rope_type="default", mrope_section=[2, 3, 3]),
        )
    },
)
QWEN2_MOE = ModelMapping(
    model_type="qwen2_moe",
    config=table(
        *EXPERTS,
        *SOFTMAX,
        switched("add_qkv_bias", "--add-qkv-bias", "qkv_bias", default=True),
        value("moe_shared_expert_intermediate_size", "shared_expert_intermediate_size", absent="no shared expert"),
        always("moe_shared_expert_gate", "--moe-shared-expert-gate", True),
    ),
    embedding=param_mapping.EMBEDDING,
    layer=(
        *QWEN2_ATTENTION,
        param_mapping.GATE_UP,
        param_mapping.DOWN,
        param_mapping.ROUTER,
        param_mapping.EXPERT_GATE_UP,
        param_mapping.EXPERT_DOWN,
        *param_mapping.shared_experts("shared_expert"),
        param_mapping.SHARED_EXPERT_GATE,
    ),
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
)


QWEN3_ATTENTION = (
    param_mapping.ATTENTION_NORM,
    param_mapping.QKV,
    param_mapping.QUERY_NORM,
    param_mapping.KEY_NORM,
    param_mapping.ATTENTION_OUTPUT,
    param_mapping.MLP_NORM,
)

QWEN3 = ModelMapping(
    model_type="qwen3",
    config=table(
        always("qk_layernorm", "--qk-layernorm", True),
        head_width(128),
        unserved=(*PLAIN_ATTENTION, *NO_BIASES),
    ),
    embedding=param_mapping.EMBEDDING,
    layer=(*QWEN3_ATTENTION, param_mapping.GATE_UP, param_mapping.DOWN),
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
    fixed_config=(("attention_bias", False),),
    toys={"qwen3": ToyConfig("Qwen3ForCausalLM", TOY_GROUPED | {"rms_norm_eps": 1e-6} | rope(1e6))},
)
QWEN3_VL = ModelMapping(
    model_type="qwen3_vl",
    config=table(
        always("qk_layernorm", "--qk-layernorm", True),
        head_width(128),
        *MULTIMODAL_POSITIONS,
        unserved=(config_rows.only("default", "mrope"), *NO_BIASES),
    ),
    embedding=vision.deeper(param_mapping.EMBEDDING),
    layer=tuple(map(vision.deeper, QWEN3.layer)),
    final_norm=vision.deeper(param_mapping.FINAL_NORM),
    head=param_mapping.HEAD,
    tower=vision.QWEN3_VL,
    toys={
        "qwen3_vl": ToyConfig(
            "Qwen3VLForConditionalGeneration",
            {
                "text_config": TOY_GROUPED
                | {"rms_norm_eps": 1e-6}
                | rope(5e6, rope_type="default", mrope_section=[4, 2, 2], mrope_interleaved=True),
                "vision_config": TOY_LEVELS,
            },
        )
    },
)
QWEN3_MOE = ModelMapping(
    model_type="qwen3_moe",
    config=table(
        *EXPERTS,
        *SOFTMAX,
        always("qk_layernorm", "--qk-layernorm", True),
        unserved=(*PLAIN_ATTENTION, *NO_BIASES),
    ),
    embedding=param_mapping.EMBEDDING,
    layer=(
        *QWEN3_ATTENTION,
        param_mapping.GATE_UP,
        param_mapping.DOWN,
        param_mapping.ROUTER,
        param_mapping.EXPERT_GATE_UP,
        param_mapping.EXPERT_DOWN,
    ),
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
    fixed_config=(("attention_bias", False),),
    toys={
        "qwen3_moe": ToyConfig(
            "Qwen3MoeForCausalLM",
            TOY_GROUPED | TOY_EXPERTS | {"rms_norm_eps": 1e-6, "norm_topk_prob": True} | rope(1e6),
        )
    },
)


def _other_levels(config: Config) -> str | None:
    """Engines add the features of exactly three levels."""
    levels = config[vision.TOWER_CONFIG].get("deepstack_visual_indexes", ())
    return None if len(levels) == vision.SERVED_LEVELS else f"deepstack_visual_indexes {list(levels)}"


QWEN3_VL_MOE = ModelMapping(
    model_type="qwen3_vl_moe",
    config=table(
        *EXPERTS,
        *SOFTMAX,
        # transformers normalises without an entry for it
        always("moe_router_pre_softmax", "--moe-router-pre-softmax", False),
        always("qk_layernorm", "--qk-layernorm", True),
        *MULTIMODAL_POSITIONS,
        unserved=(
            config_rows.only("default", "mrope"),
            *NO_BIASES,
            wrong("norm_topk_prob", True),
            Unsupported(_other_levels),
        ),
    ),
    embedding=QWEN3_VL.embedding,
    layer=tuple(map(vision.deeper, QWEN3_MOE.layer)),
    final_norm=QWEN3_VL.final_norm,
    head=param_mapping.HEAD,
    stacked_experts=True,
    tower=vision.QWEN3_VL_MOE,
    toys={
        "qwen3_vl_moe": ToyConfig(
            "Qwen3VLMoeForConditionalGeneration",
            {
                "text_config": TOY_GROUPED
                | TOY_EXPERTS
                # transformers cannot tell which way round a square gate_up_proj is
                | {"moe_intermediate_size": 48}
                | {"rms_norm_eps": 1e-6, "num_hidden_layers": vision.SERVED_LEVELS}
                | rope(5e6, rope_type="default", mrope_section=[4, 2, 2], mrope_interleaved=True),
                "vision_config": TOY_LEVELS
                | {"depth": vision.SERVED_LEVELS, "deepstack_visual_indexes": list(range(vision.SERVED_LEVELS))},
            },
        )
    },
)


MIMO = ModelMapping(
    model_type="mimo",
    config=table(always("add_qkv_bias", "--add-qkv-bias", True)),
    embedding=param_mapping.EMBEDDING,
    layer=QWEN2.layer,
    final_norm=param_mapping.FINAL_NORM,
    head=param_mapping.HEAD,
    extra_layers=MTPLayers("model.mtp_layers.{layer}.", after_decoder=False),
    toys={
        "mimo": ToyConfig(
            "Qwen2ForCausalLM",
            TOY_GROUPED | {"rms_norm_eps": 1e-5} | rope(640000.0),
            published={
                "model_type": "mimo",
                "architectures": ["MiMoForCausalLM"],
                "attention_bias": True,
                "num_nextn_predict_layers": 0,
            },
            config_code=("configuration_mimo", "MiMoConfig", "Qwen2Config"),
        )
    },
)
