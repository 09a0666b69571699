"""Reads the words of a command line and the YAML and JSON files that flags name; passthrough and removed flags.

Only exact spellings are flags. The last occurrence wins, and `--flag value` and `--flag=value` are the same. Every
unusable word is reported as a `Problem`, all in one pass; a guess at its meaning is never used as a value. Flags are
not compared with each other. `slimrl.arguments.parse` makes checked `Arguments` of the words and files.
`PassthroughFlag` is a flag of the installed engine or router (`--sglang-<x>`, `--vllm-<x>`, `--router-<x>`).
`RETIRED_FLAGS` are flags of existing scripts without a counterpart, each with the reason or the alternative.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from slimrl.arguments.flag import FlagSpec, Problem
from slimrl.arguments.foreign_flags import dotted_setting, other_word

SWITCH_ACTIONS = {"store_true": True, "store_false": False}


@dataclasses.dataclass(frozen=True)
class PassthroughFlag:
    """The declaration of one flag in the engine's own parser.

    `nargs`, `type`, `choices` and `action` ("store", "store_true" or "store_false") are those of argparse.
    `managed_by` names the slimrl flag or rule that sets this value; the flag itself is then rejected.
    """

    dest: str
    nargs: int | str | None = None
    type: Callable[[str], Any] | None = None
    choices: tuple[Any, ...] | None = None
    action: str = "store"
    managed_by: str | None = None

    def convert(self, text: str) -> Any:
        """`text` as a value. Raises ValueError with the half sentence that completes "<flag> <text> ..."."""
        try:
            value = text if self.type is None else self.type(text)
        except (ValueError, TypeError) as error:
            raise ValueError(f"is not a value that the engine accepts ({error})") from None
        if self.choices is not None and value not in self.choices:
            raise ValueError(f"is not one of {', '.join(map(str, self.choices))}")
        return value


# "sglang" -> a function that lists the engine's flags by their name without "--"
PassthroughTables = Mapping[str, Callable[[], dict[str, PassthroughFlag]]]


@dataclasses.dataclass(frozen=True)
class Spelling:
    """The flag of one spelling on the command line and, for a switch, the value that it sets."""

    target: FlagSpec | PassthroughFlag
    prefix: str | None  # "sglang", "vllm" or "router" for a flag that passes through
    switch_value: bool | None


def own_spellings(specs: list[FlagSpec]) -> dict[str, Spelling]:
    """Every spelling of slimrl's own flags."""
    table: dict[str, Spelling] = {}
    for spec in specs:
        table |= {name: Spelling(spec, None, True if spec.is_switch else None) for name in spec.on}
        table |= {name: Spelling(spec, None, False) for name in spec.off}
    return table


def passthrough_spellings(prefix: str, flags: dict[str, PassthroughFlag]) -> dict[str, Spelling]:
    """Every spelling of the flags that pass through under one prefix."""
    return {
        f"--{prefix}-{name}": Spelling(passed, prefix, SWITCH_ACTIONS.get(passed.action))
        for name, passed in flags.items()
    }


RETIRED_FLAGS: dict[str, str] = {
    "--http-proxy": "slime never read it; leave it out, downloads follow the variable http_proxy",
    "--log-probs-max-tokens-per-gpu": "slime never read it; use --max-tokens-per-gpu, which applies to both passes",
    "--min-batch-collection-ratio": "slime never read it; leave it out",
    "--rollout-buffer-url": "it belongs to an example's own service; use --rollout-function-path",
    "--fetch-trajectory-retry-times": "it belongs to an example's own service; use --rollout-function-path",
    "--rollout-task-type": "it belongs to an example's own service; use --rollout-function-path",
    "--megatron-deepgemm-forward-layers": "it needs patched engines; leave it out",
    "--megatron-deepgemm-forward-modules": "it needs patched engines; leave it out",
    "--megatron-deepgemm-moe-forward-layers": "it needs patched engines; leave it out",
    "--megatron-deepgemm-moe-forward-modules": "it needs patched engines; leave it out",
    "--recompute-loss-function": "log-probabilities are recomputed in chunks; use --log-probs-chunk-size",
    "--balance-by-flops": "micro-batches are already balanced by cost; use --balance-data",
    "--use-critic": "slime has no such flag, a critic comes with --advantage-estimator ppo; leave it out",
    "--recompute-activations": "use --recompute-granularity selective",
    "--checkpoint-activations": "use --recompute-granularity full with --recompute-method and --recompute-num-layers",
    "--train-iters": "use --num-rollout or --num-epoch",
    "--train-samples": "use --num-rollout or --num-epoch",
    "--megatron-to-hf-mode": "slimrl converts weights itself; leave it out, --ref-load reads Hugging Face folders",
    "--use-slime-router": "slimrl starts SGLang's own router; leave it out",
    "--trust-remote-code": "use --sglang-trust-remote-code, which also applies to the tokenizer",
    "--tokenizer-type": "the tokenizer is that of --hf-checkpoint; leave it out",
    "--tokenizer-model": "the tokenizer is that of --hf-checkpoint; leave it out",
    "--use-mcore-models": "every model is megatron-core's; leave it out",
    "--use-flash-attn": "use --attention-backend flash",
    "--no-load-optim-state": "use --no-load-optim",
    "--model-parallel-size": "use --tensor-model-parallel-size",
    "--use-dist-ckpt": "every checkpoint is torch_dist; leave it out",
    "--auto-detect-ckpt-format": "every checkpoint is torch_dist; leave it out",
    "--distributed-timeout-seconds-after-init": "use --distributed-timeout-minutes",
    "--tokens-per-micro-batch": "use --max-tokens-per-gpu with --use-dynamic-batch-size",
}


