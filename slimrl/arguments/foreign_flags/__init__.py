"""Setting names of other frameworks (slime, verl, OpenRLHF, TRL, ms-swift) and short forms, with slimrl's flags.

One table: the name, its owner, slimrl's flag, and a clause that completes the error. The rows of PAI-ChatLearn and
AIAK-RLHF are in `chatlearn` and `aiak`. Names are compared without leading dashes and plus signs, with dashes for
underscores. The parser looks up words that are not slimrl flags.
"""

from __future__ import annotations

import dataclasses
import re

from slimrl.arguments.foreign_flags import aiak, chatlearn, chatlearn_megatron

SLIME, VERL, OPENRLHF, TRL, SWIFT = "slime's", "verl's", "OpenRLHF's", "TRL's", "ms-swift's"
HF = "transformers'"
FORMER = "a former name"
SHORT = "a short form"
CRITIC = "a critic flag"
_LORA = "with --lora-alpha and --lora-target-modules"
_OTHER_LORA = "docs/lora.md lists the flags of adapters, for example --lora-rank; leave it out"
_CRITIC = "leave it out; docs/flags.md lists the flags of a critic, for example --critic-lr"
_VLLM = "vllm, with --vllm-python; SGLang is the default"
_MIS = "docs/coming-from-slime.md has the table; for a function that reads it, put it under custom:"
_LISTED = "docs/coming-from-verl.md has the table, and docs/flags.md all flags, written --flag value"
_PACKED = "samples are always packed without padding; leave it out"


@dataclasses.dataclass(frozen=True)
class ForeignFlag:
    """A name of `owner`; `flag` is slimrl's flag, None if there is none; `clause` completes the error.

    `is_listed` is False for a name that only a prefix gives to its owner: a flag may exist under another name.
    """

    owner: str
    flag: str | None
    clause: str
    is_listed: bool = True

    def sentence(self, name: str) -> str:
        """The error for `name`, the word as typed: the flag to use, or the reason why there is none."""
        subject = f"{name} is {self.owner}{'' if self.owner in (SHORT, FORMER, CRITIC) else ' name'}"
        if not self.is_listed:
            return f"{subject} and is not in the table of its counterparts: {self.clause}."
        if self.flag is None:
            return f"{subject} and has no counterpart: {self.clause}."
        return f"{subject}: use {self.flag}{', ' + self.clause if self.clause else ''}."


