"""Values that follow from other flags, the dtype of the model's weights, and the installed kernel libraries.

`derive` is arithmetic on flags; validation rules check files and contradictions. It fills unset values, overrides a few
values that other flags determine, and never fails. If a value that it needs is missing or wrong, the field is unchanged
and a rule reports the cause. `take_precision_of_model` takes bf16 or fp16 from config.json if no flag sets it,
`take_vision_of_model` the sizes of a vision tower.
Kernel libraries are looked up without importing them. `slimrl.megatron` and the rules decide on these booleans.
"""

from __future__ import annotations

import importlib.metadata
import importlib.util
import json
import os
import time
from pathlib import Path
from typing import Any

from slimrl.algorithms.estimators import ESTIMATORS
from slimrl.algorithms.preference_losses import PREFERENCE_LOSSES
from slimrl.arguments.checkpoints import CRITIC
from slimrl.arguments.hf_config import ARCHITECTURES
from slimrl.arguments.namespace import Arguments
from slimrl.hooks import own_path
from slimrl.models.families import family_for
from slimrl.models.families.vision import TOWER_CONFIG, decoder_config, kept_elements, tower_weights
from slimrl.models.model_spec import expand_layer_pattern


def derive(args: Arguments) -> None:
    """Fill in every derived field of `args`, in place; `eval_datasets` resolves evaluation sets."""
    _model(args)
    _experts(args)
    _layout(args)
    _batch(args)
    _offload(args)
    _lengths(args)
    # seeds per sample, and log-probabilities from one function at every temperature
    if args.true_on_policy_mode and not args.uses_vllm:
        args.sglang_options.setdefault("enable_deterministic_inference", True)
    args.rollout_function_path = own_path(args.rollout_function_path)
    if isinstance(args.prompt_data, list) and len(args.prompt_data) == 1:
        args.prompt_data = args.prompt_data[0]  # a plain string, as functions written for slime expect
    _names(args)
    _notes(args)


