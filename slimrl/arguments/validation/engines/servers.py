"""Rules about engines: their GPUs and nodes, how SGLang divides the model, health checks, external servers and routers.

An engine's GPUs are tensor parallel size x --sglang-pp-size; data-parallel attention and expert parallelism divide
the tensor parallel ranks again. The rules follow SGLang 0.5.20.
"""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterator

from slimrl.arguments.flag import Problem
from slimrl.arguments.flags.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.arguments.hf_config import context_flag, context_of_model, served_models, tokens
from slimrl.arguments.namespace import Arguments, Context

_LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"  # read by SGLang
SIZES = {"--sglang-pp-size": "pp_size", "--sglang-dp-size": "dp_size", "--sglang-ep-size": "ep_size"}
_PER_ENGINE = "--rollout-num-gpus-per-engine"


def _has_engines(args: Arguments, context: Context) -> bool:
    known = {"rollout_num_gpus", "rollout_num_gpus_per_engine", "num_gpus_per_node"}
    alike = not args.server_models  # else the rules are applied to each group
    return alike and args.rollout_num_gpus is not None and not args.debug_train_only and not known & context.broken


def _size(args: Arguments, name: str) -> int:
    size: int = max(args.sglang_options.get(name, 1), 1)
    return size


def _tensor_parallel(args: Arguments) -> tuple[int, str] | None:
    """The engines' tensor parallel size and its derivation as text; None if the GPUs do not divide."""
    gpus, stages = args.rollout_num_gpus_per_engine, _size(args, "pp_size")
    if gpus % stages:
        return None
    words = f"{_PER_ENGINE} {gpus}"
    return gpus // stages, words if stages == 1 else f"{words} / --sglang-pp-size {stages} = {gpus // stages}"


def engines_fill_their_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """Rollout GPUs = engines x GPUs per engine."""
    gpus, per_engine = args.rollout_num_gpus, args.rollout_num_gpus_per_engine
    if not _has_engines(args, context) or gpus % per_engine == 0:
        return
    shared = args.colocate and not args.debug_rollout_only
    cause = " (the training GPUs, by --colocate)" if shared or "rollout_num_gpus" not in context.given else ""
    yield Problem(
        _PER_ENGINE,
        f"--rollout-num-gpus {gpus}{cause} does not divide by {_PER_ENGINE} {per_engine}: choose a divisor.",
    )


def engine_sizes_are_counts(args: Arguments, context: Context) -> Iterator[Problem]:
    """The parallel sizes of an engine are at least 1."""
    for flag, name in SIZES.items():
        if (size := args.sglang_options.get(name, 1)) < 1:
            yield Problem(flag, f"{flag} {size} is below 1: give at least 1, or leave it out.")


def reward_model_shares_gpus(args: Arguments, context: Context) -> Iterator[Problem]:
    """--rm-colocate needs shared GPUs whose memory is released in turn, and servers that fit on them."""
    if not args.rm_colocate:
        return
    has_folder = args.rm_model is not None or args.opd_teacher_models is not None
    for flag, value, fix in (
        ("--colocate", args.colocate, "add it"),
        ("--offload-rollout", args.offload_rollout, "leave --no-offload-rollout out"),
        ("--rm-model", has_folder and args.rm_url is None, "give it, without --rm-url"),
    ):
        if not value:
            yield Problem("--rm-colocate", f"--rm-colocate needs {flag}: {fix}, or leave --rm-colocate out.")
    gpus = sum(model.gpus for model in served_models(args)) or args.rm_num_gpus
    if args.colocate and gpus > args.training_num_gpus:
        flag = "--opd-teacher-num-gpus" if args.opd_teacher_models else "--rm-num-gpus"
        yield Problem(
            flag,
            f"{flag} {gpus} is more than the {args.training_num_gpus} GPUs that --rm-colocate shares: lower it.",
        )


