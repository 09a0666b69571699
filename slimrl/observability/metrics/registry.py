"""The one table of all metrics: names, meanings, units, and how optimizer steps of one rollout combine.

A new metric is a new row here, and a value in `slimrl.megatron.training.loss.policy_loss`, in
`slimrl.megatron.training.rollout_report` or in `slimrl.rollout.metrics`. docs/metrics.md is generated from the
table, Prometheus shows its meanings, and tests check every name that a run writes against it. Names that custom
functions report are passed on unchanged.
"""

from __future__ import annotations

from slimrl.observability.metrics import Metric
from slimrl.observability.metrics.speed_rows import MEMORY, PERF, TRAIN_MEMORY

_OF_RANKS = "the trainer's rollout columns, "  # of all samples that are trained on
_TURNS = "--log-multi-turn"
_MISMATCH = "--get-mismatch-metrics"
_TIS = "--use-tis"
_RS = "--use-rs"
_OF_LEVEL = "{}, over trained tokens; over samples with --tis-level sequence and geometric"
_ENTROPY = "--use-rollout-entropy"
_OPD = "--use-opd"
_TEACHERS = "--opd-teacher-urls, --opd-teacher-models"
_FAULTS = "--use-fault-tolerance"
_SFT = "--loss-type sft_loss"
_PAIRS = "--loss-type preference_loss"
_LABELS = "--preference-loss kto, apo_zero_unpaired"
_COMPARED = f"{_PAIRS}, or reward_model_loss with --reward-model-loss bradley_terry"
_SCORED = "--reward-model-loss mse"
_STORED = "--precompute-ref-log-probs"
_CRITIC = "with a critic (--advantage-estimator ppo)"

