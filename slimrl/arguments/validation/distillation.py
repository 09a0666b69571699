"""Rules about on-policy distillation: its switch, its teacher, and the rewards that it leaves out."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrl.arguments.checkpoints import is_hf_model
from slimrl.arguments.flag import Problem
from slimrl.arguments.flags.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.arguments.hf_config import (
    ARCHITECTURES,
    RewardModelConfig,
    disagreements,
    served_models,
    starts_reward_servers,
    teachers_of_groups,
)
from slimrl.arguments.namespace import Arguments, Context, absent
from slimrl.arguments.validation.checkpoint import checkpoint_problems
from slimrl.data.reward_registry import GradedBy, reward_of
from slimrl.hooks import own_path
from slimrl.models.hf_folder import same_vocabulary, weights_fault

_ZERO = "zero"  # the --rm-type without a reward
# slime's reward function, which asks the teacher there and is the reward 0 here
_TEACHER_AS_REWARD = (
    "slimrl.rollout.on_policy_distillation.reward_func",
    "slimrl.compatibility.rollout_helpers.reward_func",
)
_ONLY_WITH_IT = (
    "opd_type",
    "opd_kl_coef",
    "opd_divergence",
    "opd_jsd_beta",
    "opd_top_k",
    "opd_teacher_load",
    "opd_teacher_ckpt_step",
    "opd_teacher_urls",
    "opd_teacher_models",
    "opd_teacher_num_gpus",
    "opd_teacher_num_gpus_per_engine",
    "opd_teacher_key",
)


def distillation_has_its_switch(args: Arguments, context: Context) -> Iterator[Problem]:
    """--use-opd and its flags come together, and there is a policy loss with advantages."""
    if not args.use_opd:
        for name in (name for name in _ONLY_WITH_IT if name in context.given):
            flag = "--" + name.replace("_", "-")
            value = getattr(args, name)
            text = " ".join(map(str, value)) if isinstance(value, list) else value
            yield Problem(flag, f"{flag} {text} belongs to --use-opd: add it, or leave {flag} out.")
        if args.custom_rm_path is not None and own_path(args.custom_rm_path) in _TEACHER_AS_REWARD:
            teacher = "" if args.rm_url is not None else ", and the address of the teacher, --rm-url"
            yield Problem(
                "--custom-rm-path",
                f"--custom-rm-path {args.custom_rm_path} gives every response the reward 0, and without --use-opd no"
                f" teacher is asked: add --use-opd --opd-type sglang{teacher}, or choose another reward.",
            )
        if args.rm_type == _ZERO and not _has_other_signal(args):
            yield Problem(
                "--rm-type",
                "--rm-type zero gives every response the same reward and --use-opd is off, so that nothing would be"
                " learned: choose another reward, or add --use-opd.",
            )
        return
    if args.opd_type is None and "opd_type" not in context.broken:
        yield Problem(
            "--opd-type",
            "--use-opd needs a teacher: give --opd-type megatron with --opd-teacher-load, or --opd-type sglang with"
            " --rm-model or --rm-url.",
        )
    if not args.compute_advantages_and_returns:
        is_given = args.loss_type not in ("sft_loss", "preference_loss")  # these two have no advantages anyway
        cause = "--disable-compute-advantages-and-returns" if is_given else f"--loss-type {args.loss_type}"
        yield Problem(
            "--use-opd",
            f"--use-opd changes advantages and {cause} has none: leave one of them out.",
        )


def divergence_has_its_teacher(args: Arguments, context: Context) -> Iterator[Problem]:
    """A divergence over the vocabulary needs the teacher's distributions and slimrl's own output layer."""
    if not args.use_opd or {"opd_divergence", "opd_type"} & context.broken:
        return
    flag, kind = "--opd-divergence", args.opd_divergence
    if kind != "jsd" and "opd_jsd_beta" in context.given:
        yield Problem("--opd-jsd-beta", f"--opd-jsd-beta has no effect with {flag} {kind}: leave it out.")
    if "opd_top_k" in context.given and not (args.has_divergence and args.opd_type == "sglang"):
        yield Problem(
            "--opd-top-k",
            f"--opd-top-k {args.opd_top_k} belongs to --opd-type sglang with another {flag} than sampled_reverse_kl:"
            " leave it out.",
        )
    if not args.has_divergence:
        return
    if args.opd_type == "sglang" and args.custom_convert_samples_to_train_data_path is not None:
        yield Problem(
            flag,
            f"{flag} {kind} reads the teacher's top tokens, which the columns of"
            " --custom-convert-samples-to-train-data-path do not have: leave one of them out.",
        )
    for other, given in (
        ("--keep-logits", args.keep_logits and args.loss_type != "custom_loss"),
        ("--loss-type custom_loss", args.loss_type == "custom_loss"),
        ("--custom-model-provider-path", args.custom_model_provider_path is not None),
    ):
        if given:
            yield Problem(
                flag,
                f"{flag} {kind} is computed by slimrl's output layer in chunks of the vocabulary, which {other}"
                " replaces: leave one of them out.",
            )


def _has_other_signal(args: Arguments) -> bool:
    """Whether something besides --rm-type may be learned from, or nothing is learned anyway."""
    if args.rm_step_separator is not None:
        return True
    paths = (args.custom_rm_path, args.custom_reward_post_process_path, args.custom_advantage_function_path)
    learns_otherwise = args.loss_type != "policy_loss" or args.overlong_buffer_len is not None
    return any(paths) or learns_otherwise or args.eval_only or args.debug_rollout_only


def teacher_in_training_is_a_checkpoint(args: Arguments, context: Context) -> Iterator[Problem]:
    """--opd-type megatron has the checkpoint of a teacher like the student, which is not deleted."""
    if not args.use_opd or {"opd_type", "opd_teacher_load"} & context.broken:
        return
    step = args.opd_teacher_ckpt_step
    if args.opd_type == "sglang":
        for flag, value in (("--opd-teacher-load", args.opd_teacher_load), ("--opd-teacher-ckpt-step", step)):
            if value is not None:
                yield Problem(
                    flag,
                    f"{flag} {value} belongs to --opd-type megatron: leave it out; the teacher of --opd-type sglang is"
                    " --rm-model or at --rm-url.",
                )
        return
    if args.opd_type is None:
        return
    if args.opd_teacher_load is None:
        yield Problem("--opd-teacher-load", "--opd-type megatron needs a teacher: give its folder, --opd-teacher-load.")
        return
    if args.debug_rollout_only:
        return
    folder = Path(args.opd_teacher_load)
    if not folder.is_dir():
        yield Problem(
            "--opd-teacher-load",
            f"--opd-teacher-load {folder} {absent(folder)}: make it with tools/convert_hf_to_torch_dist.py, or give the"
            " Hugging Face folder itself.",
        )
        return
    yield from checkpoint_problems("--opd-teacher-load", folder, "--opd-teacher-ckpt-step", step)
    if is_hf_model(folder):
        yield from _like_the_student(args, folder)
    deletes = args.save_retain_interval is not None or args.save_total_limit is not None
    if (
        deletes
        and args.save is not None
        and Path(args.save).absolute() in (folder.absolute(), folder.absolute().parent)
    ):
        yield Problem(
            "--opd-teacher-load",
            f"--opd-teacher-load {folder} is in --save {args.save}, where --save-total-limit and --save-retain-interval"
            " delete: copy the teacher to another folder.",
        )


def _like_the_student(args: Arguments, folder: Path) -> Iterator[Problem]:
    """A Hugging Face teacher has the architecture and the tokenizer of the student."""
    try:
        config: Any = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    except ValueError as error:
        yield Problem(
            "--opd-teacher-load",
            f"--opd-teacher-load {folder}/config.json is not JSON ({error}): copy the model again.",
        )
        return
    found = [problem.sentence.rpartition(": ")[0] for problem in disagreements(args, config)]
    if found:
        yield Problem(
            "--opd-teacher-load",
            f"--opd-teacher-load {folder} has another architecture than the student ({'; '.join(found)}): use"
            " --opd-type sglang, which takes any with the student's tokenizer.",
        )
    yield from _same_tokenizer("--opd-teacher-load", args, folder)


def _same_tokenizer(flag: str, args: Arguments, folder: Path) -> Iterator[Problem]:
    if args.hf_checkpoint is not None and same_vocabulary(folder, Path(args.hf_checkpoint)) is False:
        yield Problem(
            flag,
            f"{flag} {folder} has another vocabulary than --hf-checkpoint {args.hf_checkpoint}, so that it would score"
            " other tokens: give a teacher with the student's tokenizer.",
        )


def teacher_on_servers_is_comparable(args: Arguments, context: Context) -> Iterator[Problem]:
    """The teacher of --opd-type sglang has --rm-url to itself, and the student's temperature."""
    if not args.has_served_teacher:
        return
    row = None if args.rm_type is None or "rm_type" in context.broken else reward_of(args.rm_type)
    if row is not None and row.by is not GradedBy.RULE and args.custom_rm_path is None:
        yield Problem(
            "--rm-type",
            f"--rm-type {args.rm_type} needs --rm-url or --rm-model, which are the teacher of --opd-type sglang: choose"
            " another reward (zero for none), or use --opd-type megatron.",
        )
    if args.rollout_temperature != 1 and "rollout_temperature" not in context.broken:
        yield Problem(
            "--rollout-temperature",
            f"--rollout-temperature {args.rollout_temperature:g} scales the student's log-probabilities and not those"
            " of a teacher on SGLang servers: give 1, or use --opd-type megatron.",
        )
    if args.rm_step_separator is not None:
        yield Problem(
            "--rm-step-separator",
            f"--rm-step-separator {args.rm_step_separator!r} needs --rm-model or --rm-url, which are the teacher of"
            " --opd-type sglang: leave it out, or use --opd-type megatron.",
        )
    if args.rm_input is not None:
        yield Problem(
            "--rm-input",
            f"--rm-input {args.rm_input} is for a reward model, and the teacher of --opd-type sglang reads the"
            " student's token ids: leave it out.",
        )


