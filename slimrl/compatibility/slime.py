"""The slime modules and names that custom modules may import, and the slimrl object behind each.

One row per name. If no slime is installed, `slimrl.hooks.loader` creates modules from them.
`python -m slimrl.compatibility.slime` prints the table for docs/coming-from-slime.md.
"""

from __future__ import annotations

import difflib
import importlib
from typing import Any, NamedTuple

_HERE = "slimrl.compatibility"


class Offer(NamedTuple):
    """`module` and `name` as in slime, `target` as `module:attribute` of slimrl, `difference` "" for none."""

    module: str
    name: str
    target: str
    difference: str = ""

    @property
    def path(self) -> str:
        """The dotted path in slime."""
        return f"{self.module}.{self.name}"


OFFERS = (
    Offer(
        "slime.utils.types",
        "Sample",
        "slimrl.data.sample:Sample",
        "one class for both; see the fields below",
    ),
    Offer(
        "slime.utils.http_utils",
        "post",
        f"{_HERE}.rollout_helpers:post",
        "calls to the run's router use the run's client: its concurrency limit, retries, key, and cancellation when the"
        " rollout is full; HTTP 4xx and redirects fail at once; calls elsewhere time out after 600 s; with"
        " `--use-fault-tolerance` and without `max_retries` it waits up to 20 minutes for a frozen model's lost server",
    ),
    Offer("slime.utils.http_utils", "get", f"{_HERE}.rollout_helpers:get", "fails as `post` does, without retries"),
    Offer(
        "slime.rollout.sglang_rollout",
        "GenerateState",
        f"{_HERE}.rollout_helpers:GenerateState",
        "`args`, `tokenizer`, `processor` (None), `semaphore`, `sampling_params`, `aborted`, `dp_rank_context`; no"
        " `pendings` or `submit_generate_tasks`. The tokenizer runs code of the checkpoint only with"
        " `--sglang-trust-remote-code`, and the client limits requests, not `semaphore`",
    ),
    Offer(
        "slime.rollout.sglang_rollout",
        "generate",
        f"{_HERE}.rollout_helpers:generate",
        "only within `--custom-generate-function-path`; continues `sample.tokens`, which contain the prompt",
    ),
    Offer(
        "slime.rollout.sglang_rollout",
        "get_model_url",
        f"{_HERE}.rollout_helpers:get_model_url",
        "the policy is `default`, `actor` or its name in `--sglang-config`; frozen models have their names there,"
        " others are rejected",
    ),
    Offer(
        "slime.rollout.base_types",
        "RolloutFnTrainOutput",
        f"{_HERE}.rollout_helpers:RolloutFnTrainOutput",
    ),
    Offer(
        "slime.rollout.base_types",
        "RolloutFnEvalOutput",
        f"{_HERE}.rollout_helpers:RolloutFnEvalOutput",
        "`metrics` are rejected: return them per set",
    ),
    Offer("slime.rollout.rm_hub", "async_rm", "slimrl.rollout.rm_hub:async_rm", "graders run in separate processes"),
    Offer("slime.rollout.rm_hub", "batched_async_rm", "slimrl.rollout.rm_hub:batched_async_rm", "the same"),
    Offer(
        "slime.rollout.rm_hub.math_dapo_utils",
        "compute_score",
        f"{_HERE}.rollout_helpers:compute_score",
        "equivalent answers are equal ([rewards.md](rewards.md)); `strict_box_verify` scores the last box of the last"
        " 300 characters; a missing answer is `[INVALID]`",
    ),
    Offer(
        "slime.rollout.rm_hub.math_utils",
        "grade_answer_verl",
        f"{_HERE}.rollout_helpers:grade_answer_verl",
        "by equivalence, like `--rm-type math`",
    ),
    Offer(
        "slime.rollout.rm_hub.math_utils",
        "grade_answer_sympy",
        f"{_HERE}.rollout_helpers:answers_are_equal",
        "like `grade_answer_verl`, without the box",
    ),
    Offer(
        "slime.rollout.rm_hub.math_utils",
        "grade_answer_mathd",
        f"{_HERE}.rollout_helpers:answers_are_equal",
        "like `grade_answer_verl`, without the box",
    ),
    Offer(
        "slime.rollout.rm_hub.math_utils",
        "extract_answer",
        "slimrl.rollout.rm_hub.rule_reward:last_boxed",
        "an unclosed box is ignored",
    ),
    Offer(
        "slime.rollout.rm_hub.deepscaler",
        "get_deepscaler_rule_based_reward",
        f"{_HERE}.rollout_helpers:get_deepscaler_rule_based_reward",
        "by equivalence, like `--rm-type deepscaler`",
    ),
    Offer("slime.rollout.rm_hub.f1", "f1_score", f"{_HERE}.rollout_helpers:f1_score"),
    Offer(
        "slime.rollout.rm_hub.gpqa",
        "compute_gpqa_reward",
        f"{_HERE}.rollout_helpers:compute_gpqa_reward",
        "like `--rm-type gpqa`",
    ),
    Offer(
        "slime.rollout.on_policy_distillation",
        "reward_func",
        f"{_HERE}.rollout_helpers:reward_func",
        "the reward is 0, as after slime's `post_process_rewards`; `--use-opd --opd-type sglang` asks the teacher at"
        " `--rm-url` without it",
    ),
    Offer(
        "slime.rollout.on_policy_distillation",
        "post_process_rewards",
        f"{_HERE}.rollout_helpers:post_process_rewards",
        "all rewards are 0; `sample.teacher_log_probs` is already set",
    ),
    Offer(
        "slime.rollout.filter_hub.base_types",
        "DynamicFilterOutput",
        "slimrl.rollout.filter_hub.dynamic_sampling_filters:DynamicFilterOutput",
        "also has `keep_when_insufficient`",
    ),
    *(
        Offer(
            "slime.rollout.filter_hub.dynamic_sampling_filters",
            name,
            f"slimrl.rollout.filter_hub.dynamic_sampling_filters:{name}",
        )
        for name in ("check_reward_nonzero_std", "check_any_completed")
    ),
    Offer("slime.rollout.filter_hub.buffer_filters", "pop_first", "slimrl.rollout.dataset.data_source:pop_first"),
    *(
        Offer(
            "slime.rollout.data_source",
            name,
            f"slimrl.rollout.dataset.data_source:{name}",
            "constructed from `args` and `tokenizer`; saves its position by `state_dict` ([hooks.md](hooks.md))",
        )
        for name in ("RolloutDataSource", "RolloutDataSourceWithBuffer")
    ),
    Offer("slime.utils.async_utils", "run", f"{_HERE}.rollout_helpers:run", "also works inside an event loop"),
    Offer("slime.utils.misc", "load_function", f"{_HERE}.rollout_helpers:load_function"),
    Offer("slime.utils.misc", "SingletonMeta", f"{_HERE}.rollout_helpers:SingletonMeta"),
    Offer("slime.utils.processing_utils", "load_tokenizer", f"{_HERE}.rollout_helpers:load_tokenizer"),
    Offer(
        "slime.utils.processing_utils",
        "load_processor",
        f"{_HERE}.rollout_helpers:load_processor",
        "always None: images are read by the run itself ([vision.md](vision.md))",
    ),
    Offer(
        "slime.utils.mask_utils",
        "MultiTurnLossMaskGenerator",
        f"{_HERE}.loss_helpers:MultiTurnLossMaskGenerator",
        "tokenises the whole conversation once; `tokenizer_type` is a `--loss-mask-type`; trains on the end-of-turn"
        " token",
    ),
    Offer(
        "slime.utils.mask_utils",
        "get_response_lengths",
        f"{_HERE}.loss_helpers:get_response_lengths",
        "from the first trained token to the end",
    ),
    *(
        Offer(
            "slime.backends.megatron_utils.cp_utils",
            name,
            f"{_HERE}.loss_helpers:{name}",
            "returns its input: training functions get whole responses, also with context parallelism",
        )
        for name in ("all_gather_with_cp", "slice_log_prob_with_cp")
    ),
    Offer(
        "slime.backends.megatron_utils.cp_utils",
        "get_sum_of_sample_mean",
        f"{_HERE}.loss_helpers:get_sum_of_sample_mean",
        "over whole responses; masked values may be NaN",
    ),
    Offer(
        "slime.utils.ppo_utils",
        "compute_approx_kl",
        f"{_HERE}.loss_helpers:compute_approx_kl",
        "`low_var_kl` is clamped before `importance_ratio` multiplies it",
    ),
    Offer(
        "slime.utils.ppo_utils",
        "compute_policy_loss",
        f"{_HERE}.loss_helpers:compute_policy_loss",
        "advantages are constants; not compiled",
    ),
    Offer(
        "slime.utils.ppo_utils",
        "compute_gspo_kl",
        f"{_HERE}.loss_helpers:compute_gspo_kl",
        "over whole responses",
    ),
    Offer("slime.utils.ppo_utils", "get_grpo_returns", f"{_HERE}.loss_helpers:get_grpo_returns"),
    Offer(
        "slime.utils.ppo_utils",
        "get_reinforce_plus_plus_returns",
        f"{_HERE}.loss_helpers:get_reinforce_plus_plus_returns",
        "a wholly masked sample gets no reward instead of an error",
    ),
    Offer(
        "slime.utils.ppo_utils",
        "get_reinforce_plus_plus_baseline_advantages",
        f"{_HERE}.loss_helpers:get_reinforce_plus_plus_baseline_advantages",
    ),
    Offer("slime.utils.metric_utils", "dict_add_prefix", f"{_HERE}.rollout_helpers:dict_add_prefix"),
    Offer(
        "slime.utils.metric_utils",
        "compute_statistics",
        "slimrl.rollout.metrics:length_statistics",
        "an empty list is an error",
    ),
    Offer(
        "slime.utils.metric_utils",
        "compute_pass_rate",
        f"{_HERE}.rollout_helpers:compute_pass_rate",
        "a reward of 1 or more passes",
    ),
    Offer(
        "slime.utils.metric_utils",
        "has_repetition",
        "slimrl.rollout.metrics:is_repetitive",
        "also checks shorter texts, from 200 characters",
    ),
)

