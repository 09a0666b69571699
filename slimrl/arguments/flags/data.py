"""Flags of the prompt data, and of how a rollout is cut into optimizer steps and micro-batches."""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments.flag import flag
from slimrl.hooks import own_path

# as users of slime spell them, and where they are
BUILT_IN_DATA_SOURCES = tuple(
    f"slimrl.rollout.{module}.{name}"
    for module in ("data_source", "dataset.data_source")
    for name in ("RolloutDataSource", "RolloutDataSourceWithBuffer")
)


@dataclasses.dataclass
class DataArguments:
    """Where prompts come from and which columns hold what."""

    prompt_data: str | list[str] | None = flag(
        None,
        "training prompts: .jsonl or .parquet, or a folder of them (path, required); path@[a:b] takes the rows a to"
        " b-1; several paths make one set, several path=probability a mix",
        nargs="+",
    )
    max_bad_rows: int = flag(
        0,
        "bad rows that a training set may have (count): each is logged with file and line and left out, one more ends"
        " the run",
        at_least=0,
    )
    refuse_long_prompts: bool = flag(
        False,
        "end the run at the first prompt that is longer than --rollout-max-prompt-len (--eval-max-prompt-len), or than"
        " an engine's context has room for (such prompts are left out and counted)",
    )
    input_key: str = flag("input", "column with the prompt: a string or a list of messages")
    label_key: str | None = flag(None, "column with the true answer (no label)")
    metadata_key: str = flag("metadata", "column copied to Sample.metadata where the row has it")
    tool_key: str = flag("tools", "column with tool schemas for the chat template where the row has it")
    apply_chat_template: bool = flag(False, "render the prompt with the tokenizer's chat template")
    apply_chat_template_kwargs: dict[str, Any] = flag(
        {}, "keyword arguments of the chat template (JSON object), for example enable_thinking"
    )
    multimodal_keys: dict[str, Any] | None = flag(
        None,
        "columns of images and the like (JSON object: kind -> column)",
        not_served="prompts are text in this version; leave it out",
    )
    data_source_path: str = flag(
        "slime.rollout.data_source.RolloutDataSourceWithBuffer", "class that gives out prompts (dotted import path)"
    )
    rollout_global_dataset: bool = flag(
        True,
        "no --prompt-data: samples are handed out blank, for functions of your own to fill",
        negated=True,
        off=("--disable-rollout-global-dataset",),
    )

    @property
    def has_own_data_source(self) -> bool:
        """True where --data-source-path is not the built-in data source."""
        return own_path(self.data_source_path) not in BUILT_IN_DATA_SOURCES


@dataclasses.dataclass
class TrainBatchArguments:
    """Batches; rollout batch x samples per prompt = global batch x steps per rollout."""

    global_batch_size: int = flag(None, "samples per optimizer step (count; from --num-steps-per-rollout)", at_least=1)
    num_steps_per_rollout: int = flag(
        None, "optimizer steps per rollout (count; from --global-batch-size, 1 where neither is given)", at_least=1
    )
    micro_batch_size: int = flag(
        1, "samples per forward pass (count); refused with --use-dynamic-batch-size", at_least=1
    )
    use_dynamic_batch_size: bool = flag(False, "fill each forward pass up to --max-tokens-per-gpu tokens")
    max_tokens_per_gpu: int | None = flag(
        None, "tokens of one forward pass with --use-dynamic-batch-size (count); a longer sample goes alone", at_least=1
    )
    balance_data: bool = flag(False, "spread samples over data parallel ranks so that each computes about as much")
    data_pad_size_multiplier: int = flag(
        128, "packed tokens are padded to a multiple of this x tensor parallel size (tokens)", at_least=1
    )
    log_probs_chunk_size: int = flag(
        -1,
        "log-probabilities take the memory of this many tokens' logits at a time (-1: of 1/16 of all)",
        at_least=-1,
        other_than=0,
    )
    keep_logits: bool = flag(
        False,
        "keep the logits for the backward pass: faster by a quarter of the output layer's time, for their memory (on"
        " with --loss-type custom_loss)",
    )
