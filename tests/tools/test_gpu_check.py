"""scripts/gpu_check.sh without a GPU: selection, the process of a check, table, file, options, Ctrl-C."""

from __future__ import annotations

import dataclasses
import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tools.gpu_check import machine
from tools.gpu_check.__main__ import main
from tools.gpu_check.machine import Gpu, Machine, Needs, shown_variables
from tools.gpu_check.record import Figure, Record, Skip, plain
from tools.gpu_check.report import Redaction, Report, Table, check_list, summary_line
from tools.gpu_check.runner import Outcome, judge, last_error, run_all, run_check
from tools.gpu_check.table import OWN_CHECKS, Check, all_checks, chosen, skip_reason, suite_checks

ROOT = Path(__file__).resolve().parents[2]
ONE_GPU = Machine(gpus=(Gpu("NVIDIA H100", 80 * 10**9, (9, 0)),), packages={"torch": "2.13.0", "ray": ""})


def check(name: str, function: str = "succeed", minutes: float = 1.0, **more: Any) -> Check:
    """A check that runs one of the functions below."""
    return Check(name, f"what {name} does", f"tests.tools.gpu_check_samples:{function}", minutes, Needs(0), **more)


# -- selection ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("needs", "reason"),
    [
        (Needs(1, ("torch", "ray")), None),
        (Needs(0, ()), None),
        (Needs(2, ("torch",)), "it needs 2 GPUs and torch sees 1"),
        (Needs(1, ("transformer_engine",)), "transformer-engine is not installed"),
        (Needs(2, ("sglang", "ray", "megatron.core")), "sglang and megatron-core are not installed"),
    ],
)
def test_missing_requirements_are_named(needs: Needs, reason: str | None):
    assert needs.missing(ONE_GPU) == reason


def test_check_is_skipped_when_it_lacks_a_requirement_or_time():
    two = dataclasses.replace(check("two", minutes=2.5), needs=Needs(2))
    assert skip_reason(check("one", minutes=2.5), ONE_GPU, 2.5) is None
    assert skip_reason(check("one", minutes=2.5), ONE_GPU, 1.04) == "1.0 minutes are left and it needs 2.5"
    assert skip_reason(two, ONE_GPU, 0) == "it needs 2 GPUs and torch sees 1"


def test_order_follows_the_table_regardless_of_the_arguments():
    checks = [check(name) for name in "abc"]
    assert [one.name for one in chosen(checks, ["c", "a"])] == ["a", "c"]
    assert chosen(checks, []) == checks
    with pytest.raises(KeyError, match="d"):
        chosen(checks, ["d"])


def test_names_are_unique_and_every_file_of_tests_gpu_is_a_check():
    names = [one.name for one in all_checks()]
    assert len(names) == len(set(names))
    files = {path.stem.removeprefix("test_") for path in (ROOT / "tests/gpu").glob("test_*.py")}
    assert {name.removeprefix("tests/") for name in names if name.startswith("tests/")} == files


def test_most_important_files_come_first_and_new_ones_by_name():
    found = suite_checks(["test_b.py", "test_memory.py", "test_layouts.py", "test_z.py", "test_colocation.py"])
    assert [one.name.removeprefix("tests/") for one in found] == ["colocation", "memory", "b", "z", "layouts"]


def test_default_time_covers_the_important_single_gpu_checks():
    last = [one.name for one in OWN_CHECKS].index("run-tiny")
    needed = [one.minutes for one in OWN_CHECKS[: last + 1] if one.needs.gpus < 2]
    assert sum(needed) <= 20


# -- the process of a check --------------------------------------------------------------------------------------------


def outcome_of(one: Check, left_s: float = 60.0) -> Outcome:
    outcome, interrupted = run_check(one, ONE_GPU, left_s, minutes=1)
    assert not interrupted
    return outcome


def test_passed_check_has_its_figures():
    outcome = outcome_of(check("good", arguments={"value": 3.5}))
    assert (outcome.status, outcome.because, outcome.log) == ("passed", None, [])
    assert outcome.figures == [{"name": "speed", "value": 3.5, "unit": "GB/s"}] and outcome.seconds > 0


def test_machine_check_receives_the_machine():
    outcome = outcome_of(check("machine", "describe", judges_machine=True))
    assert outcome.figures == [{"name": "GPU", "value": "NVIDIA H100"}]


