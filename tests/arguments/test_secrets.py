"""A printed command line contains no keys, passwords or environment variables."""

import pytest

from slimrl.arguments.dry_run.plan import option_words
from slimrl.arguments.redact import is_secret, redact, redact_flag, without_secrets

KEY = "t0psecret"


@pytest.mark.parametrize(
    "flag",
    [
        "--wandb-key",
        "--train-env-vars",
        "--sglang-api-key",
        "--sglang-admin-api-key",
        "--sglang-ssl-keyfile-password",
        "--router-api-key",
        "--router-oracle-password",
        "--router-control-plane-api-keys",
    ],
)
def test_command_contains_no_value_of_a_secret_flag(flag):
    words = ["train.py", flag, KEY, KEY, "--lr", "1", f"{flag}={KEY}", KEY, "--use-wandb", "yes", flag, f"--{KEY}"]
    hidden = ["train.py", flag, "***", "***", "--lr", "1", f"{flag}=***", "***", "--use-wandb", "yes", flag, "***"]
    assert without_secrets(words) == hidden
    assert redact_flag(flag, KEY) == "***"


@pytest.mark.parametrize("flag", ["--wandb-key-of-mine", "--sglang-ssl-keyfile", "--router-tokenizer-path", "--lr"])
def test_other_flags_are_shown(flag):
    assert not is_secret(flag)
    assert without_secrets([flag, KEY, f"{flag}={KEY}"]) == [flag, KEY, f"{flag}={KEY}"]
    assert redact_flag(flag, KEY) == KEY


def test_url_is_shown_without_its_user():
    url = f"http://me:{KEY}@judge:80/score?by=a@b"
    assert without_secrets(["--rm-url", url, f"--rm-url={url}"]) == [
        "--rm-url",
        "http://***@judge:80/score?by=a@b",
        "--rm-url=http://***@judge:80/score?by=a@b",
    ]
    assert redact_flag("rm_url", url) == "http://***@judge:80/score?by=a@b"
    assert redact("http://judge/a@b") == "http://judge/a@b"


def test_nested_data_is_shown_without_secret_entries():
    data = {"a": [{"api_key": KEY, "b": 1}], "control_plane_api_keys": [KEY], "c": (f"x://{KEY}@h", None, 2.0)}
    assert redact(data) == {"a": [{"b": 1}], "c": ["x://***@h", None, 2.0]}


def test_key_within_json_is_hidden_in_reward_server_arguments():
    words = ["--rm-server-options", '{"mem_fraction_static": 0.8, "api_key": "' + KEY + '"}']
    assert without_secrets(words) == [words[0], '{"mem_fraction_static": 0.8, "api_key": "***"}']


def test_plan_shows_no_key_in_server_and_router_options():
    options = {"dtype": "auto", "api_key": KEY, "control_plane_api_keys": [KEY]}
    assert option_words(options) == ["--dtype auto", "--api-key ***", "--control-plane-api-keys ***"]
