"""The keys of PAI-ChatLearn: slimrl's flag for each, and the text of the page that lists them.

`ROWS` are rows of `foreign_flags`, by which the parser answers a word of this system. `CHATLEARN_KEYS` are the keys of
a configuration by the part that has them, and `CHATLEARN_VARIABLES` the variables of its scripts that set one.
`slimrl.arguments.docs` prints the page.
"""

from __future__ import annotations

from slimrl.arguments.foreign_flags.aiak import Row, table
from slimrl.arguments.foreign_flags.chatlearn_megatron import (
    CHATLEARN,
    PARKED,
    ROWS_OF_MODEL_FILES,
    TRAINER_OF_MEGATRON,
)

# completes the error for a key without a row
UNLISTED = "docs/coming-from-pai-chatlearn.md has the table, and docs/flags.md all flags, written --flag value"

_DEVICES = "training ranks are one process per GPU; leave it out"
_RESUME = "checkpoints contain the data position: --save and --load"
_W = "W&B's own WANDB_* variables are read; leave it out"
# ChatLearn: keys of the parts of a configuration, without the name of the part
_RUNTIME: dict[str, tuple[str | None, str]] = {
    "train-backend": (None, "Megatron trains; --use-megatron-fsdp is its FSDP"),
    "exp-name": ("--run-name", ""),
    "colocation": ("--colocate", ""),
    "output-dir": ("--save", "for checkpoints; --runs-dir for logs"),
    "data-path": ("--prompt-data", "a .jsonl or .parquet file"),
    "eval-data-path": ("--eval-prompt-data", "a name and a path"),
    "data-checkpoint-path": (None, _RESUME),
    "num-episode": ("--num-rollout", ""),
    "sample-per-episode": ("--rollout-batch-size", "in prompts: samples divided by --n-samples-per-prompt"),
    "train-micro-batch-size": ("--micro-batch-size", ""),
    "train-global-batch-size": ("--global-batch-size", "in samples"),
    "save-episode-interval": ("--save-interval", "in rollouts"),
    "eval-episode-interval": ("--eval-interval", "in rollouts"),
    "enable-eval-before-training": ("--skip-eval-before-train", "for False"),
    "data-shuffle": ("--rollout-shuffle", ""),
    "data-rerank": ("--balance-data", ""),
    "max-replay-episode": (None, "advantages come from the groups of one rollout, which is trained on once"),
    "num-training-epoch": (None, "a sample is trained on once; see --num-steps-per-rollout"),
    "generation-batch-size": ("--sglang-server-concurrency", "and --max-tokens-per-gpu for the passes of training"),
    "training-data-num-limit": ("--prompt-data", "path@[0:N] for the first N rows; -1 for all: the path alone"),
    "eval-data-num-limit": ("--eval-prompt-data", "a name and path@[0:N] for the first N rows"),
    "validate-param-sync": ("--check-weight-update-equal", ""),
    "free-sync-collective-group": (None, "the group of a weight update is made once and kept; leave it out"),
    "sync-memory-optimization-level": ("--update-weight-buffer-size", "in bytes of one bucket"),
    "debug": (None, "logs have each step; see docs/debugging.md; leave it out"),
    "log-config-file": (None, "the settings of its file are flags: --use-wandb, --use-tensorboard and others"),
    "rollout-backend": ("--rollout-engine", "sglang or vllm"),
    "param-sync-comm-type": ("--update-weight-transfer-mode", "broadcast or p2p"),
    **dict.fromkeys(
        ("bucket-size-mb-in-memory-manager", "coalesced-buffer-mb"),
        ("--update-weight-buffer-size", "in bytes of one bucket"),
    ),
    "data-ratio": ("--prompt-data", "path=probability for each path"),
    "enable-resume-training": ("--load", "a folder of --save; leave it out for False"),
    "load-data-checkpoint-iteration": ("--ckpt-step", ""),
    "max-data-ckpt-nums": ("--save-retain-interval", "the checkpoints that are kept"),
    "consumed-samples": (None, _RESUME),
    "nsys": ("--use-pytorch-profiler", ""),
    "profiler-dir": ("--tensorboard-dir", "where --use-pytorch-profiler writes"),
    "replay-episode-offset": (None, "a rollout is trained on once; leave it out"),
    "policy-to-regroup-queue": (None, "one flow of samples; see docs/hooks.md for flows of your own; leave it out"),
    "stream-data-loader-type": (None, "prompts are read as they are needed; leave it out"),
    "cpu-schedule-strategy": (None, "graders are processes of the rollout manager; leave it out"),
    "concurrent-setup": (None, "ranks and engines always start side by side; leave it out"),
    **dict.fromkeys(
        ("concurrent-comm", "param-sync-max-workers", "routed-expert-regrouping-comm-type"),
        (None, "each way of a weight update has its own order; see docs/weight-updates.md; leave it out"),
    ),
    "log-args-dict.log-dir": ("--runs-dir", ""),
    "log-args-dict.enable-tensorboard": ("--use-tensorboard", ""),
    "log-args-dict.tensorboard-dir": ("--tensorboard-dir", ""),
    "log-args-dict.enable-wandb": ("--use-wandb", ""),
    "log-args-dict.wandb-project": ("--wandb-project", ""),
    "log-args-dict.wandb-dir": ("--wandb-dir", ""),
    "log-args-dict.wandb-name": ("--wandb-group", ""),
    "log-args-dict.wandb-id": (None, _W),
    "log-args-dict.wandb-resume": (None, _W),
}
_TRAINER: dict[str, tuple[str | None, str]] = {
    "num-gpu": ("--actor-num-gpus-per-node", "with --actor-num-nodes"),
    "gpu-per-process": (None, _DEVICES),
    "trainable": (None, "the policy is trained, its engines and the reference are not; leave it out"),
    "load": ("--hf-checkpoint", "whose weights --load or --ref-load name"),
    "pretrain-or-model": ("--hf-checkpoint", "whose weights --load or --ref-load name"),
    "optimizer.lr": ("--lr", ""),
    "learning-rate": ("--lr", ""),
    "optimizer.clip-grad": ("--clip-grad", ""),
    "grad-clip": ("--clip-grad", ""),
    "gradient-checkpointing": ("--recompute-granularity", "selective or full"),
    "pos-clip-ratio": ("--eps-clip-high", ""),
    "neg-clip-ratio": ("--eps-clip", ""),
    "negative-clip-ratio": ("--eps-clip", ""),
    "entropy-coef": ("--entropy-coef", ""),
    "kl-coef": ("--kl-loss-coef", "with --use-kl-loss"),
    "save-hf": ("--save-hf", "a path with {rollout_id}"),
    "fsdp-size": ("--use-megatron-fsdp", "with --data-parallel-sharding-strategy"),
    "sp-size": ("--context-parallel-size", ""),
    "ulysses-sequence-parallel-size": ("--context-parallel-size", ""),
    "tensor-model-parallel-size": ("--tensor-model-parallel-size", ""),
    "pipeline-model-parallel-size": ("--pipeline-model-parallel-size", ""),
    "expert-model-parallel-size": ("--expert-model-parallel-size", ""),
    "packing": (None, "samples are always packed without padding; leave it out"),
    "max-token-in-packing": ("--max-tokens-per-gpu", "with --use-dynamic-batch-size"),
    "generation-batch-size": ("--max-tokens-per-gpu", "for all passes, with --use-dynamic-batch-size"),
    "groupgemm": ("--moe-grouped-gemm", ""),
    "meta-init": (None, "each rank reads only its part of the weights; leave it out"),
    "use-expandable-segments": (None, "PYTORCH_CUDA_ALLOC_CONF in --train-env-vars sets it"),
    "free-memory": ("--offload-train", PARKED),
    "free-gpu-memory.offload-weights": ("--offload-train", PARKED),
    "free-gpu-memory.offload-optimizer-states": ("--offload-train", PARKED),
    "free-gpu-memory.free-grad-buffers": ("--offload-train", PARKED),
}
_REPLICAS = "data parallelism follows from the number of GPUs; leave it out"
# of every model of its GRPO
_OF_EVERY_MODEL: dict[str, tuple[str | None, str]] = {
    "num-cpu": (None, "a rank or server takes the cores that it needs; leave it out"),
    "cpu-per-process": (None, "a rank or server takes the cores that it needs; leave it out"),
    "num-replica": (None, _REPLICAS),
    "replica-dp-size": (None, _REPLICAS),
    "sync-frequency": ("--update-weights-interval", "in rollouts, with train_async.py"),
}
_SAMPLING = "no flag; --custom-generate-function-path may send any sampling parameter"
_POLICY: dict[str, tuple[str | None, str]] = {
    "num-gpu": ("--rollout-num-gpus", "not needed with --colocate"),
    "gpu-per-process": (None, _DEVICES),
    "trainable": (None, "the policy is trained, its engines and the reference are not; leave it out"),
    "load": ("--hf-checkpoint", ""),
    "tokenizer": ("--hf-checkpoint", ""),
    "tensor-model-parallel-size": ("--rollout-num-gpus-per-engine", ""),
    "pipeline-model-parallel-size": ("--sglang-pp-size", ""),
    "num-inference-per-prompt": ("--n-samples-per-prompt", ""),
    "seq-length": ("--rollout-max-context-len", ""),
    "max-prompt-tokens-length": ("--rollout-max-prompt-len", ""),
    "max-response-tokens-length": ("--rollout-max-response-len", ""),
    "max-new-tokens": ("--rollout-max-response-len", ""),
    "temperature": ("--rollout-temperature", ""),
    "top-p": ("--rollout-top-p", ""),
    "top-k": ("--rollout-top-k", ""),
    "presence-penalty": (None, _SAMPLING),
    "frequency-penalty": (None, _SAMPLING),
    "repetition-penalty": (None, _SAMPLING),
    "eval-temperature": ("--eval-temperature", ""),
    "eval-top-p": ("--eval-top-p", ""),
    "eval-top-k": ("--eval-top-k", ""),
    "eval-presence-penalty": (None, _SAMPLING),
    "eval-frequency-penalty": (None, _SAMPLING),
    "eval-repetition-penalty": ("--eval-config", "repetition_penalty of a set"),
    "vllm-prompt-key": ("--input-key", ""),
    "vllm-input-ids-key": (None, "prompts are tokenized from text or messages; leave it out"),
    "enable-thinking": ("--apply-chat-template-kwargs", '{"enable_thinking": false}'),
    "max-num-batched-tokens": ("--sglang-chunked-prefill-size", ""),
    "max-seq-len-to-capture": (None, "SGLang captures graphs by batch size: --sglang-cuda-graph-max-bs"),
    "enable-stage-resume": (None, _RESUME),
    "expert-model-parallel-size": ("--sglang-ep-size", ""),
    "seed": ("--rollout-seed", ""),
    "packing": (None, "engines batch requests by themselves; leave it out"),
    "max-token-in-packing": (None, "engines batch requests by themselves; leave it out"),
    "offload-weights": ("--offload-rollout", PARKED),
    "gpu-memory-utilization": ("--sglang-mem-fraction-static", ""),
    "enforce-eager": ("--sglang-disable-cuda-graph", ""),
    "generation-batch-size": ("--sglang-server-concurrency", ""),
    "free-memory": ("--offload-rollout", PARKED),
    "free-gpu-memory.offload-weights": ("--offload-rollout", PARKED),
}
_HOST = "the reference's weights are in host memory between its passes; leave it out"
_REFERENCE: dict[str, tuple[str | None, str]] = {
    "load": ("--ref-load", ""),
    "num-gpu": (None, "the reference runs in the training ranks; leave it out"),
    "generation-batch-size": ("--max-tokens-per-gpu", "for all passes, with --use-dynamic-batch-size"),
    "free-memory": (None, _HOST),
    "free-gpu-memory.offload-weights": (None, _HOST),
}
_OF_GROUP = "a sample of a batch is generated and scored on its own; leave it out"
_OTHER_FILE = "the keys of its file are keys of this model here, and have rows of their own"
_SAME_LAYOUT = "it has the layout of training; leave it out"
_TRAINED = "policy and critic are trained, no other model; leave it out"
_ITERATION = "no flag; the folder's tracker file names the iteration that is loaded"
_REWARD: dict[str, tuple[str | None, str]] = {
    "num-cpu": ("--rm-num-graders", ""),
    "cpu-per-process": (None, "a grader is one process on one core; leave it out"),
    "generation-batch-size": (None, "each response is scored when it is finished; leave it out"),
    # a reward model, of its PPO
    "model-config-file": (None, _OTHER_FILE),
    "num-gpu": ("--rm-num-gpus", "with --rm-colocate on the GPUs of training"),
    "gpu-per-process": (None, _DEVICES),
    "trainable": (None, _TRAINED),
    "free-memory": ("--rm-colocate", "which releases its GPUs during training"),
    "load": ("--rm-model", "a Hugging Face folder, with --rm-type reward_model"),
    "load-iteration": (None, "--rm-model is a Hugging Face folder; leave it out"),
    "tensor-model-parallel-size": ("--rm-num-gpus-per-engine", ""),
    "pipeline-model-parallel-size": (None, "a server of the reward model has one stage; leave it out"),
}
_CRITIC: dict[str, tuple[str | None, str]] = {  # its values before the update, and their training
    "model-config-file": (None, _OTHER_FILE),
    "num-gpu": ("--critic-num-gpus-per-node", "only for GPUs of its own; without it the policy's GPUs train it"),
    "gpu-per-process": (None, _DEVICES),
    "trainable": (None, _TRAINED),
    "free-memory": ("--offload-train", PARKED),
    "generation-batch-size": ("--max-tokens-per-gpu", "for all passes, with --use-dynamic-batch-size"),
    "load": ("--critic-load", "with --advantage-estimator ppo"),
    "load-iteration": (None, _ITERATION),
    "tensor-model-parallel-size": (None, _SAME_LAYOUT),
    "pipeline-model-parallel-size": (None, _SAME_LAYOUT),
    "sequence-parallel": (None, _SAME_LAYOUT),
    "lr": ("--critic-lr", ""),
    "lr-warmup-iters": ("--critic-lr-warmup-iters", ""),
    **dict.fromkeys(
        ("min-lr", "weight-decay", "adam-beta1", "adam-beta2", "clip-grad"),
        ("--megatron-config-path", "a file with the critic's value; without it the policy's applies"),
    ),
    "lr-decay-style": ("--lr-decay-style", "for policy and critic"),
    "lr-decay-iters": ("--lr-decay-iters", "for policy and critic"),
}
_LORA_OF_POLICY: dict[str, tuple[str | None, str]] = {
    "lora.enable-lora": ("--lora-rank", ""),
    "lora.lora-dim": ("--lora-rank", ""),
    "lora.lora-layer": ("--lora-target-modules", "projections by their Hugging Face names"),
    "lora.column-only-qkv": ("--lora-target-modules", "projections by their Hugging Face names"),
    "lora.lora-dropout": (None, "adapters have no dropout, since the engines sample without it; leave it out"),
}
_PPO_POLICY: dict[str, tuple[str | None, str]] = {
    "model-config-file": (None, _OTHER_FILE),
    "num-gpu": ("--actor-num-gpus-per-node", "with --actor-num-nodes"),
    "gpu-per-process": (None, _DEVICES),
    "trainable": (None, _TRAINED),
    "free-memory": ("--offload-train", PARKED),
    "load": ("--ref-load", "the weights from which the policy starts; --load resumes"),
    "load-iteration": ("--ref-ckpt-step", ""),
    **_LORA_OF_POLICY,
}
_PPO_REFERENCE = _REFERENCE | {
    "model-config-file": (None, _OTHER_FILE),
    "gpu-per-process": (None, _DEVICES),
    "trainable": (None, _TRAINED),
    "load-iteration": ("--ref-ckpt-step", ""),
    "tensor-model-parallel-size": (None, _SAME_LAYOUT),
    "pipeline-model-parallel-size": (None, _SAME_LAYOUT),
    "parallel-output": (None, "log-probabilities are computed on the parts of the vocabulary; leave it out"),
}
_PPO_ENGINES: dict[str, tuple[str | None, str]] = {
    "model-config-file": (None, _OTHER_FILE),
    "load-iteration": (None, "engines get the weights of training; leave it out"),
    "batch-generation.ranking": (None, _OF_GROUP),
    "batch-generation.min-prompt-length": (None, _OF_GROUP),
    "force-free-memory": ("--offload-rollout", PARKED),
    "drop-last": (None, "a rollout has --rollout-batch-size prompts, also at the end of the data; leave it out"),
    "n": ("--n-samples-per-prompt", ""),
    "stop-token-list": ("--rollout-stop", ""),
}
_NO_LORA: dict[str, tuple[str | None, str]] = dict.fromkeys(
    _LORA_OF_POLICY, (None, "a critic of adapters has --critic-lora-rank; leave it out")
) | {"lora.lora-dim": ("--critic-lora-rank", "")}
_REFERENCE_OF_MEGATRON: dict[str, tuple[str | None, str]] = dict.fromkeys(
    (*TRAINER_OF_MEGATRON, *_TRAINER), (None, "the reference has the network and the layout of training; leave it out")
)
_MANAGER: dict[str, tuple[str | None, str]] = {
    **dict.fromkeys(
        ("num-gpu", "gpu-per-process", "trainable", "generation-batch-size"),
        (None, "the rollout manager is one process without a GPU; leave it out"),
    ),
    "max-rollout-round": ("--partial-rollout", "a response continues in the next rollout, as often as it needs"),
    "rollout-ratio": ("--partial-rollout", "a rollout ends when it has its groups, not at a share of the tokens"),
    "mini-response-per-prompt": (None, "a group is trained on when all of its responses are complete; leave it out"),
    "max-gen-len": ("--rollout-max-response-len", ""),
    "num-inference-per-prompt": ("--n-samples-per-prompt", ""),
    "enable-thinking": ("--apply-chat-template-kwargs", '{"enable_thinking": false}'),
}
_PARTS = {
    "runtime-args": _RUNTIME,
    "models.policy-trainer": _OF_EVERY_MODEL | TRAINER_OF_MEGATRON | _TRAINER,
    "models.policy": _OF_EVERY_MODEL | _POLICY | _PPO_ENGINES,
    "models.ref-policy": _OF_EVERY_MODEL | _REFERENCE_OF_MEGATRON | _REFERENCE,
    "models.rollout-manager": _OF_EVERY_MODEL | _MANAGER,
    "models.reward": _REWARD,
    # of PPO
    "models.ppo-policy": _PPO_POLICY,
    "models.reference": _PPO_REFERENCE,
    "models.value": _CRITIC,
    "models.ppo-value": _CRITIC | _NO_LORA,
}
CHATLEARN_KEYS: dict[str, Row] = {
    f"{part}.{key}": (CHATLEARN, *row) for part, rows in _PARTS.items() for key, row in rows.items()
}

