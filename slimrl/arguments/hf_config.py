"""What config.json says: compared with the model flags, of the reward model, and about the context of the engines.

A wrong shape or theta would train without an error. One declarative table per model family, in its file of
`slimrl.models.families`, maps keys to flags; `stated_flags` returns the flags that a config.json implies. Imports
nothing heavy.

`RewardModelConfig` describes the folder of --rm-model; `starts_reward_servers` says whether slimrl starts its servers.
`take_context_of_engines` sets how many tokens an engine takes, prompt and response together: --sglang-context-length,
else the length of the model, read as SGLang 0.5.20 reads it. It runs before the validation rules.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from itertools import groupby
from pathlib import Path
from typing import Any

from slimrl.arguments.engine_groups import group_flags, served_by_engines
from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments
from slimrl.models import config_rows
from slimrl.models.config_rows import Config, LayerPattern, Row, Switch, Value
from slimrl.models.families import MODEL_TYPES, TABLES, stated_flags
from slimrl.models.families.vision import decoder_config
from slimrl.models.model_spec import expand_layer_pattern


def disagreements(args: Arguments, config: Config) -> list[Problem]:
    """One problem for each flag that disagrees with the file."""
    table = TABLES.get(config.get("model_type", ""))
    if table is None:
        sentence = (
            f"--hf-checkpoint has model_type {config.get('model_type')!r}, and slimrl supports"
            f" {', '.join(MODEL_TYPES)}: give a model of these families."
        )
        return [Problem("--hf-checkpoint", sentence)]
    config = decoder_config(config)
    problems = [
        Problem("--hf-checkpoint", f"--hf-checkpoint has {what} in config.json, which is unsupported: use another.")
        for unserved in table.unserved
        if (what := unserved.found(config)) is not None
    ]
    rows = table.rows.values()
    problems += [p for row in rows if isinstance(row, Value) and (p := _value(row, args, config)) is not None]
    if args.normalization != "RMSNorm":
        flag, given = "--normalization", args.normalization
        sentence = f"{flag} is {given} and config.json says an RMSNorm model: give {flag} RMSNorm."
        problems.append(Problem(flag, sentence))
    return problems + [p for row in rows if isinstance(row, Switch) and (p := _switch(row, args, config)) is not None]


def _value(row: Value, args: Arguments, config: Config) -> Problem | None:
    flag = _flag(row)
    given, wanted = vars(args)[row.field], row.stated(config)
    given = row.unset if given is None else given
    if isinstance(row, LayerPattern):
        given, wanted = _pattern(given, args.num_layers), _pattern(wanted, args.num_layers)
    if wanted is None:
        if row.absent is None or given is None:
            return None
        return Problem(flag, f"{flag} is {given} and config.json says {row.absent}: leave {flag} out.")
    if given is None:
        if row.absent is None:  # another rule reports missing flags that every model needs
            return None
        return Problem(
            flag, f"{flag} is missing and config.json says {row.key(config)} {wanted}: give {flag} {wanted}."
        )
    if given == wanted:
        return None
    given, wanted = (" ".join(map(str, one)) if isinstance(one, list) else one for one in (given, wanted))
    return Problem(flag, f"{flag} is {given} and config.json says {row.key(config)} {wanted}: give {flag} {wanted}.")


def _switch(row: Switch, args: Arguments, config: Config) -> Problem | None:
    wanted = row.stated(config)
    if vars(args)[row.field] == wanted:
        return None
    # --disable-... sets its field to False: the flag is given if the field is False
    given = row.is_on(config) is False
    fix = f"leave {row.flag} out" if given else f"add {row.flag}"
    state = "given" if given else "missing"
    return Problem(row.flag, f"{row.flag} is {state} and config.json says {row.says(config)}: {fix}.")


def _flag(row: Row) -> str:
    return "--" + row.field.replace("_", "-")


def _pattern(layers: int | list[int] | None, count: int | None) -> str | None:
    """The layers in the flag's notation, such as [0]*3+[1]*45, so that both notations compare equal."""
    if layers is None or count is None:
        return None
    each = map(int, expand_layer_pattern(layers, count)) if isinstance(layers, int) else layers
    return "+".join(f"[{kind}]*{len(list(run))}" for kind, run in groupby(each))


__all__ = ["MODEL_TYPES", "disagreements", "stated_flags"]


TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json")  # one of them is in a folder with a tokenizer
# the classes that give numbers in place of tokens, of SGLang or of `slimrl.engines.sglang.models`; one number of a
# response is its reward
ARCHITECTURES = (
    "Gemma2ForSequenceClassification",
    "InternLM2ForRewardModel",
    "LlamaForSequenceClassification",
    "LlamaForSequenceClassificationWithNormal_Weights",
    "Qwen2ForRewardModel",
    "Qwen2ForSequenceClassification",
    "Qwen3ForRewardModel",
    "Qwen3ForSequenceClassification",
    "Qwen3MoeForSequenceClassification",
)
# served as sequence classifiers, whose head at the last token of each prefix is that of the token
TOKEN_CLASSIFIERS = ("Qwen2ForTokenClassification", "Qwen3ForTokenClassification")
# with a head of 2 labels at every token; SGLang has no class for them, and `slimrl.engines.sglang.models` has
PROCESS_REWARD_MODELS = ("Qwen2ForProcessRewardModel",)
_SEVERAL_LABELS = "LlamaForSequenceClassificationWithNormal_Weights"  # weighs its labels to one number itself


