"""What a single validation rule says of a command line; for rules whose lines are no whole recipe."""

from __future__ import annotations

from slimrl.arguments.derive import derive
from slimrl.arguments.namespace import Arguments, all_flag_specs
from slimrl.arguments.parser import parse_line
from slimrl.arguments.validation import MODEL_RULES, TRAINING_RULES, Context

RULES = {rule.__name__: rule for rule in MODEL_RULES + TRAINING_RULES}


def sentences(rule: str, line: str) -> list[str]:
    """The errors of the rule with this name for `line`, which the parser must accept."""
    parsed = parse_line(line.split(), all_flag_specs(), {})
    assert parsed.problems == []
    args = Arguments(**parsed.values)
    derive(args)
    return [str(problem) for problem in RULES[rule](args, Context("train.py", frozenset(parsed.values)))]
