"""`slimrl.cluster.command_line`: checks of flags before the run's files exist, and checks deferred to the run."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.cluster.command_line import check_flags, early_problems, passthrough

ROOT = Path(__file__).resolve().parents[2]
RUN = "/nowhere/runs/first"
FLAGS = [
    *("--num-layers", "2", "--hidden-size", "64", "--num-attention-heads", "4", "--vocab-size", "281", "--swiglu"),
    *("--hf-checkpoint", f"{RUN}/model", "--ref-load", f"{RUN}/torch_dist", "--prompt-data", f"{RUN}/train.jsonl"),
    *("--eval-prompt-data", "addition", f"{RUN}/eval.jsonl", "--eval-interval", "2", "--rm-type", "math"),
    *("--label-key", "label"),
    *("--rollout-batch-size", "8", "--n-samples-per-prompt", "8", "--rollout-max-response-len", "16"),
    *("--num-rollout", "2", "--actor-num-gpus-per-node", "2", "--colocate", "--use-dynamic-batch-size"),
    *("--max-tokens-per-gpu", "2048"),
]


def flags_of(*more: str, made_later: str | None = RUN) -> list[str]:
    """The flags with an error."""
    folder = None if made_later is None else Path(made_later)
    return [problem.flag for problem in early_problems([*FLAGS, *more], "train.py", folder, passthrough())]


def test_files_created_later_are_not_reported_missing():
    assert flags_of() == []
    assert flags_of(made_later=None) == ["--hf-checkpoint", "--prompt-data", "--eval-prompt-data", "--ref-load"]


def test_flags_values_rules_and_other_files_are_checked():
    assert flags_of("--num-rollot", "5") == ["--num-rollot"]
    assert flags_of("--lr", "fast") == ["--lr"]
    assert flags_of("--sglang-mem-fractoin-static", "0.5") == ["--sglang-mem-fractoin-static"]
    assert flags_of("--global-batch-size", "48") == ["--global-batch-size"]
    assert flags_of("--prompt-data", "/nowhere/else.jsonl") == ["--prompt-data"]


def test_checks_that_depend_on_a_missing_file_are_deferred():
    assert flags_of("--save", f"{RUN}/save", "--save-hf", f"{RUN}/save/hf_{{rollout_id}}") == []


def test_paths_on_another_machine_are_not_checked_but_flags_are():
    assert flags_of("--prompt-data", "/nowhere/else.jsonl", "--num-rollot", "5", made_later="/") == ["--num-rollot"]


def test_engine_flags_are_accepted_unchecked_without_the_engines():
    line = [*FLAGS, "--sglang-no-such-flag", "1", "--router-policy", "random", "--num-rollot", "5"]
    assert [problem.flag for problem in early_problems(line, "train.py", Path(RUN), {})] == ["--num-rollot"]


def test_errors_are_printed_once_with_exit_code_2(capsys, monkeypatch):
    def check(*flags: str) -> int:
        words = io.BytesIO(b"".join(flag.encode() + b"\0" for flag in flags))
        monkeypatch.setattr("sys.stdin", io.TextIOWrapper(words))
        return check_flags(["--entry", "train.py", "--made-later", RUN])

    assert check(*FLAGS) == 0
    assert capsys.readouterr() == ("", "")
    assert check(*FLAGS, "--num-rollot", "5") == 2
    shown = capsys.readouterr()
    assert shown.out == ""
    assert shown.err.splitlines() == [
        "train.py: 1 problem with the command line; nothing was started.",
        "  1. unknown flag --num-rollot: did you mean --num-rollout?",
    ]


def test_check_runs_without_any_package():
    """Runs before the environment exists: `-S` hides its packages."""
    command = [sys.executable, "-S", "-m", "slimrl.cluster.command_line", "--entry", "train.py", "--made-later", RUN]
    words = "\0".join([*FLAGS, "--sglang-mem-fraction-static", "0.5", "--num-rollot", "5", ""])
    done = subprocess.run(command, input=words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean --num-rollout?" in done.stderr
    assert done.stderr.count("\n") == 2


@pytest.mark.parametrize("entry", ["train.py", "train_async.py"])
def test_rules_match_the_entry_point(entry):
    found = early_problems([*FLAGS], entry, Path(RUN), {})
    assert [problem.flag for problem in found] == ([] if entry == "train.py" else ["--colocate"])
