"""Rules about LoRA: its flags belong together, the model has the targets, the run can train and send adapters."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from slimrl.arguments.checkpoints import is_hf_model
from slimrl.arguments.flag import Problem, flag_specs
from slimrl.arguments.flags.model import LoraArguments
from slimrl.arguments.namespace import Arguments, Context
from slimrl.models.adapters import AdapterConfig, AdapterMapping, problem_with, problem_with_shapes, targets_in
from slimrl.models.families import FAMILIES, ModelMapping
from slimrl.models.model_spec import ModelSpec

_RANK, _MERGE = "--lora-rank", "--lora-merge"
_IN_EXPERTS = {"gate_proj", "up_proj", "down_proj"}


def lora_flags_have_a_rank(args: Arguments, context: Context) -> Iterator[Problem]:
    """Without --lora-rank there are no adapters."""
    if args.lora_rank is not None or "lora_rank" in context.broken:
        return
    ranks = {"lora_rank", "lora_target_modules"} if args.has_adapters else {"lora_rank"}
    for spec in flag_specs(LoraArguments):
        if spec.dest in context.given and spec.dest not in context.broken and spec.dest not in ranks:
            yield Problem(spec.name, f"{spec.name} belongs to {_RANK}: add it, or leave {spec.name} out.")


def lora_targets_are_in_the_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """Each target is a projection of the model."""
    family = _family(args)
    if not args.has_adapters or family is None or context.broken:
        return
    found = targets_in(family, ModelSpec.from_args(args))
    for target in args.lora_target_modules or ():
        if target not in found:
            yield Problem(
                "--lora-target-modules",
                f"--lora-target-modules has {target}, and a {family.model_type} model has {', '.join(found)}: leave"
                f" {target} out.",
            )
    adapters = AdapterConfig.from_args(args) or AdapterConfig.of_critic(args)
    if args.lora_target_modules is None and adapters is not None and set(adapters.targets) != set(found):
        yield Problem(
            "--lora-target-modules",
            f"{_rank_flag(args)} adapts {', '.join(adapters.targets)} by default, and a {family.model_type} model has"
            f" {', '.join(found)}: give --lora-target-modules {' '.join(found)}.",
        )


def lora_fits_the_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags that adapters cannot combine with, those of the policy or those of the critic."""
    if not args.has_adapters:
        return
    rank, of_policy = _rank_flag(args), args.lora_rank is not None
    moves = args.moe_router_enable_expert_bias and args.moe_router_bias_update_rate != 0
    alone, teacher = "trains the adapters and nothing else", "has no second set of weights for a teacher"
    reward_model = "does not train the head of a reward model"
    for given, flag, reason in (
        (of_policy and args.only_train_params_name_list is not None, "--only-train-params-name-list", alone),
        (of_policy and args.freeze_params_name_list is not None, "--freeze-params-name-list", alone),
        (of_policy and args.custom_model_provider_path is not None, "--custom-model-provider-path", _OWN_LAYERS),
        (of_policy and args.spec is not None, "--spec", _OWN_LAYERS),
        (args.optimizer == "muon", "--optimizer muon", "has no matrices of Muon's kind"),
        (args.use_megatron_fsdp, "--use-megatron-fsdp", "has not been tried with sharded weights"),
        (args.optimizer_cpu_offload, "--optimizer-cpu-offload", "has a state too small to move"),
        (args.fp8_format is not None, "--fp8-format", "does not adapt layers that compute in fp8"),
        (args.fp4_format is not None, "--fp4-format", "does not adapt layers that compute in fp4"),
        (of_policy and args.trains_reward_model, "--loss-type reward_model_loss", reward_model),
        (of_policy and args.has_megatron_teacher, "--opd-type megatron", teacher),
    ):
        if given:
            yield Problem(flag, f"{rank} {reason}: leave {flag} out, or {rank}.")
    if args.transformer_impl == "transformer_engine":
        yield Problem(
            "--transformer-impl", f"{rank} adapts megatron-core's local layers: give --transformer-impl local."
        )
    if moves:
        yield Problem(
            "--moe-router-bias-update-rate",
            f"--moe-router-bias-update-rate {args.moe_router_bias_update_rate:g} changes the base of the adapters:"
            " give 0.",
        )


_OWN_LAYERS = "adapts slimrl's own layers"


def _rank_flag(args: Arguments) -> str:
    return _RANK if args.lora_rank is not None else "--critic-lora-rank"


def lora_has_a_base(args: Arguments, context: Context) -> Iterator[Problem]:
    """--ref-load has the base; --load has adapters alone."""
    if args.lora_rank is None or args.debug_rollout_only:
        return
    if args.ref_load is None and args.load is not None and "ref_load" not in context.broken:
        yield Problem("--ref-load", f"{_RANK} adapts the model of --ref-load, which is missing: give its checkpoint.")
    if args.load is not None and is_hf_model(Path(args.load)):
        yield Problem(
            "--load",
            f"--load {args.load} is a Hugging Face model, and with {_RANK} --load has the adapters of a run: give it as"
            " --ref-load, and PEFT adapters as --lora-load.",
        )


