"""Groups of engines: the file of --sglang-config, and what follows from it for each engine.

The file is slime's:

    sglang:
      - name: actor                  # the policy: its servers get every weight update
        server_groups:
          - {worker_type: regular, num_gpus: 2, num_gpus_per_engine: 1}
          - {worker_type: regular, num_gpus: 4, num_gpus_per_engine: 2, overrides: {mem_fraction_static: 0.7}}
      - name: judge                  # a frozen model with a router of its own
        model_path: /models/judge
        update_weights: false
        server_groups:
          - {worker_type: regular, num_gpus: 1}

Groups take the rollout GPUs one after the other. `placeholder` groups leave their GPUs free. A model may have `prefill`
and `decode` groups instead of `regular` ones: every request is prefilled by a server of the former, which transfers the
KV cache to one of the latter. `overrides` are options of SGLang's server by its own names, over the --sglang-* flags.
Every problem of the file is reported at once. Without the file a run has one model, the policy, with one group of all
engines.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from slimrl.arguments.flag import Problem, ended
from slimrl.arguments.parser import PassthroughFlag, PassthroughTables, parse_line, read_yaml

if TYPE_CHECKING:
    from slimrl.arguments.namespace import Arguments

FLAG = "--sglang-config"
REGULAR, PREFILL, DECODE, PLACEHOLDER = "regular", "prefill", "decode", "placeholder"
WORKER_TYPES = (REGULAR, PREFILL, DECODE, PLACEHOLDER)
_NOT_SERVED = {  # with what to do instead
    "encoder": f"a model's own servers encode images; use {REGULAR}",
    "draft": "a draft model is in the policy's servers; give speculative_draft_model_path in overrides of their group",
}
POLICY_NAMES = ("default", "actor")  # slime's names of the policy, under which custom code asks for it
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]*")
_MODEL_KEYS = ("name", "model_path", "update_weights", "num_gpus_per_engine", "server_groups", "engine_groups")
_GROUP_KEYS = ("worker_type", "num_gpus", "num_gpus_per_engine", "overrides")


@dataclasses.dataclass(frozen=True)
class ServerGroup:
    """Servers of one kind, each on `num_gpus_per_engine` of the group's `num_gpus` GPUs.

    `overrides` are options of the server by SGLang's names; they replace those of the --sglang-* flags.
    """

    worker_type: str
    num_gpus: int
    num_gpus_per_engine: int
    overrides: Mapping[str, Any] = dataclasses.field(default_factory=dict)

    @property
    def servers(self) -> int:
        """The number of servers; a placeholder has none."""
        return 0 if self.worker_type == PLACEHOLDER else self.num_gpus // self.num_gpus_per_engine


@dataclasses.dataclass(frozen=True)
class ServerModel:
    """One served model. `model_path` None is --hf-checkpoint; `update_weights`: it is the policy, else frozen."""

    name: str
    model_path: str | None
    update_weights: bool
    groups: tuple[ServerGroup, ...]

    @property
    def num_gpus(self) -> int:
        """The GPUs of all groups."""
        return sum(group.num_gpus for group in self.groups)

    @property
    def disaggregated(self) -> bool:
        """Whether some of its servers prefill and the others decode."""
        return any(group.worker_type in (PREFILL, DECODE) for group in self.groups)


def read_server_models(
    path: str, *, hf_checkpoint: str | None, per_engine: int, passthrough: PassthroughTables
) -> tuple[tuple[ServerModel, ...], list[Problem]]:
    """The models of the file, and its problems; models with a problem are left out.

    `per_engine` is --rollout-num-gpus-per-engine, for groups that give no size. Without SGLang's table in `passthrough`
    the names and values of overrides are not checked.
    """
    reader = _Reader(hf_checkpoint, per_engine, passthrough)
    try:
        models = reader.models(read_yaml(Path(path)))
    except (OSError, ValueError) as error:
        reader.complaints, models = [str(error)], []
    return tuple(models), [Problem(FLAG, ended(f"{FLAG} {path}: {complaint}")) for complaint in reader.complaints]


class _Reader:
    """Reads the content of one file and collects its complaints."""

    def __init__(self, hf_checkpoint: str | None, per_engine: int, passthrough: PassthroughTables) -> None:
        self.complaints: list[str] = []
        self._hf_checkpoint, self._per_engine, self._passthrough = hf_checkpoint, per_engine, passthrough

    def models(self, root: Any) -> list[ServerModel]:
        entries = root.get("sglang") if isinstance(root, dict) else None
        if not isinstance(entries, list) or not entries:
            raise ValueError("the file must hold the key sglang with a list of models")
        self._known_keys("the file", root, ("sglang",))
        found = [self._model(number, entry) for number, entry in enumerate(entries)]
        names = [entry["name"] for entry in entries if isinstance(entry, dict) and isinstance(entry.get("name"), str)]
        for name in sorted({name for name in names if names.count(name) > 1}):
            self.complaints.append(f"model {name} is given twice: join its server_groups, or rename one")
        return [model for model in found if model is not None]

    def _model(self, number: int, entry: Any) -> ServerModel | None:
        before = len(self.complaints)
        if not isinstance(entry, dict) or not isinstance(entry.get("name"), str):
            self.complaints.append(f"model {number} must be a mapping with name and server_groups")
            return None
        where = f"model {entry['name']}"
        self._known_keys(where, entry, _MODEL_KEYS)
        if _NAME.fullmatch(entry["name"]) is None:
            self.complaints.append(f"{where}: name logs with letters, digits, '.', '_' and '-' only: rename it")
        if {"server_groups", "engine_groups"} <= entry.keys():
            self.complaints.append(f"{where} has server_groups and their old name engine_groups: keep one of them")
        updated, model_path = entry.get("update_weights"), entry.get("model_path")
        if updated is not None and not isinstance(updated, bool):
            self.complaints.append(f"{where} has update_weights {updated!r}: give true or false")
        if model_path is not None and not isinstance(model_path, str):
            self.complaints.append(f"{where} has model_path {model_path!r}: give a folder")
        size = self._count(where, entry, "num_gpus_per_engine", self._per_engine)
        given = entry.get("server_groups", entry.get("engine_groups"))
        if not isinstance(given, list) or not given:
            self.complaints.append(f"{where} has no server_groups: list at least one, with worker_type and num_gpus")
            return None
        paths = {model_path} if isinstance(model_path, str) else set()
        groups = [
            self._group(f"{where}, group {index}", group, size, model_path, paths) for index, group in enumerate(given)
        ]
        if len(paths) > 1:
            self.complaints.append(f"{where} has several model_path: {', '.join(sorted(paths))}: give one")
        model_path = next(iter(sorted(paths)), None)
        self._roles(where, [group.worker_type for group in groups if group is not None])
        if len(self.complaints) > before:
            return None
        if updated is None:
            updated = model_path is None or _same_folder(model_path, self._hf_checkpoint)
        return ServerModel(entry["name"], model_path, updated, tuple(group for group in groups if group is not None))

    def _roles(self, where: str, given: list[str]) -> None:
        roles = set(given) - {PLACEHOLDER}
        if not roles & {PREFILL, DECODE}:
            return
        if REGULAR in roles:
            self.complaints.append(
                f"{where} has {REGULAR} groups beside {' and '.join(sorted(roles - {REGULAR}))} groups, and its router"
                f" sends every request to a {PREFILL} and a {DECODE} server: make all of them {PREFILL} or {DECODE}"
            )
        for role, other in ((PREFILL, DECODE), (DECODE, PREFILL)):
            if role not in roles:
                self.complaints.append(f"{where} has {other} groups and no {role} group: add one")

    def _group(self, where: str, entry: Any, size: int, model_path: str | None, paths: set[str]) -> ServerGroup | None:
        if not isinstance(entry, dict):
            self.complaints.append(f"{where} must be a mapping with worker_type and num_gpus")
            return None
        self._known_keys(where, entry, _GROUP_KEYS)
        worker_type = entry.get("worker_type", REGULAR)
        if worker_type in _NOT_SERVED:
            self.complaints.append(
                f"{where} has worker_type {worker_type}, which is unsupported: {_NOT_SERVED[worker_type]}"
            )
        elif worker_type not in WORKER_TYPES:
            self.complaints.append(
                f"{where} has worker_type {worker_type!r}, which is not one of {', '.join(WORKER_TYPES)}: choose one"
            )
        if "num_gpus" not in entry:
            self.complaints.append(f"{where} has no num_gpus: give the number of its GPUs")
        gpus, own = self._count(where, entry, "num_gpus", size), self._count(where, entry, "num_gpus_per_engine", size)
        if gpus % own and worker_type != PLACEHOLDER:
            self.complaints.append(f"{where} has num_gpus {gpus}, no multiple of num_gpus_per_engine {own}: choose one")
        overrides = entry.get("overrides") or {}
        if not isinstance(overrides, dict):
            self.complaints.append(f"{where} has overrides {overrides!r}: give a mapping of SGLang's options")
            return None
        return ServerGroup(worker_type, gpus, own, self._overrides(where, overrides, own, model_path, paths))

    def _overrides(
        self, where: str, given: Mapping[Any, Any], size: int, model_path: str | None, paths: set[str]
    ) -> dict[str, Any]:
        """The options as the command line would have read them; a repeated model_path or size is taken out."""
        plain = {str(key).removeprefix("--").replace("-", "_"): value for key, value in given.items()}
        if isinstance(own := plain.pop("model_path", None), str):
            paths.add(own)
        stages = plain.get("pp_size", 1)
        tensor_parallel = plain.pop("tp_size", plain.pop("tensor_parallel_size", None))
        if tensor_parallel is not None and isinstance(stages, int) and tensor_parallel * stages != size:
            self.complaints.append(
                f"{where} has tp_size {tensor_parallel} x pp_size {stages} in its overrides and num_gpus_per_engine"
                f" {size}: leave tp_size out, it follows from num_gpus_per_engine"
            )
        if "sglang" not in self._passthrough:
            return plain
        on, off = _words(plain, self._passthrough["sglang"]())
        for name in (name for name, value in plain.items() if value is None or isinstance(value, dict)):
            if plain[name] is None:
                self.complaints.append(f"{where}: {name} in its overrides is null: give a value, or leave it out")
        if "api_key" in plain:
            self.complaints.append(
                f"{where}: api_key in its overrides is another key than that of the other servers, and the run has one:"
                " leave it out, or give --sglang-api-key"
            )
        options: dict[str, Any] = {}
        for words, is_on in ((on, True), (off, False)):
            if not words:
                continue
            read = parse_line(words, [], {"sglang": self._passthrough["sglang"]})
            options |= {name: value if is_on else not value for name, value in read.options["sglang"].items()}
            self.complaints += [f"{where}, overrides: {one.sentence.removesuffix('.')}" for one in read.problems]
        return options

    def _count(self, where: str, entry: Mapping[str, Any], key: str, default: int) -> int:
        value = entry.get(key)
        if value is None:
            return default
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            self.complaints.append(f"{where} has {key} {value!r}: give a count of at least 1")
            return default
        return value

    def _known_keys(self, where: str, entry: Mapping[Any, Any], known: tuple[str, ...]) -> None:
        for key in sorted(set(entry) - set(known), key=str):
            nearest = difflib.get_close_matches(str(key), known, n=1)
            fix = f"did you mean {nearest[0]}?" if nearest else f"known: {', '.join(known)}"
            self.complaints.append(f"{where} has an unknown key {key!r}: {fix}")


def _words(options: Mapping[str, Any], flags: Mapping[str, PassthroughFlag]) -> tuple[list[str], list[str]]:
    """Words of a command line for the options that are on, and for the switches that are off.

    `flags` are the server's. An option may have the name of its flag or of the field that the flag sets.
    """
    fields = {flag.dest: name for name, flag in flags.items() if flag.dest.replace("_", "-") not in flags}
    on: list[str] = []
    off: list[str] = []
    for name, value in options.items():
        named = fields.get(name, name.replace("_", "-"))
        word = f"--sglang-{named}"
        if isinstance(value, bool):
            sets_false = named in flags and flags[named].action == "store_false"
            (on if value is not sets_false else off).append(word)
        elif value is not None:
            items = value if isinstance(value, list) else [value]
            on += [word, *(json.dumps(item) if isinstance(item, dict) else str(item) for item in items)]
    return on, off


def _same_folder(path: str, other: str | None) -> bool:
    return other is not None and Path(path).absolute().resolve() == Path(other).absolute().resolve()


def resolve_server_models(args: Arguments, passthrough: PassthroughTables) -> list[Problem]:
    """Set `args.server_models` from --sglang-config or --prefill-num-servers; returns the problems of the file."""
    size = args.rollout_num_gpus_per_engine
    if args.sglang_config is not None:
        args.server_models, problems = read_server_models(
            args.sglang_config, hf_checkpoint=args.hf_checkpoint, per_engine=size, passthrough=passthrough
        )
        frozen = (model for model in args.server_models if not model.update_weights)
        paths = {model.name: model.model_path or args.hf_checkpoint for model in frozen}
        words = args.opd_teacher_models  # a teacher that is a frozen model of the file is its name alone
        args.opd_teacher_models = words and [f"{one}={paths[one]}" if one in paths else one for one in words]
        return problems
    if args.prefill_num_servers and args.rollout_num_gpus:
        prefill = args.prefill_num_servers * size
        groups = (ServerGroup(PREFILL, prefill, size), ServerGroup(DECODE, args.rollout_num_gpus - prefill, size))
        if prefill < args.rollout_num_gpus:  # else a rule says so
            args.server_models = (ServerModel(POLICY_NAMES[0], None, True, groups),)
    return []


PREFILL_FLAG = "--prefill-num-servers"


def flag_of_groups(args: Arguments) -> tuple[str, str]:
    """The flag that makes the groups, and its value."""
    if args.sglang_config is not None:
        return FLAG, args.sglang_config
    return PREFILL_FLAG, str(args.prefill_num_servers)


def served_by_engines(args: Arguments) -> tuple[ServerModel, ...]:
    """The models of the run's engines, the policy's among them; none without engines that the run starts."""
    if args.debug_train_only or not args.rollout_gpus:
        return ()
    group = ServerGroup(REGULAR, args.rollout_gpus, args.rollout_num_gpus_per_engine)
    return args.server_models or (ServerModel(POLICY_NAMES[0], None, True, (group,)),)


def policy_options(args: Arguments, name: str) -> list[Any]:
    """The option `name` of SGLang's server in each group of the policy that has it."""
    if not args.server_models:
        return [args.sglang_options[name]] if name in args.sglang_options else []
    own = [{**args.sglang_options, **group.overrides} for group in policy_groups(args)]
    return [options[name] for options in own if name in options]


