"""Flags of evaluation; a value that is not given is taken from the rollout flag of the same meaning."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag


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
