"""The one table of all metrics: names, meanings, units, and how optimizer steps of one rollout combine.

A new metric is a new row here, and a value in `slimrl.megatron.training.loss.policy_loss`, in
`slimrl.megatron.training.reporting.train_metrics` or in `slimrl.rollout.metrics`. docs/metrics.md is generated from the
table, Prometheus shows its meanings, and tests check every name that a run writes against it. Names that custom
functions report are passed on unchanged.
"""

from __future__ import annotations

from slimrl.observability.metrics import Metric

_OF_RANKS = "the trainer's rollout columns, "  # of all samples that are trained on
_TURNS = "--log-multi-turn"
_MISMATCH = "--get-mismatch-metrics"
_TIS = "--use-tis"
_RS = "--use-rs"
_OF_LEVEL = "{}, over trained tokens; over samples with --tis-level sequence and geometric"
_ENTROPY = "--use-rollout-entropy"
_OPD = "--use-opd"
_FAULTS = "--use-fault-tolerance"
_CRITIC = "with a critic (--advantage-estimator ppo)"

TRAIN = (
    Metric("train/step", "the optimizer step: horizontal axis of train/", "count", "last"),
    Metric(
        "train/loss",
        "training loss: pg_loss - entropy_coef * entropy_loss + kl_loss_coef * kl_loss, and with"
        " --positive-example-loss-coef the weighted positive_example_loss",
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
    Metric("train/tis_weight", _OF_LEVEL.format("mean weight, clipped or masked"), when=_TIS),
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
    Metric(
        "train/memory_{parameters,gradients,optimizer}",
        "on the rank with the most",
        "bytes",
        "max",
        "with a run's first step",
    ),
    Metric(
        "train/memory_activations",
        "the same of activations, at their peak",
        "bytes",
        "max",
        "with a run's first step; on GPUs with every step",
    ),
    Metric(
        "train/planned_memory_{parameters,gradients,optimizer,activations}",
        "the estimate of --dry-run for them, with micro-batches of this size",
        "bytes",
        "max",
        "as above",
    ),
)

ROLLOUT = (
    Metric("rollout/step", "the rollout: horizontal axis of rollout/, perf/, memory/, multi_turn/, passrate/", "count"),
    Metric("rollout/raw_reward", "mean reward as scored", "reward"),
    Metric("rollout/raw_reward_std", "standard deviation (n - 1) over all samples; 0 for one sample", "reward"),
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
    Metric("rollout/reward_failures", "samples whose grader gave no score (counted as reward 0)", "count"),
    Metric(
        "rollout/failed_samples",
        "samples in which a custom function raised; their groups were dropped",
        "count",
        when="--skip-failed-samples",
    ),
    Metric("rollout/faults/servers_lost", "servers that died, hung or did not start", "count", when=_FAULTS),
    Metric("rollout/faults/servers_replaced", "servers that replaced a lost one", "count", when=_FAULTS),
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
    Metric("rollout/kl", "the same for the KL to the reference model (--kl-loss-type)", "nats", when="the same"),
    Metric("rollout/sample_kl", "mean over samples of that KL, summed over trained tokens", "nats", when="--kl-target"),
    Metric("rollout/kl_coef", "coefficient of the KL penalty in this rollout", when="--kl-target"),
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
    Metric("eval/<name>", "mean reward of the data set: with rewards 0 and 1 the accuracy", "reward"),
)

_TRAINING = "with training"
_LATENCIES = "{mean,median,p99,max,min}"
PERF = (
    Metric("perf/generate_time", "the rollout, from its start to the training batches", "s"),
    Metric("perf/train_time", "the train call", "s"),
    Metric("perf/update_weights_time", "the weight update", "s"),
    Metric("perf/{total_time,step_time}", "the step, without save and evaluate", "s"),
    Metric("perf/wait_for_rollout_time", "waiting for generation", "s"),
    Metric("perf/train_wait_time", "step time minus train_time", "s", when=_TRAINING),
    Metric("perf/wait_time_ratio", "train_wait_time as a part of the step", "fraction", when=_TRAINING),
    Metric(
        "perf/{save,evaluate}_time", "the save or the evaluation after a step", "s", when="after a step with either"
    ),
    Metric(
        "perf/{release_engines,wake_training,park_training,resume_engines}_time",
        "offloading and onloading of weights and caches",
        "s",
        when="--offload",
    ),
    Metric("perf/train_tokens_per_second", "trained tokens / perf/train_time, all ranks together", "tokens/s"),
    Metric("perf/update_weights_wire_bytes", "sent by the rank that sent most", "bytes", when="after a weight update"),
    Metric(
        "perf/update_weights_bytes_per_second",
        "the same divided by the time of the weight update",
        "bytes/s",
        when="after a weight update",
    ),
    Metric("perf/data_preprocess_time", "packing of micro-batches (rank 0)", "s", when=_TRAINING),
    Metric(
        "perf/{log_probs,ref_log_probs,teacher_log_probs}_time",
        "pass of the policy, of the reference, of the teacher, before the optimizer steps (rank 0)",
        "s",
        when="where such a pass runs",
    ),
    Metric("perf/values_time", "pass of the critic before the optimizer steps (rank 0)", "s", when=_CRITIC),
    Metric("perf/critic_train_time", "the critic's forward, backward and optimizer, all steps", "s", when=_CRITIC),
    Metric("perf/actor_train_time", "forward, backward and optimizer, all steps (rank 0)", "s", when=_TRAINING),
    Metric(
        "perf/actor_train_tok_per_s", "prompt and response tokens / that time, all ranks", "tokens/s", when=_TRAINING
    ),
    Metric(
        "perf/{log_probs,ref_log_probs,teacher_log_probs,actor_train}_tflops",
        "per training GPU, without padding and recomputation; forward and backward count as three passes",
        "TFLOP/s",
        when="where such a pass runs",
    ),
    Metric(
        "perf/rollout_time",
        "generation and scoring; with `--max-weight-staleness` the time since the previous rollout was handed over (the"
        " first after a resume uses groups from the checkpoint, so its speeds are too high)",
        "s",
    ),
    Metric("perf/tokens_per_gpu_per_sec", "response tokens per rollout_time and rollout GPU", "tokens/s"),
    Metric("perf/effective_tokens_per_gpu_per_sec", "the same without masked tokens", "tokens/s"),
    Metric("perf/longest_sample_tokens_per_sec", "tokens of the longest response / rollout_time", "tokens/s"),
    Metric("perf/longest_effective_sample_tokens_per_sec", "the same without masked tokens", "tokens/s"),
    Metric(
        "perf/longest_{sample,effective_sample}_tokens_per_sec_without_non_generation",
        "these without the time in which that sample waited for its tools",
        "tokens/s",
        when="tools",
    ),
    Metric("perf/non_generation_time/{mean,median,max,min}", "a sample's time in tools", "s", when="tools"),
    Metric(f"perf/request/e2e_latency/{_LATENCIES}", "a server's time for a request, queue included", "s"),
    Metric(
        f"perf/request/queue_time/{_LATENCIES}",
        "of that in the server's queue",
        "s",
        when="--sglang-enable-metrics",
    ),
)

MEMORY = (
    Metric("memory/<process>_rss_gib", "resident memory, by process (docs/health.md)", "GiB"),
    Metric("memory/rank<r>_cuda_{allocated,peak,reserved,device_used}_gib", "GPU memory of a rank", "GiB", when="GPUs"),
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
