"""Flags of the prompt data, and of the division of a rollout into optimizer steps and micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments.flag import flag
from slimrl.hooks import own_path

# slime's spelling, and the modules in slimrl
BUILT_IN_DATA_SOURCES = tuple(
    f"slimrl.rollout.{module}.{name}"
    for module in ("data_source", "dataset.data_source")
    for name in ("RolloutDataSource", "RolloutDataSourceWithBuffer")
)


@dataclasses.dataclass
class DataArguments:
    """Prompt data and its columns."""

    prompt_data: str | list[str] | None = flag(
        None,
        "training prompts: .jsonl or .parquet, or a folder of them (path, required); path@[a:b] selects the rows a to"
        " b-1; several paths are concatenated, several path=probability form a mixture",
        nargs="+",
    )
    max_bad_rows: int = flag(
        0,
        "bad rows allowed in a training set (count): each is logged with file and line and skipped, one more ends the"
        " run",
        at_least=0,
    )
    refuse_long_prompts: bool = flag(
        False,
        "end the run at the first prompt that is longer than --rollout-max-prompt-len (--eval-max-prompt-len), or too"
        " long for an engine's context (such prompts are skipped and counted)",
    )
    input_key: str = flag("input", "column with the prompt: a string or a list of messages")
    label_key: str | None = flag(
        None,
        "column with the reference answer (no label); of labelled answers the column that is true if the answer is"
        " desirable, else false (label)",
    )
    chosen_key: str = flag("chosen", "column with the preferred answer of a preference pair")
    rejected_key: str = flag(
        "rejected",
        "column with the rejected answer of a preference pair; with --n-samples-per-prompt above 2 a list of answers",
    )
    completion_key: str = flag("completion", "column with the answer of a row whose label says whether it is desirable")
    margin_key: str | None = flag(
        None, "column with the margin of a comparison for a reward model: the least difference of rewards (0)"
    )
    metadata_key: str = flag("metadata", "column copied to Sample.metadata if the row has it")
    tool_key: str = flag("tools", "column with tool schemas for the chat template, if the row has it")
    apply_chat_template: bool = flag(False, "render the prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag(
        {}, "keyword arguments of the chat template (JSON object), for example enable_thinking"
    )
    input_template: str | None = flag(
        None,
        "text around a text prompt, in which {} stands for the prompt, instead of a chat template; also of evaluation"
        " sets without one (the prompt unchanged)",
    )
    multimodal_keys: dict[str, Any] | None = flag(
        None,
        "columns of the images and videos of a vision-language model's prompts (JSON object: image, video -> column)",
    )
    data_source_path: str = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", "class that supplies prompts (dotted import path)"
    )
    rollout_global_dataset: bool = flag(
        True,
        "no --prompt-data: supply blank samples for custom functions to fill",
        negated=True,
        off=("--disable-rollout-global-dataset",),
    )

    @property
    def has_custom_data_source(self) -> bool:
        """True if --data-source-path is not the built-in data source."""
        return own_path(self.data_source_path) not in BUILT_IN_DATA_SOURCES


@dataclasses.dataclass
class TrainBatchArguments:
    """Batches; rollout batch x samples per prompt = global batch x steps per rollout."""

    global_batch_size: int = flag(None, "samples per optimizer step (count; from --num-steps-per-rollout)", at_least=1)
    num_steps_per_rollout: int = flag(
        None, "optimizer steps per rollout (count; from --global-batch-size, 1 if neither is given)", at_least=1
    )
    micro_batch_size: int = flag(
        1, "samples per forward pass (count); rejected with --use-dynamic-batch-size", at_least=1
    )
    use_dynamic_batch_size: bool = flag(False, "fill each forward pass up to --max-tokens-per-gpu tokens")
    max_tokens_per_gpu: int | None = flag(
        None,
        "maximum tokens per forward pass with --use-dynamic-batch-size (count); a longer sample has its own",
        at_least=1,
    )
    balance_data: bool = flag(False, "balance the computation of samples over data parallel ranks")
    data_pad_size_multiplier: int = flag(
        128, "pad packed tokens to a multiple of this x tensor parallel size (tokens)", at_least=1
    )
    log_probs_chunk_size: int = flag(
        -1,
        "compute log-probabilities in chunks with the memory of this many tokens' logits (-1: 1/16 of all logits)",
        at_least=-1,
        other_than=0,
    )
    keep_logits: bool = flag(
        False,
        "keep the logits for the backward pass: up to a quarter less time in the output layer, but more memory (on with"
        " --loss-type custom_loss)",
    )