@dataclasses.dataclass
class ParsedLine:
    """Values by field name, the engines' options by prefix, the problems, and the fields with a problem.

    `guesses` are words that are not flags, each with the flag that it may have meant.
    """

    values: dict[str, Any] = dataclasses.field(default_factory=dict)
    options: dict[str, dict[str, Any]] = dataclasses.field(default_factory=dict)
    problems: list[Problem] = dataclasses.field(default_factory=list)
    broken: set[str] = dataclasses.field(default_factory=set)
    guesses: list[tuple[_Occurrence, Spelling]] = dataclasses.field(default_factory=list)

    def as_guessed(self) -> ParsedLine:
        """The line if each guess were right, with the problems of flags but not those of unknown words."""
        options = {prefix: dict(given) for prefix, given in self.options.items()}
        line = ParsedLine(dict(self.values), options, [], set(self.broken))
        for occurrence, spelling in self.guesses:
            _store(occurrence, spelling, line)
        return line


@dataclasses.dataclass(frozen=True)
class _Occurrence:
    """One flag as typed, with the words that follow it up to the next flag."""

    name: str
    words: list[str]


def parse_line(argv: Sequence[str], specs: list[FlagSpec], passthrough: PassthroughTables) -> ParsedLine:
    """Parse `argv` with slimrl's flags and, only if it has such a flag, the engines' flags."""
    parsed = ParsedLine(options={prefix: {} for prefix in passthrough})
    occurrences = _split(argv, parsed.problems)
    spellings = own_spellings(specs)
    for prefix, list_flags in passthrough.items():
        if any(item.name.startswith(f"--{prefix}-") and item.name not in spellings for item in occurrences):
            spellings = _passed_through(prefix, list_flags, parsed) | spellings
    for occurrence in occurrences:
        spelling = spellings.get(occurrence.name)
        if spelling is None:
            _refuse_unknown(occurrence, spellings, parsed)
        else:
            _store(occurrence, spelling, parsed)
    return parsed


def _passed_through(
    prefix: str, list_flags: Callable[[], dict[str, PassthroughFlag]], parsed: ParsedLine
) -> dict[str, Spelling]:
    try:
        return passthrough_spellings(prefix, list_flags())
    except ImportError as error:
        sentence = f"the --{prefix}-* flags cannot be checked, their package cannot be imported ({error}): install it."
        parsed.problems.append(Problem(f"--{prefix}-*", sentence))
        return {}


def _split(argv: Sequence[str], problems: list[Problem]) -> list[_Occurrence]:
    """Split the command line at the flags. Words before the first flag are problems."""
    occurrences: list[_Occurrence] = []
    for word in argv:
        if word.startswith("--") and len(word) > 2:
            name, equals, value = word.partition("=")
            occurrences.append(_Occurrence(name, [value] if equals else []))
        elif (setting := dotted_setting(word)) is not None:
            occurrences.append(_Occurrence(setting[0], [setting[1]]))
        elif occurrences:
            occurrences[-1].words.append(word)
        else:
            problems.append(Problem(word, f"{word!r} is before the first flag: write every value after its --flag."))
    return occurrences


