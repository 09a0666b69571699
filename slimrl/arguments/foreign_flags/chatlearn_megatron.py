"""Megatron-LM's names in the configurations of PAI-ChatLearn: of its models' files, and of its GRPO with Megatron.

Most of them are flags of slimrl under the same name. A key maps to a flag, or None, and to what completes the sentence
of the parser. Read by `chatlearn`, which has the other keys.
"""

from __future__ import annotations

from slimrl.arguments.foreign_flags.aiak import Row

CHATLEARN = "PAI-ChatLearn's"
PARKED = "on with --colocate"
SIZES = (
    *("num-layers", "hidden-size", "num-attention-heads", "ffn-hidden-size", "num-query-groups"),
    *("group-query-attention", "normalization", "swiglu", "use-rotary-position-embeddings"),
    *("untie-embeddings-and-output-weights", "max-position-embeddings", "make-vocab-size-divisible-by"),
)
# Megatron-LM's, which slimrl has under the same name
SAME_NAMES = (
    *("apply-query-key-layer-scaling", "attention-softmax-in-fp32", "bf16", "hysteresis", "init-method-std"),
    *("attention-dropout", "hidden-dropout", "distributed-timeout-minutes", "finetune", "no-load-optim", "no-load-rng"),
    *("tensor-model-parallel-size", "pipeline-model-parallel-size", "sequence-parallel", "use-distributed-optimizer"),
    *("lr", "min-lr", "lr-decay-style", "lr-decay-iters", "lr-warmup-iters", "weight-decay", "clip-grad"),
    *("adam-beta1", "adam-beta2", "recompute-granularity", "seed", "gamma"),
)
# of its GRPO with Megatron: of the network, of the layout and the steps
_NETWORK_NAMES = (
    *("norm-epsilon", "position-embedding-type", "add-qkv-bias", "rotary-base", "qk-layernorm", "vocab-size"),
    *("kv-channels", "num-experts", "moe-grouped-gemm", "moe-token-dispatcher-type", "moe-router-topk"),
    *("moe-router-load-balancing-type", "moe-router-dtype", "moe-router-pre-softmax", "moe-layer-freq"),
    *("moe-ffn-hidden-size", "moe-aux-loss-coeff", "q-lora-rank", "kv-lora-rank", "moe-router-num-groups"),
    *("moe-router-group-topk", "moe-shared-expert-intermediate-size", "moe-router-score-function", "v-head-dim"),
    *("moe-router-enable-expert-bias", "multi-latent-attention", "moe-router-topk-scaling-factor"),
    *("moe-shared-expert-overlap", "rotary-scaling-factor", "disable-bf16-reduced-precision-matmul"),
    *("attention-dropout", "hidden-dropout"),
)
_TRAINING_NAMES = (
    "calculate-per-token-loss",
    *("decoder-first-pipeline-num-layers", "decoder-last-pipeline-num-layers", "attention-backend"),
    *("expert-tensor-parallel-size", "save-interval", "finetune", "no-load-optim", "no-load-rng"),
    *("sequence-parallel", "use-distributed-optimizer", "recompute-granularity", "bf16", "seed"),
    *("attention-softmax-in-fp32", "tensor-model-parallel-size", "pipeline-model-parallel-size"),
)
GRPO_NAMES = (*_NETWORK_NAMES, *_TRAINING_NAMES)
_CHOSEN = "megatron-core's default or the layout decides; leave it out"
_NETWORK: dict[str, tuple[str | None, str]] = {
    **{name: (f"--{name}", "") for name in (*SIZES, *_NETWORK_NAMES)},
    "add-bias-linear": ("--disable-bias-linear", "for False"),
    "apply-rope-fusion": ("--no-rope-fusion", "for False"),
    "bias-swiglu-fusion": ("--no-bias-swiglu-fusion", "for False"),
    "bias-dropout-fusion": ("--no-bias-dropout-fusion", "for False"),
}
TRAINER_OF_MEGATRON: dict[str, tuple[str | None, str]] = {
    **{f"megatron-model-cfg.{name}": row for name, row in _NETWORK.items()},
    **{name: (f"--{name}", "") for name in _TRAINING_NAMES},
    **{f"optimizer.{name}": (f"--{name}", "") for name in ("min-lr", "weight-decay", "adam-beta1", "adam-beta2")},
    "use-checkpoint-opt-param-scheduler": (None, "flags set the schedule, and the checkpoint its step; leave it out"),
    "moe-router-force-load-balancing": (None, "the model's own routing is trained; leave it out"),
    "save": ("--save", ""),
    "train-iters": ("--num-rollout", ""),
    "train-micro-batch-size": ("--micro-batch-size", ""),
    "seq-length": ("--rollout-max-context-len", ""),
    "tokenizer-type": ("--hf-checkpoint", "whose tokenizer is used"),
    "tokenizer-model": ("--hf-checkpoint", "whose tokenizer is used"),
    "log-interval": (None, "every step is logged; leave it out"),
    "no-load-scheduler": (None, "--finetune starts a schedule anew; leave it out"),
    "gradient-accumulation-fusion": ("--no-gradient-accumulation-fusion", "for False"),
    "overlap-p2p-comm": ("--no-overlap-p2p-communication", "for False"),
    **dict.fromkeys(
        ("async-tensor-model-parallel-allreduce", "batch-p2p-comm", "deallocate-pipeline-outputs"), (None, _CHOSEN)
    ),
    "variable-seq-lengths": (None, "samples are packed, whatever their lengths; leave it out"),
    "use-group-sequence-policy": ("--advantage-estimator", "gspo"),
    "final-clip-ratio": ("--eps-clip-c", "the dual clip"),
    "diff-clip-ratio": (None, "differences of log-probabilities are not clamped; --eps-clip-c bounds the loss"),
    "zero-size": ("--use-megatron-fsdp", "with --data-parallel-sharding-strategy"),
    "offload-optimizer-states": ("--offload-train", PARKED),
    "offload-weights": ("--offload-train", PARKED),
    "free-grad-buffers": ("--offload-train", PARKED),
}
_FLAGS_OF_RUN = "the flags of the run apply, and a checkpoint's are compared with them; leave it out"
_OWN_REWARD = "no flag; --custom-rm-path may add such a reward"
_NOT_NEEDED = "nothing depends on it here; leave it out"
# of the files that the models include, for every model
MODEL_FILE_KEYS: dict[str, tuple[str | None, str]] = {
    **{name: (f"--{name}", "") for name in (*SIZES, *SAME_NAMES)},
    "lam": ("--lambd", ""),
    "cliprange": ("--eps-clip", ""),
    "cliprange-value": ("--value-clip", ""),
    "clipped-value-only": (None, "the loss of a value is the larger of the clipped and the other; see --value-clip"),
    "init-kl-coef": ("--kl-coef", ""),
    "fix-kl-coef": ("--kl-target", "for False; without it --kl-coef stays as it is"),
    "target": ("--kl-target", "in nats per response"),
    "horizon": ("--kl-horizon", "with --kl-target"),
    "scale-reward": ("--normalize-reward", "for a running scale; leave it out for None"),
    "cliprange-reward": ("--custom-reward-post-process-path", "a function that clips rewards"),
    **dict.fromkeys(("ngram-coef", "lm-coef", "math-coef", "raw-reward-coeff"), (None, _OWN_REWARD)),
    "trainer-engine": ("--advantage-estimator", "ppo for rlhf, grpo for grpo; --loss-type preference_loss for dpo"),
    "use-ipo": ("--preference-loss", "ipo"),
    "dpo-weight": ("--preference-beta", ""),
    "num-inference-per-prompt": ("--n-samples-per-prompt", ""),
    "train-to-compare-num-responses": ("--n-samples-per-prompt", "of a preference loss"),
    "loss-on-prompts": (None, "losses are on responses; --loss-type sft_loss trains on the assistant's tokens"),
    "log-entropy": (None, "the entropy is always logged; leave it out"),
    "seq-length": ("--rollout-max-context-len", ""),
    "max-new-tokens": ("--rollout-max-response-len", ""),
    "init-shuffle-prompts": ("--rollout-shuffle", ""),
    "tokenizer-model": ("--hf-checkpoint", ""),
    "tokenizer-type": ("--hf-checkpoint", "whose tokenizer is used"),
    "add-bias-linear": ("--disable-bias-linear", "for False"),
    "add-position-embedding": ("--use-rotary-position-embeddings", "for False"),
    "use-flash-attn": ("--attention-backend", "flash"),
    "recompute-activations": ("--recompute-granularity", "selective"),
    "gradient-accumulation-fusion": ("--no-gradient-accumulation-fusion", "for False"),
    "save-interval": ("--save-interval", "in rollouts"),
    "log-interval": (None, "every step is logged; leave it out"),
    "exit-on-missing-checkpoint": (None, "a wrong path is always an error; leave it out"),
    "adaptive-parallel-strategy-on-checkpoint": (None, "checkpoints load in every layout; leave it out"),
    **dict.fromkeys(("use-checkpoint-args", "no-load-args", "no-load-scheduler"), (None, _FLAGS_OF_RUN)),
    **dict.fromkeys(("numerical-stable", "build-path", "num-workers", "train-iters"), (None, _NOT_NEEDED)),
}
_PPO_MODELS = ("policy", "ppo-policy", "reference", "value", "ppo-value", "reward")
_NO_SIZES = {
    "reward": "config.json of --rm-model says it; leave it out",
    "value": "the critic has the policy's network; leave it out",
    "ppo-value": "the critic has the policy's network; leave it out",
}
ROWS_OF_MODEL_FILES: dict[str, Row] = {
    f"models.{model}.{key}": (CHATLEARN, None, _NO_SIZES[model])
    if key in SIZES and model in _NO_SIZES
    else (CHATLEARN, *row)
    for model in _PPO_MODELS
    for key, row in MODEL_FILE_KEYS.items()
}
