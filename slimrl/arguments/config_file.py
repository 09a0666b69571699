"""Reads the YAML and JSON files that flags name, above all --custom-config-path: a mapping of flags.

A key of --custom-config-path is a flag with or without its dashes ("lr", "rollout_batch_size",
"--sglang-mem-fraction-static", "disable_rewards_normalization") or the attribute that it sets
("rewards_normalization"). Values are checked like those of the command line and override them. Settings for custom
functions go under `custom` and reach them as `args.custom`. Any other key is a problem.

--megatron-config-path has flags of one role, policy or critic: `read_roles` maps them to slimrl's flags of that role.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from slimrl.arguments.flag import FlagSpec, Problem, ended, flag_specs
from slimrl.arguments.flags.algorithm import WITH_CRITIC, AlgorithmArguments
from slimrl.arguments.foreign_flags import other_word
from slimrl.arguments.parser import ParsedLine, PassthroughTables, nearest_flag, parse_line


def read_yaml(path: Path) -> Any:
    """The file's content.

    Raises OSError if it cannot be read and ValueError if it is not YAML (or JSON), or a mapping has a key twice.
    """
    if not path.is_file():
        raise FileNotFoundError(
            "is not a file: check the path" if path.exists() else "the file does not exist: check the path"
        )
    text = path.read_text(encoding="utf-8")
    if path.suffix == ".json":
        return json.loads(text, object_pairs_hook=_mapping_of_pairs)
    import yaml  # only where such a file is given: everything else here needs the standard library alone

    try:
        for node in _mappings(yaml.compose(text, Loader=yaml.SafeLoader)):
            _check_keys(key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode))
        return yaml.safe_load(text)
    except yaml.YAMLError as error:
        raise ValueError(f"the file is not YAML ({' '.join(str(error).split())})") from error


def _mapping_of_pairs(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    _check_keys(key for key, _ in pairs)
    return dict(pairs)


def _mappings(root: Any) -> Iterable[Any]:
    """Every mapping node of a composed YAML document; the parser's own reading keeps the last of equal keys."""
    pending, seen = [root], set()
    while pending:
        node = pending.pop()
        if node is None or id(node) in seen or isinstance(node.value, str):
            continue
        seen.add(id(node))  # an alias is the node itself
        if isinstance(node.value, list) and node.value and isinstance(node.value[0], tuple):
            yield node
            pending += [value for _, value in node.value]
        else:
            pending += node.value


def _check_keys(keys: Iterable[str]) -> None:
    twice = [key for key, count in Counter(keys).items() if count > 1]
    if twice:
        raise ValueError(f"{', '.join(twice)} is given twice: keep one of them")


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
