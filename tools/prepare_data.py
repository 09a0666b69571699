#!/usr/bin/env python3
"""Turn a published data set into the .jsonl files that the recipes read.

    python tools/prepare_data.py gsm8k --output-dir /root/gsm8k
    python tools/prepare_data.py MATH-lighteval --input /mnt/data/MATH-lighteval --output-dir /root/math
    python tools/prepare_data.py preference --input Anthropic/hh-rlhf --output-dir /root/hh
    python tools/prepare_data.py labelled-answers --input trl-lib/kto-mix-14k --output-dir /root/kto

Problems become rows with `prompt` (messages), `label` (the answer) and optional `metadata`; preferences become rows
with `prompt`, `chosen` and `rejected`. Labelled answers, for KTO, become rows with `prompt`, `completion` and `label`
(whether it is desirable); a set of preferences becomes two of them per pair. Prints how many rows were converted or
skipped. Exit code 0, or 2 with an error.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from slimrl.rollout.dataset_prep.layouts import INSTRUCTION
from slimrl.rollout.dataset_prep.prepare import PUBLIC_SETS, prepare

NAME = Path(__file__).name


def count(text: str) -> int:
    """A whole number of at least 0."""
    value = int(text)
    if value < 0:
        raise ValueError(text)
    return value


def parse(argv: list[str]) -> argparse.Namespace:
    """The flags of this tool."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument(
        "name",
        choices=PUBLIC_SETS,
        help="the data set; preference for any preference data set; labelled-answers for such a set or one for KTO",
    )
    parser.add_argument(
        *("--input", "--input_dir"),
        help="file, folder, or id on the Hugging Face hub (default: the published data set)",
    )
    parser.add_argument(*("--output-dir", "--local_dir"), type=Path, required=True, help="folder to write into")
    parser.add_argument(
        "--folders", nargs="+", default=[], metavar="FOLDER", help="read only these folders of the set (default: all)"
    )
    parser.add_argument(
        "--instruction",
        help=f'text appended to each problem, "" for none (default: "{INSTRUCTION}" if a problem has none)',
    )
    parser.add_argument("--input-key", default="prompt", help="column for the prompt (default: prompt)")
    parser.add_argument("--label-key", default="label", help="column for the answer, or its label (default: label)")
    parser.add_argument(
        "--max-bad-rows", type=count, default=0, help="bad rows of a file that may be skipped (default: 0)"
    )
    args = parser.parse_args(argv)
    if args.input is None and PUBLIC_SETS[args.name].hub_id is None:
        parser.error(f"--input is needed for {args.name}: give a file, a folder, or an id on the hub")
    if args.instruction is not None and PUBLIC_SETS[args.name].rows != "problems":
        parser.error(f"--instruction is appended to problems, and {args.name} has none: leave it out")
    return args


def main(argv: list[str]) -> int:
    """The exit code."""
    args = parse(argv)
    known = PUBLIC_SETS[args.name]
    try:
        accounts = prepare(
            known,
            args.input or known.hub_id or "",  # `parse` rejects the last
            args.output_dir,
            folders=args.folders,
            instruction=args.instruction,
            max_bad=args.max_bad_rows,
            keys={"prompt": args.input_key, "label": args.label_key},
        )
    except (OSError, ValueError) as error:
        print(f"{NAME}: {error}", file=sys.stderr)
        return 2
    for account in accounts:
        print(account)
        for bad in account.bad:
            print(f"  left out: {bad}", file=sys.stderr)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