def lora_load_is_of_this_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """The PEFT folder has the adapters that the flags describe, tensor by tensor."""
    adapters, family = AdapterConfig.from_args(args), _family(args)
    if args.lora_load is None or adapters is None or context.broken:
        return
    folder = Path(args.lora_load)
    found = problem_with(folder, adapters)
    if found is None and family is not None:
        spec = ModelSpec.from_args(args)
        shapes = {
            part.name: tuple(spec.dimension(dim) for dim in part.dims)
            for row in AdapterMapping.of(family, adapters).rows(spec)
            for part in row.hf
        }
        found = problem_with_shapes(folder, shapes)
    if found is not None:
        yield Problem("--lora-load", f"--lora-load {folder} {found}.")


_STAGES, _COPIES, _DRAFTS = "--sglang-pp-size", "--sglang-dp-size", "--sglang-speculative-algorithm"


def engines_can_load_adapters(args: Arguments, context: Context) -> Iterator[Problem]:
    """Without --lora-merge the engines keep their base and load the adapters."""
    adapters = AdapterConfig.from_args(args)
    if adapters is None or not args.engines_have_adapters or context.broken:
        return
    options = args.sglang_options
    if args.multi_latent_attention:
        yield Problem(
            "--multi-latent-attention",
            f"{_RANK} sends the engines adapters, and those of latent attention are not served beside a base: add"
            f" {_MERGE}.",
        )
        return
    for given, flag, reason in (
        (args.update_weight_transport == "disk", "--update-weight-transport disk", "they are sent in HTTP calls"),
        (options.get("pp_size", 1) > 1, _STAGES, "engines with pipeline stages do not load them"),
        (options.get("dp_size", 1) > 1, _COPIES, "engines with several copies do not load them"),
        (options.get("speculative_algorithm"), _DRAFTS, "draft models do not know them"),
        (options.get("load_format") == "dummy", "--sglang-load-format dummy", "the engines need the base's weights"),
    ):
        if given:
            yield Problem(flag, f"{_RANK} sends the engines adapters, and {reason}: leave {flag} out, or add {_MERGE}.")
    if args.update_weights_in_flight:
        yield Problem(
            _RANK,
            f"{_RANK} replaces the adapter that requests in flight use: add --no-update-weights-in-flight or {_MERGE}.",
        )
    if args.num_experts is not None and (found := [name for name in adapters.targets if name in _IN_EXPERTS]):
        yield Problem(
            "--lora-target-modules",
            f"--lora-target-modules has {', '.join(found)}, and engines do not load adapters of experts: give"
            f" q_proj k_proj v_proj o_proj, or add {_MERGE}.",
        )


def lora_name_is_of_an_adapter(args: Arguments, context: Context) -> Iterator[Problem]:
    """The name is part of the names of adapters in the engines, which --lora-merge does not load."""
    if "lora_name" not in context.given or "lora_name" in context.broken or args.lora_rank is None:
        return
    if re.fullmatch(r"[A-Za-z0-9_-]+", args.lora_name) is None:
        yield Problem("--lora-name", f"--lora-name {args.lora_name!r} is not a name: use letters, digits, - and _.")
    if args.lora_merge:
        yield Problem(
            "--lora-name",
            f"--lora-name {args.lora_name} names an adapter in the engines, and {_MERGE} sends none: leave one of the"
            " two out.",
        )


_LORA_KERNELS = ("lora_backend", "max_lora_chunk_size", "lora_use_virtual_experts")


def engine_lora_options_follow_the_adapters(args: Arguments, context: Context) -> Iterator[Problem]:
    """LoRA options of the server are set by --lora-rank, except those of its kernels."""
    for name, value in args.sglang_options.items():
        if value and "lora" in name and not (args.engines_have_adapters and name in _LORA_KERNELS):
            flag = f"--sglang-{name.replace('_', '-')}"
            yield Problem(
                flag, f"{flag} is for LoRA adapters, which --lora-rank without --lora-merge sets up: leave it out."
            )


def _config(folder: str | None) -> dict[str, Any]:
    """config.json of a folder; empty if another rule reports it."""
    if folder is None:
        return {}
    try:
        found = json.loads((Path(folder) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return found if isinstance(found, dict) else {}


def _family(args: Arguments) -> ModelMapping | None:
    """The family of --hf-checkpoint; None if another rule reports it."""
    name = _config(args.hf_checkpoint).get("model_type")
    return next((family for family in FAMILIES if family.model_type == name), None)