TRAIN = (
    Metric("train/step", "the optimizer step: horizontal axis of train/", "count", "last"),
    Metric(
        "train/loss",
        "training loss: pg_loss - entropy_coef * entropy_loss + kl_loss_coef * kl_loss, and with"
        " --positive-example-loss-coef the weighted positive_example_loss; or that of another --loss-type",
    ),
    Metric("train/perplexity", "exp of train/loss", when=_SFT),
    Metric(
        "train/pair_accuracy",
        "pairs whose preferred response has the higher reward, of a preference loss the implicit one; 0 while these are"
        " equal",
        "fraction",
        when=_COMPARED,
    ),
    Metric(
        "train/label_accuracy",
        "responses whose implicit reward is on the side of the reference point (beta times kto_kl, or 0) that their"
        " label says",
        "fraction",
        when=_LABELS,
    ),
    Metric("train/desirable_share", "responses that are desirable", "fraction", when=_LABELS),
    Metric(
        "train/kto_kl",
        "the estimated KL to the reference model, at least 0: the reference point without beta",
        "nats",
        when="--preference-loss kto",
    ),
    Metric(
        "train/reward_margin",
        "mean of chosen - rejected reward of a pair; of single responses the difference of the two means",
        when=_COMPARED,
    ),
    Metric(
        "train/{chosen,rejected}_reward",
        "mean reward of the preferred (desirable) and of the other responses",
        when=_COMPARED,
    ),
    Metric("train/absolute_error", "mean |reward - score| of a response", when=_SCORED),
    Metric("train/{predicted,target}_reward", "mean reward, and mean score, of the responses", when=_SCORED),
    Metric(
        "train/{chosen,rejected}_log_probs",
        "mean log-probability of such a response: the sum over its trained tokens",
        "nats",
        when=_PAIRS,
    ),
    Metric("train/pg_loss", "clipped policy-gradient loss"),
    Metric("train/entropy_loss", "mean entropy of the policy's next-token distributions", "nats"),
    Metric("train/pg_clipfrac", "tokens whose loss was clipped", "fraction"),
    Metric("train/ppo_kl", "mean of old - new log-probability: distance that this rollout's steps have moved", "nats"),
    Metric(
        "train/kl_loss",
        "KL to the reference model by --kl-loss-type; 0 without a reference",
        "nats",
        when="not in rollouts that --ref-kl-metric-interval leaves out",
    ),
    Metric(
        "train/positive_example_loss",
        "mean negative log-likelihood of the trained tokens of samples with a high reward",
        "nats",
        when="--positive-example-loss-coef",
    ),
    Metric(
        "train/opd_divergence",
        "mean divergence of the student's distributions from the teacher's, by --opd-divergence",
        "nats",
        when="--opd-divergence other than sampled_reverse_kl",
    ),
    Metric("train/ratio_mean", "mean of policy / old policy; 1 in the first optimizer step"),
    Metric("train/ratio_max_abs_diff", "largest |ratio - 1| of any token", "", "max"),
    Metric(
        "train/train_rollout_logprob_abs_diff_mean",
        "mean |train - rollout log-probability| over trained tokens",
        "nats",
    ),
    Metric("train/train_rollout_logprob_abs_diff_max", "largest such difference of any trained token", "nats", "max"),
    Metric("train/tis", "mean ratio of training to engine probability, the weight before clipping", when=_TIS),
    Metric("train/tis_clipfrac", "tokens whose weight was clipped", "fraction", when=_TIS),
    Metric("train/tis_abs", "mean distance of that weight from 1", when=_TIS),
    Metric(
        "train/tis_clipped_samples",
        "samples with a token whose weight was clipped or masked, of those with trained tokens",
        "fraction",
        when=_TIS,
    ),
    Metric(
        "train/tis_weight", _OF_LEVEL.format("mean weight, clipped or masked, before --tis-batch-normalize"), when=_TIS
    ),
    Metric("train/tis_weight_square", _OF_LEVEL.format("mean square of that weight"), when=_TIS),
    Metric(
        "train/tis_ess",
        "effective sample size of these weights (Kish), tis_weight^2 / tis_weight_square",
        "fraction",
        when=_TIS,
    ),
    Metric("train/rs_masked_tokens", "trained tokens that --use-rs rejected", "fraction", when=_RS),
    Metric("train/rs_masked_samples", "samples of which it rejected every trained token", "fraction", when=_RS),
    Metric(
        "train/rs_vetoed_samples", "samples with a token below the threshold", "fraction", when="--rs-veto-threshold"
    ),
    Metric("train/opsm_clipfrac", "tokens that --use-opsm masked", "fraction", when="--use-opsm"),
    Metric("train/grad_norm", "norm of the gradient over all parameters, before clipping"),
    Metric("train/lr", "learning rate of the optimizer step", "", "last"),
    Metric("train/lr-pg_<group>", "the same of each of the optimizer's parameter groups", "", "last"),
    Metric("train/skipped", "optimizer steps not taken because loss or gradient was not finite", "count", "sum"),
    Metric("train/tokens", "trained tokens, over all data-parallel ranks", "tokens", "sum"),
    Metric(
        "train/{samples,global_batch_size}", "samples of the optimizer step, over all data-parallel ranks", "samples"
    ),
    Metric("train/critic-value_loss", "clipped value loss of the critic", when=_CRITIC),
    Metric(
        "train/critic-value_clipfrac", "tokens whose value moved by more than --value-clip", "fraction", when=_CRITIC
    ),
    Metric(
        "train/critic-explained_variance",
        "1 - variance of (return - value) / variance of the returns, over trained tokens; 1 is perfect",
        when=_CRITIC,
    ),
    Metric("train/critic-grad_norm", "norm of the critic's gradient, before clipping", when=_CRITIC),
    Metric("train/critic-lr", "learning rate of the critic", "", "last", _CRITIC),
    Metric("train/critic-skipped", "optimizer steps of the critic not taken, as skipped", "count", "sum", _CRITIC),
    Metric("train/critic-lr-pg_<group>", "the same of each of its optimizer's parameter groups", "", "last", _CRITIC),
    Metric("train/mismatch_kl", "mean of the engines' - training's log-probability (k1)", "nats", when=_MISMATCH),
    Metric("train/mismatch_k3_kl", "the same KL by the estimator that is never negative (k3)", "nats", when=_MISMATCH),
    Metric(
        "train/mismatch_{training,rollout}_ppl",
        "exp of minus the mean log-probability of a sample's trained tokens, mean over samples that have any",
        when=_MISMATCH,
    ),
    Metric(
        "train/mismatch_log_ppl_abs_diff", "mean distance of these two logarithms, per sample", "nats", when=_MISMATCH
    ),
    *TRAIN_MEMORY,
)

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
    Metric("rollout/stored_ref_log_probs", "samples with stored values of the reference", "fraction", when=_STORED),
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
    Metric(
        "rollout/values", "the same for the critic's values before the rollout's first optimizer step", when=_CRITIC
    ),
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
    Metric("eval/<name>-loss", "mean loss of held-out pairs or conversations", when=f"{_COMPARED}; {_SFT}; {_SCORED}"),
    Metric("eval/<name>-reward_margin", "mean of the chosen - rejected reward of held-out pairs", when=_COMPARED),
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
