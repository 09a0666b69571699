"""Which weights drew which tokens: `[version, number of tokens]` pairs over a response, oldest first.

Promises that neighbours differ and that no span is empty. Lists, so that they are the same after a way through JSON.
Built by generation, read by the bound on staleness and by whoever shows a sample.
"""

from __future__ import annotations

Span = list[str | int]

NO_VERSION = ""  # tokens that no model drew (the words of a tool), or of which nobody said who did


def add(spans: list[Span], version: str, count: int) -> None:
    """Appends `count` tokens of `version`, in place."""
    if count <= 0:
        return
    if spans and spans[-1][0] == version:
        spans[-1][1] += count
    else:
        spans.append([version, count])


def fitted(spans: list[Span], length: int) -> list[Span]:
    """The spans over a response of `length` tokens, whose end was cut off, or to which somebody added tokens."""
    made: list[Span] = []
    left = length
    for version, count in spans:
        add(made, version, min(count, left))
        left -= min(count, left)
    add(made, NO_VERSION, left)
    return made


def shown(spans: list[Span]) -> str:
    """ "3: 120 tokens, 4: 17 tokens"."""
    return ", ".join(f"{version or 'none'}: {count} token{'s' * (count != 1)}" for version, count in spans)