# other imports of slime's examples (modules, or names of the modules above), with the alternative
INSTEAD = {
    "slime.agent": "slimrl.rollout.generation.multi_turn.multi_turn_generate alternates model and tool (docs/hooks.md)",
    "slime.backends.megatron_utils.loss": "batch.scores(logits) gives log-probabilities and entropy (docs/hooks.md);"
    " icepop_function is --use-tis --tis-mode mask",
    "slime.backends.sglang_utils": "custom functions get the keyword argument engine (docs/hooks.md)",
    "slime.ray": "custom functions get everything they need as arguments (docs/hooks.md)",
    "slime.rollout.filter_hub.base_types.MetricGatherer": "slimrl counts the reasons of filters (docs/metrics.md)",
    "slime.rollout.sft_rollout": "--rollout-function-path slime.rollout.sft_rollout.generate_rollout, or its parts in"
    " slimrl.rollout.sft_rollout",
    "slime.rollout.sglang_rollout.abort": "slimrl aborts requests in flight when a rollout is full",
    "slime.rollout.sglang_rollout.eval_rollout": "take the keyword argument generator and call"
    " generator.evaluation(rollout_id)",
    "slime.rollout.sglang_rollout.generate_and_rm": "accept the keyword argument generator in a rollout function"
    " (docs/hooks.md), or use async_rm and generate in a generate function",
    "slime.rollout.sglang_rollout.generate_and_rm_group": "train_async.py --max-weight-staleness generates fully"
    " asynchronously (docs/asynchrony.md); a rollout function gets the keyword argument generator",
    "slime.rollout.sglang_rollout.generate_rollout": "take the keyword argument generator and call"
    " generator.rollout(rollout_id, data_source)",
    "slime.router": "the router is SGLang's; every response contains its tokens",
    "slime.utils.arguments": "docs/flags.md lists the flags, args.custom has custom settings",
    "slime.utils.data": "slimrl.rollout.dataset.data_source samples prompts, slimrl.data.readers reads files",
    "slime.utils.http_utils.init_http_client": "post needs no initialization: leave it out",
    "slime.utils.logging_utils": "return metrics from --custom-rollout-log-function-path (docs/observability.md)",
    "slime.utils.ppo_utils.get_advantages_and_returns": "use generalized_advantages of slimrl.algorithms.returns",
    "slime.utils.ppo_utils.calculate_log_probs_and_entropy": "batch.scores(logits) gives both (docs/hooks.md)",
    "slime.utils.trace_utils": "slimrl records requests and rewards on the timeline by itself (docs/timeline.md)",
    "slime.utils.wandb_utils": "return metrics from --custom-rollout-log-function-path (docs/observability.md)",
}

