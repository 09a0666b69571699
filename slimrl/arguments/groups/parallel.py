"""Flags that spread one model over the training slots, and recomputation, in Megatron-LM's spelling."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


@dataclasses.dataclass
class ParallelArguments:
    """Parallel layout and memory saving by recomputation."""

    tensor_model_parallel_size: int = flag(1, "slots that share each layer's matrices (count)", at_least=1)
    sequence_parallel: bool = flag(False, "share norm activations over the tensor parallel slots (off when that is 1)")
    pipeline_model_parallel_size: int = flag(1, "pipeline stages (count); this version serves 1", at_least=1)
    decoder_first_pipeline_num_layers: int | None = flag(
        None, "layers of the first pipeline stage (count); this version has one stage"
    )
    decoder_last_pipeline_num_layers: int | None = flag(
        None, "layers of the last pipeline stage (count); this version has one stage"
    )
    context_parallel_size: int = flag(
        1, "slots that share each sample's tokens (count); this version serves 1", at_least=1
    )
    expert_model_parallel_size: int = flag(1, "slots that share the experts (count); this version serves 1", at_least=1)
    expert_tensor_parallel_size: int | None = flag(
        None, "slots that share each expert's matrices (count); this version serves 1", at_least=1
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
    accumulate_allreduce_grads_in_fp32: bool = flag(False, "add and reduce gradients in fp32")
    use_distributed_optimizer: bool = flag(
        False, "spread the optimizer state over the data parallel slots (slime switches this on by force)"
    )
