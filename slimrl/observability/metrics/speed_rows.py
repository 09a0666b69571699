"""The rows of the table of all metrics (`registry`) about time, speed and memory."""

from __future__ import annotations

from slimrl.observability.metrics import Metric

_RANKS = "--use-fault-tolerance with --save-interval"
_TRAINING = "with training"
_CRITIC = "with a critic (--advantage-estimator ppo)"
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


def _bytes(name: str, meaning: str, when: str) -> Metric:
    return Metric(name, meaning, "bytes", "max", when)


TRAIN_MEMORY = (
    _bytes("train/memory_{parameters,gradients,optimizer}", "on the rank with the most", "with a run's first step"),
    _bytes(
        "train/memory_{critic,critic_gradients}",
        "a critic in the same ranks: weights, optimizer state; gradients",
        _CRITIC,
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