# name: (owner, slimrl's flag, clause)
_ROWS: dict[str, tuple[str, str | None, str]] = {
    # former names of slimrl flags
    "slot-memory-gib": (FORMER, "--gpu-memory-gib", ""),
    # of earlier versions of slime
    "update-weight-encoding": (SLIME, "--update-weight-delta-encoding", "xor or overwrite; compression is always zstd"),
    "update-weight-delta-dir": (SLIME, "--update-weight-disk-dir", "with --update-weight-local-checkpoint-dir"),
    # keys of slime's example of corrections for the mismatch between engines and training
    "tis-upper-bound": (SLIME, "--tis-clip", ""),
    "tis-lower-bound": (SLIME, "--tis-clip-low", "not for tis_mode truncate, which does not read it"),
    "mis-level": (SLIME, "--tis-level", f"with --use-tis; {_MIS}"),
    "mis-mode": (SLIME, "--tis-mode", f"truncate also for clip, with --tis-clip-low; {_MIS}"),
    "mis-lower-bound": (SLIME, "--tis-clip-low", f"not for mis_mode truncate; {_MIS}"),
    "mis-upper-bound": (SLIME, "--tis-clip", f"with --use-tis; {_MIS}"),
    "mis-veto-threshold": (SLIME, "--rs-veto-threshold", f"with --use-rs; {_MIS}"),
    "topk-level-opd": (SLIME, "--opd-top-k", "with --opd-divergence"),
    "critic-config-path": (SLIME, "--megatron-config-path", "with its entries below megatron, each with role: critic"),
    "opd-teacher-loads": (SLIME, "--opd-teacher-models", "for several teachers, on servers of the run"),
    "gae-lambda": (OPENRLHF, "--lambd", ""),
    # short forms
    "tp": (SHORT, "--tensor-model-parallel-size", "and --rollout-num-gpus-per-engine for the engines"),
    "tp-size": (SHORT, "--tensor-model-parallel-size", "and --rollout-num-gpus-per-engine for the engines"),
    "tensor-parallel-size": (SHORT, "--tensor-model-parallel-size", "and --rollout-num-gpus-per-engine for engines"),
    "pp": (SHORT, "--pipeline-model-parallel-size", ""),
    "pp-size": (SHORT, "--pipeline-model-parallel-size", ""),
    "pipeline-parallel-size": (SHORT, "--pipeline-model-parallel-size", ""),
    "cp": (SHORT, "--context-parallel-size", ""),
    "cp-size": (SHORT, "--context-parallel-size", ""),
    "ep": (SHORT, "--expert-model-parallel-size", ""),
    "ep-size": (SHORT, "--expert-model-parallel-size", ""),
    "expert-parallel-size": (SHORT, "--expert-model-parallel-size", ""),
    "etp": (SHORT, "--expert-tensor-parallel-size", ""),
    "value-norm": (SHORT, "--normalize-values", "which normalizes the critic's targets, the returns"),
    "normalize-returns": (SHORT, "--normalize-values", "which normalizes the critic's targets, the returns"),
    "dp": (SHORT, None, "it is the training GPUs divided by the other parallel sizes; leave it out"),
    "dp-size": (SHORT, None, "it is the training GPUs divided by the other parallel sizes; leave it out"),
    "data-parallel-size": (SHORT, None, "it is the training GPUs divided by the other sizes; leave it out"),
    "batch-size": (SHORT, "--rollout-batch-size", "in prompts, or --global-batch-size, in samples"),
    "num-gpus": (SHORT, "--actor-num-gpus-per-node", "and --rollout-num-gpus or --colocate for the engines"),
    "nnodes": (SHORT, "--actor-num-nodes", ""),
    "epochs": (SHORT, "--num-epoch", ""),
    "name": (SHORT, "--run-name", ""),
    "temperature": (SHORT, "--rollout-temperature", ""),
    "top-p": (SHORT, "--rollout-top-p", ""),
    "top-k": (SHORT, "--rollout-top-k", ""),
    # verl: data
    "data.train-files": (VERL, "--prompt-data", ""),
    "data.val-files": (VERL, "--eval-prompt-data", "a name and a path"),
    "data.train-batch-size": (VERL, "--rollout-batch-size", "in prompts"),
    "data.gen-batch-size": (VERL, "--over-sampling-batch-size", "in prompts"),
    "data.max-prompt-length": (VERL, "--rollout-max-prompt-len", ""),
    "data.max-response-length": (VERL, "--rollout-max-response-len", ""),
    "data.prompt-key": (VERL, "--input-key", ""),
    "data.reward-fn-key": (
        VERL,
        "--rm-type",
        "or rm_type in a row's metadata; --custom-rm-path may choose by Sample.metadata",
    ),
    "data.shuffle": (VERL, "--rollout-shuffle", ""),
    "data.seed": (VERL, "--rollout-seed", ""),
    "data.filter-overlong-prompts": (VERL, "--rollout-max-prompt-len", "longer prompts are skipped"),
    "data.truncation": (
        VERL,
        "--rollout-truncate-prompt",
        "left, right or middle; --refuse-long-prompts for error",
    ),
    # verl: model and training
    "actor-rollout-ref.model.path": (VERL, "--hf-checkpoint", ""),
    "actor-rollout-ref.model.enable-gradient-checkpointing": (VERL, "--recompute-granularity", "selective or full"),
    "actor-rollout-ref.model.lora-rank": (VERL, "--lora-rank", _LORA),
    "critic.model.lora-rank": (VERL, "--critic-lora-rank", "with --critic-lora-alpha"),
    "actor-rollout-ref.model.use-remove-padding": (VERL, None, _PACKED),
    "actor-rollout-ref.actor.strategy": (VERL, None, "Megatron trains; --use-megatron-fsdp is its FSDP"),
    "actor-rollout-ref.actor.optim.lr": (VERL, "--lr", ""),
    "actor-rollout-ref.actor.optim.lr-warmup-steps": (VERL, "--lr-warmup-iters", ""),
    "actor-rollout-ref.actor.optim.lr-warmup-steps-ratio": (VERL, "--lr-warmup-fraction", ""),
    "actor-rollout-ref.actor.optim.lr-scheduler-type": (VERL, "--lr-decay-style", "constant or cosine"),
    "actor-rollout-ref.actor.optim.warmup-style": (VERL, "--lr-decay-style", "constant or cosine"),
    "actor-rollout-ref.actor.optim.weight-decay": (VERL, "--weight-decay", ""),
    "actor-rollout-ref.actor.grad-clip": (VERL, "--clip-grad", ""),
    "actor-rollout-ref.actor.ppo-mini-batch-size": (VERL, "--global-batch-size", "in samples, not in prompts"),
    "actor-rollout-ref.actor.ppo-micro-batch-size": (VERL, "--micro-batch-size", ""),
    "actor-rollout-ref.actor.ppo-micro-batch-size-per-gpu": (VERL, "--micro-batch-size", ""),
    "actor-rollout-ref.actor.use-dynamic-bsz": (VERL, "--use-dynamic-batch-size", ""),
    "actor-rollout-ref.actor.ppo-max-token-len-per-gpu": (VERL, "--max-tokens-per-gpu", ""),
    "actor-rollout-ref.actor.ppo-epochs": (VERL, None, "a sample is trained on once; see --num-steps-per-rollout"),
    "actor-rollout-ref.actor.use-kl-loss": (VERL, "--use-kl-loss", ""),
    "actor-rollout-ref.actor.kl-loss-coef": (VERL, "--kl-loss-coef", ""),
    "actor-rollout-ref.actor.kl-loss-type": (VERL, "--kl-loss-type", "k1 for kl, k2 for mse"),
    "actor-rollout-ref.actor.entropy-coeff": (VERL, "--entropy-coef", ""),
    "actor-rollout-ref.actor.clip-ratio": (VERL, "--eps-clip", ""),
    "actor-rollout-ref.actor.clip-ratio-low": (VERL, "--eps-clip", ""),
    "actor-rollout-ref.actor.clip-ratio-high": (VERL, "--eps-clip-high", ""),
    "actor-rollout-ref.actor.clip-ratio-c": (VERL, "--eps-clip-c", ""),
    "actor-rollout-ref.actor.policy-loss.loss-mode": (
        VERL,
        "--advantage-estimator",
        "gspo for gspo; for vanilla leave it out",
    ),
    "actor-rollout-ref.actor.loss-agg-mode": (
        VERL,
        "--calculate-per-token-loss",
        "for token-mean; --advantage-estimator dr_grpo for seq-mean-token-sum-norm",
    ),
    "actor-rollout-ref.actor.ulysses-sequence-parallel-size": (VERL, "--context-parallel-size", ""),
    "actor-rollout-ref.actor.fsdp-config.param-offload": (VERL, "--offload-train", ""),
    "actor-rollout-ref.actor.fsdp-config.optimizer-offload": (VERL, "--optimizer-cpu-offload", ""),
    "actor-rollout-ref.actor.megatron.tensor-model-parallel-size": (VERL, "--tensor-model-parallel-size", ""),
    "actor-rollout-ref.actor.megatron.pipeline-model-parallel-size": (VERL, "--pipeline-model-parallel-size", ""),
    "actor-rollout-ref.actor.megatron.context-parallel-size": (VERL, "--context-parallel-size", ""),
    "actor-rollout-ref.actor.megatron.expert-model-parallel-size": (VERL, "--expert-model-parallel-size", ""),
    "actor-rollout-ref.ref.log-prob-micro-batch-size-per-gpu": (VERL, "--max-tokens-per-gpu", "for all passes"),
    # verl: generation
    "actor-rollout-ref.rollout.name": (VERL, "--rollout-engine", _VLLM),
    "actor-rollout-ref.rollout.n": (VERL, "--n-samples-per-prompt", ""),
    "actor-rollout-ref.rollout.temperature": (VERL, "--rollout-temperature", ""),
    "actor-rollout-ref.rollout.top-p": (VERL, "--rollout-top-p", ""),
    "actor-rollout-ref.rollout.top-k": (VERL, "--rollout-top-k", ""),
    "actor-rollout-ref.rollout.response-length": (VERL, "--rollout-max-response-len", ""),
    "actor-rollout-ref.rollout.tensor-model-parallel-size": (VERL, "--rollout-num-gpus-per-engine", ""),
    "actor-rollout-ref.rollout.gpu-memory-utilization": (
        VERL,
        "--sglang-mem-fraction-static",
        "or --vllm-gpu-memory-utilization",
    ),
    "actor-rollout-ref.rollout.max-model-len": (VERL, "--sglang-context-length", ""),
    "actor-rollout-ref.rollout.enforce-eager": (VERL, "--sglang-disable-cuda-graph", ""),
    "actor-rollout-ref.rollout.log-prob-micro-batch-size-per-gpu": (VERL, "--max-tokens-per-gpu", "for all passes"),
    "actor-rollout-ref.rollout.multi-turn.enable": (VERL, "--custom-generate-function-path", ""),
    "actor-rollout-ref.rollout.multi-turn.tool-config-path": (
        VERL,
        "--custom-generate-function-path",
        "schemas by --tool-key",
    ),
    "actor-rollout-ref.rollout.val-kwargs.n": (VERL, "--n-samples-per-eval-prompt", ""),
    "actor-rollout-ref.rollout.val-kwargs.temperature": (VERL, "--eval-temperature", ""),
    # verl: algorithm, rewards, trainer
    "algorithm.adv-estimator": (VERL, "--advantage-estimator", "ppo for gae"),
    "algorithm.gamma": (VERL, "--gamma", ""),
    "algorithm.lam": (VERL, "--lambd", ""),
    "critic.optim.lr": (VERL, "--critic-lr", ""),
    "critic.cliprange-value": (VERL, "--value-clip", ""),
    "critic.model.path": (VERL, "--critic-load", ""),
    "trainer.critic-warmup": (VERL, "--num-critic-only-steps", ""),
    "algorithm.use-kl-in-reward": (VERL, "--kl-coef", "above 0"),
    "algorithm.kl-penalty": (VERL, "--kl-loss-type", "k1 for kl, k2 for mse"),
    "algorithm.kl-ctrl.kl-coef": (VERL, "--kl-coef", ""),
    "algorithm.kl-ctrl.target-kl": (VERL, "--kl-target", "in nats per response, not per token"),
    "algorithm.kl-ctrl.horizon": (VERL, "--kl-horizon", "with --kl-target"),
    "algorithm.norm-adv-by-std-in-grpo": (VERL, "--disable-grpo-std-normalization", "for False"),
    "algorithm.filter-groups.enable": (
        VERL,
        "--dynamic-sampling-filter-path",
        "slimrl.rollout.filter_hub.dynamic_sampling_filters.check_reward_nonzero_std",
    ),
    "algorithm.filter-groups.metric": (
        VERL,
        "--dynamic-sampling-filter-path",
        "a function of yours for another than the reward",
    ),
    "algorithm.rollout-correction.rollout-is": (VERL, "--tis-level", "with --use-tis"),
    "algorithm.rollout-correction.rollout-is-threshold": (VERL, "--tis-clip", "with --use-tis"),
    "algorithm.rollout-correction.rollout-rs": (VERL, "--rs-level", "with --use-rs"),
    "algorithm.rollout-correction.rollout-rs-threshold": (VERL, "--rs-upper-bound", "and --rs-lower-bound"),
    "algorithm.rollout-correction.rollout-token-veto-threshold": (VERL, "--rs-veto-threshold", "with --use-rs"),
    "reward-model.model.path": (VERL, "--rm-model", ""),
    "reward-model.overlong-buffer.enable": (VERL, "--overlong-buffer-len", "in tokens; without it there is no penalty"),
    "reward-model.overlong-buffer.len": (VERL, "--overlong-buffer-len", ""),
    "reward-model.overlong-buffer.penalty-factor": (VERL, "--overlong-penalty-factor", ""),
    "custom-reward-function.path": (VERL, "--custom-rm-path", "package.module.function"),
    "custom-reward-function.name": (VERL, "--custom-rm-path", "package.module.function"),
    "trainer.total-epochs": (VERL, "--num-epoch", ""),
    "trainer.total-training-steps": (VERL, "--num-rollout", ""),
    "trainer.n-gpus-per-node": (VERL, "--actor-num-gpus-per-node", ""),
    "trainer.nnodes": (VERL, "--actor-num-nodes", ""),
    "trainer.save-freq": (VERL, "--save-interval", ""),
    "trainer.test-freq": (VERL, "--eval-interval", ""),
    "trainer.val-before-train": (VERL, "--skip-eval-before-train", "for False"),
    "trainer.project-name": (VERL, "--wandb-project", ""),
    "trainer.experiment-name": (VERL, "--run-name", ""),
    "trainer.logger": (VERL, "--use-wandb", "or --use-tensorboard"),
    "trainer.default-local-dir": (VERL, "--save", "and --load, to resume"),
    "trainer.resume-mode": (VERL, "--load", "which resumes if it contains a checkpoint"),
    # OpenRLHF
    "pretrain": (OPENRLHF, "--hf-checkpoint", ""),
    "reward-pretrain": (OPENRLHF, "--rm-model", ""),
    "remote-rm-url": (OPENRLHF, "--rm-url", "with --rm-type remote_rm, or --custom-rm-path for a function"),
    "save-path": (OPENRLHF, "--save", ""),
    "ckpt-path": (OPENRLHF, "--save", "and --load, to resume"),
    "load-checkpoint": (OPENRLHF, "--load", ""),
    "save-steps": (OPENRLHF, "--save-interval", "in rollouts"),
    "eval-steps": (OPENRLHF, "--eval-interval", "in rollouts"),
    "train-batch-size": (OPENRLHF, "--global-batch-size", "in samples"),
    "micro-train-batch-size": (OPENRLHF, "--micro-batch-size", ""),
    "micro-rollout-batch-size": (OPENRLHF, None, "the engines form their own batches; leave it out"),
    "max-epochs": (
        OPENRLHF,
        None,
        "a response is trained on once, see --num-steps-per-rollout; for passes over a data set use --num-epoch",
    ),
    "num-episodes": (OPENRLHF, "--num-epoch", ""),
    "prompt-max-len": (OPENRLHF, "--rollout-max-prompt-len", ""),
    "generate-max-len": (OPENRLHF, "--rollout-max-response-len", ""),
    "max-new-tokens": (OPENRLHF, "--rollout-max-response-len", ""),
    "zero-stage": (
        OPENRLHF,
        "--use-distributed-optimizer",
        "on by default, for 1; --use-megatron-fsdp with --data-parallel-sharding-strategy for 2 and 3. Only the first"
        " can be combined with --optimizer-cpu-offload",
    ),
    "actor-learning-rate": (OPENRLHF, "--lr", ""),
    "critic-learning-rate": (OPENRLHF, "--critic-lr", ""),
    "critic-pretrain": (OPENRLHF, "--critic-load", ""),
    "freezing-actor-steps": (OPENRLHF, "--num-critic-only-steps", "in rollouts"),
    "init-kl-coef": (OPENRLHF, "--kl-coef", ""),
    "kl-estimator": (OPENRLHF, "--kl-loss-type", ""),
    "eps-clip-low-high": (OPENRLHF, "--eps-clip-high", "with --eps-clip"),
    "gradient-checkpointing": (HF, "--recompute-granularity", "selective or full"),
    "adam-offload": (
        OPENRLHF,
        "--optimizer-cpu-offload",
        "with --use-precision-aware-optimizer and without --use-megatron-fsdp",
    ),
    "packing-samples": (OPENRLHF, None, _PACKED),
    "ring-attn-size": (OPENRLHF, "--context-parallel-size", ""),
    "flash-attn": (OPENRLHF, "--attention-backend", "flash"),
    "colocate-all-models": (OPENRLHF, "--colocate", ""),
    "async-train": (OPENRLHF, "--max-weight-staleness", "with train_async.py"),
    "vllm-num-engines": (OPENRLHF, "--rollout-num-gpus", "in GPUs, with --rollout-num-gpus-per-engine"),
    "vllm-tensor-parallel-size": (OPENRLHF, "--rollout-num-gpus-per-engine", ""),
    "vllm-gpu-memory-utilization": (OPENRLHF, "--sglang-mem-fraction-static", ""),
    "l2": (OPENRLHF, "--weight-decay", ""),
    "ipo": (OPENRLHF, "--preference-loss", "ipo"),
    "label-smoothing": (OPENRLHF, "--preference-label-smoothing", ""),
    "desirable-loss-weight": (OPENRLHF, "--desirable-weight", ""),
    "undesirable-loss-weight": (OPENRLHF, "--undesirable-weight", ""),
    "nll-loss-coef": (OPENRLHF, "--preference-nll-coef", ""),
    "aux-loss-coef": (OPENRLHF, "--moe-aux-loss-coeff", ""),
    # TRL and transformers
    "model-name-or-path": (TRL, "--hf-checkpoint", ""),
    "dataset-name": (TRL, "--prompt-data", "a .jsonl or .parquet file"),
    "output-dir": (HF, "--save", ""),
    "per-device-train-batch-size": (HF, "--micro-batch-size", "and --global-batch-size for a step"),
    "gradient-accumulation-steps": (HF, "--global-batch-size", "in samples of one optimizer step"),
    "learning-rate": (HF, "--lr", ""),
    "lr-scheduler": (HF, "--lr-decay-style", ""),
    "lr-scheduler-type": (HF, "--lr-decay-style", ""),
    "warmup-steps": (HF, "--lr-warmup-iters", ""),
    "lr-warmup-steps": (HF, "--lr-warmup-iters", ""),
    "warmup-ratio": (HF, "--lr-warmup-fraction", ""),
    "lr-warmup-ratio": (HF, "--lr-warmup-fraction", ""),
    "max-steps": (HF, "--num-rollout", ""),
    "num-train-epochs": (HF, "--num-epoch", ""),
    "max-grad-norm": (HF, "--clip-grad", ""),
    "report-to": (HF, "--use-wandb", "or --use-tensorboard"),
    "resume-from-checkpoint": (HF, "--load", ""),
    "logging-steps": (HF, None, "every step is logged; leave it out"),
    "deepspeed": (HF, None, "Megatron trains; --use-megatron-fsdp shards weights"),
    "fsdp": (HF, "--use-megatron-fsdp", ""),
    "mask-truncated-completions": (TRL, "--mask-truncated-samples", ""),
    "num-generations": (TRL, "--n-samples-per-prompt", ""),
    "max-prompt-length": (TRL, "--rollout-max-prompt-len", ""),
    "max-completion-length": (TRL, "--rollout-max-response-len", ""),
    "max-response-length": (SHORT, "--rollout-max-response-len", ""),
    "beta": (TRL, "--kl-loss-coef", "with --use-kl-loss; --preference-beta for preferences"),
    "dpo-beta": (SHORT, "--preference-beta", ""),
    "rpo-alpha": (TRL, "--preference-nll-coef", ""),
    "reference-free": (TRL, "--preference-reference-free", ""),
    "epsilon": (TRL, "--eps-clip", ""),
    "epsilon-high": (TRL, "--eps-clip-high", ""),
    "num-iterations": (TRL, None, "a sample is trained on once; see --num-steps-per-rollout"),
    "scale-rewards": (TRL, "--disable-grpo-std-normalization", "for False"),
    "cliprange-value": (TRL, "--value-clip", ""),
    "whiten-rewards": (TRL, "--normalize-advantages", "which whitens what the rewards become"),
    "vf-coef": (TRL, None, "the critic has weights and an optimizer of its own, with --critic-lr; leave it out"),
    "importance-sampling-level": (TRL, "--advantage-estimator", "gspo for sequence"),
    "reward-funcs": (TRL, "--custom-rm-path", "or --rm-type"),
    "use-vllm": (TRL, "--rollout-engine", _VLLM),
    "use-peft": (TRL, "--lora-rank", _LORA),
    "use-lora": (TRL, "--lora-rank", _LORA),
    # ms-swift
    "model": (SWIFT, "--hf-checkpoint", ""),
    "dataset": (SWIFT, "--prompt-data", "a .jsonl or .parquet file"),
    "val-dataset": (SWIFT, "--eval-prompt-data", "a name and a path"),
    "rlhf-type": (SWIFT, "--advantage-estimator", ""),
    "train-type": (SWIFT, "--lora-rank", "for lora; leave it out for full"),
    "torch-dtype": (HF, "--bf16", "or --fp16; default: the model's dtype"),
    "reward-model": (SWIFT, "--rm-model", ""),
    "external-plugins": (SWIFT, "--custom-rm-path", "package.module.function"),
    "sequence-parallel-size": (SWIFT, "--context-parallel-size", ""),
    "max-length": (SWIFT, "--rollout-max-context-len", ""),
}

