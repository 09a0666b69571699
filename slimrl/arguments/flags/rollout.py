"""Flags of generation (sample counts, sampling parameters, custom functions), evaluation and rewards.

An evaluation flag that is not given defaults to the corresponding rollout flag.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments.flag import flag
from slimrl.data.loss_mask import LOSS_MASK_TYPES
from slimrl.data.reward_registry import rm_types

# slime's path: `slimrl.renamed_modules` maps it to slimrl.rollout.rollout_function
DEFAULT_ROLLOUT_FUNCTION = "slimrl.rollout.sglang_rollout.generate_rollout"

PREFERENCE_ROLLOUT_FUNCTION = "slimrl.rollout.preference_rollout.generate_rollout"
SFT_ROLLOUT_FUNCTION = "slimrl.rollout.sft_rollout.generate_rollout"


@dataclasses.dataclass
class RolloutArguments:
    """Sampling, and functions that replace parts of it."""

    num_rollout: int = flag(
        None, "rollouts of the whole run (count; 0: evaluate only); or give --num-epoch", at_least=0
    )
    num_epoch: int | None = flag(
        None,
        "passes over --prompt-data (count), each of size // --rollout-batch-size rollouts; --num-rollout takes"
        " precedence",
        at_least=1,
    )
    start_rollout_id: int | None = flag(None, "number of the first rollout (the checkpoint's next, or 0)", at_least=0)
    rollout_batch_size: int = flag(None, "prompts per rollout (count, required)", at_least=1)
    n_samples_per_prompt: int = flag(1, "responses per prompt (count): the size of a group", at_least=1)
    over_sampling_batch_size: int = flag(
        None, "prompts submitted at a time until the rollout is full (count; --rollout-batch-size)", at_least=1
    )
    rollout_temperature: float = flag(
        1.0, "sampling temperature, above 0; training also divides its logits by it", above=0
    )
    rollout_top_p: float = flag(
        1.0, "nucleus sampling: smallest set of tokens with this probability (1: all)", above=0, at_most=1
    )
    rollout_top_k: int = flag(-1, "number of most probable tokens to sample from (-1: all)", at_least=-1, other_than=0)
    rollout_max_response_len: int = flag(None, "longest response (tokens, required)", at_least=1)
    rollout_max_prompt_len: int | None = flag(
        None, "skip prompts longer than this (tokens; --rollout-max-context-len - 1, else no limit)", at_least=1
    )
    rollout_truncate_prompt: str | None = flag(
        None,
        "shorten longer training prompts by cutting out tokens at the left, the right or in the middle (they are"
        " skipped)",
        choices=("left", "right", "middle"),
    )
    rollout_max_context_len: int | None = flag(
        None,
        "maximum length of prompt plus response; conversations and pairs of training data are cut off there (tokens; no"
        " limit)",
        at_least=2,
    )
    rollout_stop: list[str] | None = flag(None, "strings that end a response", nargs="+")
    rollout_stop_token_ids: list[int] | None = flag(None, "token ids that end a response", nargs="+")
    rollout_skip_special_tokens: bool = flag(False, "remove special tokens from the response text")
    rollout_shuffle: bool = flag(False, "shuffle the prompts in each epoch, with seed --rollout-seed + epoch")
    rollout_seed: int = flag(
        42, "seed of the prompt order and of deterministic sampling", at_least=0, at_most=2**32 - 1
    )
    rollout_function_path: str = flag(
        DEFAULT_ROLLOUT_FUNCTION, "function that makes a whole rollout (dotted import path)"
    )
    custom_generate_function_path: str | None = flag(
        None, "function that generates one sample (dotted import path; the built-in one)"
    )
    dynamic_sampling_filter_path: str | None = flag(
        None, "function that keeps or drops a finished group (dotted import path; keep all)"
    )
    partial_rollout: bool = flag(
        False,
        "keep unfinished responses when a rollout is full, and continue them in the next one; needs"
        " --over-sampling-batch-size above --rollout-batch-size, or a filter",
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "do not train on tokens of a continued response that earlier rollouts sampled"
    )
    discard_surplus_groups: bool = flag(
        False,
        "regenerate finished groups that exceed a full rollout (the next rollout uses them)",
    )
    buffer_filter_path: str | None = flag(
        None,
        "function that chooses the buffered groups to submit next (dotted import path; the oldest first)",
    )
    rollout_sample_hook_path: list[str] = flag(
        [], "functions called on each finished sample before its reward, in this order (dotted import paths)", nargs="+"
    )
    rollout_sample_filter_path: str | None = flag(
        None, "function that excludes samples from training by setting remove_sample (dotted import path)"
    )
    mask_truncated_samples: bool = flag(
        False, "do not train on responses that the length limit cut off (DAPO's overlong filtering)"
    )
    overlong_buffer_len: int | None = flag(
        None,
        "subtract up to --overlong-penalty-factor from the training reward of responses whose length is within that"
        " many tokens of --rollout-max-response-len (DAPO's soft overlong punishment; no penalty)",
        at_least=1,
    )
    overlong_penalty_factor: float = flag(
        1.0, "penalty of a response of --rollout-max-response-len tokens (reward)", above=0
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "function called with all scored groups of a rollout, including dropped ones (dotted import path)"
    )
    skip_failed_samples: bool = flag(
        False,
        "if a custom function that generates or scores a sample raises, drop its group and generate another prompt (the"
        " run ends)",
    )
    max_failed_samples: int = flag(
        16, "--skip-failed-samples: more failed samples than this in one rollout end the run (count)", at_least=0
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "function that makes the training data of a rollout (dotted import path)"
    )
    custom_rollout_log_function_path: str | None = flag(
        None, "function that logs a rollout (dotted import path); if it returns True, slimrl logs only the mean reward"
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None,
        "function that logs an evaluation (dotted import path); if it returns True, slimrl logs only the mean reward",
    )
    use_distributed_post: bool = flag(
        False,
        "send requests from every node",
        not_served="one asynchronous client sends all requests; use --sglang-server-concurrency",
    )
    rollout_data_transport: str = flag(
        "object-store",
        "transport of samples to training",
        choices=("object-store", "nixl"),
        not_served="samples go through Ray's object store; leave it out",
    )
    loss_mask_type: str = flag(
        "qwen",
        "chat template family, by which training on messages finds the assistant's tokens; chat_template: the"
        " {% generation %} blocks of the template itself",
        choices=LOSS_MASK_TYPES,
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        None,
        "external SGLang servers to use instead of starting servers, as host:port; they receive weights and are never"
        " stopped",
        nargs="+",
    )

    @property
    def eval_only(self) -> bool:
        """True if the run only evaluates: no training, no rollouts."""
        return self.num_rollout == 0

    @property
    def rollout_gpus(self) -> int:
        """GPUs that this run reserves for engines: 0 with external engines."""
        return 0 if self.rollout_external_engine_addrs else self.rollout_num_gpus or 0  # type: ignore[attr-defined] # of ClusterArguments

    @property
    def reads_pairs(self) -> bool:
        """True if the rows of --prompt-data are preference pairs."""
        return self.rollout_function_path == PREFERENCE_ROLLOUT_FUNCTION

    @property
    def reads_conversations(self) -> bool:
        """True if the rows of --prompt-data are conversations, as in supervised training."""
        return self.rollout_function_path in (
            SFT_ROLLOUT_FUNCTION,
            SFT_ROLLOUT_FUNCTION.replace("slimrl.", "slime.", 1),
        )

    @property
    def has_custom_rollout_function(self) -> bool:
        """True if --rollout-function-path is not the built-in rollout."""
        return self.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION


@dataclasses.dataclass
class EvalArguments:
    """Evaluation: interval, data sets, sampling."""

    eval_interval: int | None = flag(None, "evaluate before training and after every N rollouts (never)", at_least=1)
    eval_prompt_data: list[str] | None = flag(
        None,
        "evaluation sets as pairs: name path [name path ...]; a single path is named after its file",
        nargs="+",
    )
    eval_config: str | None = flag(
        None, "YAML or JSON file with eval: defaults and datasets (path); instead of --eval-prompt-data"
    )
    skip_eval_before_train: bool = flag(False, "no evaluation before the first rollout")
    n_samples_per_eval_prompt: int = flag(1, "responses per evaluation prompt (count)", at_least=1)
    eval_input_key: str | None = flag(None, "column with the prompt (--input-key)")
    eval_label_key: str | None = flag(None, "column with the reference answer (--label-key)")
    eval_tool_key: str | None = flag(None, "column with tool schemas (--tool-key)")
    eval_reward_key: str | None = flag(None, "entry of a dict reward (--reward-key)")
    eval_temperature: float | None = flag(None, "sampling temperature, 0 is greedy (--rollout-temperature)", at_least=0)
    eval_top_p: float | None = flag(None, "nucleus probability (--rollout-top-p)", above=0, at_most=1)
    eval_top_k: int | None = flag(
        None, "number of most probable tokens to sample from, -1 is all (--rollout-top-k)", at_least=-1, other_than=0
    )
    eval_max_response_len: int | None = flag(None, "longest response (tokens; --rollout-max-response-len)", at_least=1)
    eval_max_prompt_len: int | None = flag(None, "skip prompts longer than this (tokens; no limit)", at_least=1)
    eval_max_context_len: int | None = flag(
        None, "maximum length of prompt plus response (tokens; --rollout-max-context-len)", at_least=2
    )
    eval_min_new_tokens: int | None = flag(None, "shortest response (tokens; no minimum)", at_least=0)
    eval_function_path: str | None = flag(
        None,
        "function that makes an evaluation (dotted import path; --rollout-function-path)",
    )


RM_TYPES = rm_types()


@dataclasses.dataclass
class RewardArguments:
    """Scoring of responses."""

    rm_type: str | None = flag(
        None,
        "built-in reward; prefix boxed_: of the content of the last \\boxed{}; a sample's metadata.rm_type takes"
        " precedence",
        choices=RM_TYPES,
    )
    custom_rm_path: str | None = flag(None, "reward function (dotted import path); takes precedence over --rm-type")
    group_rm: bool = flag(
        False, "score a whole group in one call: --custom-rm-path is then async f(args, samples), a list of rewards"
    )
    rm_url: str | None = flag(
        None,
        "address of the reward service of --rm-type remote_rm; with --rm-model or --opd-type sglang the addresses of"
        " external SGLang servers of the reward model or teacher, separated by commas",
    )
    rm_model: str | None = flag(
        None,
        "reward model of --rm-type reward_model (Hugging Face folder, a sequence classifier with one label), or teacher"
        " of --opd-type sglang (a language model with the student's tokenizer); without --rm-url slimrl starts its"
        " servers on dedicated GPUs",
    )
    rm_num_gpus: int = flag(1, "GPUs of the servers of --rm-model, after those of training and rollout", at_least=1)
    rm_colocate: bool = flag(
        False,
        "with --colocate: the servers of --rm-model are on the first --rm-num-gpus of the shared GPUs; during training"
        " their memory is released and their weights are in host memory (dedicated GPUs)",
    )
    rm_num_gpus_per_engine: int = flag(1, "GPUs per server of --rm-model", at_least=1)
    rm_server_options: dict[str, Any] = flag(
        {}, 'SGLang flags of the servers of --rm-model (JSON object), as in {"mem_fraction_static": 0.8}'
    )
    rm_input: str | None = flag(
        None,
        "input of the reward model: the conversation in its own chat template, prompt and response as text, or the"
        " policy's token ids (conversation if it has a template; else tokens if it has the policy's tokenizer, else"
        " text)",
        choices=("conversation", "text", "tokens"),
    )
    rm_input_template: str | None = flag(
        None,
        "text that the reward model reads, in which {prompt} and {response} stand for those, instead of a chat template"
        " (--rm-input)",
    )
    rm_step_separator: str | None = flag(
        None,
        "text that separates the steps of a response: --rm-model is a process reward model, a token or sequence"
        " classifier with one or two labels, whose output for each step is added to --rm-type's reward (none)",
    )
    rm_step_marker: str | None = flag(
        None, "text that follows each step where the process reward model reads it (--rm-step-separator)"
    )
    rm_step_coef: float = flag(1.0, "factor of the rewards of steps (--rm-step-separator)")
    rm_concurrency: int = flag(64, "requests in flight per server of the reward model or teacher", at_least=1)
    rm_failure_limit: float = flag(
        1.0,
        "end the run if graders could not score at least this fraction of a rollout's samples; above 1: never",
        above=0,
    )
    rm_time_limit: float = flag(5.0, "time limit of a built-in grader per answer (s); then it is killed", above=0)
    rm_num_graders: int | None = flag(
        None, "processes of built-in graders (a quarter of the cores, 2 to 16)", at_least=1
    )
    reward_key: str | None = flag(None, "entry of a dict reward to train on")
    normalize_reward: bool = flag(
        False,
        "normalize rewards by the mean and standard deviation of all rewards of the run so far, which checkpoints"
        " contain",
    )
    custom_reward_post_process_path: str | None = flag(
        None, "function that turns raw rewards into training rewards (dotted import path; group normalisation)"
    )
