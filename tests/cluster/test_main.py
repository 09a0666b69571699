"""What an entry point does before anything starts."""

from __future__ import annotations

import sys

from slimrl.arguments import Arguments
from slimrl.cluster import dry_run, main


def test_secrets_leave_the_command_before_anything_records_it(monkeypatch):
    words = ["train.py", "--rm-url", "http://me:s3cret@judge", "--router-oracle-password", "s3cret"]
    monkeypatch.setattr(sys, "argv", [*words, "--train-env-vars", '{"A": "s3cret"}'])
    monkeypatch.setattr(main, "parse_args", lambda words, **_: Arguments(dry_run=True))
    monkeypatch.setattr(main, "prepare_ray_environment", lambda: None)
    monkeypatch.setattr(dry_run, "dry_run", lambda args, entry: 7)
    shown = []
    monkeypatch.setattr(main, "show_as", shown.append)
    assert main.main("train.py", lambda run: None) == 7
    hidden = ["train.py", "--rm-url", "http://***@judge", "--router-oracle-password", "***", "--train-env-vars", "***"]
    assert shown == [hidden]
