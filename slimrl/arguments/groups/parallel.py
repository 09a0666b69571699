"""Flags that spread one model over the training slots, and recomputation, in Megatron-LM's spelling."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class ParallelArguments:
    """Parallel layout and memory saving by recomputation."""

    tensor_model_parallel_size: int = flag(1, "slots that share each layer's matrices (count)", at_least=1)
    sequence_parallel: bool = flag(False, "share norm activations over the tensor parallel slots (off when that is 1)")
    pipeline_model_parallel_size: int = flag(1, "pipeline stages (count)", at_least=1)
    decoder_first_pipeline_num_layers: int | None = flag(
        None,
        "layers of the first pipeline stage (count; an even share)",
        at_least=1,
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None,
        "layers of the last pipeline stage (count; an even share)",
        at_least=1,
    )
    num_layers_per_virtual_pipeline_stage: int | None = flag(
        None,
        "layers of one virtual stage: each slot holds several of them (count; one stage per slot)",
        at_least=1,
    )
    num_virtual_stages_per_pipeline_rank: int | None = flag(
        None,
        "virtual stages of each pipeline slot (count); instead of --num-layers-per-virtual-pipeline-stage",
        at_least=1,
    )
    microbatch_group_size_per_vp_stage: int | None = flag(
        None, "micro-batches that a virtual stage takes in a row (count; pipeline stages)", at_least=1
    )
    pipeline_model_parallel_layout: str | None = flag(
        None,
        "layers of every stage as a drawing, such as Et*3|(tt|)*2L",
        not_served="give --decoder-first-pipeline-num-layers and --decoder-last-pipeline-num-layers instead",
    )
    account_for_embedding_in_pipeline_split: bool = flag(False, "count the embedding as one layer of the first stage")
    account_for_loss_in_pipeline_split: bool = flag(False, "count the output layer as one layer of the last stage")
    context_parallel_size: int = flag(
        1,
        "slots that share each sample's tokens (count)",
        at_least=1,
    )
    cp_comm_type: list[str] | None = flag(
        None,
        "how context parallel slots exchange keys and values with Transformer Engine (p2p)",
        choices=("p2p", "all_gather", "a2a", "a2a+p2p"),
        nargs="+",
    )
    hierarchical_context_parallel_sizes: list[int] | None = flag(
        None,
        "slots of each level of --cp-comm-type a2a+p2p",
        nargs="+",
        not_served="one level of context parallelism is served; use --context-parallel-size alone",
    )
    hybrid_context_parallel: bool = flag(
        False,
        "choose the context parallel size sample by sample",
        not_served="samples are packed instead; use --context-parallel-size and --use-dynamic-batch-size",
    )
    max_seqlen_per_dp_cp_rank: int | None = flag(
        None,
        "tokens of a slot with --hybrid-context-parallel",
        not_served="it belongs to --hybrid-context-parallel; use --max-tokens-per-gpu",
    )
    expert_model_parallel_size: int = flag(
        1,
        "slots that share the experts (count)",
        at_least=1,
    )
    expert_tensor_parallel_size: int | None = flag(
        None,
        "slots that share each expert's matrices (count; --tensor-model-parallel-size)",
        at_least=1,
    )
    recompute_granularity: str | None = flag(
        None, "what to recompute in the backward pass (nothing)", choices=("full", "selective")
    )
    recompute_method: str | None = flag(
        None, "how --recompute-granularity full chooses layers", choices=("uniform", "block")
    )
    recompute_num_layers: int | None = flag(
        None, "layers per recomputed unit (uniform) or layers recomputed (block) (count)", at_least=1
    )
    recompute_modules: list[str] | None = flag(
        None,
        "what --recompute-granularity selective recomputes (core_attn)",
        choices=("core_attn", "moe_act", "layernorm", "mla_up_proj", "mlp", "moe", "shared_experts"),
        nargs="*",
    )
    distribute_saved_activations: bool = flag(
        False, "spread the saved inputs of recomputed layers over the tensor parallel slots"
    )
    num_microbatches_with_partial_activation_checkpoints: int | None = flag(
        None,
        "micro-batches that recompute less because memory allows it",
        not_served="the number of micro-batches varies here from step to step; use --recompute-num-layers",
    )
