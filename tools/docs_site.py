"""mkdocs hooks of the documentation site, named in mkdocs.yml.

Pages of docs/ link to files outside docs/ (`../CONTRIBUTING.md`), which works on GitHub but not on a site.
`on_page_markdown` redirects such links to the repository of `repo_url`; without one it keeps only their text.
`on_config` gives headings the anchors that GitHub gives them.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

BRANCH = "main"
OUTSIDE = re.compile(r"(?<!!)\[([^\]\[]*)\]\(((?:\.\./)+)([^)#\s]*)(#[^)\s]*)?\)")
FENCE = re.compile(r"^( *(`{3,}|~{3,}).*?^ *\2`*~* *$)", re.MULTILINE | re.DOTALL)


def on_config(config: Any) -> Any:
    """Anchors of headings as on GitHub."""
    config["mdx_configs"].setdefault("toc", {})["slugify"] = anchor
    return config


def on_page_markdown(markdown: str, page: Any, config: Any, files: Any) -> str:
    """The text of a page with links that a site can follow; called by mkdocs for each page."""
    root = Path(config["docs_dir"]).parent
    return inside_only(markdown, root, config["repo_url"] or "")


def anchor(title: str, separator: str) -> str:
    """The anchor of a heading: lower case, without punctuation, and one `separator` for each space."""
    return re.sub(r"[^\w\- ]", "", title.strip().lower()).replace(" ", separator)


def inside_only(markdown: str, root: Path, repository: str) -> str:
    """`markdown` with links to files and folders of `root` outside docs/ pointing to `repository`, or removed.

    Code blocks are unchanged. A link to a missing file stays, and mkdocs reports it.
    """

    def outside(link: re.Match[str]) -> str:
        text, _, path, section = link.groups()
        target = root / path
        if not target.exists():
            return link[0]
        if not repository:
            return text
        kind = "tree" if target.is_dir() else "blob"
        return f"[{text}]({repository}/{kind}/{BRANCH}/{path.rstrip('/')}{section or ''})"

    parts = FENCE.split(markdown)
    # split with two groups: text, whole block, its fence, text, ...
    return "".join(OUTSIDE.sub(outside, part) if at % 3 == 0 else part * (at % 3 == 1) for at, part in enumerate(parts))
