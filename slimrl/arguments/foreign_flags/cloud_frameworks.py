"""The settings of PAI-ChatLearn and Baidu AIAK-RLHF: slimrl's flag for each, and the pages generated from this table.

`ROWS` are rows of `foreign_flags`, by which the parser answers a word of these systems. `AIAK` lists every flag of
AIAK-RLHF's two programs, also those that slimrl or OpenRLHF has under the same name; `CHATLEARN_KEYS` every key of
ChatLearn's configuration, and `CHATLEARN_VARIABLES` the variables of its scripts that set one. `slimrl.arguments.docs`
prints both pages.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

CHATLEARN, AIAK_RLHF = "PAI-ChatLearn's", "AIAK-RLHF's"
Row = tuple[str, str | None, str]  # owner, slimrl's flag, clause

_DEVICES = "training ranks are one process per GPU; leave it out"
_PARKED = "on with --colocate"
_RESUME = "checkpoints contain the data position: --save and --load"
_W = "W&B's own WANDB_* variables are read; leave it out"

# AIAK-RLHF's names that OpenRLHF does not have
_AIAK_ROWS: dict[str, tuple[str | None, str]] = {
    "num-nodes": ("--actor-num-nodes", ""),
    "colocate-all": ("--colocate", "and --rm-colocate for the reward model"),
    "ref-reward-offload": (
        "--rm-colocate",
        "which keeps the reward model in host memory during training; the reference always is there",
    ),
    "max-samples": ("--prompt-data", "path@[0:N] for the first N rows"),
    "prompt-data-probs": ("--prompt-data", "path=probability for each path"),
    "dataset-probs": ("--prompt-data", "path=probability for each path"),
    "tensorboard": ("--tensorboard-dir", "with --use-tensorboard"),
    "prompt-key": ("--input-key", ""),
    "max-len": ("--rollout-max-context-len", ""),
}


@dataclasses.dataclass(frozen=True)
class AiakFlag:
    """A flag of AIAK-RLHF: the programs that have it, its default there, and how its meaning differs from slimrl's."""

    programs: str  # "rm", "ppo" or "rm ppo"
    default: str
    note: str = ""


