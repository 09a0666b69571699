"""Flags that users may still have in their scripts and that have nothing to set: why, and what to use instead."""

from __future__ import annotations

RETIRED_FLAGS: dict[str, str] = {
    "--http-proxy": "slime never read it; the http_proxy variable serves downloads, and servers are reached directly",
    "--log-probs-max-tokens-per-gpu": "slime never read it; use --max-tokens-per-gpu, which holds for both passes",
    "--min-batch-collection-ratio": "slime never read it; leave it out",
    "--rollout-buffer-url": "it belongs to an example's own service; use --rollout-function-path",
    "--fetch-trajectory-retry-times": "it belongs to an example's own service; use --rollout-function-path",
    "--rollout-task-type": "it belongs to an example's own service; use --rollout-function-path",
    "--megatron-config-path": "one model is trained; give its flags on the command line or in --custom-config-path",
    "--megatron-deepgemm-forward-layers": "it needs patched engines; leave it out",
    "--megatron-deepgemm-forward-modules": "it needs patched engines; leave it out",
    "--megatron-deepgemm-moe-forward-layers": "it needs patched engines; leave it out",
    "--megatron-deepgemm-moe-forward-modules": "it needs patched engines; leave it out",
    "--recompute-loss-function": "log-probabilities are recomputed in pieces; use --log-probs-chunk-size",
    "--balance-by-flops": "micro-batches are balanced by cost already; use --balance-data",
    "--use-critic": "no system has this flag; a critic belongs to --advantage-estimator ppo",
    "--recompute-activations": "use --recompute-granularity selective",
    "--checkpoint-activations": "use --recompute-granularity full with --recompute-method and --recompute-num-layers",
    "--train-iters": "a run's length is --num-rollout or --num-epoch",
    "--train-samples": "a run's length is --num-rollout or --num-epoch",
    "--tokenizer-type": "the tokenizer is that of --hf-checkpoint; leave it out",
    "--tokenizer-model": "the tokenizer is that of --hf-checkpoint; leave it out",
    "--use-mcore-models": "every model is megatron-core's; leave it out",
    "--use-flash-attn": "use --attention-backend flash",
    "--no-load-optim-state": "use --no-load-optim",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--use-dist-ckpt": "every checkpoint is torch_dist; leave it out",
    "--auto-detect-ckpt-format": "every checkpoint is torch_dist; leave it out",
    "--distributed-timeout-seconds-after-init": "use --distributed-timeout-minutes",
    "--tokens-per-micro-batch": "use --max-tokens-per-gpu with --use-dynamic-batch-size",
}
