"""Flags of mixture-of-experts layers, in Megatron-LM's spelling."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag, layer_pattern


@dataclasses.dataclass
class MoeArguments:
    """Experts, router and token dispatch."""

    num_experts: int | None = flag(None, "experts of a mixture-of-experts layer (count; dense layers only)", at_least=1)
    moe_layer_freq: int | list[int] = flag(
        1,
        "layers with experts: N for every N-th, or one 0 or 1 per layer such as [0]*3+[1]*45",
        parse=layer_pattern,
    )
    moe_ffn_hidden_size: int = flag(None, "inner width of one expert (--ffn-hidden-size)", at_least=1)
    moe_shared_expert_intermediate_size: int | None = flag(
        None, "inner width of all shared experts together, which process every token (no shared expert)", at_least=1
    )
    moe_shared_expert_gate: bool = flag(False, "scale the shared expert by a learned gate (Qwen2-MoE)")
    moe_shared_expert_overlap: bool = flag(False, "compute the shared expert during token dispatch")
    moe_router_topk: int = flag(2, "experts per token (count)", at_least=1)
    moe_router_score_function: str = flag(
        "softmax", "function from router logits to scores", choices=("softmax", "sigmoid")
    )
    moe_router_pre_softmax: bool = flag(False, "apply the softmax over all experts before the top-k, not after it")
    moe_router_dtype: str | None = flag(None, "precision of the router (that of the weights)", choices=("fp32", "fp64"))
    moe_router_num_groups: int | None = flag(None, "expert groups for group-limited routing (count)", at_least=1)
    moe_router_group_topk: int | None = flag(None, "expert groups per token (count)", at_least=1)
    moe_router_topk_limited_devices: int | None = flag(
        None, "maximum expert parallel GPUs per token (count; no limit)", at_least=1
    )
    moe_router_topk_scaling_factor: float | None = flag(
        None, "factor on the selected experts' weights (none); needs --moe-router-pre-softmax or sigmoid scores"
    )
    moe_router_enable_expert_bias: bool = flag(
        False, "select experts by score plus a bias that balances their load (DeepSeek-V3)"
    )
    moe_router_bias_update_rate: float = flag(1e-3, "update of that bias after each optimizer step (0: frozen)")
    moe_router_load_balancing_type: list[str] = flag(
        ["aux_loss"],
        "load balancing method",
        choices=("aux_loss", "seq_aux_loss", "global_aux_loss", "sinkhorn", "none"),
        nargs="+",
    )
    moe_aux_loss_coeff: list[float] = flag(
        [0.0], "weight of the load balancing loss, one per kind of --moe-router-load-balancing-type", nargs="+"
    )
    moe_z_loss_coeff: float | None = flag(None, "weight of the loss on the size of router logits (none)")
    moe_input_jitter_eps: float | None = flag(None, "noise on the router's input (fraction; none)", at_least=0)
    moe_router_force_load_balancing: bool = flag(
        False,
        "select experts at random, for benchmarks",
        not_served="it replaces the model's routing, for benchmarks without learning; leave it out",
    )
    moe_router_padding_for_quantization: bool = flag(
        False,
        "pad each expert's tokens to the size that quantised matrix products need",
        spellings=("--moe-router-padding-for-fp8",),
    )
    moe_router_fusion: bool = flag(False, "fused router kernels of Transformer Engine")
    moe_grouped_gemm: bool = flag(False, "one grouped matrix product for all experts of a GPU")
    moe_use_legacy_grouped_gemm: bool = flag(False, "the grouped_gemm package's kernel for --moe-grouped-gemm")
    moe_permute_fusion: bool = flag(False, "fused kernel that sorts tokens by expert")
    moe_token_dispatcher_type: str = flag(
        "alltoall",
        "token dispatcher between expert parallel GPUs; allgather does not support packed sequences and is replaced by"
        " alltoall with a log line",
        choices=("allgather", "alltoall", "flex"),
    )
    moe_enable_deepep: bool = flag(False, "DeepEP's kernels for --moe-token-dispatcher-type flex")
    moe_flex_dispatcher_backend: str = flag(
        "deepep", "kernels of --moe-token-dispatcher-type flex", choices=("deepep", "hybridep")
    )
    moe_deepep_num_sms: int = flag(20, "multiprocessors reserved for DeepEP (count)", at_least=1)
    moe_hybridep_num_sms: int = flag(16, "multiprocessors reserved for HybridEP (count)", at_least=1)
    moe_expert_capacity_factor: float | None = flag(
        None, "maximum tokens per expert, as a factor of an even split (no limit: no token is dropped)", above=0
    )
    moe_pad_expert_input_to_capacity: bool = flag(False, "pad each expert's tokens to that capacity")
    moe_token_drop_policy: str = flag("probs", "tokens to drop if an expert is full", choices=("probs", "position"))
    moe_token_dropping: bool = flag(
        False,
        "drop tokens of full experts",
        not_served="megatron-core does not implement it; use --moe-expert-capacity-factor",
    )
    moe_apply_probs_on_input: bool = flag(False, "scale an expert's input instead of its output")
    moe_latent_size: int | None = flag(
        None, "width to which tokens are projected before the experts (none)", at_least=1
    )
    moe_layer_recompute: bool = flag(False, "recompute whole mixture-of-experts layers in the backward pass")
    moe_per_layer_logging: bool = flag(
        False,
        "log each layer's balancing losses",
        not_served="balancing losses are not logged; leave it out",
    )
    moe_enable_routing_replay: bool = flag(
        False,
        "megatron-core's recording of routing decisions",
        not_served="use --use-routing-replay, or --use-rollout-routing-replay",
    )
    use_routing_replay: bool = flag(
        False,
        "optimizer steps choose the experts of each token as the pass that computed its old log-probability did",
    )
    use_rollout_routing_replay: bool = flag(
        False,
        "the passes over a rollout and its optimizer steps choose the experts of each token as the engine did"
        " (R3, arXiv:2510.11370)",
    )
    moe_extended_tp: bool = flag(
        False,
        "shard each expert's matrices over tensor and expert parallel GPUs",
        not_served="megatron-core removed it; use --expert-tensor-parallel-size",
    )
    overlap_moe_expert_parallel_comm: bool = flag(
        False,
        "overlap the experts' communication with the next micro-batch",
        not_served="it needs megatron-core's combined schedule of two micro-batches; leave it out",
    )
    delay_wgrad_compute: bool = flag(
        False,
        "compute weight gradients separately from input gradients",
        not_served="it belongs to --overlap-moe-expert-parallel-comm; leave it out",
    )
    ep_overlap_early_attn_memory_release: bool = flag(
        False,
        "free attention memory early in that schedule",
        not_served="it belongs to --overlap-moe-expert-parallel-comm; leave it out",
    )

    @property
    def replays_routing(self) -> bool:
        """True if a training step takes choices of experts that were made before it."""
        return self.use_routing_replay or self.use_rollout_routing_replay
