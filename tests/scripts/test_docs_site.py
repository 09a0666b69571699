"""The documentation site: it builds without a warning, has every page, and its links work."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from tools import docs_site

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted(path.stem for path in (ROOT / "docs").glob("*.md"))
TAGS = {
    *("a", "article", "aside", "br", "button", "circle", "code", "div", "em", "footer", "form", "h1", "h2", "h3", "h4"),
    *("hr", "img", "input", "label", "li", "link", "main", "nav", "ol", "p", "path", "pre", "script", "span", "strong"),
    *("style", "svg", "table", "tbody", "td", "th", "thead", "tr", "ul"),
}
REPOSITORY = "https://example.org/owner/name"


def script(*arguments: str, **variables: str) -> subprocess.CompletedProcess:
    """scripts/docs.sh in the environment of the tests, which has mkdocs."""
    options = {"capture_output": True, "text": True, "timeout": 120, "cwd": ROOT}
    environment = {**os.environ, "VENV": sys.prefix, **variables}
    return subprocess.run(["bash", "scripts/docs.sh", *arguments], env=environment, **options)


@pytest.fixture(scope="module")
def site(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    done = script("--output", str(folder), REPOSITORY_URL=REPOSITORY)
    assert done.returncode == 0, done.stderr
    assert f"done: {folder}/index.html" in done.stdout
    return folder


def text(site: Path, page: str) -> str:
    return (site / f"{page}.html").read_text()


def test_script_prints_help_and_rejects_an_invalid_option():
    assert "--serve" in script("--help").stdout
    refused = script("--sevre")
    assert (refused.returncode, refused.stderr) == (2, "slimrl: unknown option --sevre; see --help\n")


def test_every_page_is_in_the_navigation(site):
    # the start page has all of them: mkdocs writes the full navigation into each page
    navigation = re.search(r'<nav class="md-nav md-nav--primary.*?</nav>\s*</div>', text(site, "index"), re.DOTALL)[0]
    assert set(re.findall(r'href="([\w-]+)\.html"', navigation)) | {"index"} == set(PAGES)


def test_every_page_is_searchable(site):
    index = json.loads((site / "search/search_index.json").read_text())
    assert {entry["location"].partition(".html")[0] for entry in index["docs"]} == set(PAGES)


def test_nothing_is_loaded_from_another_host(site):
    for page in PAGES:
        loaded = re.findall(
            r'<(?:script|img|link rel="(?:stylesheet|preconnect)")[^>]*?(?:src|href)="(http[^"]*)', text(site, page)
        )
        assert loaded == [], f"{page} loads {loaded}"


def test_tables_and_lists_are_rendered(site):
    """mkdocs needs an empty line before a list or a table, GitHub does not."""
    for page in PAGES:
        plain = re.sub(r"<pre.*?</pre>|<code>.*?</code>", "", text(site, page), flags=re.DOTALL)
        assert not re.search(r"<p>[^<]*\n(?:- |\d+\. |\|)", plain), (
            f"{page} has a list or table without an empty line before it"
        )


def test_list_item_content_is_indented_by_four_spaces():
    """mkdocs ends a list before a paragraph that is indented by two or three, GitHub does not."""
    for page in PAGES:
        outside = re.sub(r"^ *```.*?^ *```", "", (ROOT / f"docs/{page}.md").read_text(), flags=re.MULTILINE | re.DOTALL)
        assert not re.search(r"\n\n {1,3}\S", outside), page


def test_placeholders_are_not_parsed_as_tags(site):
    """`<name>` in plain text would be parsed as a tag, and not be shown."""
    for page in PAGES:
        assert set(re.findall(r"<([a-z][\w-]*)", text(site, page).partition("<article")[2])) <= TAGS, page


def test_links_outside_docs_point_to_the_repository(site):
    assert f'href="{REPOSITORY}/blob/main/CONTRIBUTING.md"' in text(site, "architecture")


def test_broken_link_or_missing_section_fails_the_build(tmp_path):
    (tmp_path / "docs").mkdir()
    (tmp_path / "tools").mkdir()
    (tmp_path / "tools/docs_site.py").write_text((ROOT / "tools/docs_site.py").read_text())
    config = (ROOT / "mkdocs.yml").read_text().partition("\nnav:")[0]
    (tmp_path / "mkdocs.yml").write_text(config)
    (tmp_path / "docs/index.md").write_text("# A\n\n[b](b.md) [c](#missing) [d](../none.md)\n")
    command = [sys.executable, "-m", "mkdocs", "build", "--strict"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=120)
    assert done.returncode != 0
    for link in ("b.md", "#missing", "../none.md"):
        assert link in done.stderr


@pytest.mark.parametrize(
    ("markdown", "repository", "expected"),
    [
        ("see [this](../README.md#two).", "https://h/o/r", "see [this](https://h/o/r/blob/main/README.md#two)."),
        ("[a](../slimrl/hooks/)", "https://h/o/r", "[a](https://h/o/r/tree/main/slimrl/hooks)"),
        ("[`train.py`](../train.py), [b](data.md)", "", "`train.py`, [b](data.md)"),
        ("[gone](../gone.md)", "", "[gone](../gone.md)"),
        ("```\n[a](../README.md)\n```\n[a](../README.md)", "", "```\n[a](../README.md)\n```\na"),
    ],
)
def test_link_is_rewritten(markdown, repository, expected):
    assert docs_site.inside_only(markdown, ROOT, repository) == expected


@pytest.mark.parametrize(
    ("title", "anchor"),
    [
        ("Deterministic kernels: `--deterministic-mode`", "deterministic-kernels---deterministic-mode"),
        ("GPU or CPU", "gpu-or-cpu"),
        ("MoE & FSDP, C++", "moe--fsdp-c"),
    ],
)
def test_headings_have_the_github_anchors(title, anchor):
    assert docs_site.anchor(title, "-") == anchor
