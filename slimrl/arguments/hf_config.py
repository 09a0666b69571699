"""Compares the model flags with a Hugging Face config.json: a wrong shape or theta would train without an error.

One declarative table per model family, in its file of `slimrl.models.families`, maps keys to flags. Imports nothing
heavy. `stated_flags` returns the flags that a config.json implies.
"""

from __future__ import annotations

from itertools import groupby

from slimrl.arguments.flag import Problem
from slimrl.arguments.namespace import Arguments
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
