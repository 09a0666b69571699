"""Resolves the evaluation sets: where a set says nothing, `defaults` does, then the --eval-* flag, then --rollout-*.

Promises that every `EvalDataset` is complete, so that nobody has to look a value up again. Called once, after parsing.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from slimrl.arguments.eval_config import read_eval_config
from slimrl.arguments.namespace import Arguments, EvalDataset
from slimrl.arguments.problem import Problem


def resolve_eval_datasets(args: Arguments) -> list[Problem]:
    """Set `args.eval_datasets` from --eval-config or --eval-prompt-data; returns what is wrong with them."""
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
            values["custom_rm_path"] = None  # a set's own reward goes before the run's custom one
        args.eval_datasets.append(EvalDataset(**values))
    return problems


def _flag(args: Arguments) -> str:
    return "--eval-prompt-data" if args.eval_config is None else "--eval-config"


def _first(*values: Any) -> Any:
    return next((value for value in values if value is not None), None)


def _fallback(args: Arguments) -> dict[str, Any]:
    """What the flags say for every set."""
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
