"""The one table of all metrics: names, meanings, units, and how optimizer steps of one rollout combine.

A new metric is a new row here or in `training_rows`, and a value in `slimrl.megatron.training.loss.policy_loss`, in
`slimrl.megatron.training.train_metrics` or in `slimrl.rollout.metrics`. `markdown` makes docs/metrics.md of the table,
Prometheus shows its meanings, and tests check every name that a run writes against it. Names that custom functions
report are passed on unchanged.
"""

from __future__ import annotations

from collections.abc import Sequence

from slimrl.observability.metrics import Metric
from slimrl.observability.metrics.training_rows import COMPARED, CRITIC, MEMORY, PERF, SCORED, SFT, STORED, TRAIN

_OF_RANKS = "the trainer's rollout columns, "  # of all samples that are trained on
_TURNS = "--log-multi-turn"
_ENTROPY = "--use-rollout-entropy"
_OPD = "--use-opd"
_TEACHERS = "--opd-teacher-urls, --opd-teacher-models"
_FAULTS = "--use-fault-tolerance"

ROLLOUT = (
    Metric("rollout/step", "the rollout: horizontal axis of rollout/, perf/, memory/, multi_turn/, passrate/", "count"),
    Metric("rollout/raw_reward", "mean reward as scored", "reward"),
    Metric("rollout/raw_reward_std", "standard deviation (n - 1) over all samples; 0 for one sample", "reward"),
    Metric(
        "rollout/running_reward/{mean,std}", "of all rewards of the run so far", "reward", when="--normalize-reward"
    ),
    Metric("rollout/response_len/{mean,median,max,min}", "response tokens of a sample", "tokens"),
    Metric("rollout/prompt_len/mean", "prompt tokens of a sample", "tokens"),
    Metric("rollout/truncated_ratio", "samples cut off by the length limit", "fraction"),
    Metric(
        "rollout/overlong_penalty",
        "mean of what is added to the training rewards of long responses",
        "reward",
        when="--overlong-buffer-len",
    ),
    Metric("rollout/overlong_ratio", "samples with that penalty", "fraction", when="--overlong-buffer-len"),
    Metric("rollout/repetition_frac", "responses that end in a repeated pattern", "fraction"),
    Metric("rollout/zero_std/ratio", "groups whose rewards are all equal: they contribute no gradient", "fraction"),
    Metric("rollout/zero_std/count_<reward>", "groups in which every sample has that reward", "count"),
    Metric("rollout/steps", "steps of a response", "count", when="--rm-step-separator"),
    Metric("rollout/step_reward", "mean reward of a step, without --rm-step-coef", when="--rm-step-separator"),
    Metric("rollout/teacher/<name>/samples", "samples of that teacher", "samples", when=_TEACHERS),
    Metric(
        "rollout/teacher/<name>/opd_reverse_kl",
        "engine - teacher log-probability of sampled tokens of that teacher, a sample's mean over trained tokens",
        "nats",
        when=_TEACHERS,
    ),
    Metric("rollout/reward_failures", "samples whose grader gave no score (counted as reward 0)", "count"),
    Metric(
        "rollout/failed_samples",
        "samples in which a custom function raised; their groups were dropped",
        "count",
        when="--skip-failed-samples",
    ),
    Metric("rollout/faults/servers_lost", "servers that died, hung or did not start", "count", when=_FAULTS),
    Metric("rollout/faults/servers_replaced", "servers that replaced a lost one", "count", when=_FAULTS),
    Metric("rollout/faults/servers_joined", "servers that joined the running job", "count", when=_FAULTS),
    Metric("rollout/faults/router_restarts", "restarts of the router", "count", when=_FAULTS),
    Metric(
        "rollout/faults/requests_resent",
        "requests sent again because their server or the router was lost, or none accepted them",
        "count",
        when=_FAULTS,
    ),
    Metric(
        "rollout/dynamic_filter/drop_<reason>",
        "groups that the dynamic sampling filter dropped",
        "count",
        when="--dynamic-sampling-filter-path",
    ),
    Metric(
        "rollout/dynamic_filter/carried_over",
        "groups returned to the data source when the batch was full",
        "count",
        when="--dynamic-sampling-filter-path",
    ),
    Metric(
        "rollout/partial/continued",
        "trained samples that started in an earlier rollout",
        "count",
        when="--partial-rollout",
    ),
    Metric(
        "rollout/partial/oldest",
        "largest distance of such a sample to the rollout in which it started; 0 for none",
        "rollouts",
        when="--partial-rollout",
    ),
    Metric(
        "rollout/partial/carried_over",
        "groups returned to the data source when the batch was full",
        "count",
        when="--partial-rollout",
    ),
    Metric(
        "rollout/partial/unfinished",
        "samples of these groups that were aborted or not started",
        "count",
        when="--partial-rollout",
    ),
    Metric(
        "rollout/staleness/{mean,max}",
        "staleness of a sample: rollouts between the weights that sampled its oldest token and those that it trains",
        "rollouts",
    ),
    Metric("rollout/staleness/count_<n>", "samples of that staleness", "samples"),
    Metric(
        "rollout/staleness/dropped",
        "finished groups that were too old to train on and were regenerated",
        "count",
        when="--max-weight-staleness",
    ),
    Metric("rollout/prefix_cache_hit_rate", "prompt tokens that a server had in its cache", "fraction"),
    Metric("rollout/avg_cached_tokens_per_sample", "such tokens per trained sample", "tokens"),
    Metric("rollout/spec_accept_rate", "draft tokens that the model accepted", "fraction", when="speculative decoding"),
    Metric("rollout/spec_accept_length", "tokens per pass of the model", "tokens", when="speculative decoding"),
    Metric(
        "rollout/error_cat/<category>",
        "samples by that entry of their reward",
        "fraction",
        when="--log-reward-category",
    ),
    Metric(
        "rollout/correct_length/{p25,p50,p75,p100}",
        "response tokens of the samples with reward 1 or more, quantiles",
        "tokens",
        when="--log-correct-samples",
    ),
    Metric("rollout/correct_ratio", "samples with reward 1 or more", "fraction", when="--log-correct-samples"),
    Metric(
        "rollout/correct_entropy",
        "entropy as below, of these samples only",
        "nats",
        when=f"--log-correct-samples with {_ENTROPY}",
    ),
    Metric("rollout/rewards", f"{_OF_RANKS}mean: the reward after the group's normalisation", "reward"),
    Metric("rollout/truncated", f"{_OF_RANKS}mean: 1 if truncated", "fraction"),
    Metric("rollout/response_lengths", f"{_OF_RANKS}mean", "tokens"),
    Metric("rollout/total_lengths", f"{_OF_RANKS}mean: prompt and response", "tokens"),
    Metric(
        "rollout/log_probs",
        f"{_OF_RANKS}mean over trained tokens, then over the samples that have any: those of training",
        "nats",
    ),
    Metric("rollout/rollout_log_probs", "the same for the engines' log-probabilities", "nats"),
    Metric(
        "rollout/ref_log_probs",
        "the same for the reference model",
        "nats",
        when="with a reference model, every --ref-kl-metric-interval",
    ),
    Metric("rollout/stored_ref_log_probs", "samples with stored values of the reference", "fraction", when=STORED),
    Metric("rollout/kl", "the same for the KL to the reference model (--kl-loss-type)", "nats", when="the same"),
    Metric("rollout/sample_kl", "mean over samples of that KL, summed over trained tokens", "nats", when="--kl-target"),
    Metric("rollout/kl_coef", "coefficient of the KL penalty in this rollout", when="--kl-target"),
    Metric("rollout/entropy_coef", "coefficient of the entropy bonus in this rollout", when="--entropy-target"),
    Metric("rollout/teacher_log_probs", "the same for the teacher's log-probabilities", "nats", when=_OPD),
    Metric(
        "rollout/opd_reverse_kl",
        "the same for the sampled reverse KL to the teacher, student - teacher log-probability",
        "nats",
        when=_OPD,
    ),
    Metric("rollout/advantages", "the same for the advantages, after whitening"),
    Metric(
        "rollout/returns",
        "the same for the returns: the advantages before whitening",
        when="without --custom-advantage-function-path",
    ),
    Metric("rollout/values", "the same for the critic's values before the rollout's first optimizer step", when=CRITIC),
    Metric("rollout/entropy", "the same for the entropy of the next-token distributions", "nats", when=_ENTROPY),
)