@pytest.mark.parametrize(
    ("function", "status", "because"),
    [
        ("miss_a_bound", "failed", "error is 0.5 and may be 0.25 at most; something else is wrong"),
        ("leave_out", "skipped", "the GPU is too small"),
        ("raise_error", "failed", "RuntimeError: CUDA error: an illegal memory access was encountered"),
        ("kill_itself", "failed", "its process ended with exit code -9 (SIGKILL)"),
    ],
)
def test_end_of_a_check_is_reported_and_its_figures_are_kept(function: str, status: str, because: str):
    outcome = outcome_of(check("other", function))
    assert (outcome.status, outcome.because) == (status, because)
    assert [found["name"] for found in outcome.figures] == ["error"]
    assert bool(outcome.log) == (status == "failed" and function != "miss_a_bound" and function != "kill_itself")


@pytest.mark.slow
def test_hung_check_is_stopped_with_all_its_processes(tmp_path: Path):
    hangs = check("hangs", "hang", minutes=0.001, arguments={"folder": str(tmp_path)})
    hangs = dataclasses.replace(hangs, minutes=0.001)
    started = time.monotonic()
    outcome, _ = run_check(hangs, ONE_GPU, left_s=8.0, minutes=1)
    assert time.monotonic() - started < 40
    # the time of all checks was over, which is no failure of this one
    assert (outcome.status, outcome.because) == ("skipped", "the 1 minutes were over before it ended")
    assert outcome.figures == [{"name": "begun", "value": True}]
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists()


def test_exit_status_of_a_process_is_classified():
    good = {"done": True, "complaints": [], "skipped": None}
    assert judge(good, 0, [], None, "over") == ("passed", None)
    assert judge(good | {"done": False}, None, [], "it took longer than 4 minutes", "over") == (
        "failed",
        "it took longer than 4 minutes",
    )
    assert judge(good | {"done": False}, None, [], None, "over") == ("skipped", "over")
    assert judge({"complaints": ["wrong"]}, None, [], None, "over") == ("failed", "wrong")
    assert judge({}, 1, ["some", "last line", ""], None, "over") == ("failed", "last line")
    assert judge({}, -11, [], None, "over") == ("failed", "its process ended with exit code -11 (SIGSEGV)")
    assert judge({}, 0, ["said nothing"], None, "over") == ("failed", "said nothing")


def test_last_exception_of_a_log_is_the_reason():
    log = [
        "Traceback (most recent call last):",
        '  File "x"',
        "torch.AcceleratorError: CUDA error: unspecified",
        "hint",
    ]
    assert last_error(log) == "torch.AcceleratorError: CUDA error: unspecified"
    assert last_error(["[rank0]: ValueError: --lr is wrong", "[rank0]:[W1] destroy it"]) == "ValueError: --lr is wrong"
    assert last_error([]) is None


def test_checks_run_sequentially_and_a_failure_affects_no_other():
    outcomes: list[Outcome] = []
    checks = [check("a", "raise_error"), check("b"), check("c", minutes=9)]
    assert run_all(checks, ONE_GPU, 5, outcomes.append)
    assert [(one.name, one.status) for one in outcomes] == [("a", "failed"), ("b", "passed"), ("c", "skipped")]


# -- figures, table, file ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("figure", "text", "complaint"),
    [
        (Figure("speed", 12.345, "GB/s"), "speed 12.3 GB/s", None),
        (Figure("tokens", 40000), "tokens 40,000", None),
        (Figure("model", "qwen3-4B"), "model qwen3-4B", None),
        (Figure("right", True), "right yes", None),
        (Figure("error", 0.1, at_most=0.1), "error 0.1 (at most 0.1)", None),
        (Figure("error", 0.2, at_most=0.1), "error 0.2 (at most 0.1)", "error is 0.2 and may be 0.1 at most"),
        (Figure("x", 1.0, "GB", at_least=2), "x 1 GB (at least 2)", "x is 1 GB and must be 2 GB at least"),
        (Figure("loss", float("nan"), at_most=1), "loss nan (at most 1)", "loss is nan"),
        (Figure("loss", float("inf")), "loss inf", "loss is inf"),
    ],
)
def test_figure_is_shown_with_its_bound_and_a_violation_reported(figure: Figure, text: str, complaint: str | None):
    assert (figure.text(), figure.complaint()) == (text, complaint)
    assert json.loads(json.dumps(figure.as_json(), allow_nan=False))["name"] == figure.name


def test_small_numbers_keep_three_digits():
    assert [plain(value) for value in (0.000123456, 1e-9, 999.5, 1000.4, -12345.6, 7)] == [
        "0.000123", "1e-09", "1e+03", "1,000", "-12,346", "7"
    ]  # fmt: skip


def test_results_are_written_as_they_arrive():
    seen: list[dict] = []
    record = Record(seen.append)
    record.figure("first", 1)
    record.figure("second", 2, at_most=1)
    assert [(len(one["figures"]), one["done"]) for one in seen] == [(1, False), (2, False)]
    assert seen[-1]["complaints"] == ["second is 2 and may be 1 at most"]
    assert str(Skip("so")) == "so"