def policy_groups(args: Arguments) -> list[ServerGroup]:
    """The groups that get the weight updates, without placeholders."""
    return [
        group for model in served_by_engines(args) if model.update_weights for group in model.groups if group.servers
    ]


DRAFT_ALGORITHM, DRAFT_PATH = "speculative_algorithm", "speculative_draft_model_path"


def draft_folder(options: Mapping[str, Any]) -> str | None:
    """The folder of the draft model in servers with these options, which gets no weight updates; None without one."""
    return options.get(DRAFT_PATH) if options.get(DRAFT_ALGORITHM) is not None else None


TRANSFER_OPTION, DEFAULT_TRANSFER = "disaggregation_transfer_backend", "mooncake"


def kv_transfers(args: Arguments) -> list[str]:
    """What moves KV caches from prefill to decode servers, by SGLang's names; empty without such servers."""
    given = [
        {**args.sglang_options, **group.overrides}
        for model in served_by_engines(args)
        if model.disaggregated
        for group in model.groups
        if group.servers
    ]
    return sorted({str(options.get(TRANSFER_OPTION, DEFAULT_TRANSFER)) for options in given})


@dataclasses.dataclass(frozen=True)
class EnginePlace:
    """One engine: its model, the number of its group there, and its GPUs."""

    model: ServerModel
    group_index: int
    gpus: range

    @property
    def group(self) -> ServerGroup:
        """Its group."""
        return self.model.groups[self.group_index]


