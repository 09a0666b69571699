"""`python -m tools.gpu_check`, called by scripts/gpu_check.sh: options, table, exit code."""

from __future__ import annotations

import argparse
import difflib
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from tools.gpu_check.machine import Machine, look
from tools.gpu_check.report import Report, Table, check_list, summary_line
from tools.gpu_check.runner import Outcome, run_all
from tools.gpu_check.table import Check, all_checks, chosen

DONE, FAILED, WRONG_ARGUMENTS, INTERRUPTED = 0, 1, 2, 130
MINUTES = 20.0
DESCRIPTION = """Checks slimrl on this machine's GPUs, most valuable checks first.

Prints one table (check, result, figures) and writes the same with more detail as JSON. Checks whose GPUs or packages
are missing are skipped with a reason. Nothing is installed and nothing is downloaded. docs/gpu-check.md explains every
row. Exit code: 0 if nothing failed, 1 if a check failed, 2 for wrong options, 130 after Ctrl-C."""


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The options; exits with code 2 for a wrong one."""
    parser = argparse.ArgumentParser(
        prog="gpu_check.sh", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--minutes", type=positive, default=MINUTES, help=f"total time limit (default {MINUTES:g})")
    parser.add_argument("--output", type=Path, default=Path("gpu_check.json"), help="the file (default gpu_check.json)")
    parser.add_argument("--only", nargs="+", default=[], metavar="NAME", help="run only these checks, see --list")
    parser.add_argument("--list", action="store_true", help="list the checks and exit")
    parser.add_argument("--verbose", action="store_true", help="print the end of the log of a check that failed")
    return parser.parse_args(argv)


def positive(text: str) -> float:
    """A number above zero."""
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text} is not a number of minutes above 0")
    return value


def main(argv: Sequence[str], machine: Machine | None = None, checks: Sequence[Check] | None = None) -> int:
    """Runs the program; `machine` and `checks` default to this machine and the table."""
    options = parse(argv)
    known = all_checks() if checks is None else checks
    try:
        wanted = chosen(known, options.only)
    except KeyError as error:
        name = error.args[0]
        near = difflib.get_close_matches(name, [check.name for check in known], 1)
        hint = f"did you mean {near[0]}?" if near else "--list names them"
        print(f"slimrl: --only {name}: there is no such check; {hint}", file=sys.stderr)
        return WRONG_ARGUMENTS
    if options.list:
        print(check_list(wanted))
        return DONE
    if problem := unwritable(options.output):
        print(f"slimrl: --output {options.output}: {problem}", file=sys.stderr)
        return WRONG_ARGUMENTS
    before = signal.signal(signal.SIGTERM, lambda *_: signal.raise_signal(signal.SIGINT))
    try:
        machine = look() if machine is None else machine
        if not machine.has_gpu:
            print(no_gpu_line(machine) + " On a machine with GPUs it would do this, in this order:\n")
            print(check_list(wanted))
            return DONE
        return check_machine(wanted, machine, options)
    except KeyboardInterrupt:
        return INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, before)


def no_gpu_line(machine: Machine) -> str:
    """Why nothing is checked."""
    error = machine.facts.get("torch", {}).get("error")
    if "torch" not in machine.packages:
        why = "nvidia-smi lists none, and torch, which could see others, is not installed"
    elif error is not None:
        why = f"nvidia-smi lists none, and torch cannot be imported: {error}"
    else:
        why = "torch sees none, and nvidia-smi lists none"
    return f"This machine has no GPU ({why}): nothing is checked."


def unwritable(path: Path) -> str | None:
    """Why the file cannot be written, or None."""
    folder = path.resolve().parent
    if path.is_dir():
        return "is a folder; name a file"
    if not folder.is_dir():
        return f"there is no folder {folder}"
    return None if os.access(folder, os.W_OK) else f"the folder {folder} cannot be written to"


def check_machine(checks: Sequence[Check], machine: Machine, options: argparse.Namespace) -> int:
    """Runs the checks, prints their rows as they come and writes the file; the exit code."""
    report, table = Report(options.output, machine, options.minutes), Table([check.name for check in checks])
    terminal = sys.stdout.isatty()

    def started(check: Check) -> None:
        if terminal:
            print(f"{check.name} ... (about {check.minutes:g} min)", end="\r", flush=True)

    def tell(outcome: Outcome) -> None:
        if terminal:
            print("\r\033[K", end="")  # also erases the terminal's ^C
        print(table.row(outcome), flush=True)
        if options.verbose and outcome.log:
            print("\n".join(f"    | {line}" for line in outcome.log), flush=True)
        report.add(outcome)

    report.save(finished=False)
    print(table.head(), flush=True)
    finished = run_all(checks, machine, options.minutes, tell, started)
    report.save(finished=finished)
    print(f"\n{summary_line(report.outcomes, report.seconds)}; details: {options.output}")
    if not finished:
        return INTERRUPTED
    return FAILED if any(one.status == "failed" for one in report.outcomes) else DONE


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