def test_table_has_a_row_per_outcome_and_fits_its_width():
    table = Table(["log-probs", "ipc"], width=80)
    speed = {"name": "speed", "value": 3.5, "unit": "GB/s"}
    rows = [
        Outcome("ipc", "passed", None, 1.0, [speed]),
        Outcome("log-probs", "skipped", "torch is not installed"),
        Outcome("ipc", "failed", "the first reason; " * 8, 1.0, [speed]),
    ]
    assert table.row(rows[0]) == "ipc        passed   speed 3.5 GB/s"
    assert table.row(rows[1]) == "log-probs  skipped  because torch is not installed"
    lines = table.row(rows[2]).splitlines()
    assert lines[0].startswith("ipc        failed   the first reason;") and max(map(len, lines)) <= 80
    assert lines[-1] == " " * 20 + "speed 3.5 GB/s"
    assert "..." in table.row(Outcome("ipc", "failed", "a very long line of a log " * 100))
    assert summary_line(rows, 90) == "1 passed, 1 failed, 1 skipped in 1.5 min"


def test_list_shows_requirements_and_duration_of_each_check():
    needs = Needs(2, ("torch", "transformers", "megatron.core", "sglang", "sglang_router", "ray"))
    listed = check_list([dataclasses.replace(check("one", minutes=2.5), needs=needs), check("two")], width=100)
    assert listed.splitlines() == [
        "one   2.5 min  what one does; needs 2 GPUs, megatron-core, sglang, ray",
        "two     1 min  what two does",
    ]


def test_output_contains_no_user_or_host():
    redact = Redaction(
        {
            "/home/alice": "<home>",
            "/home/alice/slimrl": "<slimrl>",
            "alice": "<user>",
            "node7": "<host>",
            "10.0.0.7": "<address>",
        }
    )
    content = {"log": ['File "/home/alice/slimrl/train.py"', "/home/alice/x alice@node7 (10.0.0.7:1)"], "seconds": 3}
    assert redact(content) == {
        "log": ['File "<slimrl>/train.py"', "<home>/x <user>@<host> (<address>:1)"],
        "seconds": 3,
    }
    assert redact("malice node77 10.0.0.77 cuda 110.0.0.7") == "malice node77 10.0.0.77 cuda 110.0.0.7"


def test_only_harmless_environment_variables_are_shown():
    given = {
        "NCCL_DEBUG": "INFO",
        "CUDA_VISIBLE_DEVICES": "0",
        "WANDB_API_KEY": "secret",
        "HOME": "/root",
        "HF_TOKEN": "x",
    }
    assert shown_variables(given) == {"CUDA_VISIBLE_DEVICES": "0", "NCCL_DEBUG": "INFO"}


def test_file_is_complete_after_every_outcome(tmp_path: Path):
    report = Report(tmp_path / "out.json", ONE_GPU, 20)
    report.save(finished=False)
    assert json.loads((tmp_path / "out.json").read_text())["checks"] == []
    report.add(Outcome("ipc", "failed", "why", 1.23, [{"name": "speed", "value": 1.0}], ["last line"]))
    content = json.loads((tmp_path / "out.json").read_text())
    assert content["format"] == "slimrl-gpu-check-1" and content["finished"] is False and content["minutes"] == 20
    assert content["tested_versions"]["megatron-core"] == machine.tested_versions()["megatron-core"] != ""
    assert content["checks"] == [
        {
            "name": "ipc",
            "status": "failed",
            "because": "why",
            "seconds": 1.2,
            "figures": [{"name": "speed", "value": 1.0}],
            "log": ["last line"],
        }
    ]
    assert [path.name for path in tmp_path.iterdir()] == ["out.json"]


# -- the program -------------------------------------------------------------------------------------------------------


def program(*options: str, **more: Any) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHON": sys.executable, "COLUMNS": "120"}
    command = ["bash", str(ROOT / "scripts/gpu_check.sh"), *options]
    return subprocess.run(command, capture_output=True, text=True, timeout=120, env=environment, **more)


def test_exit_code_on_a_gpu_machine_reports_failures(tmp_path: Path, capsys: Any):
    output = str(tmp_path / "out.json")
    assert main(["--output", output], ONE_GPU, [check("good"), check("left-out", "leave_out")]) == 0
    assert main(["--output", output, "--verbose"], ONE_GPU, [check("bad", "raise_error"), check("good")]) == 1
    shown = capsys.readouterr().out
    assert "bad    failed   RuntimeError: CUDA error" in shown and "    | Traceback" in shown
    assert shown.endswith(f"1 passed, 1 failed, 0 skipped in 0.0 min; details: {output}\n")
    content = json.loads(Path(output).read_text())
    assert content["finished"] and [one["status"] for one in content["checks"]] == ["failed", "passed"]


