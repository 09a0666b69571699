"""docs/flags.md and docs/unsupported.md match the declarations of the flags."""

from __future__ import annotations

import dataclasses
import re
from pathlib import Path

import pytest

from slimrl.arguments.docs import CAPABILITIES, aiak, capability_of, chatlearn, markdown, unsupported
from slimrl.arguments.namespace import all_flag_specs

PAGE = Path(__file__).parents[2] / "docs" / "flags.md"


def test_flags_page_is_up_to_date():
    assert PAGE.read_text() == markdown(), "make it again: python -m slimrl.arguments.docs > docs/flags.md"


def test_flags_page_has_every_spelling():
    page = markdown()
    for spec in all_flag_specs():
        for name in spec.on + spec.off:
            assert f"`{name}`" in page


def test_unsupported_features_page_is_up_to_date():
    text = (PAGE.parent / "unsupported.md").read_text()
    assert text == unsupported(), "make it again: python -m slimrl.arguments.docs unsupported > docs/unsupported.md"


THEIRS = "examples/(fsdp|megatron)/"  # files of ChatLearn


@pytest.mark.parametrize(
    ("page", "made", "name"),
    [("coming-from-aiak-rlhf.md", aiak, "aiak"), ("coming-from-pai-chatlearn.md", chatlearn, "chatlearn")],
)
def test_pages_of_cloud_frameworks_are_up_to_date_and_link_files(page, made, name):
    text = (PAGE.parent / page).read_text()
    assert text == made(), f"make it again: python -m slimrl.arguments.docs {name} > docs/{page}"
    links = re.findall(r"\]\(([^)#]+)", text) + [
        f"../{path}" for path in re.findall(r"`((?:scripts|examples)/[\w./-]+)`", text)
    ]
    assert [link for link in links if not (PAGE.parent / link).exists() and not re.search(THEIRS, link)] == []


def test_each_unsupported_flag_has_one_capability_and_each_pattern_a_flag():
    flags = [spec for spec in all_flag_specs() if spec.not_served is not None]
    for spec in flags:
        assert [row.title for row in CAPABILITIES if row.has(spec)] == [capability_of(spec).title]
    for row in CAPABILITIES:
        for pattern in row.flags.split():
            assert any(dataclasses.replace(row, flags=pattern).has(spec) for spec in flags), f"{row.title}: {pattern}"


def test_readme_names_every_unsupported_capability():
    readme = re.sub(r"\s+", " ", (PAGE.parents[1] / "README.md").read_text().partition("## Unsupported")[2].lower())
    for row in CAPABILITIES:
        if row.in_readme:
            assert row.title.lower() in readme, f"README.md does not name: {row.title}"
