"""The rows of the table of all metrics (`registry`) about training, and about time, speed and memory."""

from __future__ import annotations

from slimrl.observability.metrics import Metric

# when a row is reported; the names without underscore are also those of `registry`
_RANKS = "--use-fault-tolerance with --save-interval"
_TRAINING = "with training"
CRITIC = "with a critic (--advantage-estimator ppo)"
SFT = "--loss-type sft_loss"
_PAIRS = "--loss-type preference_loss"
COMPARED = f"{_PAIRS}, or reward_model_loss with --reward-model-loss bradley_terry"
SCORED = "--reward-model-loss mse"
_MISMATCH = "--get-mismatch-metrics"
_TIS = "--use-tis"
_RS = "--use-rs"
_OF_LEVEL = "{}, over trained tokens; over samples with --tis-level sequence and geometric"
_LABELS = "--preference-loss kto, apo_zero_unpaired"
STORED = "--precompute-ref-log-probs"
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
    Metric("rollout/faults/ranks_lost", "losses of training ranks, after which all are replaced", "count", when=_RANKS),
    Metric("perf/rank_recovery_time", "replacing lost ranks, with the training that they repeat", "s", when=_RANKS),
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
        "perf/{log_probs,ref_log_probs,teacher_log_probs,kl_log_probs}_time",
        "pass of the policy, of the reference, of the teacher, before the optimizer steps (rank 0)",
        "s",
        when="where such a pass runs",
    ),
    Metric("perf/values_time", "pass of the critic before the optimizer steps (rank 0)", "s", when=CRITIC),
    Metric("perf/critic_train_time", "the critic's forward, backward and optimizer, all steps", "s", when=CRITIC),
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


def _bytes(name: str, meaning: str, when: str) -> Metric:
    return Metric(name, meaning, "bytes", "max", when)


TRAIN_MEMORY = (
    _bytes("train/memory_{parameters,gradients,optimizer}", "on the rank with the most", "with a run's first step"),
    _bytes(
        "train/memory_{critic,critic_gradients}",
        "a critic in the same ranks: weights, optimizer state; gradients",
        CRITIC,
    ),
    _bytes(
        "train/memory_host_models",
        "host memory of reference and teacher, and of the policy's weights while one of them is loaded",
        "a reference, or --opd-type megatron",
    ),
    _bytes("train/memory_activations", "at their peak", "with a run's first step; on GPUs with every step"),
    _bytes(
        "train/planned_memory_{parameters,gradients,optimizer,activations,critic,critic_gradients,host_models}",
        "the estimate of --dry-run for them, with micro-batches of this size",
        "as above",
    ),
    _bytes(
        "train/critic-memory_{parameters,gradients,optimizer,activations}",
        "the same of a critic on GPUs of its own",
        "--critic-num-gpus-per-node",
    ),
    _bytes(
        "train/critic-planned_memory_{parameters,gradients,optimizer,activations}",
        "the estimate of --dry-run for them",
        "--critic-num-gpus-per-node",
    ),
)


TRAIN = (
    Metric("train/step", "the optimizer step: horizontal axis of train/", "count", "last"),
    Metric(
        "train/loss",
        "training loss: pg_loss - entropy_coef * entropy_loss + kl_loss_coef * kl_loss, and with"
        " --positive-example-loss-coef the weighted positive_example_loss; or that of another --loss-type",
    ),
    Metric("train/perplexity", "exp of train/loss", when=SFT),
    Metric(
        "train/pair_accuracy",
        "pairs whose preferred response has the higher reward, of a preference loss the implicit one; 0 while these are"
        " equal",
        "fraction",
        when=COMPARED,
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
        when=COMPARED,
    ),
    Metric(
        "train/{chosen,rejected}_reward",
        "mean reward of the preferred (desirable) and of the other responses",
        when=COMPARED,
    ),
    Metric("train/absolute_error", "mean |reward - score| of a response", when=SCORED),
    Metric("train/{predicted,target}_reward", "mean reward, and mean score, of the responses", when=SCORED),
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
    Metric("train/critic-value_loss", "clipped value loss of the critic", when=CRITIC),
    Metric(
        "train/critic-value_clipfrac", "tokens whose value moved by more than --value-clip", "fraction", when=CRITIC
    ),
    Metric(
        "train/critic-explained_variance",
        "1 - variance of (return - value) / variance of the returns, over trained tokens; 1 is perfect",
        when=CRITIC,
    ),
    Metric("train/critic-grad_norm", "norm of the critic's gradient, before clipping", when=CRITIC),
    Metric("train/critic-lr", "learning rate of the critic", "", "last", CRITIC),
    Metric("train/critic-skipped", "optimizer steps of the critic not taken, as skipped", "count", "sum", CRITIC),
    Metric("train/critic-lr-pg_<group>", "the same of each of its optimizer's parameter groups", "", "last", CRITIC),
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
