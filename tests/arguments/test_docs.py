"""docs/flags.md is what the declarations say."""

from __future__ import annotations

from pathlib import Path

from slimrl.arguments.docs import markdown
from slimrl.arguments.namespace import all_flag_specs

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_the_flags_page_is_fresh():
    assert PAGE.read_text() == markdown(), "make it anew: python -m slimrl.arguments.docs > docs/flags.md"


def test_the_flags_page_has_every_spelling():
    page = markdown()
    for spec in all_flag_specs():
        for name in spec.on + spec.off:
            assert f"`{name}`" in page