def engine_places(args: Arguments, first: int) -> list[EnginePlace]:
    """Every engine, in the order of the file; the first GPU is number `first`."""
    return list(_places(args, first))


def policy_places(args: Arguments, first: int) -> list[EnginePlace]:
    """The engines that get the weight updates."""
    return [place for place in engine_places(args, first) if place.model.update_weights]


def frozen_places(args: Arguments, first: int) -> list[EnginePlace]:
    """The engines of the frozen models."""
    return [place for place in engine_places(args, first) if not place.model.update_weights]


def _places(args: Arguments, first: int) -> Iterator[EnginePlace]:
    for model in served_by_engines(args):
        for number, group in enumerate(model.groups):
            size = group.num_gpus_per_engine
            for index in range(group.servers):
                yield EnginePlace(model, number, range(first + index * size, first + (index + 1) * size))
            first += group.num_gpus


def group_flags(args: Arguments, model: ServerModel, group: ServerGroup) -> Arguments:
    """The flags as they apply to the engines of one group: model, GPUs, size, and SGLang's options."""
    if not args.server_models:
        return args
    return dataclasses.replace(
        args,
        server_models=(),
        sglang_config=None,
        prefill_num_servers=None,
        hf_checkpoint=args.hf_checkpoint if model.model_path is None else str(Path(model.model_path)),
        rollout_num_gpus=group.num_gpus,
        rollout_num_gpus_per_engine=group.num_gpus_per_engine,
        sglang_options={**args.sglang_options, **group.overrides},
    )
