"""Evaluation sets from --eval-config or --eval-prompt-data, and the row format of training and evaluation data.

A value that a set leaves out comes from the file's `defaults`, then from the --eval-* flag, then from the flag of
training (--rollout-temperature, --input-key). Every resolved `EvalDataset` is complete: no reader looks up a default.
--eval-config is YAML or JSON with `datasets` and `defaults`, at the top level or under `eval`. Each key must be a field
of `EvalDataset` with a value of its type and range; anything else is a problem that names it.
"""

from __future__ import annotations

import dataclasses
import difflib
import typing
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from slimrl.arguments.flag import Bounds, Problem, ended
from slimrl.arguments.flags.rollout import DEFAULT_ROLLOUT_FUNCTION
from slimrl.arguments.hf_config import least
from slimrl.arguments.namespace import Arguments, DerivedVision, EvalDataset, PromptArguments
from slimrl.arguments.parser import read_yaml
from slimrl.data.images import IMAGE, VIDEO, ImageColumn
from slimrl.data.preference_pairs import AnswerColumns, PairColumns
from slimrl.data.prompt_format import PromptFormat, TeacherChoice

_FIELDS = {field.name: typing.get_type_hints(EvalDataset)[field.name] for field in dataclasses.fields(EvalDataset)}
_BOUNDS = {
    "n_samples_per_eval_prompt": Bounds(at_least=1),
    "temperature": Bounds(at_least=0),
    "top_p": Bounds(above=0, at_most=1),
    "top_k": Bounds(at_least=-1, other_than=0),
    "max_response_len": Bounds(at_least=1),
    "max_prompt_len": Bounds(at_least=1),
    "max_context_len": Bounds(at_least=2),
    "min_new_tokens": Bounds(at_least=0),
    "repetition_penalty": Bounds(above=0, at_most=2),
}
# keys that slime knows, with what to do instead
_NOT_SERVED = {
    "min_eval_samples": "every row is asked n_samples_per_eval_prompt times; give that",
    "reward_model": "a set is scored by rm_type or custom_rm_path; give one of them",
    "message_processor": "messages go through the chat template unchanged; prepare them in the file",
    **dict.fromkeys(
        ("app_service", "remote_environment", "eval_task_timeout"), "slimrl does not read it; leave it out"
    ),
}


def read_eval_config(config_path: str, problems: list[Problem]) -> list[dict[str, Any]]:
    """The sets of the file, each over the file's defaults; a bad set is left out and becomes a problem."""
    complaints: list[str] = []
    try:
        entries = _entries(read_yaml(Path(config_path)), complaints)
    except (OSError, ValueError) as error:
        complaints, entries = [str(error)], []
    problems += [
        Problem("--eval-config", ended(f"--eval-config {config_path}: {complaint}")) for complaint in complaints
    ]
    return entries


def _entries(root: Any, complaints: list[str]) -> list[dict[str, Any]]:
    root = root.get("eval", root) if isinstance(root, dict) else root
    if not isinstance(root, dict):
        raise ValueError("the file must hold a mapping with datasets (and defaults)")
    for key in sorted(set(root) - {"defaults", "datasets"}, key=str):
        complaints.append(
            f"{key!r} is not a known key (known: datasets, defaults): remove it, or move it under defaults"
        )
    datasets, defaults = root.get("datasets"), root.get("defaults") or {}
    if isinstance(datasets, dict):
        datasets = [{"name": name, **entry} if isinstance(entry, dict) else entry for name, entry in datasets.items()]
    if not isinstance(datasets, list) or not datasets:
        raise ValueError("datasets must list at least one set with name and path")
    if not isinstance(defaults, dict):
        raise ValueError("defaults must be a mapping of values for every set")
    complaints += _complaints(defaults, "defaults")
    entries = []
    for number, entry in enumerate(datasets, start=1):
        if not isinstance(entry, dict) or not {"name", "path"} <= set(entry):
            complaints.append(f"set {number} must be a mapping with at least name and path")
        elif found := _complaints(entry, f"set {number} ({entry['name']})"):
            complaints += found
        else:
            entries.append({**{key: value for key, value in defaults.items() if key in _FIELDS}, **entry})
    return entries


def _complaints(values: Mapping[str, Any], where: str) -> list[str]:
    """The problems of a set's keys and values."""
    complaints = []
    for key, value in values.items():
        if key in _NOT_SERVED:
            complaints.append(f"{where} has {key}, which is unsupported: {_NOT_SERVED[key]}")
        elif key not in _FIELDS:
            nearest = difflib.get_close_matches(str(key), _FIELDS, n=1)
            guess = f", did you mean {nearest[0]}?" if nearest else ""
            complaints.append(f"{where} has an unknown key {key!r}{guess}")
        elif not _has_type(value, _FIELDS[key]):
            complaints.append(f"{where} has {key} {value!r}, which is not of type {_type_name(_FIELDS[key])}")
        elif key in _BOUNDS and value is not None:
            try:
                _BOUNDS[key].check(value)
            except ValueError as error:
                complaints.append(f"{where} has {key} {value}, which {error}")
    return complaints