@pytest.mark.skipif(bool(machine.look().gpus), reason="this machine has a GPU")
def test_machine_without_a_gpu_lists_the_checks_and_exits_with_0(tmp_path: Path):
    done = program(cwd=tmp_path)
    assert (done.returncode, done.stderr) == (0, "")
    first, _, *listed = done.stdout.splitlines()
    assert first == (
        "This machine has no GPU (torch sees none, and nvidia-smi lists none): nothing is checked."
        " On a machine with GPUs it would do this, in this order:"
    )
    assert listed == program("--list").stdout.splitlines()
    assert list(tmp_path.iterdir()) == []


def test_torch_that_cannot_be_imported_is_named(capsys: Any):
    broken = Machine(packages={"torch": "2.13.0"}, facts={"torch": {"error": "OSError: libcudart.so.13"}})
    assert main([], broken, [check("one")]) == 0
    assert "torch cannot be imported: OSError: libcudart.so.13): nothing is checked." in capsys.readouterr().out


def test_program_needs_only_the_standard_library(tmp_path: Path):
    """Without site-packages there is no torch, and nothing fails."""
    command = [sys.executable, "-S", "-m", "tools.gpu_check", "--output", str(tmp_path / "out.json")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stderr) == (
        0,
        "",
    ) and "torch, which could see others, is not installed" in done.stdout


@pytest.mark.parametrize(
    ("options", "sentence"),
    [
        (["--minutes", "0"], "argument --minutes: 0 is not a number of minutes above 0"),
        (["--minutes", "soon"], "argument --minutes: soon is not a number of minutes above 0"),
        (["--only", "log-prob"], "slimrl: --only log-prob: there is no such check; did you mean log-probs?"),
        (["--only", "?"], "slimrl: --only ?: there is no such check; --list names them"),
        (["--output", "/nowhere/out.json"], "slimrl: --output /nowhere/out.json: there is no folder /nowhere"),
        (["--output", "/tmp"], "slimrl: --output /tmp: is a folder; name a file"),
        (["--hours", "1"], "unrecognized arguments: --hours 1"),
    ],
)
def test_invalid_options_exit_with_code_2(options: list[str], sentence: str):
    done = program(*options)
    assert done.returncode == 2 and sentence in done.stderr and done.stdout == ""


def test_program_prints_help_and_lists_single_checks():
    shown = program("--help").stdout
    for option in ("--minutes", "--output", "--only", "--list", "--verbose"):
        assert option in shown
    listed = program("--list", "--only", "ipc", "offload").stdout
    assert [line.split()[0] for line in listed.splitlines() if not line.startswith(" ")] == ["ipc", "offload"]


def test_missing_python_is_named():
    environment = os.environ | {"PYTHON": "/no/such/python"}
    done = subprocess.run(
        ["bash", str(ROOT / "scripts/gpu_check.sh")], capture_output=True, text=True, timeout=60, env=environment
    )
    assert done.returncode == 2 and done.stderr.startswith("slimrl: needs Python 3.11 or newer, and /no/such/python is")


INTERRUPTED = """
import sys
from tests.tools.test_gpu_check import ONE_GPU, check
from tools.gpu_check.__main__ import main
checks = [check("good"), check("hangs", "hang", arguments={"folder": sys.argv[1]}), check("after")]
sys.exit(main(["--output", sys.argv[1] + "/out.json"], ONE_GPU, checks))
"""


@pytest.mark.slow
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_leaves_a_valid_file_with_known_results_and_no_process(number: signal.Signals, tmp_path: Path):
    running = subprocess.Popen(
        [sys.executable, "-c", INTERRUPTED, str(tmp_path)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    deadline = time.monotonic() + 60
    while not (tmp_path / "pid").exists():
        assert running.poll() is None and time.monotonic() < deadline
        time.sleep(0.05)
    running.send_signal(number)
    output, errors = running.communicate(timeout=60)
    assert (running.returncode, errors) == (130, "")
    content = json.loads((tmp_path / "out.json").read_text())
    assert [(one["name"], one["status"], one["because"]) for one in content["checks"]] == [
        ("good", "passed", None),
        ("hangs", "skipped", "it was interrupted"),
        ("after", "skipped", "the check was interrupted before"),
    ]
    assert content["finished"] is False and content["checks"][1]["figures"] == [{"name": "begun", "value": True}]
    assert not Path(f"/proc/{(tmp_path / 'pid').read_text()}").exists()
    assert "1 passed, 0 failed, 2 skipped" in output