def teacher_on_servers_is_reachable(args: Arguments, context: Context) -> Iterator[Problem]:
    """The teacher of --opd-type sglang has servers, or a custom function that may set its log-probabilities."""
    if not args.has_served_teacher or {"rm_model", "rm_url"} & context.broken:
        return
    for address in (args.rm_url or "http://").split(","):
        if not address.strip().startswith(("http://", "https://")):
            yield Problem("--rm-url", f"--rm-url {address} is not an address: begin it with http:// or https://.")
    if args.rm_model is None:
        if args.opd_teachers:
            yield from _teachers_have_addresses(args)
        if args.opd_teacher_models is not None:
            yield from _teachers_have_folders(args)
            return
        if args.opd_teachers:
            pass
        elif args.rm_url is None and not args.debug_train_only and not _may_set_log_probs(args):
            yield Problem(
                "--rm-model",
                "--opd-type sglang needs a teacher: give its folder, --rm-model, or the address of its server,"
                " --rm-url.",
            )
        unused = {"rm_num_gpus", "rm_num_gpus_per_engine", "rm_server_options"}
        external = args.rm_url is not None or args.opd_teachers
        if external and args.rm_server_options.keys() <= {"api_key"}:  # of an external server
            unused.discard("rm_server_options")
        for name in sorted(unused & context.given):
            flag = "--" + name.replace("_", "-")
            yield Problem(flag, f"{flag} belongs to the servers of --rm-model: give that folder, or leave {flag} out.")
        return
    if starts_reward_servers(args) and args.rm_num_gpus % args.rm_num_gpus_per_engine:
        yield Problem(
            "--rm-num-gpus",
            f"--rm-num-gpus {args.rm_num_gpus} is not a multiple of --rm-num-gpus-per-engine"
            f" {args.rm_num_gpus_per_engine}: choose a multiple.",
        )
    yield from _served_folder("--rm-model", args, Path(args.rm_model))