def _has_type(value: Any, hint: Any) -> bool:
    options = typing.get_args(hint) if type(None) in typing.get_args(hint) else (hint,)
    for option in options:
        kind = typing.get_origin(option) or option
        if kind is list:
            item = typing.get_args(option)[0]
            if isinstance(value, list) and all(_has_type(part, item) for part in value):
                return True
        elif kind is float or kind is int:
            if isinstance(value, (int, float) if kind is float else int) and not isinstance(value, bool):
                return True
        elif isinstance(value, kind):
            return True
    return False


def _type_name(hint: Any) -> str:
    return str(hint) if typing.get_args(hint) else hint.__name__


def resolve_eval_datasets(args: Arguments) -> list[Problem]:
    """Set `args.eval_datasets` from --eval-config or --eval-prompt-data; returns their problems."""
    problems: list[Problem] = []
    if args.eval_config is not None:
        entries = read_eval_config(args.eval_config, problems)
    elif args.eval_prompt_data is not None:
        entries = _entries_of_flag(args.eval_prompt_data, problems)
    else:
        return []
    if args.eval_config is not None and args.eval_prompt_data is not None:
        problems.append(
            Problem(
                "--eval-config",
                "--eval-config and --eval-prompt-data both name evaluation sets: give one of them.",
            )
        )
    names = [entry["name"] for entry in entries]
    for name in sorted({name for name in names if names.count(name) > 1}):
        problems.append(
            Problem(_flag(args), f"{_flag(args)} names {name!r} twice: give each evaluation set its own name.")
        )
    fallback = _fallback(args)
    for entry in entries:
        values = {**fallback, **entry}
        if "rm_type" in entry and "custom_rm_path" not in entry:
            values["custom_rm_path"] = None  # a set's own reward overrides the run's custom one
        args.eval_datasets.append(EvalDataset(**values))
    return problems


def _flag(args: Arguments) -> str:
    return "--eval-prompt-data" if args.eval_config is None else "--eval-config"


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _fallback(args: Arguments) -> dict[str, Any]:
    """The flags' values for every set."""
    return {
        "n_samples_per_eval_prompt": args.n_samples_per_eval_prompt,
        "temperature": _first(args.eval_temperature, args.rollout_temperature),
        "top_p": _first(args.eval_top_p, args.rollout_top_p),
        "top_k": _first(args.eval_top_k, args.rollout_top_k),
        "max_response_len": _first(args.eval_max_response_len, args.rollout_max_response_len),
        "max_prompt_len": args.eval_max_prompt_len,
        "max_context_len": _first(args.eval_max_context_len, args.rollout_max_context_len),
        "min_new_tokens": args.eval_min_new_tokens,
        "repetition_penalty": None,
        "stop": args.rollout_stop,
        "stop_token_ids": args.rollout_stop_token_ids,
        "skip_special_tokens": args.rollout_skip_special_tokens,
        "no_stop_trim": True,
        "input_key": _first(args.eval_input_key, args.input_key),
        "label_key": _first(args.eval_label_key, args.label_key),
        "metadata_key": args.metadata_key,
        "tool_key": _first(args.eval_tool_key, args.tool_key),
        "apply_chat_template": args.apply_chat_template,
        "apply_chat_template_kwargs": args.apply_chat_template_kwargs,
        "multimodal_keys": args.multimodal_keys,
        "rm_type": args.rm_type,
        "custom_rm_path": args.custom_rm_path,
        "reward_key": _first(args.eval_reward_key, args.reward_key),
        "custom_generate_function_path": args.custom_generate_function_path,
        "metadata_overrides": {},
    }


def _entries_of_flag(words: list[str], problems: list[Problem]) -> list[dict[str, Any]]:
    """name path pairs; a single word is a path, and its file's stem the name (slime calls every such set aime)."""
    if len(words) == 1:
        return [{"name": Path(words[0].partition("@[")[0]).stem, "path": words[0]}]
    if len(words) % 2:
        sentence = (
            f"--eval-prompt-data got {len(words)} words, {' '.join(words)}, which do not pair up:"
            " write name path [name path ...]."
        )
        problems.append(Problem("--eval-prompt-data", sentence))
        return []
    return [{"name": name, "path": path} for name, path in zip(words[::2], words[1::2], strict=True)]


