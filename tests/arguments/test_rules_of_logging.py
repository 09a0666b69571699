"""Rules about metric writers, Prometheus and the timeline: valid flags pass, each violation is one error."""

from __future__ import annotations

import importlib.machinery
import socket

import pytest

from slimrl.arguments import read_args
from slimrl.engines.sglang.server_args import router_flags
from tests.megatron.launch import free_port


def sentences(recipe, more: str) -> list[str]:
    _, problems = read_args(recipe.line(more), passthrough={"router": router_flags})
    return [str(problem) for problem in problems]


@pytest.mark.parametrize(
    "flags",
    [
        "--use-tensorboard --tensorboard-dir charts --tb-project-name p --tb-experiment-name e",
        "--use-wandb --wandb-mode offline --wandb-key k --wandb-group g --wandb-run-id r --disable-wandb-random-suffix",
        "--use-tensorboard --wandb-always-use-train-step",
        "--timeline-requests 3",
        "--no-timeline",
        "--log-multi-turn --log-passrate --log-correct-samples --log-reward-category acc",
    ],
)
def test_valid_flag_combinations_are_accepted(recipe, flags):
    assert sentences(recipe, flags) == []


@pytest.mark.parametrize(
    ("flags", "sentence"),
    [
        (
            "--tensorboard-dir charts",
            "--tensorboard-dir charts belongs to --use-tensorboard: add it, or leave --tensorboard-dir out.",
        ),
        (
            "--wandb-project p",
            "--wandb-project p belongs to --use-wandb: add it, or leave --wandb-project out.",
        ),
        ("--wandb-key secret", "--wandb-key belongs to --use-wandb: add it, or leave --wandb-key out."),
        (
            "--prometheus-host 0.0.0.0",
            "--prometheus-host 0.0.0.0 belongs to --prometheus-port: add it, or leave --prometheus-host out.",
        ),
        (
            "--wandb-always-use-train-step",
            "--wandb-always-use-train-step belongs to --use-wandb or --use-tensorboard: add one of them, or leave it"
            " out.",
        ),
        (
            "--no-timeline --timeline-requests 3",
            "--timeline-requests 3 has no effect with --no-timeline: leave one of them out.",
        ),
        (
            "--prometheus-port 70000",
            "--prometheus-port 70000 is too large: it must be at most 65535.",
        ),
    ],
)
def test_flag_without_its_switch_is_rejected(recipe, flags, sentence):
    assert sentences(recipe, flags) == [sentence]


@pytest.mark.parametrize("found", [None, importlib.machinery.ModuleSpec("wandb", None)], ids=["absent", "a folder"])
def test_missing_wandb_package_is_rejected(recipe, monkeypatch, found):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: found)
    assert sentences(recipe, "--use-wandb") == [
        "--use-wandb needs the package wandb, which is not installed: pip install 'slimrl[wandb]', or leave it out."
    ]
    assert sentences(recipe, "--use-wandb --wandb-mode disabled") == []


def test_occupied_port_is_rejected_and_a_free_one_stays_free(recipe):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        assert sentences(recipe, f"--prometheus-port {port}") == [
            f"--prometheus-port {port} on 127.0.0.1 cannot be opened (Address already in use): give another port or"
            " --prometheus-host, or end the program that listens there."
        ]
    assert sentences(recipe, f"--prometheus-port {port}") == []
    socket.create_server(("127.0.0.1", port)).close()  # the check released it


def test_foreign_address_is_rejected(recipe):
    (sentence,) = sentences(recipe, "--prometheus-port 9400 --prometheus-host 192.0.2.1")
    assert sentence.startswith("--prometheus-port 9400 on 192.0.2.1 cannot be opened (")


def test_key_replaced_by_a_file_is_not_shown_in_notes(recipe, tmp_path):
    variables = '{"TOKEN": "t0psecret"}'
    (tmp_path / "flags.yaml").write_text(f"wandb_key: t0psecret\nlr: 2.0e-6\ntrain_env_vars: {variables}\n")
    line = recipe.line(f"--use-wandb --wandb-key s3cond --custom-config-path {tmp_path / 'flags.yaml'}")
    line += ["--train-env-vars", variables.replace("t0psecret", "s3cond")]
    args, problems = read_args(line)
    assert problems == [] and args.wandb_key == "t0psecret"
    assert sum("from --custom-config-path" in note for note in args.notes) == 3
    assert not any(key in note for note in args.notes for key in ("t0psecret", "s3cond"))


def test_port_used_twice_is_rejected(recipe):
    one, two, three = free_port(), free_port(), free_port()
    flags = "--prometheus-port {} --sglang-router-port {} --router-prometheus-port {}"
    assert sentences(recipe, flags.format(one, two, three)) == []
    ending = "give one of them another port."
    assert sentences(recipe, flags.format(one, two, one)) == [
        f"--router-prometheus-port {one} is also the port of --prometheus-port: {ending}"
    ]
    assert sentences(recipe, flags.format(one, one, one)) == [
        f"--sglang-router-port {one} is also the port of --prometheus-port: {ending}",
        f"--router-prometheus-port {one} is also the port of --prometheus-port: {ending}",
    ]
    # an external router may be on another machine
    assert sentences(recipe, f"--prometheus-port {one} --sglang-router-ip 10.0.0.1 --sglang-router-port {one}") == []