def several_teachers_are_on_servers(args: Arguments, context: Context) -> Iterator[Problem]:
    """Several teachers are the only ones, with one of the two flags, and --opd-teacher-key belongs to them."""
    if not args.use_opd or {"opd_type", "opd_teacher_urls", "opd_teacher_models"} & context.broken:
        return
    urls, models, key = "--opd-teacher-urls", "--opd-teacher-models", "--opd-teacher-key"
    words = args.opd_teacher_urls or args.opd_teacher_models
    for name in ("opd_teacher_num_gpus", "opd_teacher_num_gpus_per_engine"):
        if name in context.given and args.opd_teacher_models is None:
            other = "--" + name.replace("_", "-")
            yield Problem(other, f"{other} belongs to {models}: add it, or leave {other} out.")
    if words is None:
        if "opd_teacher_key" in context.given:
            yield Problem(key, f"{key} {args.opd_teacher_key} belongs to {urls}: add it, or leave {key} out.")
        return
    flag = urls if args.opd_teacher_urls else models
    if args.opd_teacher_urls is not None and args.opd_teacher_models is not None:
        yield Problem(models, f"{models} are teachers that slimrl serves, and {urls} external ones: give one of them.")
    if args.opd_type == "megatron":
        yield Problem(
            flag,
            f"{flag} {' '.join(words)} belongs to --opd-type sglang: leave it out; the teacher of"
            " --opd-type megatron is --opd-teacher-load.",
        )
    for other, value in (("--rm-model", args.rm_model), ("--rm-url", args.rm_url)):
        if value is not None and args.opd_type == "sglang":
            yield Problem(
                other, f"{other} {value} is one teacher, and {flag} has the teachers: name it there, or leave one out."
            )


