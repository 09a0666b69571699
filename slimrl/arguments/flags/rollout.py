"""Flags of generation (how many samples, how they are sampled, by which functions), evaluation and rewards.

An evaluation flag that is not given takes the value of the rollout flag of the same meaning.
"""

from __future__ import annotations

import dataclasses
from typing import Any

from slimrl.arguments.flag import flag
from slimrl.data.reward_table import rm_types

DEFAULT_ROLLOUT_FUNCTION = "slimrl.rollout.sglang_rollout.generate_rollout"


@dataclasses.dataclass
class RolloutArguments:
    """Sampling and the functions that do it."""

    num_rollout: int = flag(
        None, "rollouts of the whole run (count; 0 evaluates and trains nothing); or give --num-epoch", at_least=0
    )
    num_epoch: int | None = flag(
        None,
        "passes over --prompt-data (count), each of size // --rollout-batch-size rollouts; --num-rollout wins",
        at_least=1,
    )
    start_rollout_id: int | None = flag(None, "number of the first rollout (the checkpoint's next, or 0)", at_least=0)
    rollout_batch_size: int = flag(None, "prompts per rollout (count, required)", at_least=1)
    n_samples_per_prompt: int = flag(1, "responses per prompt (count): the size of a group", at_least=1)
    over_sampling_batch_size: int = flag(
        None, "prompts sent out at a time while a rollout fills (count; --rollout-batch-size)", at_least=1
    )
    rollout_temperature: float = flag(
        1.0, "sampling temperature, above 0; training divides its logits by it too", above=0
    )
    rollout_top_p: float = flag(
        1.0, "keep the smallest set of tokens with this probability (1: all)", above=0, at_most=1
    )
    rollout_top_k: int = flag(-1, "keep that many of the likeliest tokens (-1: all)", at_least=-1, other_than=0)
    rollout_max_response_len: int = flag(None, "longest response (tokens, required)", at_least=1)
    rollout_max_prompt_len: int | None = flag(
        None, "leave out prompts longer than this (tokens; --rollout-max-context-len less 1, else no limit)", at_least=1
    )
    rollout_max_context_len: int | None = flag(
        None, "longest prompt and response together (tokens; no limit)", at_least=2
    )
    rollout_stop: list[str] | None = flag(None, "strings that end a response", nargs="+")
    rollout_stop_token_ids: list[int] | None = flag(None, "token ids that end a response", nargs="+")
    rollout_skip_special_tokens: bool = flag(False, "leave special tokens out of the response text")
    rollout_shuffle: bool = flag(False, "shuffle the prompts again in each epoch, by --rollout-seed + epoch")
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
        "keep the responses that are unfinished when a rollout is full, and continue them in the next one; needs"
        " --over-sampling-batch-size above --rollout-batch-size, or a filter, to leave any",
    )
    mask_offpolicy_in_partial_rollout: bool = flag(
        False, "do not train on the tokens that a continued response brought from earlier rollouts"
    )
    discard_surplus_groups: bool = flag(
        False,
        "generate finished groups for which a full rollout had no place again (they go into the next rollout as they"
        " are)",
    )
    buffer_filter_path: str | None = flag(
        None,
        "function that chooses which waiting groups are sent out next (dotted import path; those that wait longest)",
    )
    rollout_sample_hook_path: list[str] = flag(
        [], "functions that see each finished sample before its reward, in this order (dotted import paths)", nargs="+"
    )
    rollout_sample_filter_path: str | None = flag(
        None, "function that takes samples out of training by their remove_sample (dotted import path)"
    )
    rollout_all_samples_process_path: str | None = flag(
        None, "function that sees all judged groups of a rollout, dropped ones too (dotted import path)"
    )
    skip_failed_samples: bool = flag(
        False,
        "where a function of yours that makes or judges a sample raises, leave its group out and generate another"
        " prompt in its place (the run ends)",
    )
    max_failed_samples: int = flag(
        16, "--skip-failed-samples: more of them in one rollout end the run after all (count)", at_least=0
    )
    custom_convert_samples_to_train_data_path: str | None = flag(
        None, "function that makes the training data of a rollout (dotted import path)"
    )
    custom_rollout_log_function_path: str | None = flag(
        None, "function that logs a rollout (dotted import path); what it returns says whether slimrl does not"
    )
    custom_eval_rollout_log_function_path: str | None = flag(
        None, "function that logs an evaluation (dotted import path); what it returns says whether slimrl does not"
    )
    use_distributed_post: bool = flag(
        False,
        "send requests from every node",
        not_served="one asynchronous client sends them all; give --sglang-server-concurrency",
    )
    rollout_data_transport: str = flag(
        "object-store",
        "how samples travel to training",
        choices=("object-store", "nixl"),
        not_served="samples travel through Ray's object store; leave it out",
    )
    loss_mask_type: str = flag(
        "qwen",
        "family of the chat template, by which supervised training finds what the assistant says",
        choices=("qwen", "qwen3", "qwen3_5", "distill_qwen"),
    )
    rollout_external_engine_addrs: list[str] | None = flag(
        None,
        "running SGLang servers to use in place of slimrl's own, as host:port; they are given weights and never ended",
        nargs="+",
    )

    @property
    def only_evaluates(self) -> bool:
        """True where nothing is trained and nothing generated to be trained on."""
        return self.num_rollout == 0

    @property
    def rollout_gpus(self) -> int:
        """GPUs that this run reserves for engines: none where the engines are the user's."""
        return 0 if self.rollout_external_engine_addrs else self.rollout_num_gpus or 0  # type: ignore[attr-defined] # of ClusterArguments

    @property
    def has_own_rollout_function(self) -> bool:
        """True where --rollout-function-path is not the built-in rollout."""
        return self.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION


@dataclasses.dataclass
class EvalArguments:
    """When, on what and how to evaluate."""

    eval_interval: int | None = flag(
        None, "evaluate before training and after every that many rollouts (never)", at_least=1
    )
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
    eval_label_key: str | None = flag(None, "column with the true answer (--label-key)")
    eval_tool_key: str | None = flag(None, "column with tool schemas (--tool-key)")
    eval_reward_key: str | None = flag(None, "entry of a reward that is a dict (--reward-key)")
    eval_temperature: float | None = flag(None, "sampling temperature, 0 is greedy (--rollout-temperature)", at_least=0)
    eval_top_p: float | None = flag(None, "nucleus probability (--rollout-top-p)", above=0, at_most=1)
    eval_top_k: int | None = flag(None, "likeliest tokens kept, -1 is all (--rollout-top-k)", at_least=-1, other_than=0)
    eval_max_response_len: int | None = flag(None, "longest response (tokens; --rollout-max-response-len)", at_least=1)
    eval_max_prompt_len: int | None = flag(None, "leave out longer prompts (tokens; no limit)", at_least=1)
    eval_max_context_len: int | None = flag(
        None, "longest prompt and response together (tokens; --rollout-max-context-len)", at_least=2
    )
    eval_min_new_tokens: int | None = flag(None, "shortest response (tokens; no minimum)", at_least=0)
    eval_function_path: str | None = flag(
        None,
        "function that makes an evaluation (dotted import path; --rollout-function-path)",
    )


RM_TYPES = rm_types()


@dataclasses.dataclass
class RewardArguments:
    """How a response is judged."""

    rm_type: str | None = flag(
        None,
        "built-in reward, with boxed_ the last \\boxed{} wherever it stands; a sample's metadata.rm_type goes first",
        choices=RM_TYPES,
    )
    custom_rm_path: str | None = flag(None, "reward function (dotted import path); goes before --rm-type")
    group_rm: bool = flag(
        False, "judge a whole group in one call: --custom-rm-path is then async f(args, samples), a list of rewards"
    )
    rm_url: str | None = flag(
        None,
        "address of the reward service that --rm-type remote_rm asks; with --rm-model the address of an SGLang server"
        " with that model which runs already, several with commas between them",
    )
    rm_model: str | None = flag(
        None,
        "reward model that --rm-type reward_model asks (Hugging Face folder, a sequence classifier with one label);"
        " without --rm-url its servers are started on GPUs of their own",
    )
    rm_num_gpus: int = flag(1, "GPUs of the reward model's servers, behind those of training and rollout", at_least=1)
    rm_num_gpus_per_engine: int = flag(1, "GPUs of one server of the reward model", at_least=1)
    rm_server_options: dict[str, Any] = flag(
        {}, 'flags of SGLang for the reward model\'s servers (JSON object), as in {"mem_fraction_static": 0.8}'
    )
    rm_input: str | None = flag(
        None,
        "what the reward model reads: the conversation in its own chat template, prompt and response as text, or the"
        " policy's token ids as they are (conversation where it has a template; else tokens where its tokenizer is the"
        " policy's, else text)",
        choices=("conversation", "text", "tokens"),
    )
    rm_concurrency: int = flag(64, "requests in flight per server of the reward model", at_least=1)
    rm_failure_limit: float = flag(
        1.0,
        "end the run where at least this share of a rollout's samples got no score from their graders; above 1 never",
        above=0,
    )
    rm_time_limit: float = flag(5.0, "time that a built-in grader has for one answer (s); then it is killed", above=0)
    rm_num_graders: int | None = flag(
        None, "processes that built-in graders run in (a quarter of the cores, 2 to 16)", at_least=1
    )
    reward_key: str | None = flag(None, "entry to train on where the reward is a dict")
    custom_reward_post_process_path: str | None = flag(
        None, "function that turns raw rewards into training rewards (dotted import path; group normalisation)"
    )
