"""Search-style retrieval: the model asks a local index between its own words.

    python3 -m examples.search corpus.jsonl index.sqlite
    --custom-generate-function-path examples.search.generate --custom-config-path search.yaml

where search.yaml says `custom: {search_index: index.sqlite}`. The model writes `<search>words</search>` and reads the
best passages between `<information>` and `</information>`; it is trained on its own words only. The index is an FTS5
table of SQLite, ranked by BM25.
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
from slimrl.rollout.generation.multi_turn import converse

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
    return await converse(
        sample,
        sampling_params,
        engine=engine,
        tokenizer=tokenizer,
        tool=tool,
        stop=[CALL[1]],
        max_calls=MAX_SEARCHES,
    )


def answer(index: str | Path, text: str) -> str:
    """What to write behind `text`, which ends with the end of a call; nothing is found where it did not begin."""
    _, begun, question = text.removesuffix(CALL[1]).rpartition(CALL[0])
    found = search(index, question) if begun else []
    return f"{ANSWER[0]}{' '.join(found) or 'nothing found'}{ANSWER[1]}"


def search(index: str | Path, question: str, count: int = PASSAGES) -> list[str]:
    """The passages that match best, the best first; any of the words of `question` may match."""
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
    """Indexes the column `text` of a jsonl file; the number of passages. Raises FileExistsError."""
    if Path(index).exists():
        raise FileExistsError(f"{index} exists already: give another place for the index")
    connection = sqlite3.connect(index)
    with connection, open(corpus, encoding="utf-8") as lines:
        connection.execute("CREATE VIRTUAL TABLE passages USING fts5(text)")
        connection.executemany("INSERT INTO passages VALUES (?)", ((json.loads(line)["text"],) for line in lines))
    (count,) = connection.execute("SELECT count(*) FROM passages").fetchone()
    connection.close()
    return count


if __name__ == "__main__":
    print(f"{build(sys.argv[1], sys.argv[2])} passages in {sys.argv[2]}")
