"""`parse_args` turns a command line into checked `Arguments`, or reports all its problems and exits with code 2.

A key of --custom-config-path is a flag with or without its dashes ("lr", "rollout_batch_size",
"--sglang-mem-fraction-static", "disable_rewards_normalization") or the attribute that it sets
("rewards_normalization"). Values are checked like those of the command line and override them. Settings for custom
functions go under `custom` and reach them as `args.custom`. Any other key is a problem.

--megatron-config-path has flags of one role, policy or critic: `read_roles` maps them to slimrl's flags of that role.
"""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NoReturn

from slimrl.arguments.derive import derive, take_distributed_optimizer, take_precision_of_model, take_vision_of_model
from slimrl.arguments.engine_groups import resolve_server_models
from slimrl.arguments.eval_datasets import resolve_eval_datasets
from slimrl.arguments.flag import FlagSpec, Problem, ended, flag_specs, report
from slimrl.arguments.flags.algorithm import WITH_CRITIC, AlgorithmArguments
from slimrl.arguments.foreign_flags import other_word
from slimrl.arguments.hf_config import take_context_of_engines
from slimrl.arguments.namespace import Arguments, all_flag_specs
from slimrl.arguments.parser import ParsedLine, PassthroughTables, nearest_flag, parse_line, read_yaml
from slimrl.arguments.redact import redact_flag
from slimrl.arguments.validation import Context, check

logger = logging.getLogger(__name__)


def parse_args(
    argv: Sequence[str], *, entry: str = "train.py", passthrough: PassthroughTables | None = None
) -> Arguments:
    """Parse, derive and check a command line.

    `entry` is the calling program: "train.py" and "train_async.py" check all flags, a tool only the model flags.
    `passthrough` maps a prefix ("sglang", "vllm", "router") to a function that lists the engine's flags; it is called
    only if the command line has such a flag. With problems, prints all of them to stderr and exits with code 2.
    """
    if {"-h", "--help"} & set(argv):
        from slimrl.arguments.docs import help_text

        print(help_text(Path(entry).name))
        sys.exit(0)
    args, problems = read_args(argv, entry=entry, passthrough=passthrough)
    if problems:
        _exit_with(problems, entry)
    for note in args.notes:
        logger.warning(note)
    return args


def read_args(
    argv: Sequence[str], *, entry: str = "train.py", passthrough: PassthroughTables | None = None
) -> tuple[Arguments, list[Problem]]:
    """Like `parse_args`, but returns the problems instead of printing them; prints nothing and never exits."""
    entry = Path(entry).name
    specs = all_flag_specs()
    parsed = parse_line(argv, specs, passthrough or {})
    notes = _add_config_file(parsed, specs, passthrough or {}) + _add_roles(parsed, specs)
    args, found = _checked(parsed, entry, passthrough or {})
    if parsed.guesses and found:
        # report only problems that exist both with and without the guesses
        otherwise = _checked(parsed.as_guessed(), entry, passthrough or {})[1]
        found = [problem for problem in found if problem in otherwise]
    args.notes = notes + args.notes
    return args, [*parsed.problems, *found]


def _checked(parsed: ParsedLine, entry: str, passthrough: PassthroughTables) -> tuple[Arguments, list[Problem]]:
    """The arguments of a parsed line with derived values, and the problems that the rules find."""
    args = Arguments(**parsed.values)
    args.sglang_options = parsed.options.get("sglang", {})
    args.vllm_options = parsed.options.get("vllm", {})
    args.router_options = parsed.options.get("router", {})
    context = Context(entry, frozenset(parsed.values), frozenset(parsed.broken))
    if context.is_training:
        take_precision_of_model(args, context.given)
        take_distributed_optimizer(args, context.given)
    take_vision_of_model(args)
    derive(args)
    problems = []
    if context.is_training:
        problems += resolve_server_models(args, passthrough)
        take_context_of_engines(args)
    problems += resolve_eval_datasets(args)
    return args, [*problems, *check(args, context)]