def _model(args: Arguments) -> None:
    if args.num_attention_heads:
        if args.kv_channels is None and args.hidden_size is not None:
            args.kv_channels = args.hidden_size // args.num_attention_heads
        if args.num_query_groups is None and not args.group_query_attention:
            args.num_query_groups = args.num_attention_heads
    if args.ffn_hidden_size is None and args.hidden_size is not None:
        # Megatron-LM's rule: a gated block has 2/3 of the width, in multiples of 64, for about the same parameter count
        args.ffn_hidden_size = 4 * args.hidden_size * 2 // 3 // 64 * 64 if args.swiglu else 4 * args.hidden_size
    if args.max_position_embeddings is None:
        args.max_position_embeddings = args.seq_length
    # adapters and batch-invariant operators are those of megatron-core's local layers, also where Transformer Engine is
    if args.transformer_impl is None and (args.has_adapters or args.true_on_policy_mode):
        args.transformer_impl = "local"
    if args.padded_vocab_size is None and args.vocab_size is not None:
        unit = args.make_vocab_size_divisible_by * args.tensor_model_parallel_size
        if unit > 0:
            args.padded_vocab_size = -(-args.vocab_size // unit) * unit


def _layout(args: Arguments) -> None:
    if args.sequence_parallel and args.tensor_model_parallel_size == 1:
        args.sequence_parallel = False
        args.notes.append("--sequence-parallel is off: it needs --tensor-model-parallel-size above 1.")
    if args.expert_tensor_parallel_size is None:
        args.expert_tensor_parallel_size = args.tensor_model_parallel_size
    model_gpus = args.tensor_model_parallel_size * args.pipeline_model_parallel_size * args.context_parallel_size
    if model_gpus > 0:
        args.data_parallel_size = max(args.actor_num_gpus // model_gpus, 1)
    if args.critic_num_nodes is not None or args.critic_num_gpus_per_node is not None:
        args.critic_num_nodes = args.critic_num_nodes or args.actor_num_nodes
        args.critic_num_gpus_per_node = args.critic_num_gpus_per_node or args.actor_num_gpus_per_node
    _colocated_gpus(args)
    if args.rollout_external_engine_addrs and args.rollout_num_gpus is None:  # for metrics per GPU
        args.rollout_num_gpus = len(args.rollout_external_engine_addrs) * args.rollout_num_gpus_per_engine
    _pipeline(args)


def _colocated_gpus(args: Arguments) -> None:
    """With --colocate the engines use the training GPUs; --rollout-num-gpus is ignored."""
    given, shared = args.rollout_num_gpus, args.training_num_gpus
    if not args.colocate or given == shared or (given is not None and args.debug_rollout_only):
        return
    if given is not None:
        args.notes.append(
            f"--rollout-num-gpus {given} is ignored: with --colocate the engines use the {shared} training GPUs."
        )
    args.rollout_num_gpus = shared


def _offload(args: Arguments) -> None:
    """--colocate offloads each side unless a flag disables that or the run does not start that side."""
    no_trainer = "--debug-rollout-only: no trainer is started"
    sides = {
        "offload_train": (args.debug_rollout_only, no_trainer),
        "offload_rollout": (
            args.debug_train_only or args.debug_rollout_only,
            no_trainer if args.debug_rollout_only else "--debug-train-only: no engine is started",
        ),
    }
    alternates = args.colocate and not args.debug_rollout_only and not args.debug_train_only
    for name, (absent, why) in sides.items():
        wanted = vars(args)[name]
        if absent and (wanted or args.offload):
            args.notes.append(f"--{name.replace('_', '-')} is off with {why}.")
        default = args.offload or alternates
        setattr(args, name, (default if wanted is None else wanted) and not absent)


def _pipeline(args: Arguments) -> None:
    stages, layers = args.pipeline_model_parallel_size, args.num_layers_per_virtual_pipeline_stage
    virtual = args.num_virtual_stages_per_pipeline_rank
    if virtual is None and layers and stages > 0 and args.num_layers is not None:
        counted = args.account_for_embedding_in_pipeline_split + args.account_for_loss_in_pipeline_split
        virtual = (args.num_layers + counted) // stages // layers
    args.virtual_pipeline_model_parallel_size = virtual if virtual and virtual > 1 else None
    if args.virtual_pipeline_model_parallel_size is not None and args.microbatch_group_size_per_vp_stage is None:
        args.microbatch_group_size_per_vp_stage = stages if stages > 1 else None


def _experts(args: Arguments) -> None:
    if args.num_experts is None or args.num_layers is None:
        return
    if isinstance(args.moe_layer_freq, int):
        args.moe_layer_freq = [int(moe) for moe in expand_layer_pattern(max(args.moe_layer_freq, 1), args.num_layers)]
    if args.moe_ffn_hidden_size is None:
        args.moe_ffn_hidden_size = args.ffn_hidden_size
    if args.moe_enable_deepep:
        args.moe_token_dispatcher_type = "flex"
    if args.moe_token_dispatcher_type == "allgather":
        args.moe_token_dispatcher_type = "alltoall"
        args.notes.append(
            "--moe-token-dispatcher-type allgather is replaced by alltoall: it does not support packed sequences."
        )


def _batch(args: Arguments) -> None:
    if args.rollout_batch_size is None and args.eval_only:
        args.rollout_batch_size = args.data_parallel_size * args.micro_batch_size  # nothing is trained on it
    if args.rollout_batch_size is not None:
        samples = args.prompts_trained_per_rollout * args.n_samples_per_prompt
        if args.global_batch_size is None:
            args.num_steps_per_rollout = args.num_steps_per_rollout or 1
            args.global_batch_size = samples // args.num_steps_per_rollout
        elif args.num_steps_per_rollout is None and args.global_batch_size > 0:
            args.num_steps_per_rollout = samples // args.global_batch_size
        if args.over_sampling_batch_size is None:
            args.over_sampling_batch_size = args.rollout_batch_size
    if args.eps_clip_high is None:
        args.eps_clip_high = args.eps_clip
    if args.load_debug_rollout_data is not None:
        args.debug_train_only = True
    if args.update_weights_in_flight is None:
        args.update_weights_in_flight = args.max_weight_staleness is not None
    if args.is_supervised:
        args.compute_advantages_and_returns = False
    if args.preference_beta is None and args.preference_loss in PREFERENCE_LOSSES:
        args.preference_beta = PREFERENCE_LOSSES[args.preference_loss].beta
    estimator = ESTIMATORS.get(args.advantage_estimator)  # None for one that the rules reject
    if estimator is not None and estimator.whitens and args.compute_advantages_and_returns:
        args.normalize_advantages = True
    if args.loss_type == "custom_loss":
        args.keep_logits = True  # the custom function gets them
    _critic(args)


def _critic(args: Arguments) -> None:
    """The critic's schedule and folder, by default the policy's."""
    if args.critic_lr is None:
        args.critic_lr = args.lr
    if args.critic_save is None and args.save is not None and args.use_critic:
        args.critic_save = str(Path(args.save) / CRITIC)


def _lengths(args: Arguments) -> None:
    samples_responses = not args.reads_pairs and not args.reads_conversations
    if args.rollout_max_prompt_len is None and args.rollout_max_context_len is not None and samples_responses:
        args.rollout_max_prompt_len = args.rollout_max_context_len - 1


def _names(args: Arguments) -> None:
    if args.dump_details is not None:
        if args.save_debug_rollout_data is None:
            args.save_debug_rollout_data = f"{args.dump_details}/rollout_data/{{rollout_id}}.jsonl"
        if args.save_debug_train_data is None:
            args.save_debug_train_data = f"{args.dump_details}/train_data/{{rollout_id}}.pt"
    if args.run_name is None:
        args.run_name = f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"
    args.run_dir = str(Path(args.runs_dir) / args.run_name)
    if args.save_debug_rollout_data is not None:
        args.save_debug_rollout_data = args.save_debug_rollout_data.replace("{run_dir}", args.run_dir)
    if args.use_tensorboard:
        levels = [level for level in (args.tb_project_name, args.tb_experiment_name) if level is not None]
        own_folder = "tensorboard_log" if levels else str(Path(args.run_dir) / "tensorboard")
        args.tensorboard_dir = str(Path(args.tensorboard_dir or own_folder, *levels))


def _notes(args: Arguments) -> None:
    tp, per_node = args.tensor_model_parallel_size, args.actor_num_gpus_per_node
    if tp > per_node:
        args.notes.append(
            f"--tensor-model-parallel-size {tp} shards each layer over nodes of {per_node} training GPUs: every layer"
            " waits for the network between nodes."
        )
    if args.num_rollout is not None and args.num_epoch is not None:
        args.notes.append(
            f"--num-epoch {args.num_epoch} is ignored: --num-rollout {args.num_rollout} takes precedence."
        )
    if args.eval_interval is None and (args.eval_prompt_data is not None or args.eval_config is not None):
        args.notes.append("no evaluation will run: evaluation sets are given without --eval-interval.")
    _sampling_notes(args)
    _classifier_note(args)


def _classifier_note(args: Arguments) -> None:
    """Where no server can score with the reward model that is trained."""
    if not args.trains_reward_model or args.hf_checkpoint is None:
        return
    try:
        config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text(encoding="utf-8"))
        (name,) = config["architectures"]
    except (OSError, ValueError, KeyError, TypeError):  # a rule reports it
        return
    exported = f"{name.removesuffix('ForCausalLM')}ForSequenceClassification"
    if exported not in ARCHITECTURES and name not in ARCHITECTURES:
        args.notes.append(
            f"this reward model is exported as a {exported}, which --rm-model does not serve"
            f" ({', '.join(ARCHITECTURES)}): --critic-load takes it, and a --custom-rm-path can score with it."
        )


def _sampling_notes(args: Arguments) -> None:
    batch, wave = args.rollout_batch_size, args.over_sampling_batch_size
    if batch is None or args.dynamic_sampling_filter_path is not None or args.has_custom_rollout_function:
        return
    if args.partial_rollout and wave == batch:
        args.notes.append(
            "--partial-rollout has no effect: only --rollout-batch-size prompts are submitted; give a larger"
            " --over-sampling-batch-size or a --dynamic-sampling-filter-path."
        )
    if wave > batch and not args.partial_rollout:
        args.notes.append(
            f"--over-sampling-batch-size {wave} is ignored: without --dynamic-sampling-filter-path or --partial-rollout"
            f" exactly --rollout-batch-size {batch} prompts are submitted."
        )


def take_distributed_optimizer(args: Arguments, given: frozenset[str]) -> None:
    """Only Adam has a distributed optimizer; a rule rejects the flag with another."""
    if args.optimizer != "adam" and "use_distributed_optimizer" not in given:
        args.use_distributed_optimizer = False


_FORMATS = {"bfloat16": "bf16", "float16": "fp16"}


def take_precision_of_model(args: Arguments, given: frozenset[str]) -> None:
    """Set `bf16` or `fp16` from config.json of --hf-checkpoint, unless a flag sets it; adds a sentence to `notes`.

    Without a dtype there, weights are fp32, or bf16 with --optimizer-cpu-offload, which needs 16-bit weights. If the
    file is missing or broken, weights are fp32 and a rule reports it.
    """
    if args.hf_checkpoint is None or {"bf16", "fp16"} & given:
        return
    stated = _stated(Path(args.hf_checkpoint) / "config.json")
    name = _FORMATS.get(stated or "")
    if stated == "" and args.optimizer_cpu_offload:
        args.bf16 = True
        args.notes.append(
            "training in bf16: config.json of --hf-checkpoint has no dtype, and --optimizer-cpu-offload needs 16-bit"
            " weights."
        )
    elif name is not None:
        setattr(args, name, True)
        args.notes.append(f"training in {name}, the dtype in config.json of --hf-checkpoint; for fp32 give --no-bf16.")


def take_vision_of_model(args: Arguments) -> None:
    """Sets the vision tower from config.json of --hf-checkpoint; nothing if the file is missing or broken."""
    config = None if args.hf_checkpoint is None else _config(Path(args.hf_checkpoint) / "config.json")
    if config is not None and isinstance(config.get(TOWER_CONFIG), dict):
        try:
            family = family_for(config)
        except ValueError:
            return  # another rule reports the family
        if family.tower is not None:
            args.vision_weights = tower_weights(family.tower_rows)
            args.vision_activations = kept_elements(family.tower, config)
            args.vision_folder = args.hf_checkpoint
            args.vision_levels = len(config[TOWER_CONFIG].get("deepstack_visual_indexes", ()))


def _config(path: Path) -> dict[str, Any] | None:
    """The entries of a config.json; None without a readable file."""
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return config if isinstance(config, dict) else None


def _stated(path: Path) -> str | None:
    """The dtype name in config.json, "" if it has none; None without a readable file."""
    config = _config(path)
    if config is None:
        return None
    entries = decoder_config(config)
    return str(entries.get("dtype") or entries.get("torch_dtype") or "")


def transformer_engine_installed() -> bool:
    """True if Transformer Engine and its torch binding, a separate package, are both installed.

    megatron-core treats one without the other as absent.
    """
    return all(
        importlib.util.find_spec(name) is not None for name in ("transformer_engine", "transformer_engine_torch")
    )


def flash_attention_installed(*, latent: bool) -> bool:
    """True if a FlashAttention is installed that Transformer Engine uses; for `latent` attention only the third.

    Version 2 needs queries and values of one width. flash-attn-4, which SGLang installs, is not one of them.
    """
    return any(map(_is_installed, FLASH_ATTENTION[latent]))


# distributions by whose name Transformer Engine 2.11 looks for it
FLASH_ATTENTION = {False: ("flash-attn", "flash-attn-3"), True: ("flash-attn-3",)}


def _is_installed(distribution: str) -> bool:
    try:
        importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return False
    return True


def apex_optimizers_installed() -> bool:
    """True if Apex's optimizers are installed."""
    return importlib.util.find_spec("apex") is not None


def apex_installed() -> bool:
    """True if Apex's kernel that accumulates weight gradients inside the matrix product is installed."""
    return importlib.util.find_spec("fused_weight_gradient_mlp_cuda") is not None
