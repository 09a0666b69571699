"""Rules about vision-language models: multimodal rotary positions, layouts, and the columns of images and videos."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path

from slimrl.arguments.flag import Problem
from slimrl.arguments.layout import stage_layers
from slimrl.arguments.namespace import Arguments, Context
from slimrl.data.images import PLACEHOLDERS, VIDEO

_KEYS, _POSITIONS, _SECTION = "--multimodal-keys", "--position-embedding-type", "--mrope-section"
_PROCESSOR = "preprocessor_config.json"
_DECODER = "av"  # of videos


def multimodal_positions_are_complete(args: Arguments, context: Context) -> Iterator[Problem]:
    """--position-embedding-type mrope has a section for time, height and width, which fill the rotary channels."""
    section, mrope = args.mrope_section, args.position_embedding_type == "mrope"
    if section is not None and not mrope and "position_embedding_type" not in context.broken:
        yield Problem(_SECTION, f"{_SECTION} belongs to {_POSITIONS} mrope: add it, or leave {_SECTION} out.")
    if not mrope:
        return
    if section is None and "mrope_section" not in context.broken:
        yield Problem(_SECTION, f"{_POSITIONS} mrope needs {_SECTION}: give the mrope_section of config.json.")
    if section is not None and args.kv_channels is not None and 2 * sum(section) != args.kv_channels:
        yield Problem(
            _SECTION,
            f"{_SECTION} {' '.join(map(str, section))} has {sum(section)} pairs of channels and --kv-channels"
            f" {args.kv_channels} {args.kv_channels // 2}: give the mrope_section of config.json.",
        )
    elif section is not None and len(section) != 3:
        yield Problem(_SECTION, f"{_SECTION} has {len(section)} numbers: give those of time, height and width.")
    if args.vision_folder is None and not context.broken and args.hf_checkpoint is not None:
        yield Problem(
            _POSITIONS,
            f"{_POSITIONS} mrope is for models with a vision tower, and config.json of --hf-checkpoint"
            f" {args.hf_checkpoint} has no vision_config of a supported family: leave it out.",
        )


def vision_model_can_be_trained(args: Arguments, context: Context) -> Iterator[Problem]:
    """Flags that a vision-language model cannot combine with."""
    if args.vision_folder is None or args.debug_rollout_only:
        return
    for given, flag, reason in (
        (args.trains_reward_model, "--loss-type reward_model_loss", "has no value head for"),
        (args.true_on_policy_mode, "--true-on-policy-mode", "has no batch-invariant tower for"),
        (args.spec is not None, "--spec", "has its own layers instead of"),
        (args.custom_model_provider_path is not None, "--custom-model-provider-path", "is built without"),
    ):
        if given:
            yield Problem(
                flag.split(" ")[0],
                f"a vision-language model (--hf-checkpoint) {reason} {flag}: leave {flag} out, or give a text model.",
            )


def levels_are_on_the_first_stage(args: Arguments, context: Context) -> Iterator[Problem]:
    """Features that a tower adds to layers reach them: on its own stage, and in a pass that is not repeated."""
    levels = args.vision_levels
    if not levels or args.debug_rollout_only or context.broken:
        return
    if args.recompute_granularity == "full":
        yield Problem(
            "--recompute-granularity",
            f"--recompute-granularity full repeats layers without the features that the vision tower adds to the first"
            f" {levels} (--hf-checkpoint): give selective, or leave it out.",
        )
    first = len(stage_layers(args)[0])
    if args.virtual_pipeline_model_parallel_size is not None:
        first //= args.virtual_pipeline_model_parallel_size
    if first < levels:
        yield Problem(
            "--pipeline-model-parallel-size",
            f"--pipeline-model-parallel-size {args.pipeline_model_parallel_size} leaves {first} layers on the first"
            f" stage, and the vision tower (--hf-checkpoint) adds features to {levels}: use fewer stages, or give"
            f" --decoder-first-pipeline-num-layers {levels}.",
        )


def vision_model_can_be_served(args: Arguments, context: Context) -> Iterator[Problem]:
    """Only SGLang gets images, and the tower with a weight update."""
    if args.vision_folder is None or args.debug_train_only:
        return
    if args.uses_vllm:
        yield Problem(
            "--rollout-engine",
            "--rollout-engine vllm serves models of text, and --hf-checkpoint is a vision-language model: use sglang.",
        )
    if args.rollout_external_engine_addrs:
        yield Problem(
            "--rollout-external-engine-addrs",
            "--rollout-external-engine-addrs names servers that may keep the features of images over weight updates"
            " (--hf-checkpoint is a vision-language model): let slimrl start them.",
        )
    size = args.rollout_num_gpus_per_engine
    if args.check_weight_update_equal and size > 1:
        yield Problem(
            "--check-weight-update-equal",
            f"--check-weight-update-equal compares a vision tower (--hf-checkpoint) on engines of one GPU, and"
            f" --rollout-num-gpus-per-engine is {size}: leave it out, or give 1.",
        )
    if args.update_weight_transfer_mode == "p2p" and size > 1:
        yield Problem(
            "--update-weight-transfer-mode",
            f"--update-weight-transfer-mode p2p sends a vision tower (--hf-checkpoint) to engines of one GPU, and"
            f" --rollout-num-gpus-per-engine is {size}: leave it out, or give 1.",
        )
    if args.update_weight_mode == "delta":
        yield Problem(
            "--update-weight-mode",
            "--update-weight-mode delta does not load a vision tower (--hf-checkpoint): leave it out.",
        )


def images_have_a_model(args: Arguments, context: Context) -> Iterator[Problem]:
    """--multimodal-keys names columns of images and videos, for a vision-language model with its processor."""
    keys = args.multimodal_keys
    if keys is None or "multimodal_keys" in context.broken:
        return
    for kind, column in keys.items():
        if kind not in PLACEHOLDERS:
            yield Problem(_KEYS, f"{_KEYS} has {kind!r}, and images and videos are supported: leave it out.")
        elif not isinstance(column, str) or not column:
            yield Problem(_KEYS, f"{_KEYS} has {column!r} for {kind}: give the name of a column.")
    if VIDEO in keys and importlib.util.find_spec(_DECODER) is None:
        yield Problem(_KEYS, f"{_KEYS} has videos, and the package {_DECODER} is not installed: pip install av.")
    if not keys:
        yield Problem(_KEYS, f'{_KEYS} is empty: give the column of images, {{"image": "images"}}, or leave it out.')
    if args.hf_checkpoint is None:
        return
    if args.vision_folder is None:
        yield Problem(
            _KEYS,
            f"{_KEYS} needs a vision-language model, and config.json of --hf-checkpoint {args.hf_checkpoint} has no"
            " vision_config of a supported family: give such a model.",
        )
    elif not (Path(args.hf_checkpoint) / _PROCESSOR).is_file():
        yield Problem(
            _KEYS,
            f"{_KEYS} needs an image processor, and --hf-checkpoint {args.hf_checkpoint} has no {_PROCESSOR}: copy it"
            " there from the model.",
        )


def images_fit_the_run(args: Arguments, context: Context) -> Iterator[Problem]:
    """Nothing between the data and the loss loses the images or the videos."""
    if not args.multimodal_keys:
        return
    if not args.apply_chat_template and not args.reads_conversations and not args.reads_pairs:
        yield Problem(_KEYS, f"{_KEYS} puts images where the chat template has them: add --apply-chat-template.")
    own_function = args.has_custom_rollout_function and not args.reads_pairs and not args.reads_conversations
    for given, flag, reason in (
        (own_function, "--rollout-function-path", "passes the engine no images"),
        (
            args.custom_convert_samples_to_train_data_path is not None,
            "--custom-convert-samples-to-train-data-path",
            "makes rows without images",
        ),
        (args.rollout_truncate_prompt is not None, "--rollout-truncate-prompt", "may cut an image"),
        (args.has_served_teacher, "--opd-type sglang", "scores text"),
        (args.rm_model is not None, "--rm-model", "scores text"),
        (args.rm_url is not None, "--rm-url", "scores text"),
    ):
        if given:
            yield Problem(_KEYS, f"{flag} {reason}: leave it or {_KEYS} out.")