def _add_config_file(parsed: ParsedLine, specs: list[FlagSpec], passthrough: PassthroughTables) -> list[str]:
    """Overrides the command line with --custom-config-path; returns a sentence for each replaced value."""
    path = parsed.values.get("custom_config_path")
    if path is None:
        return []
    from_file = read_config_file(path, specs, passthrough)
    return _override(parsed, from_file, f"--custom-config-path {path}")


def _add_roles(parsed: ParsedLine, specs: list[FlagSpec]) -> list[str]:
    """The same with --megatron-config-path."""
    path = parsed.values.get("megatron_config_path")
    return [] if path is None else _override(parsed, read_roles(path, specs, parsed.values), f"{ROLES_FLAG} {path}")


def _override(parsed: ParsedLine, from_file: ParsedLine, file: str) -> list[str]:
    replaced = [
        f"{dest} is {redact_flag(dest, value)} from {file}, which overrides"
        f" {redact_flag(dest, parsed.values[dest])} from the command line."
        for dest, value in from_file.values.items()
        if parsed.values.get(dest, value) != value
    ]
    parsed.values |= from_file.values
    for prefix, options in from_file.options.items():
        parsed.options[prefix] |= options
    parsed.problems += from_file.problems
    parsed.broken |= from_file.broken
    return replaced


def _exit_with(problems: Sequence[Problem], entry: str) -> NoReturn:
    print(report(problems, Path(entry).name), file=sys.stderr)
    sys.exit(2)


_OWN = "custom"
_THIS_FILE = "custom_config_path"


def read_config_file(path: str, specs: list[FlagSpec], passthrough: PassthroughTables) -> ParsedLine:
    """The file's flags as if they had been typed; `custom` is in `values` under that name."""
    parsed = ParsedLine(options={prefix: {} for prefix in passthrough})
    try:
        mapping = read_yaml(Path(path))
        if not isinstance(mapping, dict):
            raise ValueError("the file must contain a mapping of flags to values")
    except (OSError, ValueError) as error:
        _complain(parsed, path, str(error))
        return parsed
    by_key = _specs_by_key(specs)
    passed: dict[str, Any] = {}
    for key, value in mapping.items():
        plain = _plain(str(key))
        if plain == _OWN:
            _take_own(value, path, by_key, parsed)
        elif plain == _THIS_FILE:
            _complain(parsed, path, f"{key} cannot name another file from within one: put its flags in here")
        elif plain in by_key:
            _take(*by_key[plain], key, value, path, parsed)
        elif plain.split("_")[0] in passthrough:
            passed[plain] = value
        else:
            _complain(parsed, path, _unknown(str(key), plain, by_key))
    _pass_through(passed, path, specs, passthrough, parsed)
    return parsed


def _specs_by_key(specs: list[FlagSpec]) -> dict[str, tuple[FlagSpec, bool]]:
    """Each flag by its attribute and its spellings, and whether the spelling means the attribute or its opposite."""
    by_key = {_plain(name): (spec, False) for spec in specs for name in spec.off}
    return by_key | {_plain(name): (spec, True) for spec in specs for name in [spec.dest, *spec.on]}


def _plain(key: str) -> str:
    """A key without dashes, as an attribute."""
    return key.removeprefix("--").replace("-", "_")


def _take_own(value: Any, path: str, flags: Iterable[str], parsed: ParsedLine) -> None:
    if isinstance(value, dict):
        parsed.values[_OWN] = value
        for name in sorted(set(map(str, value)).intersection(flags)):
            complaint = f"{name} under {_OWN} is a flag, and args.{name} would have the flag's value: move it out"
            _complain(parsed, path, f"{complaint} of {_OWN}, or rename it")
    else:
        _complain(parsed, path, f"{_OWN} must be a mapping of your own settings, each with a name")


def _take(spec: FlagSpec, straight: bool, key: Any, value: Any, path: str, parsed: ParsedLine) -> None:
    """One flag's value, converted as on the command line."""
    if spec.dest in parsed.values or spec.dest in parsed.broken:
        _complain(parsed, path, f"{key} is given twice, in two spellings: keep one of them")
        return
    try:
        read = _value(spec, value)
        parsed.values[spec.dest] = read if straight else not read
    except ValueError as error:
        shown = json.dumps(value, default=str)
        _complain(parsed, path, f"{key}: {shown} {error}")
        parsed.broken.add(spec.dest)


