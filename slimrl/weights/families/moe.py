"""The rows of mixture-of-experts layers: router, experts, shared experts.

Hugging Face's published layout has one tensor per expert and projection; families differ in the names of the shared
experts only. Megatron-core keeps experts one by one (SequentialMLP) or grouped (Transformer Engine).
"""

from __future__ import annotations

from slimrl.weights.families.dense import HF_LAYER, MEGATRON_LAYER
from slimrl.weights.families.table import HfTensor, Layers, Layout, Row

ROUTER = Row(
    megatron=(MEGATRON_LAYER + "mlp.router.weight",),
    hf=(HfTensor(HF_LAYER + "mlp.gate.weight", ("experts", "hidden")),),
    layers=Layers.MOE,
)
# a buffer on both sides: it decides which experts are chosen and has no gradient
EXPERT_BIAS = Row(
    megatron=(MEGATRON_LAYER + "mlp.router.expert_bias",),
    hf=(HfTensor(HF_LAYER + "mlp.gate.e_score_correction_bias", ("experts",)),),
    layers=Layers.MOE,
    when="expert_bias",
)
EXPERT_GATE_UP = Row(
    megatron=(
        MEGATRON_LAYER + "mlp.experts.local_experts.{expert}.linear_fc1.weight",
        MEGATRON_LAYER + "mlp.experts.linear_fc1.weight{expert}",
    ),
    hf=(
        HfTensor(HF_LAYER + "mlp.experts.{expert}.gate_proj.weight", ("moe_ffn", "hidden")),
        HfTensor(HF_LAYER + "mlp.experts.{expert}.up_proj.weight", ("moe_ffn", "hidden")),
    ),
    layout=Layout.GATE_UP,
    shard_dim=0,
    layers=Layers.MOE,
)
EXPERT_DOWN = Row(
    megatron=(
        MEGATRON_LAYER + "mlp.experts.local_experts.{expert}.linear_fc2.weight",
        MEGATRON_LAYER + "mlp.experts.linear_fc2.weight{expert}",
    ),
    hf=(HfTensor(HF_LAYER + "mlp.experts.{expert}.down_proj.weight", ("hidden", "moe_ffn")),),
    shard_dim=1,
    layers=Layers.MOE,
)
SHARED_EXPERT_GATE = Row(
    megatron=(MEGATRON_LAYER + "mlp.shared_experts.gate_weight",),
    hf=(HfTensor(HF_LAYER + "mlp.shared_expert_gate.weight", ("one", "hidden")),),
    layers=Layers.MOE,
    when="shared_expert_gate",
)


def shared_experts(module: str) -> tuple[Row, Row]:
    """The rows of the shared experts (one block, however many they are) under the Hugging Face name `module`."""
    return (
        Row(
            megatron=(MEGATRON_LAYER + "mlp.shared_experts.linear_fc1.weight",),
            hf=(
                HfTensor(f"{HF_LAYER}mlp.{module}.gate_proj.weight", ("shared_ffn", "hidden")),
                HfTensor(f"{HF_LAYER}mlp.{module}.up_proj.weight", ("shared_ffn", "hidden")),
            ),
            layout=Layout.GATE_UP,
            shard_dim=0,
            layers=Layers.MOE,
            when="shared_experts",
        ),
        Row(
            megatron=(MEGATRON_LAYER + "mlp.shared_experts.linear_fc2.weight",),
            hf=(HfTensor(f"{HF_LAYER}mlp.{module}.down_proj.weight", ("hidden", "shared_ffn")),),
            shard_dim=1,
            layers=Layers.MOE,
            when="shared_experts",
        ),
    )