def _teachers_have_addresses(args: Arguments) -> Iterator[Problem]:
    """Each word of --opd-teacher-urls is a name of its own and addresses."""
    flag, words = "--opd-teacher-urls", args.opd_teacher_urls or []
    for word in words:
        name, _, addresses = word.partition("=")
        if not name or not all(one.strip().startswith(("http://", "https://")) for one in addresses.split(",")):
            yield Problem(flag, f"{flag} {word} is not a name and addresses: write name=http://host:port[,http://...].")
    yield from _names_differ(flag, words, "with its addresses after a comma")


def _teachers_have_folders(args: Arguments) -> Iterator[Problem]:
    """Each word of --opd-teacher-models is a name of its own and the folder of a model; the GPUs are of these."""
    flag, words = "--opd-teacher-models", args.opd_teacher_models or []
    for word in words:
        name, _, folder = word.partition("=")
        if not name or not folder:
            yield Problem(
                flag,
                f"{flag} {word} is not a name and a folder: write name=folder, or name a frozen model of"
                " --sglang-config.",
            )
        else:
            yield from _served_folder(flag, args, Path(folder))
    yield from _names_differ(flag, words, "with its folder")
    own = len(words) - len(teachers_of_groups(args))
    for other, given in (
        ("--opd-teacher-num-gpus", args.opd_teacher_num_gpus),
        ("--opd-teacher-num-gpus-per-engine", args.opd_teacher_num_gpus_per_engine),
    ):
        if given is not None and len(given) != own:
            also = "" if own == len(words) else " beside those of --sglang-config, which have their groups' GPUs"
            yield Problem(
                other, f"{other} has {len(given)} numbers and {flag} {own} teachers{also}: give one number each."
            )
            return
    for model in served_models(args):
        if model.gpus % model.per_server:
            yield Problem(
                "--opd-teacher-num-gpus",
                f"the teacher {model.name} has {model.gpus} GPUs, which is not a multiple of the {model.per_server} of"
                " a server: choose a multiple.",
            )


def _names_differ(flag: str, words: list[str], what: str) -> Iterator[Problem]:
    names = [word.partition("=")[0] for word in words]
    for name in sorted({name for name in names if names.count(name) > 1}):
        yield Problem(flag, f"{flag} names {name} twice: give each teacher one name, {what}.")


def _may_set_log_probs(args: Arguments) -> bool:
    """Whether a custom function can set the teacher's log-probabilities of the samples."""
    paths = (
        args.custom_rm_path,
        args.custom_generate_function_path,
        args.custom_reward_post_process_path,
        args.custom_convert_samples_to_train_data_path,
        args.rollout_sample_hook_path,
    )
    return any(paths) or args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION


def _served_folder(flag: str, args: Arguments, folder: Path) -> Iterator[Problem]:
    """The teacher of `flag` is a language model with the student's tokenizer and room for its responses."""
    try:
        config = RewardModelConfig.read(folder)
    except ValueError as error:
        yield Problem(flag, str(error).replace("--rm-model", flag))
        return
    if config.architecture in ARCHITECTURES:
        yield Problem(
            flag,
            f"{flag} {folder} is a {config.architecture}, and the teacher of --opd-type sglang is a language model:"
            " give another.",
        )
    if starts_reward_servers(args) and not args.dry_run and (fault := weights_fault(folder)) is not None:
        yield Problem(flag, f"{flag} {folder} {fault}.")
    yield from _same_tokenizer(flag, args, folder)
    longest = args.rollout_max_response_len
    if config.context is not None and longest is not None and longest >= config.context:
        yield Problem(
            flag,
            f"{flag} {folder} has a context of {config.context} tokens (max_position_embeddings), and a response"
            f" may have {longest} (--rollout-max-response-len): lower that, or give a teacher with a longer context.",
        )
