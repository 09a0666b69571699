"""`slimrl.cluster.check_flags`: a run's flags before its files are made, and what is left to the run itself."""

import io
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.cluster.check_flags import early_problems, passthrough
from slimrl.cluster.check_flags import main as check_flags

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
    """The flags that something is said of."""
    folder = None if made_later is None else Path(made_later)
    return [problem.flag for problem in early_problems([*FLAGS, *more], "train.py", folder, passthrough())]


def test_files_that_are_made_later_are_not_missed():
    assert flags_of() == []
    assert flags_of(made_later=None) == ["--hf-checkpoint", "--prompt-data", "--eval-prompt-data", "--ref-load"]


def test_flags_values_rules_and_other_files_are_looked_at():
    assert flags_of("--num-rollot", "5") == ["--num-rollot"]
    assert flags_of("--lr", "fast") == ["--lr"]
    assert flags_of("--sglang-mem-fractoin-static", "0.5") == ["--sglang-mem-fractoin-static"]
    assert flags_of("--global-batch-size", "48") == ["--global-batch-size"]
    assert flags_of("--prompt-data", "/nowhere/else.jsonl") == ["--prompt-data"]


def test_what_is_said_of_one_flag_for_want_of_the_file_of_another_is_left_for_later():
    assert flags_of("--save", "/tmp/x", "--save-hf", "/tmp/x/hf_{rollout_id}") == []


def test_where_the_files_are_on_another_machine_no_path_is_looked_at_and_flags_are():
    assert flags_of("--prompt-data", "/nowhere/else.jsonl", "--num-rollot", "5", made_later="/") == ["--num-rollot"]


def test_without_the_engines_their_flags_are_taken_as_they_are():
    line = [*FLAGS, "--sglang-no-such-flag", "1", "--router-policy", "random", "--num-rollot", "5"]
    assert [problem.flag for problem in early_problems(line, "train.py", Path(RUN), {})] == ["--num-rollot"]


def test_the_problems_are_printed_once_with_exit_code_2(capsys, monkeypatch):
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


def test_a_python_without_any_package_can_check():
    """Before the environment is made: `-S` leaves out its packages."""
    command = [sys.executable, "-S", "-m", "slimrl.cluster.check_flags", "--entry", "train.py", "--made-later", RUN]
    words = "\0".join([*FLAGS, "--sglang-mem-fraction-static", "0.5", "--num-rollot", "5", ""])
    done = subprocess.run(command, input=words, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert done.returncode == 2 and "did you mean --num-rollout?" in done.stderr
    assert done.stderr.count("\n") == 2


@pytest.mark.parametrize("entry", ["train.py", "train_async.py"])
def test_the_rules_are_those_of_the_entry(entry):
    found = early_problems([*FLAGS], entry, Path(RUN), {})
    assert [problem.flag for problem in found] == ([] if entry == "train.py" else ["--colocate"])