def _value(spec: FlagSpec, value: Any) -> Any:
    if value is None and spec.default is None:
        return None
    if spec.is_switch:
        if isinstance(value, bool):
            return value
        raise ValueError("is neither true nor false")
    if spec.value_type is dict:
        return spec.convert(value if isinstance(value, str) else json.dumps(value))
    items = value if spec.many and isinstance(value, list) else [value]
    if isinstance(value, list) and spec.parse is None and not spec.many:
        raise ValueError("is a list, and one value is wanted")
    if any(item is None or isinstance(item, bool | dict) for item in items) or (
        spec.parse is None and any(isinstance(item, list) for item in items)
    ):
        raise ValueError(f"is not what {spec.name} takes")
    if len(items) < spec.least:
        raise ValueError("is empty, and a value is wanted")
    converted = [spec.convert(str(item)) for item in items]
    return converted if spec.many else converted[0]


def _pass_through(
    given: Mapping[str, Any], path: str, specs: list[FlagSpec], passthrough: PassthroughTables, parsed: ParsedLine
) -> None:
    """The engines' flags, read as on the command line; `false` takes a switch back that the command line sets."""
    on: list[str] = []
    off: list[str] = []
    for key, value in given.items():
        flag = "--" + key.replace("_", "-")
        if value is None:
            _complain(parsed, path, f"{key}: null is no value: give one, or leave {key} out")
        elif isinstance(value, bool):
            (on if value else off).append(flag)
        else:
            items = value if isinstance(value, list) else [value]
            on += [flag, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in items)]
    for words, is_on in ((on, True), (off, False)):
        if not words:
            continue
        read = parse_line(words, specs, passthrough)
        for prefix, options in read.options.items():
            parsed.options[prefix] |= options if is_on else {dest: not value for dest, value in options.items()}
        for problem in read.problems:
            _complain(parsed, path, problem.sentence.removesuffix("."))


def _unknown(key: str, plain: str, known: Iterable[str]) -> str:
    if (word := other_word(plain)) is not None:
        return f"{word.sentence(key).removesuffix('.')} (settings of custom hooks: under {_OWN})"
    nearest = nearest_flag(plain, list(known))
    fix = f"did you mean {nearest}?" if nearest else "docs/flags.md lists all flags"
    return f"{key} is not a flag: put settings of custom hooks under {_OWN}; {fix}"


def _complain(parsed: ParsedLine, path: str, complaint: str) -> None:
    parsed.problems.append(Problem("--custom-config-path", ended(f"--custom-config-path {path}: {complaint}")))


ROLES_FLAG = "--megatron-config-path"
_ACTOR, _CRITIC = "actor", "critic"
# flags that the critic has under another name, and flags of the optimizer that may differ between the roles
_OF_CRITIC = {
    "lr": "critic_lr",
    "lr_warmup_iters": "critic_lr_warmup_iters",
    "load": "critic_load",
    "save": "critic_save",
}
_OPTIMIZER = (
    "min_lr",
    "lr_warmup_init",
    "weight_decay",
    "adam_beta1",
    "adam_beta2",
    "adam_eps",
    "sgd_momentum",
    "muon_momentum",
    "clip_grad",
)
_POLICY_FOLDERS = ("load", "save", "ref_load", "ref_ckpt_step", "ckpt_step")
# the flags of the algorithm say nothing about the critic's model or optimizer, but for this one: both losses read it
_OF_POLICY = {spec.dest for spec in flag_specs(AlgorithmArguments)} - {"calculate_per_token_loss"}