def training_prompt_format(args: PromptArguments) -> PromptFormat:
    """The row format of `--prompt-data`."""
    pair = _pair_columns(args, args.apply_chat_template, args.label_key) if args.reads_pairs else None
    return PromptFormat(
        input_key=args.input_key,
        label_key=args.label_key,
        metadata_key=args.metadata_key,
        tool_key=args.tool_key,
        # pairs and conversations are rendered with their answers
        apply_chat_template=args.apply_chat_template and pair is None and not args.reads_conversations,
        chat_template_kwargs=args.apply_chat_template_kwargs,
        max_prompt_len=least(args.rollout_max_prompt_len, _engine_limit(args)),
        refuse_too_long=args.refuse_long_prompts,
        keep_messages=args.custom_generate_function_path is not None or args.has_custom_rollout_function,
        keep_conversation=args.rm_model is not None,
        pair=pair,
        input_template=args.input_template,
        truncation=args.rollout_truncate_prompt,
        label_is_score=args.trains_reward_model and pair is None,
        teachers=_teachers(args),
        reward_rule=_rule(args, args.rm_type, args.custom_rm_path, args.custom_generate_function_path),
        images=image_column(args, args.multimodal_keys),
        conversations=args.reads_conversations,
    )


def eval_prompt_format(args: PromptArguments, dataset: EvalDataset) -> PromptFormat:
    """The row format of an evaluation set."""
    holds_pairs = args.reads_pairs and args.debug_train_only  # held-out ones
    holds_conversations = args.reads_conversations and args.debug_train_only
    pair = _pair_columns(args, dataset.apply_chat_template, dataset.label_key) if holds_pairs else None
    return PromptFormat(
        input_key=dataset.input_key,
        label_key=dataset.label_key,
        metadata_key=dataset.metadata_key,
        tool_key=dataset.tool_key,
        apply_chat_template=dataset.apply_chat_template and pair is None and not holds_conversations,
        chat_template_kwargs=dataset.apply_chat_template_kwargs,
        max_prompt_len=least(dataset.max_prompt_len, _engine_limit(args)),
        refuse_too_long=args.refuse_long_prompts,
        keep_messages=dataset.custom_generate_function_path is not None or pair is not None or holds_conversations,
        keep_conversation=args.rm_model is not None,
        pair=pair,
        input_template=None if dataset.apply_chat_template else args.input_template,
        label_is_score=args.trains_reward_model and holds_conversations,
        reward_rule=_rule(args, dataset.rm_type, dataset.custom_rm_path, dataset.custom_generate_function_path),
        images=image_column(args, dataset.multimodal_keys),
        conversations=holds_conversations,
    )


def image_column(vision: DerivedVision, keys: dict[str, Any] | None) -> ImageColumn | None:
    """The columns of `--multimodal-keys`; None without any, or without a vision-language model (a rule)."""
    image, video = ((keys or {}).get(kind) for kind in (IMAGE, VIDEO))
    image, video = (column if isinstance(column, str) else None for column in (image, video))
    if (image is None and video is None) or vision.vision_folder is None:
        return None
    return ImageColumn(image, vision.vision_folder, video)


def _pair_columns(args: PromptArguments, as_chat: bool, label_key: str | None) -> PairColumns | AnswerColumns:
    if args.reads_labelled_answers:
        return AnswerColumns(args.completion_key, label_key or "label", as_chat)
    return PairColumns(
        args.chosen_key,
        args.rejected_key,
        as_chat,
        rejected_answers=max(args.n_samples_per_prompt - 1, 1),
        has_margin=args.trains_reward_model,
        margin=args.margin_key if args.trains_reward_model else None,
    )


def _teachers(args: PromptArguments) -> TeacherChoice | None:
    if not args.opd_teacher_names or not args.has_served_teacher:
        return None
    flag = "--opd-teacher-urls" if args.opd_teacher_urls else "--opd-teacher-models"
    return TeacherChoice(args.opd_teacher_key, args.opd_teacher_names, flag)


def _engine_limit(args: PromptArguments) -> int | None:
    """The longest prompt that leaves room for a response in the context; None with a custom rollout function."""
    if args.engine_context_len is None or args.has_custom_rollout_function:
        return None
    return args.engine_context_len - 1


def _rule(args: PromptArguments, rm_type: str | None, custom_rm: str | None, custom_generate: str | None) -> str | None:
    """The built-in reward that compares with the row's label; None if a custom function may change either."""
    own = custom_rm or custom_generate or args.rollout_sample_hook_path or args.debug_train_only
    return None if own or args.rollout_function_path != DEFAULT_ROLLOUT_FUNCTION else rm_type