# the variables that examples/fsdp/scripts/train_grpo_qwen3.sh exports, with the key that each sets
CHATLEARN_VARIABLES: dict[str, str] = {
    "model-path": "models.policy-trainer.load",
    "train-data-path": "runtime-args.data-path",
    "sample-per-episode": "runtime-args.sample-per-episode",
    "num-episode": "runtime-args.num-episode",
    "train-micro-batch-size": "runtime-args.train-micro-batch-size",
    "train-global-batch-size": "runtime-args.train-global-batch-size",
    "save-episode-interval": "runtime-args.save-episode-interval",
    "eval-episode-interval": "runtime-args.eval-episode-interval",
    "enable-eval-before-training": "runtime-args.enable-eval-before-training",
    "exp-name": "runtime-args.exp-name",
    "eval-data-path": "runtime-args.eval-data-path",
    "data-checkpoint-path": "runtime-args.data-checkpoint-path",
    "log-dir": "runtime-args.log-args-dict.log-dir",
    "enable-wandb": "runtime-args.log-args-dict.enable-wandb",
    "sp-size": "models.policy-trainer.sp-size",
    "num-inference-per-prompt": "models.policy.num-inference-per-prompt",
    "policy-temperature": "models.policy.temperature",
    "policy-top-p": "models.policy.top-p",
    "policy-top-k": "models.policy.top-k",
    "policy-eval-temperature": "models.policy.eval-temperature",
    "policy-eval-top-p": "models.policy.eval-top-p",
    "policy-eval-top-k": "models.policy.eval-top-k",
    "max-seq-len-to-capture": "models.policy.max-seq-len-to-capture",
    "vllm-generation-batch-size": "models.policy.generation-batch-size",
    "gpu-memory-utilization": "models.policy.gpu-memory-utilization",
    "enable-thinking": "models.policy.enable-thinking",
}
ROWS: dict[str, Row] = {
    **ROWS_OF_MODEL_FILES,
    **CHATLEARN_KEYS,
    # as its first configurations say
    **{f"{part}.{key}": (CHATLEARN, *row) for part in ("runtime", "rlhf") for key, row in _RUNTIME.items()},
    "rlhf.num-ppo-episode": (CHATLEARN, "--num-rollout", ""),
    **{name: CHATLEARN_KEYS[key] for name, key in CHATLEARN_VARIABLES.items()},
}
PREFIXES = {
    **dict.fromkeys(("runtime-args.", "runtime.", "rlhf.", "models."), UNLISTED),
    "runtime-env.": "the job's files and environment are those of docs/launchers.md",
}
_CHATLEARN_DIFFERENCES = (
    ("ChatLearn", "slimrl"),
    (
        "`examples/fsdp/scripts/train_grpo_qwen3.sh`",
        "`scripts/run-qwen3-8B-math-fsdp.sh`: the same model, data, batch sizes and rewards, with Megatron-FSDP",
    ),
    (
        "`examples/megatron/configs/llama2/rlhf.yaml`: PPO with `policy`, `reference`, `reward`, `value`, "
        "`ppo_policy`, `ppo_value`",
        "`--advantage-estimator ppo` with `--ref-load`, `--rm-type reward_model --rm-model` and `--critic-load`; "
        "`value` and `ppo_value` are one critic ([algorithms.md](algorithms.md#ppo))",
    ),
    (
        "FSDP (`train_backend: fsdp`) or Megatron-core",
        "Megatron-core, with its FSDP by `--use-megatron-fsdp` ([sharding.md](sharding.md))",
    ),
    (
        "vLLM or SGLang",
        "`--rollout-engine sglang` (default) or `vllm`, behind SGLang's router ([engines.md](engines.md))",
    ),
    (
        "models as a graph: `Engine`, `Environment`, `Trainer`, `Evaluator` with `env_flow` and `trainer_flow`",
        "a loop in Python over the methods of `Run`: `examples/flow.py`, `train.py` ([hooks.md](hooks.md))",
    ),
    ("`colocation: [policy,policy_trainer,ref_policy]`", "`--colocate` ([colocation.md](colocation.md))"),
    ("`rule_reward.py`", "`--rm-type math`, or a function with `--custom-rm-path` ([rewards.md](rewards.md))"),
    ("`math_lighteval.py`", "`python tools/prepare_data.py MATH-lighteval` ([data.md](data.md#published-sets))"),
    (
        "dynamic batch size and sequence packing",
        "always packed; `--use-dynamic-batch-size --max-tokens-per-gpu N --balance-data` ([packing.md](packing.md))",
    ),
    (
        "Ulysses sequence parallelism",
        "`--context-parallel-size`, and `--tensor-model-parallel-size` with `--sequence-parallel` "
        "([parallelism.md](parallelism.md))",
    ),
    ("partial rollout", "`--partial-rollout` ([rollouts.md](rollouts.md))"),
    ("asynchronous schedule", "`train_async.py` ([asynchrony.md](asynchrony.md))"),
    ("`save_model/policy_trainer/<n>/huggingface` for serving", "`--save-hf` ([serving.md](serving.md))"),
    (
        "a job on PAI-DLC that is shown as failed after its training is complete: `ray.exceptions.RpcError: Timed out "
        "while waiting for GCS to become available.`",
        "no such end: the head's node tells the others how the run ended before its Ray ends; they exit with code 0, "
        "and the recipe on the head's node with that of training "
        "([launchers.md](launchers.md#a-lost-run-starts-again))",
    ),
)
CHATLEARN_PAGE = f"""\
# Coming from PAI-ChatLearn

ChatLearn reads a YAML file with one part per model (`models.policy`, `models.policy_trainer`, ...) and one for the run,
and overrides `part.key=value`; slimrl has one list of flags. Written on slimrl's command line, a key of ChatLearn is
answered with the flag to use. This page is generated from the table that the parser uses:
`python -m slimrl.arguments.docs chatlearn > docs/coming-from-pai-chatlearn.md`.

## What is different

{table(_CHATLEARN_DIFFERENCES)}

## Keys

The keys of `runtime_args` are also those of `runtime` and `rlhf`, as older files say. The last column completes the
error that the command line gives for a key; for a key without a row it says that there is none.

"""