def read_roles(path: str, specs: list[FlagSpec], given: Mapping[str, Any]) -> ParsedLine:
    """The file's flags as if they had been typed; those of the critic's optimizer are in `critic_overrides`.

    `given` are the values of the command line. A flag that only one role overrides keeps its value for the other, if
    there is a critic. A flag that both roles must share, such as a parallel size, may only repeat that value.
    """
    parsed = ParsedLine()

    def complain(complaint: str) -> None:
        parsed.problems.append(Problem(ROLES_FLAG, ended(f"{ROLES_FLAG} {path}: {complaint}")))

    try:
        roles = _roles(read_yaml(Path(path)))
    except (OSError, ValueError) as error:
        complain(str(error))
        return parsed
    by_key = {spec.dest: spec for spec in specs}
    values: dict[str, dict[str, Any]] = {_ACTOR: {}, _CRITIC: {}}
    for role, overrides in roles.items():
        for key, value in overrides.items():
            plain = _plain(str(key))
            spec = by_key.get(plain)
            if spec is None:
                nearest = nearest_flag("--" + plain.replace("_", "-"), [spec.name for spec in specs])
                complain(f"{key} of the {role} is not a flag{f': did you mean {nearest}?' if nearest else ''}")
                continue
            try:
                if isinstance(value, str) and "${" in value:
                    raise ValueError("names an environment variable: write its value")
                values[role][plain] = _value(spec, value)
            except ValueError as error:
                complain(f"{key} of the {role}: {json.dumps(value, default=str)} {error}")
                continue
            same = given.get(plain, spec.default) == values[role][plain]
            if not same and (why := _not_of_role(role, spec)) is not None:
                complain(f"{key} of the {role}: {why}")
    parsed.values |= _of_roles(values[_ACTOR], values[_CRITIC], by_key, given)
    return parsed


def _roles(root: Any) -> dict[str, dict[Any, Any]]:
    """The overrides by role. Raises ValueError if the file has another form."""
    entries = root.get("megatron") if isinstance(root, dict) else None
    if not isinstance(entries, list) or set(root) != {"megatron"}:
        raise ValueError("the file must hold one key, megatron, with a list of roles")
    found: dict[str, dict[Any, Any]] = {}
    for entry in entries:
        if not isinstance(entry, dict) or set(entry) - {"name", "role", "overrides"}:
            raise ValueError(f"{entry!r} is no role: each has role and overrides, and may have the name default")
        role, overrides = entry.get("role"), entry.get("overrides") or {}
        if role not in (_ACTOR, _CRITIC):
            raise ValueError(f"the role {role!r} does not exist: give actor or critic")
        if entry.get("name", "default") != "default":
            raise ValueError(f"the {role} {entry['name']!r}: a run has one policy and one critic; leave name out")
        if role in found or not isinstance(overrides, dict):
            why = "is given twice: join its overrides" if role in found else "needs a mapping as overrides"
            raise ValueError(f"the role {role} {why}")
        found[role] = overrides
    return found


def _not_of_role(role: str, spec: FlagSpec) -> str | None:
    """Why a role cannot have a flag for itself; None if it can."""
    if spec.dest in _OPTIMIZER or spec.dest in _OF_CRITIC:
        return None
    if role == _CRITIC:
        return f"the critic has the policy's {spec.name}; leave it out, or change {spec.name} for both"
    if spec.dest in _POLICY_FOLDERS or spec.dest in _OF_POLICY:
        return None
    return f"it also applies to the critic or the engines; give {spec.name} on the command line"


def _of_roles(
    actor: Mapping[str, Any], critic: Mapping[str, Any], specs: Mapping[str, FlagSpec], given: Mapping[str, Any]
) -> dict[str, Any]:
    """The values of slimrl's flags; what the actor overrides keeps its value for the critic."""
    allowed = {name for name in actor if _not_of_role(_ACTOR, specs[name]) is None}
    values = {name: actor[name] for name in allowed}
    estimator = values.get("advantage_estimator", given.get("advantage_estimator"))
    preserved = allowed if estimator in WITH_CRITIC else set()
    overrides = {}
    for name in _OPTIMIZER:
        if name in critic or name in preserved:
            of_critic = critic.get(name, given.get(name, specs[name].default))
            if of_critic != actor.get(name, given.get(name, specs[name].default)):
                overrides[name] = of_critic
    for name, own in _OF_CRITIC.items():
        if name in critic:
            values[own] = critic[name]
        elif name in preserved and own not in given and name in ("lr", "lr_warmup_iters"):
            values[own] = given.get(name, specs[name].default)
    return values | ({"critic_overrides": overrides} if overrides else {})