@dataclasses.dataclass(frozen=True)
class RewardModelConfig:
    """Values from config.json; `context` and `vocabulary` are None if missing."""

    architecture: str
    labels: int
    context: int | None
    vocabulary: int | None

    @classmethod
    def read(cls, folder: Path) -> RewardModelConfig:
        """Raises ValueError, a sentence, where the folder has no readable config.json."""
        path = folder / "config.json"
        try:
            config: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"--rm-model {folder} has no readable config.json ({error}): copy the model again."
            ) from error
        architecture = (config.get("architectures") or ["model without architectures in its config.json"])[0]
        # transformers leaves out its default, 2 labels
        default = 2 if architecture in (*TOKEN_CLASSIFIERS, *PROCESS_REWARD_MODELS) else 1
        labels = config.get("num_labels") or len(config.get("id2label") or {}) or default
        scaled = config.get("rope_scaling") is not None
        return cls(
            architecture=architecture,
            labels=labels,
            context=None if scaled else config.get("max_position_embeddings"),
            vocabulary=config.get("vocab_size"),
        )

    @property
    def fault(self) -> str | None:
        """Why a server cannot give one number for a response; None if it can."""
        if self.architecture in (*TOKEN_CLASSIFIERS, *PROCESS_REWARD_MODELS):
            return (
                f"is a {self.architecture}, which scores steps (--rm-step-separator), and a reward model one response"
            )
        if self.architecture not in ARCHITECTURES:
            return f"is a {self.architecture}, and a reward model is one of {', '.join(ARCHITECTURES)}"
        if self.labels != 1 and self.architecture != _SEVERAL_LABELS:
            return f"has {self.labels} labels, and a reward model has one"
        return None

    @property
    def fault_of_steps(self) -> str | None:
        """Why a server cannot give a reward to each step (--rm-step-separator); None if it can."""
        known = (*TOKEN_CLASSIFIERS, *PROCESS_REWARD_MODELS, *ARCHITECTURES)
        if self.architecture not in known:
            return f"is a {self.architecture}, and a process reward model is one of {', '.join(known)}"
        return None if self.labels in (1, 2) else f"has {self.labels} labels, and a process reward model has one or two"


def teachers_of_groups(args: Arguments) -> set[str]:
    """The teachers of --opd-teacher-models that are frozen models of --sglang-config, with its servers and router."""
    frozen = {
        model.name: model.model_path or args.hf_checkpoint for model in args.server_models if not model.update_weights
    }
    return {name for name, folder in args.opd_teacher_folders.items() if frozen.get(name) == folder}


def starts_reward_servers(args: Arguments) -> bool:
    """Whether slimrl starts the servers of the reward model or teachers: a folder is given, and no address.

    An evaluation needs no teacher and no rewards of steps.
    """
    for_training = args.has_served_teacher or args.rm_step_separator is not None
    used = not args.debug_train_only and not (for_training and args.eval_only)
    own = set(args.opd_teacher_folders) - teachers_of_groups(args)
    has_folder = args.rm_model is not None or (args.has_served_teacher and bool(own))
    return has_folder and args.rm_url is None and args.opd_teacher_urls is None and used


@dataclasses.dataclass(frozen=True)
class ServedModel:
    """A model whose servers slimrl starts; `name` is that of one of several teachers, else empty."""

    name: str
    folder: str
    gpus: int
    per_server: int

    def title(self, args: Arguments) -> str:
        """What it is in messages."""
        return f"{served_role(args)} {self.name}".rstrip()


def served_models(args: Arguments) -> tuple[ServedModel, ...]:
    """The reward model, the teacher or the teachers, in the order of their GPUs; none without servers to start."""
    if not starts_reward_servers(args):
        return ()
    if args.rm_model is not None:
        return (ServedModel("", args.rm_model, args.rm_num_gpus, args.rm_num_gpus_per_engine),)
    in_groups = teachers_of_groups(args)
    folders = {name: folder for name, folder in args.opd_teacher_folders.items() if name not in in_groups}
    gpus = args.opd_teacher_num_gpus or [args.rm_num_gpus] * len(folders)
    sizes = args.opd_teacher_num_gpus_per_engine or [args.rm_num_gpus_per_engine] * len(folders)
    parts = zip(folders.items(), gpus, sizes, strict=False)  # a rule compares the lengths
    return tuple(ServedModel(name, folder, own, size) for (name, folder), own, size in parts)


