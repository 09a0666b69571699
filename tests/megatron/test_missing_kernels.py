"""The warning on a GPU without Transformer Engine names what is slower and how to fix it."""

from __future__ import annotations

import logging

import pytest
import torch

from slimrl.megatron.patches import slower_on_gpu, warn
from tests.megatron import tiny

PLAIN = tiny.tiny_args()
EXPERTS = tiny.tiny_args(**tiny.MOE_FLAGS)
LOCAL = tiny.tiny_args(transformer_impl="local")
ABSENT = "Transformer Engine or its binding (transformer-engine-torch) is not installed"
START = "GPU training runs in slower kernels, because "
LAYERS = "attention, norms and rotary positions run in separate kernels"
ADAM = "AdamW is torch's own, in several kernels"


@pytest.mark.parametrize(
    ("args", "packages", "sentence"),
    [
        (
            PLAIN,
            (),
            f"{START}{ABSENT}: {LAYERS}, {ADAM}; install it as docs/install.md says",
        ),
        (
            EXPERTS,
            ("apex",),
            f"{START}{ABSENT}: {LAYERS}, the experts of a rank run one after another;"
            " install it as docs/install.md says",
        ),
        (LOCAL, ("transformer_engine",), f"{START}--transformer-impl local is given: {LAYERS}; leave the flag out"),
        (
            tiny.tiny_args(optimizer="sgd"),
            (),
            f"{START}{ABSENT}: {LAYERS}; install it as docs/install.md says",
        ),
        (EXPERTS, ("transformer_engine",), None),
    ],
)
def test_message_names_the_features_this_run_loses(args, packages, sentence):
    found = {name: name in packages for name in ("transformer_engine", "apex")}
    assert slower_on_gpu(args, cuda=True, **found) == sentence
    assert slower_on_gpu(args, cuda=False, **found) is None


def test_trainer_warns_on_a_gpu_and_not_on_a_cpu(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    warn(PLAIN, torch.device("cpu"))
    assert caplog.records == []
    warn(PLAIN, torch.device("cuda", 0))
    (record,) = caplog.records
    assert (record.levelno, record.message.startswith(START)) == (logging.WARNING, True)
