"""Pushing weights: what servers receive and in which order, and that every failure is seen and named."""

from __future__ import annotations

import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from slimrl.weights.families import family_for
from slimrl.weights.layout import megatron_shape
from slimrl.weights.shape import ModelShape
from slimrl.weights.sync import ModelSource, WeightSyncError, WeightUpdater
from slimrl.weights.transport_tensor import EngineLink, TensorTransport
from tests.weights.models import named_module
from tests.weights.servers import RecordingServer

SHAPE = ModelShape(
    num_layers=2,
    hidden_size=8,
    ffn_hidden_size=32,
    num_attention_heads=4,
    num_query_groups=2,
    kv_channels=2,
    vocab_size=64,
    padded_vocab_size=128,
    tied=True,
    qk_layernorm=True,
    qkv_bias=False,
)
FAMILY = family_for({"model_type": "qwen3"})
CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def one_rank_world(tmp_path: Path):
    dist.init_process_group("gloo", init_method=f"file://{tmp_path}/store", rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def random_model(seed: int) -> nn.Module:
    generator = torch.Generator().manual_seed(seed)
    rows = FAMILY.rows(SHAPE)
    tensors = {row.megatron[0]: torch.randn(megatron_shape(row, SHAPE), generator=generator) for row in rows}
    return named_module(tensors, SHAPE.num_layers)


def updater_for(
    *servers: RecordingServer, bucket_bytes: int = 4096, transport=None, with_stages: tuple[int, ...] = ()
) -> WeightUpdater:
    groups = {f"{axis}_group": dist.group.WORLD for axis in ("tp", "pp", "ep", "etp")}
    parallel = types.SimpleNamespace(rank=0, world_size=1, device=CPU, **groups)
    transport = transport or TensorTransport([EngineLink(server, 1, (0,), None) for server in servers], CPU)
    sizes = [1] * len(servers)
    source = ModelSource(SHAPE, FAMILY, parallel)
    return WeightUpdater(source, servers, sizes, [transport], {0}, bucket_bytes, with_stages, 0.0)


def test_every_server_gets_every_tensor_and_then_the_version():
    servers = [RecordingServer("http://a"), RecordingServer("http://b")]
    model = random_model(1)
    report = updater_for(*servers).push(model, version="3", check_equal=True)
    for server in servers:
        assert server.calls == ["begin", *["update"] * report.buckets, "commit 3", "continue"]
        assert sorted(server.tensors) == sorted(FAMILY.hf_names(SHAPE))
    weights = dict(model.named_parameters())
    assert torch.equal(
        servers[1].tensors["model.embed_tokens.weight"], weights["embedding.word_embeddings.weight"][:64]
    )
    # embedding 64x8, per layer: q 8x8, k and v 4x8, o 8x8, gate, up and down 32x8, norms 8+8+2+2, final norm 8
    assert report.bytes == 4 * (512 + 2 * (64 + 32 + 32 + 64 + 3 * 256 + 20) + 8)
    assert report.buckets == 3 and report.seconds > 0


def test_a_server_with_pipeline_stages_is_waited_for_before_memory_is_given_up():
    class ReleasingTransport(TensorTransport):
        def release(self):
            staged.calls.append("released")
            super().release()

    plain, staged = RecordingServer("http://a"), RecordingServer("http://b")
    links = [EngineLink(plain, 1, (0,), None), EngineLink(staged, 1, (0, 0), None)]
    report = updater_for(plain, staged, transport=ReleasingTransport(links, CPU), with_stages=(1,)).push(
        random_model(1), version="3"
    )
    assert staged.calls == ["begin", *["update"] * report.buckets, "commit 3", "continue", "settle", "released"]
    assert "settle" not in plain.calls
    assert sorted(staged.tensors) == sorted(FAMILY.hf_names(SHAPE))


def test_the_next_push_brings_the_next_weights():
    server = RecordingServer("http://a")
    updater = updater_for(server, bucket_bytes=1 << 20)
    updater.push(random_model(1), version="1", check_equal=True)
    first = server.tensors["model.norm.weight"].clone()
    updater.push(random_model(2), version="2", check_equal=True)
    assert not torch.equal(server.tensors["model.norm.weight"], first)
    updater.close()


def test_a_server_that_keeps_its_old_version_is_named_with_both_versions():
    servers = [RecordingServer("http://a"), RecordingServer("http://b", reports="2")]
    with pytest.raises(WeightSyncError, match=r"version '3', http://b reports '2'"):
        updater_for(*servers).push(random_model(1), version="3")


def test_a_server_that_refuses_a_bucket_is_named_and_no_server_goes_on():
    servers = [RecordingServer("http://a"), RecordingServer("http://b", fails_at=1)]
    with pytest.raises(WeightSyncError, match=r"failed on http://b: out of memory"):
        updater_for(*servers).push(random_model(1), version="3")
    assert all("continue" not in server.calls for server in servers)


class CorruptingTransport(TensorTransport):
    """Turns over one bit of one tensor on its way."""

    def start(self, bucket):
        for name, tensor in bucket.tensors():
            if name == "model.layers.1.mlp.up_proj.weight":
                tensor.view(torch.int32)[3, 5] ^= 1
        super().start(bucket)


def test_the_proof_of_equality_finds_one_wrong_bit():
    server = RecordingServer("http://a")
    transport = CorruptingTransport([EngineLink(server, 1, (0,), None)], CPU)
    updater = updater_for(server, transport=transport)
    updater.push(random_model(1), version="1")
    with pytest.raises(WeightSyncError, match=r"http://a rank 0: 1 of 18 tensors differ.*layers\.1\.mlp\.gate_up_proj"):
        updater.push(random_model(1), version="2", check_equal=True)


def mapped_shared_memory() -> set[str]:
    """The files of /dev/shm that this process has mapped; other processes may make some at any time."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}


def test_shared_memory_leaves_no_file(tmp_path):
    before = mapped_shared_memory()
    updater = updater_for(RecordingServer("http://a"))
    updater.push(random_model(1), version="1")
    assert "memfd:slimrl-weights" in Path("/proc/self/maps").read_text()
    assert mapped_shared_memory() - before == set()
    updater.close()
