"""Search-R1-style retrieval: the model queries a local index while it generates.

    python3 -m examples.search corpus.jsonl index.sqlite
    --custom-generate-function-path examples.search.generate --custom-config-path search.yaml

where search.yaml contains `custom: {search_index: index.sqlite}`. The model writes `<search>words</search>`, and the
best passages are appended between `<information>` and `</information>`; only the model's tokens are trained on. The
index is an SQLite FTS5 table, ranked by BM25.
"""

from __future__ import annotations

import asyncio
import json
import re
import sqlite3
import sys
from pathlib import Path
from typing import Any

from slimrl.arguments import Arguments
from slimrl.data.sample import Sample
from slimrl.engines.protocol import EngineClient
from slimrl.rollout.generation.multi_turn import multi_turn_generate

MAX_SEARCHES = 4
PASSAGES = 3
CALL = ("<search>", "</search>")
ANSWER = ("<information>", "</information>")


async def generate(
    args: Arguments,
    sample: Sample,
    sampling_params: dict[str, Any],
    *,
    engine: EngineClient | None = None,
    tokenizer: Any = None,
) -> Sample:
    """One sample in which the model may search up to `MAX_SEARCHES` times."""

    async def tool(text: str) -> str | None:
        return await asyncio.to_thread(answer, args.custom["search_index"], text)

    sample.session_id = sample.session_id or f"search-{sample.index}"
    return await multi_turn_generate(
        sample,
        sampling_params,
        engine=engine,
        tokenizer=tokenizer,
        tool=tool,
        stop=[CALL[1]],
        max_calls=MAX_SEARCHES,
    )


def answer(index: str | Path, text: str) -> str:
    """The text to append to `text`, which ends with `</search>`; without `<search>` nothing is found."""
    _, started, question = text.removesuffix(CALL[1]).rpartition(CALL[0])
    found = search(index, question) if started else []
    return f"{ANSWER[0]}{' '.join(found) or 'nothing found'}{ANSWER[1]}"


def search(index: str | Path, question: str, count: int = PASSAGES) -> list[str]:
    """The best matching passages, best first; any word of `question` may match."""
    words = re.findall(r"\w+", question)
    if not words:
        return []
    query = " OR ".join(f'"{word}"' for word in words)
    connection = sqlite3.connect(f"file:{index}?mode=ro", uri=True)
    try:
        rows = connection.execute(
            "SELECT text FROM passages WHERE passages MATCH ? ORDER BY bm25(passages) LIMIT ?", (query, count)
        )
        return [text for (text,) in rows]
    finally:
        connection.close()


def build(corpus: str | Path, index: str | Path) -> int:
    """Indexes the column `text` of a jsonl file; returns the number of passages. Raises FileExistsError."""
    if Path(index).exists():
        raise FileExistsError(f"{index} already exists: give another path for the index")
    connection = sqlite3.connect(index)
    with connection, open(corpus, encoding="utf-8") as lines:
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(text)")
        connection.executemany("INSERT INTO passages VALUES (?)", ((json.loads(line)["text"],) for line in lines))
    (count,) = connection.execute("SELECT count(*) FROM passages").fetchone()
    connection.close()
    return count


if __name__ == "__main__":
    print(f"{build(sys.argv[1], sys.argv[2])} passages in {sys.argv[2]}")