def engines_fill_whole_nodes(args: Arguments, context: Context) -> Iterator[Problem]:
    """An engine that is larger than a node has all GPUs of its nodes."""
    per_engine, per_node = args.rollout_num_gpus_per_engine, args.num_gpus_per_node
    if not _has_engines(args, context) or per_engine <= per_node:
        return
    if per_engine % per_node:
        yield Problem(
            _PER_ENGINE,
            f"{_PER_ENGINE} {per_engine} is more than a node has and not a multiple of --num-gpus-per-node"
            f" {per_node}: an"
            " engine over several nodes fills them; choose a multiple, or correct --num-gpus-per-node.",
        )
    first = 0 if args.colocate or args.debug_rollout_only else args.training_num_gpus
    if first % per_node and "actor_num_gpus_per_node" not in context.broken:
        yield Problem(
            _PER_ENGINE,
            f"{_PER_ENGINE} {per_engine} takes whole nodes of --num-gpus-per-node {per_node}, and the {first} training"
            f" GPUs before the engines leave {per_node - first % per_node} GPUs of a node free: let training fill its"
            " nodes, or choose smaller engines.",
        )


def engine_stages_divide(args: Arguments, context: Context) -> Iterator[Problem]:
    """Pipeline stages divide an engine's GPUs evenly, and fit its nodes."""
    gpus, per_node, stages = args.rollout_num_gpus_per_engine, args.num_gpus_per_node, _size(args, "pp_size")
    if not _has_engines(args, context) or stages == 1:
        return
    nodes = max(gpus // per_node, 1)
    if gpus % stages:
        yield Problem(
            "--sglang-pp-size",
            f"{_PER_ENGINE} {gpus} does not divide by --sglang-pp-size {stages}: choose a divisor.",
        )
    elif nodes % stages and stages % nodes:
        yield Problem(
            "--sglang-pp-size",
            f"--sglang-pp-size {stages} does not fit the {nodes} nodes of an engine ({_PER_ENGINE} {gpus} /"
            f" --num-gpus-per-node {per_node}): choose a divisor or a multiple of {nodes}.",
        )


def engine_stages_can_be_updated(args: Arguments, context: Context) -> Iterator[Problem]:
    """Engines with pipeline stages receive weights through shared memory only.

    SGLang gives the ranks of all stages the same positions in a broadcast, and acknowledges an update once the first
    stage has read it. So the weights must stay in memory until the last stage has read them.
    """
    stages = _size(args, "pp_size")
    if not _has_engines(args, context) or stages == 1 or args.debug_rollout_only:
        return
    if not args.colocate or args.update_weight_transport != "nccl":
        transport = args.update_weight_transport
        way = "a broadcast" if transport == "nccl" else f"--update-weight-transport {transport}"
        yield Problem(
            "--sglang-pp-size",
            f"--sglang-pp-size {stages} does not support weight updates by {way}: SGLang's pipeline stages take weights"
            " only from trainers on their own GPUs; give --colocate without --update-weight-transport disk, or use"
            " tensor and expert parallelism only.",
        )


def engine_layout_can_be_checked(args: Arguments, context: Context) -> Iterator[Problem]:
    """--check-weight-update-equal supports only tensor parallel engines."""
    if not _has_engines(args, context) or not args.check_weight_update_equal:
        return
    for flag, name in SIZES.items():
        if (size := _size(args, name)) > 1:
            yield Problem(
                "--check-weight-update-equal",
                f"--check-weight-update-equal supports only tensor parallel engines, and {flag} is {size}: leave one of"
                " them out.",
            )


def engine_attention_copies_divide(args: Arguments, context: Context) -> Iterator[Problem]:
    """DP attention divides an engine's tensor parallel ranks."""
    copies = _size(args, "dp_size")
    if not _has_engines(args, context) or copies == 1:
        return
    if not args.sglang_options.get("enable_dp_attention"):
        yield Problem(
            "--sglang-dp-size",
            f"--sglang-dp-size {copies} needs --sglang-enable-dp-attention: add it; for more full copies of the model"
            f" lower {_PER_ENGINE}.",
        )
    yield from _divides_tensor_parallel(args, "--sglang-dp-size", copies)


def engine_experts_divide(args: Arguments, context: Context) -> Iterator[Problem]:
    """Experts are divided over an engine's tensor parallel ranks."""
    size = _size(args, "ep_size")
    if _has_engines(args, context) and size > 1:
        yield from _divides_tensor_parallel(args, "--sglang-ep-size", size)


def _divides_tensor_parallel(args: Arguments, flag: str, size: int) -> Iterator[Problem]:
    tensor_parallel = _tensor_parallel(args)
    if tensor_parallel is not None and tensor_parallel[0] % size:
        yield Problem(
            flag,
            f"{flag} {size} does not divide the tensor parallel size of an engine ({tensor_parallel[1]}): choose a"
            " divisor.",
        )


# server options that quantise the weights
_QUANTISES = ("quantization", "modelopt_quant", "quantize_and_serve", "rl_quant_profile")


def engine_weights_are_those_of_training(args: Arguments, context: Context) -> Iterator[Problem]:
    """Weight updates send bf16 tensors under the checkpoint's names, which a quantised server does not have."""
    if not context.is_training or args.debug_train_only or args.debug_rollout_only:
        return
    for name in _QUANTISES:
        if value := args.engine_options.get(name):
            flag = f"--{args.rollout_engine}-{name.replace('_', '-')}"
            shown = flag if value is True else f"{flag} {value}"
            yield Problem(
                flag,
                f"{shown} quantises the engines' weights, and weight updates send unquantised tensors: leave it out.",
            )


def engine_collectives_agree(args: Arguments, context: Context) -> Iterator[Problem]:
    """Trainers and engines have the same NCCL_CUMEM_ENABLE; with symmetric memory SGLang sets 1."""
    chosen = args.train_env_vars.get("NCCL_CUMEM_ENABLE", "1")
    if args.broadcasts_weights and args.sglang_options.get("enable_symm_mem") and chosen != "1":
        yield Problem(
            "--train-env-vars",
            f"--train-env-vars has NCCL_CUMEM_ENABLE {chosen}, and --sglang-enable-symm-mem makes the engines set 1:"
            " the process group for weight updates needs the same value on both sides; leave one of them out.",
        )


def engine_context_holds_a_sample(args: Arguments, context: Context) -> Iterator[Problem]:
    """The longest sample fits into the engine's context; longer requests would be rejected."""
    flag, given = context_flag(args)
    if not _has_engines(args, context) or args.sglang_options.get("allow_auto_truncate"):
        return
    if args.rollout_external_engine_addrs:
        return  # slimrl does not know their context
    of_model = context_of_model(args)
    if given is not None and of_model is not None and tokens(given) > of_model and _LONGER not in os.environ:
        yield Problem(
            flag,
            f"{flag} {given} is more than the {of_model} tokens in config.json of --hf-checkpoint, and"
            f" the engines would not start: lower it, or set {_LONGER}=1 if the model supports a longer context.",
        )
        return
    limit = _Context(flag, given, tokens(given)) if given is not None else _Context(flag, None, of_model)
    own = args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION or args.custom_generate_function_path is not None
    if limit.tokens is None or own or "rollout_max_response_len" in context.broken:
        return
    lengths: _Lengths = (args.rollout_max_prompt_len, args.rollout_max_response_len, args.rollout_max_context_len)
    if not args.eval_only:
        yield from _fits_context(limit, "--rollout-max", *lengths)
    for dataset in args.eval_datasets:
        if args.eval_interval is not None and dataset.custom_generate_function_path is None:
            lengths = (dataset.max_prompt_len, dataset.max_response_len, dataset.max_context_len)
            yield from _fits_context(limit, f"evaluation set {dataset.name}: max", *lengths)


_Lengths = tuple[int | None, int | None, int | None]  # of a prompt, a response and both together


@dataclasses.dataclass(frozen=True)
class _Context:
    """The context of an engine in tokens; `given` is the value of `flag`, None if the model's context applies."""

    flag: str
    given: int | str | None
    tokens: int | None


def _fits_context(
    context: _Context, name: str, prompt: int | None, response: int | None, limit: int | None
) -> Iterator[Problem]:
    """`prompt`, `response` and `limit` (both together) in tokens; a prompt of unknown length counts as one token."""
    if response is None:
        return
    need = (1 if prompt is None else prompt) + response
    words = f"{name}-prompt-len {prompt}" if prompt is not None else "at least one token of prompt"
    words += f" + {name}-response-len {response} = {need}"
    if limit is not None and limit < need:
        need, words = limit, f"{name}-context-len {limit}"
    if context.tokens is None or context.tokens >= need:
        return
    if context.given is not None:
        yield Problem(
            context.flag,
            f"{context.flag} {context.given} is less than the longest sample, {words}: give at least {need}.",
        )
    else:
        yield Problem(
            "--rollout-max-response-len",
            f"the model of --hf-checkpoint has a context of {context.tokens} tokens (config.json), less than the"
            f" longest sample, {words}: lower these lengths, or give a model with a longer context.",
        )


_HEALTH = ("rollout_health_check_interval", "rollout_health_check_first_wait")
_TIMEOUT = "rollout_health_check_timeout"  # also applies to external servers and routers, which are always probed
_EXTERNAL = "--rollout-external-engine-addrs"


def limits_belong_to_their_features(args: Arguments, context: Context) -> Iterator[Problem]:
    """Limits need the feature that they limit: health probes, or skipping of failed samples."""
    watched = bool(args.rollout_external_engine_addrs) or args.sglang_router_ip is not None
    for names, switch, on in (
        (_HEALTH, "--use-fault-tolerance", args.use_fault_tolerance),
        ((_TIMEOUT,), "--use-fault-tolerance", args.use_fault_tolerance or watched),
        (("max_failed_samples",), "--skip-failed-samples", args.skip_failed_samples),
    ):
        for name in names:
            if name in context.given and not on:
                flag = "--" + name.replace("_", "-")
                value = vars(args)[name]
                yield Problem(flag, f"{flag} {value:g} belongs to {switch}: add it, or leave {flag} out.")


def router_has_an_address(args: Arguments, context: Context) -> Iterator[Problem]:
    """An external router has host and port, and takes no --router-* options."""
    if args.sglang_router_ip is None:
        return
    if args.sglang_router_port is None:
        yield Problem(
            "--sglang-router-port",
            f"--sglang-router-ip {args.sglang_router_ip} needs the port of that router: give --sglang-router-port.",
        )
    if args.router_options:
        given = ", ".join(f"--router-{name.replace('_', '-')}" for name in sorted(args.router_options))
        yield Problem(
            "--sglang-router-ip",
            f"{given} is for a router that slimrl starts, and --sglang-router-ip {args.sglang_router_ip} is an external"
            " one: start that router with the option, or leave --sglang-router-ip out.",
        )


def external_engines_exclude_local_engine_flags(args: Arguments, context: Context) -> Iterator[Problem]:
    """External servers have valid addresses, no GPUs of this run and no --sglang-* options except the key."""
    addresses = args.rollout_external_engine_addrs
    if not addresses:
        return
    for address in addresses:
        host, _, port = address.rpartition(":")
        if not host or not port.isdigit() or "/" in host:
            yield Problem(
                _EXTERNAL, f"{_EXTERNAL} {address} is not an address: give host:port, such as 10.0.0.1:30000."
            )
    if len(set(addresses)) < len(addresses):
        yield Problem(_EXTERNAL, f"{_EXTERNAL} names a server twice: give each once.")
    given = {
        "--colocate": args.colocate,
        "--offload-rollout": bool(args.offload_rollout) and not args.colocate,
        "--debug-train-only": args.debug_train_only,
        "--rollout-num-gpus": "rollout_num_gpus" in context.given,
    }
    for flag, clashes in given.items():
        if clashes:
            yield Problem(
                flag,
                f"{flag} is for servers that slimrl starts, and {_EXTERNAL} names external ones: leave one of the two"
                " out.",
            )
    if options := args.sglang_options.keys() - {"api_key"}:  # the key of the external servers
        names = ", ".join(f"--sglang-{name.replace('_', '-')}" for name in sorted(options))
        yield Problem(
            _EXTERNAL,
            f"{names} is for servers that slimrl starts, and {_EXTERNAL} names external ones: start those with the"
            " option, and leave it out here.",
        )