TURNS = (
    Metric(
        "multi_turn/raw_response_length/response_length_{mean,max,min}",
        "response tokens of a sample, those of tools included",
        "tokens",
        when=_TURNS,
    ),
    Metric(
        "multi_turn/raw_response_length/response_length_clip_ratio",
        "samples with --rollout-max-response-len such tokens or more",
        "fraction",
        when=_TURNS,
    ),
    Metric(
        "multi_turn/wo_obs_response_length/response_length_{mean,max,min}",
        "tokens that the model generated (loss mask 1)",
        "tokens",
        when=_TURNS,
    ),
    Metric("multi_turn/round_number_{mean,max,min}", "turns of the model in a sample", "count", when=_TURNS),
    Metric(
        "passrate/pass@<k>",
        "probability that k of a prompt's samples contain one with reward 1 or more; k = 1, 2, 4, ..., group size",
        "fraction",
        when="--log-passrate",
    ),
)

EVAL = (
    Metric("eval/step", "rollouts trained on before the evaluation: horizontal axis of eval/", "count"),
    Metric("eval/<name>/response_len/{mean,median,max,min}", "response tokens of a sample", "tokens"),
    Metric("eval/<name>-truncated_ratio", "samples cut off by the length limit", "fraction"),
    Metric("eval/<name>-reward_failures", "samples whose grader gave no score (counted as reward 0)", "count"),
    Metric(
        "eval/<name>-pass@<k>",
        "probability that k of a prompt's samples contain one with reward 1 or more; k = 1, 2, 4, ..., their number",
        "fraction",
    ),
    Metric("eval/<name>-loss", "mean loss of held-out pairs or conversations", when=f"{COMPARED}; {SFT}; {SCORED}"),
    Metric("eval/<name>-reward_margin", "mean of the chosen - rejected reward of held-out pairs", when=COMPARED),
    Metric(
        "eval/<name>",
        "mean reward of the data set: with rewards 0 and 1 the accuracy; the accuracy of held-out pairs; the perplexity"
        " of held-out conversations; the mean error of held-out scores",
        "reward",
    ),
)