_PROMPTS = "counts prompts, as there; with `--n-samples-per-prompt 1` also samples"
AIAK: dict[str, AiakFlag] = {
    "pretrain": AiakFlag("rm ppo", "bigscience/bloomz-1b7", "the reference is `--ref-load`, a critic `--critic-load`"),
    "reward-pretrain": AiakFlag("ppo", "", "with `--rm-type reward_model`"),
    "save-path": AiakFlag("rm ppo", "./ckpt", "checkpoints; `--save-hf` also exports Hugging Face folders"),
    "save-steps": AiakFlag("rm ppo", "-1", "without it only the last rollout is saved"),
    "eval-steps": AiakFlag("rm", "-1"),
    "logging-steps": AiakFlag("rm ppo", "1"),
    "tensorboard": AiakFlag("rm ppo", ""),
    "train-batch-size": AiakFlag("rm", "128"),
    "micro-train-batch-size": AiakFlag("rm ppo", "8", "a pair is two; or `--use-dynamic-batch-size`"),
    "micro-rollout-batch-size": AiakFlag("ppo", "8"),
    "rollout-batch-size": AiakFlag("ppo", "512", _PROMPTS),
    "max-samples": AiakFlag("ppo", "100000"),
    "max-epochs": AiakFlag("rm ppo", "1", "in `train_rm.py`: `--num-epoch`"),
    "max-len": AiakFlag("rm", "512", "cuts longer answers at their end, as there"),
    "prompt-max-len": AiakFlag("ppo", "1024", "AIAK cuts longer prompts: `--rollout-truncate-prompt`"),
    "generate-max-len": AiakFlag("ppo", "1024"),
    "zero-stage": AiakFlag("rm ppo", "2", "3: `--data-parallel-sharding-strategy optim_grads_params`"),
    "bf16": AiakFlag("rm ppo", "off", "the default follows the model's dtype"),
    "flash-attn": AiakFlag("rm ppo", "off"),
    "gradient-checkpointing": AiakFlag("rm ppo", "off"),
    "learning-rate": AiakFlag("rm", "1e-5"),
    "actor-learning-rate": AiakFlag("ppo", "1e-6"),
    "critic-learning-rate": AiakFlag("ppo", "9e-6"),
    "init-kl-coef": AiakFlag("ppo", "0.02", "needs `--ref-load`"),
    "normalize-reward": AiakFlag("ppo", "off", "by the moments of the run ([rewards.md](rewards.md))"),
    "dataset": AiakFlag("rm", "Dahoas/full-hh-rlh", "`tools/prepare_data.py preference` converts published sets"),
    "dataset-probs": AiakFlag("rm", "1.0"),
    "prompt-data": AiakFlag("ppo", "Dahoas/full-hh-rlh", "a file or folder instead of a name on the hub"),
    "prompt-data-probs": AiakFlag("ppo", "1.0"),
    "prompt-key": AiakFlag("rm", ""),
    "chosen-key": AiakFlag("rm", "", "belongs to training on pairs"),
    "rejected-key": AiakFlag("rm", "", "belongs to training on pairs"),
    "input-key": AiakFlag("ppo", "", "the default is `input`"),
    "input-template": AiakFlag("ppo", "Human: {}\\nAssistant:", "without default: a row's text is the prompt"),
    "apply-chat-template": AiakFlag("rm ppo", "off"),
    "num-nodes": AiakFlag("ppo", ""),
    "num-gpus-per-node": AiakFlag("ppo", "", "GPUs of a node; those of training are `--actor-num-gpus-per-node`"),
    "colocate-all": AiakFlag("ppo", "on"),
    "ref-reward-offload": AiakFlag("ppo", "off"),
    "adam-offload": AiakFlag("ppo", "off"),
    "vllm-num-engines": AiakFlag("ppo", "", "with `--colocate` the engines use all training GPUs: leave it out"),
    "vllm-tensor-parallel-size": AiakFlag("ppo", ""),
    "vllm-gpu-memory-utilization": AiakFlag("ppo", "0.9"),
}

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
    "log-config-file": (None, "the settings of its file are flags: --use-wandb, --use-tensorboard and others"),
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
    "free-memory": ("--offload-train", _PARKED),
    "free-gpu-memory.offload-weights": ("--offload-train", _PARKED),
    "free-gpu-memory.offload-optimizer-states": ("--offload-train", _PARKED),
    "free-gpu-memory.free-grad-buffers": ("--offload-train", _PARKED),
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
    "gpu-memory-utilization": ("--sglang-mem-fraction-static", ""),
    "enforce-eager": ("--sglang-disable-cuda-graph", ""),
    "generation-batch-size": ("--sglang-server-concurrency", ""),
    "free-memory": ("--offload-rollout", _PARKED),
    "free-gpu-memory.offload-weights": ("--offload-rollout", _PARKED),
}
_HOST = "the reference's weights are in host memory between its passes; leave it out"
_REFERENCE: dict[str, tuple[str | None, str]] = {
    "load": ("--ref-load", ""),
    "num-gpu": (None, "the reference runs in the training ranks; leave it out"),
    "generation-batch-size": ("--max-tokens-per-gpu", "for all passes, with --use-dynamic-batch-size"),
    "free-memory": (None, _HOST),
    "free-gpu-memory.offload-weights": (None, _HOST),
}
_REWARD: dict[str, tuple[str | None, str]] = {
    "num-cpu": ("--rm-num-graders", ""),
    "cpu-per-process": (None, "a grader is one process on one core; leave it out"),
    "generation-batch-size": (None, "each response is scored when it is finished; leave it out"),
}
_PARTS = {
    "runtime-args": _RUNTIME,
    "models.policy-trainer": _TRAINER,
    "models.policy": _POLICY,
    "models.ref-policy": _REFERENCE,
    "models.reward": _REWARD,
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
    **{name: (AIAK_RLHF, *row) for name, row in _AIAK_ROWS.items()},
    **CHATLEARN_KEYS,
    **{f"runtime.{key}": (CHATLEARN, *row) for key, row in _RUNTIME.items()},  # as its first configurations say
    **{name: CHATLEARN_KEYS[key] for name, key in CHATLEARN_VARIABLES.items()},
}
PREFIXES = ("runtime-args.", "runtime.", "runtime-env.", "models.")


def _table(rows: Sequence[tuple[str, str]]) -> str:
    """A Markdown table; the first row is its head."""
    lines = [f"| {left} | {right} |" for left, right in rows]
    return "\n".join([lines[0], "| --- | --- |", *lines[1:]])