def _refuse_unknown(occurrence: _Occurrence, spellings: dict[str, Spelling], parsed: ParsedLine) -> None:
    """Report an unknown flag with the nearest flag, and record the guess."""
    name = occurrence.name
    if name in RETIRED_FLAGS:
        parsed.problems.append(Problem(name, f"{name} has no effect in slimrl: {RETIRED_FLAGS[name]}."))
        return
    meant: str | None = _same_but_for_dashes(name, spellings)
    passes = {spelling.prefix for spelling in spellings.values()} & {name.removeprefix("--").partition("-")[0]}
    word = other_word(name) if meant is None and not passes else None
    if word is not None:
        meant, sentence = word.flag, word.sentence(name)
    else:
        meant = meant or nearest_flag(name, spellings)
        sentence = f"unknown flag {name}: " + (
            f"did you mean {meant}?" if meant else "see docs/flags.md for all flags."
        )
    parsed.problems.append(Problem(name, sentence))
    if meant in spellings:
        parsed.guesses.append((occurrence, spellings[meant]))


def nearest_flag(name: str, spellings: Iterable[str]) -> str | None:
    """The flag that `name` probably misspells; None if no flag is close enough."""
    near = difflib.get_close_matches(name, spellings, n=5, cutoff=0.7)
    return next((other for other in near if _misspells(name, other)), None)


def _same_but_for_dashes(name: str, spellings: Iterable[str]) -> str | None:
    plain = name.replace("_", "").replace("-", "")
    return next((other for other in spellings if other.replace("_", "").replace("-", "") == plain), None)


def _misspells(name: str, other: str) -> bool:
    """Whether every word of `name` is a word of `other`, misspelt or abbreviated; words may be joined or split."""
    given, known = name.strip("-").replace("_", "-").split("-"), other.strip("-").split("-")
    if difflib.SequenceMatcher(None, "".join(given), "".join(known)).ratio() >= 0.92:
        return True
    unknown = [word for word in given if word not in known]
    left = [word for word in known if word not in given]
    return all(
        any(known_word.startswith(word) and len(word) >= 3 for known_word in left)
        or difflib.get_close_matches(word, left, n=1, cutoff=0.7)
        for word in unknown
    )


def _store(occurrence: _Occurrence, spelling: Spelling, parsed: ParsedLine) -> None:
    target, name = spelling.target, occurrence.name
    into = parsed.values if spelling.prefix is None else parsed.options[spelling.prefix]
    if isinstance(target, PassthroughFlag) and target.managed_by is not None:
        parsed.problems.append(Problem(name, f"{name} is set by slimrl itself ({target.managed_by}): leave it out."))
    elif spelling.switch_value is not None:
        into[target.dest] = spelling.switch_value
        if occurrence.words:
            parsed.problems.append(_too_many(name, occurrence.words, "a switch that takes no value"))
    else:
        _store_value(occurrence, spelling, into, parsed)


def _store_value(occurrence: _Occurrence, spelling: Spelling, into: dict[str, Any], parsed: ParsedLine) -> None:
    target, name, words = spelling.target, occurrence.name, occurrence.words
    least, most, as_list = _arity(target)
    if len(words) < least:
        given = {0: "none is", 1: "only 1 is"}.get(len(words), f"only {len(words)} are")
        wants = "a value" if least == 1 else f"{least} values"
        parsed.problems.append(Problem(name, f"{name} needs {wants} and {given} given: write {name} <value>."))
        parsed.broken.add(target.dest)
        return
    if most is not None and len(words) > most:
        wants = "takes one value" if most == 1 else f"takes {most} values"
        parsed.problems.append(_too_many(name, words[most:], f"a flag that {wants}"))
    values = []
    for word in words[:most]:
        try:
            values.append(target.convert(word))
        except ValueError as error:
            parsed.problems.append(Problem(name, f"{name} {word or repr(word)} {error}."))
            parsed.broken.add(target.dest)
            return
    into[target.dest] = values if as_list else values[0] if values else None


def _arity(target: FlagSpec | PassthroughFlag) -> tuple[int, int | None, bool]:
    """Minimum and maximum number of values of a flag (None: no limit), and whether its value is a list."""
    if isinstance(target, FlagSpec):
        return (target.least, None, True) if target.many else (1, 1, False)
    if isinstance(target.nargs, int):
        return target.nargs, target.nargs, True
    return {None: (1, 1, False), "?": (0, 1, False), "*": (0, None, True), "+": (1, None, True)}[target.nargs]


def _too_many(name: str, words: Sequence[str], kind: str) -> Problem:
    extra = " ".join(words)
    return Problem(name, f"{name} is {kind}, so {extra!r} after it belongs to no flag: remove it or name its flag.")


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
