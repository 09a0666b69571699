"""The warning on a GPU without Transformer Engine names what is slower and how to fix it."""

from __future__ import annotations

import logging

import pytest
import torch

from slimrl.megatron.patches import slower_on_gpu, warn
from tests.megatron import tiny

A100, H100 = (8, 0), (9, 0)
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
    found = {name: name in packages for name in ("transformer_engine", "apex", "flash")}
    assert slower_on_gpu(args, capability=H100, **found) == sentence
    assert slower_on_gpu(args, capability=None, **found) is None


WHOLE = (
    "attention stores the scores of whole samples, [length, length] for each head, because Transformer Engine has no"
    " other kernel for packed samples on GPUs before Hopper: "
)


@pytest.mark.parametrize(
    ("args", "capability", "flash", "sentence"),
    [
        (PLAIN, A100, False, f"{WHOLE}install flash-attn (2.8 or earlier), or give --transformer-impl local"),
        (tiny.tiny_args(**tiny.LATENT_FLAGS), A100, False, f"{WHOLE}give --transformer-impl local"),
        (PLAIN, A100, True, None),
        (PLAIN, H100, False, None),
    ],
)
def test_message_names_the_attention_that_stores_all_scores(args, capability, flash, sentence):
    found = slower_on_gpu(args, capability=capability, transformer_engine=True, apex=False, flash=flash)
    assert found == sentence


def test_trainer_warns_on_a_gpu_and_not_on_a_cpu(caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda _: None)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: H100)
    warn(PLAIN, torch.device("cpu"))
    assert caplog.records == []
    warn(PLAIN, torch.device("cuda", 0))
    (record,) = caplog.records
    assert (record.levelno, record.message.startswith(START)) == (logging.WARNING, True)
