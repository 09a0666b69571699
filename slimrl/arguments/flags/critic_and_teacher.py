"""Flags of the models that train the policy: the critic of PPO, and the teacher of on-policy distillation."""

from __future__ import annotations

import dataclasses

from slimrl.arguments.flag import flag

SAMPLED_REVERSE_KL = "sampled_reverse_kl"


@dataclasses.dataclass
class CriticArguments:
    """The critic (with --advantage-estimator ppo).

    It is a model of the policy's sizes with a value head, trained by the policy's GPUs, or with --critic-num-nodes or
    --critic-num-gpus-per-node by GPUs of its own. Flags that are not here apply to both.
    """

    value_clip: float = flag(0.2, "clip of the value loss: the distance from the value before the rollout", at_least=0)
    normalize_values: bool = flag(
        False,
        "train the critic on returns normalized by the mean and standard deviation of all returns of the run so far,"
        " which checkpoints contain; --value-clip is then in units of that deviation",
    )
    num_critic_only_steps: int = flag(
        0, "rollouts at the start that train the critic only, up to all of --num-rollout (count)", at_least=0
    )
    critic_lr: float = flag(None, "learning rate of the critic after warm-up (--lr)", at_least=0)
    critic_lr_warmup_iters: int = flag(
        None, "optimizer steps of the critic's linear warm-up (as the policy's)", at_least=0
    )
    critic_load: str | None = flag(
        None,
        "folder of the critic's weights: a critic's checkpoint, a reward model, or a model (torch_dist or Hugging Face)"
        " whose head is then new (path; on resuming --critic-save, at the start --ref-load or --load)",
    )
    critic_save: str | None = flag(
        None, "folder for the critic's checkpoints, written at each of --save (path; the folder critic in --save)"
    )
    critic_num_nodes: int | None = flag(
        None,
        "train the critic on GPUs of its own: its nodes (count; without both flags the policy's ranks train it, with"
        " --critic-num-gpus-per-node alone --actor-num-nodes)",
        at_least=1,
    )
    critic_num_gpus_per_node: int | None = flag(
        None,
        "GPUs of the critic's own on each of its nodes (count; with --critic-num-nodes alone"
        " --actor-num-gpus-per-node)",
        at_least=1,
    )
    critic_lora_rank: int | None = flag(
        None,
        "train LoRA adapters of this rank, and the head, in place of the critic's weights; those of --critic-load, else"
        " of --ref-load, are their base (default: every weight is trained, also beside --lora-rank)",
        above=0,
    )
    critic_lora_alpha: float | None = flag(
        None, "scale of the critic's adapters, as --lora-alpha (default: their rank)", above=0
    )
    megatron_config_path: str | None = flag(
        None,
        "YAML file of flags that policy or critic have for themselves (path), which override the command line:"
        " megatron: a list of role (actor or critic) and overrides",
    )


@dataclasses.dataclass
class DistillationArguments:
    """On-policy distillation: a teacher's log-probabilities of the responses that the trained model, the student, gave.

    At most one of `has_megatron_teacher` and `has_served_teacher` is true.
    """

    use_opd: bool = flag(
        False,
        "on-policy distillation: a teacher's term in the advantage of each token, or in the loss (--opd-divergence)",
    )
    opd_type: str | None = flag(
        None,
        "where the teacher of --use-opd runs: on SGLang servers (--rm-model, --rm-url), or in the training ranks"
        " (--opd-teacher-load)",
        choices=("sglang", "megatron"),
    )
    opd_kl_coef: float = flag(1.0, "weight of the divergence of --use-opd; with 0 it is only logged", at_least=0)
    opd_teacher_urls: list[str] | None = flag(
        None,
        "several teachers of --opd-type sglang on external SGLang servers, as name=address[,address ...]; a prompt's is"
        " named by --opd-teacher-key, else by its file without suffix, else default",
        nargs="+",
    )
    opd_teacher_models: list[str] | None = flag(
        None,
        "several teachers of --opd-type sglang whose servers slimrl starts, as name=Hugging Face folder on GPUs of"
        " their own, or as the name of a frozen model of --sglang-config; a prompt's is chosen as with"
        " --opd-teacher-urls",
        nargs="+",
    )
    opd_teacher_num_gpus: list[int] | None = flag(
        None, "GPUs of each of --opd-teacher-models, in their order (--rm-num-gpus each)", nargs="+", at_least=1
    )
    opd_teacher_num_gpus_per_engine: list[int] | None = flag(
        None, "GPUs per server of each of them (--rm-num-gpus-per-engine each)", nargs="+", at_least=1
    )
    opd_teacher_key: str = flag(
        "teacher", "entry of a row's metadata that names its teacher of --opd-teacher-urls or --opd-teacher-models"
    )
    opd_divergence: str = flag(
        SAMPLED_REVERSE_KL,
        "divergence of the student from the teacher: the reverse KL of the sampled tokens, in the advantages; or, over"
        " the vocabulary and as a loss, KL(teacher || student), KL(student || teacher) or the generalised"
        " Jensen-Shannon divergence",
        choices=(SAMPLED_REVERSE_KL, "forward_kl", "reverse_kl", "jsd"),
    )
    opd_top_k: int = flag(
        64, "tokens of a served teacher that --opd-divergence compares, the most probable; the rest is one", at_least=1
    )
    opd_jsd_beta: float = flag(0.5, "weight of the teacher in the mixture of --opd-divergence jsd", above=0, below=1)
    opd_teacher_load: str | None = flag(
        None,
        "torch_dist or Hugging Face folder of the teacher of --opd-type megatron, with the student's architecture and"
        " vocabulary (path)",
    )
    opd_teacher_ckpt_step: int | None = flag(
        None, "iteration to load from --opd-teacher-load (the one in its tracker file)", at_least=0
    )

    @property
    def opd_teachers(self) -> dict[str, str]:
        """The addresses of each teacher by name, separated by commas; a word without a name has the name ""."""
        return _by_name(self.opd_teacher_urls)

    @property
    def opd_teacher_folders(self) -> dict[str, str]:
        """The folder of each teacher whose servers slimrl starts, by name."""
        return _by_name(self.opd_teacher_models)

    @property
    def opd_teacher_names(self) -> tuple[str, ...]:
        """The names of several teachers; empty for a single one."""
        return tuple(self.opd_teachers or self.opd_teacher_folders)

    @property
    def has_divergence(self) -> bool:
        """True if the loss has a divergence over the vocabulary, and the advantages no term of the teacher."""
        return self.use_opd and self.opd_divergence != SAMPLED_REVERSE_KL

    @property
    def has_megatron_teacher(self) -> bool:
        """True if the training ranks compute the teacher's log-probabilities."""
        return self.use_opd and self.opd_type == "megatron"

    @property
    def has_served_teacher(self) -> bool:
        """True if SGLang servers compute the teacher's log-probabilities."""
        return self.use_opd and self.opd_type == "sglang"


def _by_name(words: list[str] | None) -> dict[str, str]:
    """Of words name=value; one without a name has the name ""."""
    parts = (word.partition("=") for word in words or ())
    return {name if equals else "": value if equals else name for name, equals, value in parts}