SECTIONS = {
    "Training": TRAIN,
    "Rollouts": ROLLOUT,
    "Turns and pass rates": TURNS,
    "Evaluation": EVAL,
    "Time and speed": PERF,
    "Memory": MEMORY,
}
METRICS = tuple(metric for rows in SECTIONS.values() for metric in rows)


_INTRODUCTION = """\
# Metrics

Every number that a run reports, under the same name in [TensorBoard, W&B and Prometheus](observability.md) and in
`steps[]` of [`summary.json`](summary.md) (there without the prefix `train/`, with `memory/` as a separate object, and
with the times of phases in `seconds`). This page is generated from the table in the source:
`python -m slimrl.observability.metrics.registry > docs/metrics.md`.

- `{a,b}` means one of these words, `<x>` a name or number of the run.
- *when* is empty if every run reports the metric. A fraction is between 0 and 1.
- Metrics of custom functions (a loss, a log function, a rollout function) keep their own names.

## Horizontal axes

| names | axis | value |
| --- | --- | --- |
| `train/` | `train/step` | optimizer steps before this one; each step of a rollout is a separate point |
| `eval/` | `eval/step` | rollouts trained on before the evaluation |
| all others | `rollout/step` | the rollout, from 0 |

With `--wandb-always-use-train-step` all three count optimizer steps, also in TensorBoard. `summary.json` has one entry
per rollout; the column *combined* of the first table says how it combines several optimizer steps into one number, and
`by_optimizer_step` has each of them.
"""
_NAMES_FROM_SLIME = """
## Names that differ from slime

| slime | slimrl |
| --- | --- |
| `train/train_rollout_logprob_abs_diff` | `train/train_rollout_logprob_abs_diff_mean`, `..._max` |
| `train/ois` | `train/ratio_mean` |
| `perf/sleep_time`, `perf/wake_up_time` | `perf/park_training_time`, `perf/wake_training_time` |
| `perf/save_model_time` | `perf/save_time` |
| `rollout/raw_reward` of the train ranks | the same name: it is computed once, with the rollout |
"""


def markdown() -> str:
    """The whole page."""
    return _INTRODUCTION + "".join(_section(title, rows) for title, rows in SECTIONS.items()) + _NAMES_FROM_SLIME


def _section(title: str, rows: Sequence[Metric]) -> str:
    heads = ["name", "meaning", "unit", *(["combined"] if rows is TRAIN else []), "when"]
    lines = [_line(heads), _line(["---"] * len(heads))]
    for metric in rows:
        combined = [metric.combine] if rows is TRAIN else []
        lines.append(_line([f"`{metric.name}`", metric.meaning, metric.unit, *combined, metric.when]))
    return f"\n## {title}\n\n" + "\n".join(lines) + "\n"


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


if __name__ == "__main__":
    print(markdown(), end="")
