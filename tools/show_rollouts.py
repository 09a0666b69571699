#!/usr/bin/env python3
"""Render rollout dumps as one web page: search, sort by reward or length, read prompts and responses token by token.

    python tools/show_rollouts.py runs/x/rollout_7.jsonl [more dumps] --tokenizer model --output rollout_7.html

The page needs no server and no network. Dumps are written with --save-debug-rollout-data. Exit code 0, or 2 if a file
cannot be read or the page already exists.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slimrl.observability.rollout_dump import read_dump
from slimrl.observability.show import page


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("dumps", nargs="+", type=Path, help="files written with --save-debug-rollout-data")
    parser.add_argument("--output", type=Path, help="the page to write (the first dump's name, with .html)")
    parser.add_argument(
        "--tokenizer",
        type=Path,
        help="folder of the model (--hf-checkpoint): colours each token by its log-probability",
    )
    parser.add_argument("--trust-remote-code", action="store_true", help="run Python code from the tokenizer's folder")
    parser.add_argument("--reward-key", help="the entry to sort by if rewards are dicts (that of the run)")
    parser.add_argument("--force", action="store_true", help="replace an existing page")
    return parser.parse_args(argv)


def main(argv: list[str]) -> int:
    """Writes the page; returns the exit code."""
    options = parse(argv)
    output = options.output or options.dumps[0].with_suffix(".html")
    if output.exists() and not options.force:
        print(f"--output {output} already exists: choose another file, or add --force", file=sys.stderr)
        return 2
    try:
        dumps = [read_dump(path) for path in options.dumps]
        tokenizer = None
        if options.tokenizer is not None:
            from transformers import AutoTokenizer

            tokenizer = AutoTokenizer.from_pretrained(
                options.tokenizer, trust_remote_code=options.trust_remote_code, local_files_only=True
            )
        html = page(dumps, tokenizer, reward_key=options.reward_key)
        output.write_text(html, encoding="utf-8")
    except (OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return 2
    print(f"wrote {output}: {sum(len(dump.samples) for dump in dumps)} samples, {len(html) / 2**20:.1f} MiB")
    if tokenizer is None:
        print("without --tokenizer the responses have no colours")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