_AIAK_DIFFERENCES = (
    (
        "AIAK-RLHF",
        "slimrl",
    ),
    (
        "`train_ppo_ray_optim.py`",
        "`train.py --advantage-estimator ppo`; without a critic any other estimator "
        "([algorithms.md](algorithms.md#advantages))",
    ),
    (
        "`train_rm.py`",
        "`train.py --loss-type reward_model_loss` on pairs or scores ([reward-models.md](reward-models.md))",
    ),
    (
        "`--colocate_all`, `--ref_reward_offload`",
        "`--colocate --rm-colocate`: policy, critic, reference, engines and reward model on the same "
        "GPUs, each offloaded while another works; the reference is always in host memory between its "
        "passes ([colocation.md](colocation.md))",
    ),
    (
        "Llama-2",
        "`scripts/models/llama2-7B.sh`, `llama2-13B.sh`, `llama2-70B.sh`",
    ),
    (
        "`--normalize_reward`",
        "the same flag: mean and standard deviation over the rewards of the run "
        "([rewards.md](rewards.md#normalization-over-the-run))",
    ),
    (
        "prompts above `--prompt_max_len` are cut",
        "they are skipped, or cut with `--rollout-truncate-prompt` ([data.md](data.md#long-prompts))",
    ),
    (
        "`Human: {}` around a prompt by default",
        "`--input-template`, and `--rm-input-template` for the reward model; no default",
    ),
    (
        "several data sets with probabilities",
        "`--prompt-data a.jsonl=0.7 b.jsonl=0.3` ([data.md](data.md))",
    ),
    (
        "a PyTorchJob with its ConfigMap",
        "`tools/launch.py pytorchjob` writes both from a recipe ([launchers.md](launchers.md#pytorchjob))",
    ),
)
AIAK_PAGE = f"""\
# Coming from Baidu AIAK-RLHF

AIAK-RLHF trains reward models (`train_rm.py`) and PPO with every model on every GPU (`train_ppo_ray_optim.py`), on
OpenRLHF with DeepSpeed and vLLM. slimrl trains with Megatron-core and generates with SGLang or vLLM. This page is
generated from the table that the parser uses: `python -m slimrl.arguments.docs aiak > docs/coming-from-aiak-rlhf.md`.

## What is different

{_table(_AIAK_DIFFERENCES)}

## Flags

Every flag of the two programs, with its default there. The last column is the answer of the command line: *accepted*,
or the error, which comes before anything starts. Most names are OpenRLHF's, and the error says so.

"""
_CHATLEARN_DIFFERENCES = (
    (
        "ChatLearn",
        "slimrl",
    ),
    (
        "`examples/fsdp/scripts/train_grpo_qwen3.sh`",
        "`scripts/run-qwen3-8B-math-fsdp.sh`: the same model, data, batch sizes and rewards, with Megatron-FSDP",
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
        "a loop in Python over the verbs of a run: `examples/flow.py`, `train.py` ([hooks.md](hooks.md))",
    ),
    (
        "`colocation: [policy,policy_trainer,ref_policy]`",
        "`--colocate` ([colocation.md](colocation.md))",
    ),
    (
        "`rule_reward.py`",
        "`--rm-type math`, or a function with `--custom-rm-path` ([rewards.md](rewards.md))",
    ),
    (
        "`math_lighteval.py`",
        "`python tools/prepare_data.py MATH-lighteval` ([data.md](data.md#published-sets))",
    ),
    (
        "dynamic batch size and sequence packing",
        "always packed; `--use-dynamic-batch-size --max-tokens-per-gpu N --balance-data` ([packing.md](packing.md))",
    ),
    (
        "Ulysses sequence parallelism",
        "`--context-parallel-size`, and `--tensor-model-parallel-size` with `--sequence-parallel` "
        "([parallelism.md](parallelism.md))",
    ),
    (
        "partial rollout",
        "`--partial-rollout` ([rollouts.md](rollouts.md))",
    ),
    (
        "asynchronous schedule",
        "`train_async.py` ([asynchrony.md](asynchrony.md))",
    ),
    (
        "`save_model/policy_trainer/<n>/huggingface` for serving",
        "`--save-hf` ([serving.md](serving.md))",
    ),
)
CHATLEARN_PAGE = f"""\
# Coming from PAI-ChatLearn

ChatLearn reads a YAML file with one part per model (`models.policy`, `models.policy_trainer`, ...) and one for the run,
and overrides `part.key=value`; slimrl has one list of flags. Written on slimrl's command line, a key of ChatLearn is
answered with the flag to use. This page is generated from the table that the parser uses:
`python -m slimrl.arguments.docs chatlearn > docs/coming-from-pai-chatlearn.md`.

## What is different

{_table(_CHATLEARN_DIFFERENCES)}

## Keys

The keys of `runtime_args` are also those of `runtime`, as older files say. The last column completes the error that the
command line gives for a key.

"""