OTHER_WORDS = {word: ForeignFlag(*row) for word, row in (_ROWS | aiak.ROWS | chatlearn.ROWS).items()}

# prefixes of all other names
_PREFIXES = {
    "lora-": ForeignFlag(TRL, None, _OTHER_LORA),
    "vllm-": ForeignFlag(OPENRLHF, "--rollout-engine", "vllm, with the flags of vLLM under the prefix vllm"),
    "critic-": ForeignFlag(CRITIC, None, _CRITIC),
    **dict.fromkeys(
        ("actor-rollout-ref.", "algorithm.", "critic.", "trainer.", "reward-model."),
        ForeignFlag(VERL, None, _LISTED, is_listed=False),
    ),
    **{
        prefix: ForeignFlag(chatlearn_megatron.CHATLEARN, None, clause, is_listed=False)
        for prefix, clause in chatlearn.PREFIXES.items()
    },
}
_SETTING = re.compile(r"\+{0,2}(?P<name>[a-z_]+(\.[a-z0-9_]+)+)=(?P<value>.*)", re.DOTALL)


def other_word(name: str) -> ForeignFlag | None:
    """The row of a word as typed, `--name` or `a.dotted.name`; None if it is unknown."""
    plain = _plain(name)
    if plain in OTHER_WORDS:
        return OTHER_WORDS[plain]
    return next((row for prefix, row in _PREFIXES.items() if plain.startswith(prefix)), None)


def dotted_setting(word: str) -> tuple[str, str] | None:
    """Name and value of an `a.dotted.name=value` of another framework; None for any other word."""
    match = _SETTING.fullmatch(word)
    if match is None or other_word(match["name"]) is None:
        return None
    return match["name"], match["value"]


def _plain(name: str) -> str:
    return name.removeprefix("--").replace("_", "-")