def served_role(args: Arguments) -> str:
    """What the servers of --rm-model and --rm-url are in messages."""
    return "teacher" if args.has_served_teacher else "reward model"


def served_vocabulary(folder: Path) -> int | None:
    """The number of token ids of the model in `folder`, by its config.json; None if it does not say."""
    config: dict[str, Any] = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    return (config.get("text_config") or config).get("vocab_size")


def reward_gpus(args: Arguments, others: int) -> tuple[range, ...]:
    """GPUs of each server of the reward model or teachers, in GPU order.

    They come after the `others`, of training and rollout, or are the first of those. GPUs beyond a multiple of the
    size of a server make a last, smaller one, which a rule rejects.
    """
    first, found = 0 if args.rm_colocate else others, []
    for model in served_models(args):
        end = first + model.gpus
        found += [range(at, min(at + model.per_server, end)) for at in range(first, end, model.per_server)]
        first = end
    return tuple(found)


# names of config.json for the longest sequence, in the server's order
_KEYS = ("max_sequence_length", "seq_length", "max_seq_len", "model_max_length", "max_position_embeddings")
_UNITS = {
    **{"k": 10**3, "M": 10**6, "G": 10**9, "T": 10**12},
    **{"Ki": 2**10, "Mi": 2**20, "Gi": 2**30, "Ti": 2**40},
    "K": 2**10,  # only vLLM's
}
# A server rejects prompts within this many tokens of its context with HTTP 400, including continued responses.
RESERVED_TOKENS = 6


def take_context_of_engines(args: Arguments) -> None:
    """Set `engine_context_len`; it stays None if it is not known, or if the engine truncates prompts itself."""
    if args.debug_train_only or args.rollout_external_engine_addrs or args.sglang_options.get("allow_auto_truncate"):
        return
    groups = [
        group_flags(args, model, group)
        for model in served_by_engines(args)
        if model.update_weights
        for group in model.groups
        if group.servers
    ]
    context = least(*(_context_of_engine(flags) for flags in groups or [args]))
    if context is not None and context > RESERVED_TOKENS + 1:
        args.engine_context_len = context - RESERVED_TOKENS


def _context_of_engine(args: Arguments) -> int | None:
    """The tokens that an engine with these flags takes; None if it is not known, or if it truncates prompts."""
    if args.sglang_options.get("allow_auto_truncate"):
        return None
    _, given = context_flag(args)
    try:
        context = context_of_model(args) if given is None else tokens(given)
    except ValueError:
        return None  # the server's own parser reports it
    cache = args.sglang_options.get("max_total_tokens")
    if isinstance(cache, int):
        context = least(context, cache)
    return context


def context_flag(args: Arguments) -> tuple[str, Any]:
    """The flag of the engines' context, and its value; None if the model's context applies."""
    if args.uses_vllm:
        given = args.vllm_options.get("max_model_len")
        return "--vllm-max-model-len", None if given in ("auto", "-1") else given
    return "--sglang-context-length", args.sglang_options.get("context_length")


def context_of_model(args: Arguments) -> int | None:
    """The context length of the model of --hf-checkpoint in tokens; None if config.json has none.

    Applies --sglang-json-model-override-args.
    """
    if args.hf_checkpoint is None:
        return None
    try:
        config = json.loads((Path(args.hf_checkpoint) / "config.json").read_text(encoding="utf-8"))
        changes = json.loads(args.sglang_options.get("json_model_override_args") or "{}")
    except (OSError, TypeError, ValueError):
        return None  # another rule's problem, or the server's
    if not isinstance(config, dict) or not isinstance(changes, dict):
        return None
    for key, value in changes.items():
        is_part = key.endswith("_config") and isinstance(value, dict) and isinstance(config.get(key), dict)
        config[key] = {**config[key], **value} if is_part else value
    text = config.get("text_config")
    return stated_context(text if isinstance(text, dict) else config)


def stated_context(config: Mapping[str, Any]) -> int | None:
    """The longest sequence of a config.json, with the factor of a rope scaling that does not count its own."""
    settings = config_rows.settings(config)
    factor = settings.get("factor") or 1
    if "original_max_position_embeddings" in settings or config_rows.kind(config) == "llama3":
        factor = 1
    longest = next((config[key] for key in _KEYS if isinstance(config.get(key), int)), None)
    return None if longest is None else int(factor * longest)


def tokens(given: int | str) -> int:
    """A number as the engines read it: 32768, "32k" (thousands), "32Ki" or "32K" (of 1024). Raises ValueError."""
    text = str(given).strip()
    unit = next((unit for unit in sorted(_UNITS, key=len, reverse=True) if text.endswith(unit)), "")
    return int(float(text.removesuffix(unit)) * _UNITS.get(unit, 1))


def least(*limits: int | None) -> int | None:
    """The least of the limits that there are."""
    return min((limit for limit in limits if limit is not None), default=None)