_PATHS = {offer.path: offer for offer in OFFERS}
_MODULES = {offer.module for offer in OFFERS}
_PACKAGES = {module[:index] for module in _MODULES for index, letter in enumerate(module) if letter == "."}


def is_module(name: str) -> bool:
    """Whether `name` is a supported module, or a package that contains one."""
    return name in _MODULES or name in _PACKAGES


def is_package(name: str) -> bool:
    """Whether `name` contains supported modules."""
    return name in _PACKAGES


def names(module: str) -> list[str]:
    """The names that can be imported from a module."""
    return [offer.name for offer in OFFERS if offer.module == module]


def load(module: str, name: str) -> Any:
    """The object that `from module import name` binds. Raises ImportError if it is unsupported."""
    offer = _PATHS.get(f"{module}.{name}")
    if offer is None:
        raise ImportError(refusal(f"{module}.{name}"), name=module)
    target, _, attribute = offer.target.partition(":")
    return getattr(importlib.import_module(target), attribute)


def refusal(path: str) -> str:
    """The error of an unsupported import: the alternative, or the supported names in the nearest module."""
    sentence = f"slimrl has no counterpart of {path}"
    for name, instead in INSTEAD.items():
        if path == name or path.startswith(f"{name}."):
            return f"{sentence}: {instead}; docs/coming-from-slime.md lists the supported imports"
    module = path
    while not is_module(module):
        module = module.rpartition(".")[0]
    offered = names(module) or sorted(one for one in _MODULES if one.startswith(f"{module}."))
    nearest = difflib.get_close_matches(path, _PATHS, n=1, cutoff=0.8)
    guess = f": did you mean {nearest[0]}?" if nearest else "."
    return f"{sentence}{guess} Supported in {module}: {', '.join(offered)} (docs/coming-from-slime.md)"


def table() -> str:
    """The rows as Markdown."""
    lines = ["| import | here | difference |", "| --- | --- | --- |"]
    for offer in OFFERS:
        lines.append(f"| `{offer.path}` | `{offer.target.replace(':', '.')}` | {offer.difference} |")
    return "\n".join(lines)


def table_of_refusals() -> str:
    """The unsupported imports and their alternatives, as Markdown."""
    rows = [f"| `{path}` | {text} |" for path, text in INSTEAD.items()]
    return "\n".join(["| import | instead |", "| --- | --- |", *rows])


if __name__ == "__main__":
    print(f"{table()}\n\n{table_of_refusals()}")
