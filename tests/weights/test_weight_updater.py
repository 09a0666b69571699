"""Weight updates: what servers receive and in which order, and that every failure is detected and named."""

from __future__ import annotations

import sys
import types
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from safetensors.torch import load_file
from torch import nn

from slimrl.arguments import Arguments
from slimrl.engines.protocol import EngineTimeoutError, EngineUnavailableError
from slimrl.models.families import family_for
from slimrl.models.model_spec import ModelSpec
from slimrl.platform.collective_errors import RankSync
from slimrl.weights.reshard import megatron_shape
from slimrl.weights.update.buckets import ReusedBuffer, iter_buckets
from slimrl.weights.update.export import iter_hf_tensors
from slimrl.weights.update.shared_memory import shared_copies
from slimrl.weights.update.transport_disk import Delivery, DiskTransport, post_write
from slimrl.weights.update.transport_tensor import EngineLink, TensorTransport
from slimrl.weights.update.weight_updater import ModelSource, WeightSyncError, WeightUpdater
from tests.weights.models import named_module
from tests.weights.servers import RecordingServer

SHAPE = ModelSpec(
    moe_layers=(False,) * 2,
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
    report = updater_for(*servers).update_weights(model, version="3", check_equal=True)
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


def test_pipeline_server_is_flushed_before_memory_is_released():
    class ReleasingTransport(TensorTransport):
        def release(self):
            staged.calls.append("released")
            super().release()

    plain, staged = RecordingServer("http://a"), RecordingServer("http://b")
    links = [EngineLink(plain, 1, (0,), None), EngineLink(staged, 1, (0, 0), None)]
    report = updater_for(plain, staged, transport=ReleasingTransport(links, CPU), with_stages=(1,)).update_weights(
        random_model(1), version="3"
    )
    assert staged.calls == ["begin", *["update"] * report.buckets, "commit 3", "continue", "settle", "released"]
    assert "settle" not in plain.calls
    assert sorted(staged.tensors) == sorted(FAMILY.hf_names(SHAPE))


def test_next_weight_update_sends_the_new_weights():
    server = RecordingServer("http://a")
    updater = updater_for(server, bucket_bytes=1 << 20)
    updater.update_weights(random_model(1), version="1", check_equal=True)
    first = server.tensors["model.norm.weight"].clone()
    updater.update_weights(random_model(2), version="2", check_equal=True)
    assert not torch.equal(server.tensors["model.norm.weight"], first)
    updater.close()


def test_weights_in_shared_memory_are_read_where_they_are():
    server, model = RecordingServer("http://a"), random_model(1)
    plain = updater_for(server).update_weights(model, version="1", check_equal=True)
    expected = server.tensors
    for parameter, copy in zip(model.parameters(), shared_copies(list(model.parameters())), strict=True):
        parameter.data = copy
    server.tensors = {}
    updater = updater_for(server)
    report = updater.update_weights(model, version="2", check_equal=True)
    # only query, key and value are reordered and packed: 2 layers of 16 x 8 floats, less than a bucket
    assert (report.bytes, report.buckets, plain.buckets) == (plain.bytes, 1, 3)
    assert server.tensors.keys() == expected.keys()
    assert all(torch.equal(server.tensors[name], tensor) for name, tensor in expected.items())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(1)
    updater.update_weights(model, version="3", check_equal=True)
    assert all(torch.equal(server.tensors[name], tensor + 1) for name, tensor in expected.items())
    updater.close()


def test_weights_of_several_senders_are_packed():
    (shared,) = shared_copies([torch.ones(4)])
    alone, several = (EngineLink(None, 1, (0,), group) for group in (None, dist.group.WORLD))
    assert TensorTransport([alone], CPU).opens(shared)
    assert not TensorTransport([alone, several], CPU).opens(shared)
    assert not TensorTransport([alone], CPU).opens(torch.ones(4))


def test_server_that_keeps_its_old_version_is_named_with_both_versions():
    servers = [RecordingServer("http://a"), RecordingServer("http://b", reports="2")]
    with pytest.raises(WeightSyncError, match=r"version '3', http://b reports '2'"):
        updater_for(*servers).update_weights(random_model(1), version="3")


def test_server_that_does_not_resume_ends_the_update_without_another_attempt():
    class Hung(RecordingServer):
        def continue_(self) -> None:
            raise RuntimeError("no answer")

    servers = [RecordingServer("http://a"), Hung("http://b")]
    with pytest.raises(WeightSyncError, match="continuing with new weights failed on http://b: no answer"):
        updater_for(*servers).update_weights(random_model(1), version="3")
    for server in servers:  # all have the new weights
        assert server.calls.count("begin") == 1 and "commit 3" in server.calls


def test_requests_are_aborted_unless_they_resume_and_every_attempt_sets_the_mode():
    server = RecordingServer("http://a", fails_at=1, failures=1)
    updater = updater_for(server)
    assert updater.update_weights(random_model(1), version="1", running="retract").attempts == 2
    assert server.running == ["retract"] * 3  # two starts and one end
    server.running.clear()
    updater.update_weights(random_model(1), version="2")
    assert server.running == ["abort"] * 2


def test_rejected_bucket_restarts_the_complete_weight_update():
    servers = [RecordingServer("http://a"), RecordingServer("http://b", fails_at=1, failures=2)]
    report = updater_for(*servers).update_weights(random_model(1), version="3", check_equal=True)
    assert (report.attempts, report.buckets) == (3, 3)
    for server in servers:
        assert server.calls.count("begin") == 3
        assert server.calls[-5:] == ["update"] * 3 + ["commit 3", "continue"]
        assert server.version == "3"


def test_persistent_rejection_names_all_server_states_and_no_server_resumes():
    servers = [RecordingServer("http://a"), RecordingServer("http://b", fails_at=1)]
    with pytest.raises(WeightSyncError) as caught:
        updater_for(*servers).update_weights(random_model(1), version="3")
    assert "'3' was not loaded by every server (3 of 3 attempts), so no server resumes: " in str(caught.value)
    assert "failed on http://b: out of memory; " in str(caught.value)
    for server in servers:
        assert f"{server.url} is stopped and reports version 'default'" in str(caught.value)
        assert server.calls.count("begin") == 3 and "continue" not in server.calls


def test_lost_or_late_server_is_not_retried():
    gone = RecordingServer("http://b", fails_at=1, gone=EngineUnavailableError("connection refused"))
    with pytest.raises(WeightSyncError, match=r"1 of 3 attempts.*http://b does not answer \(connection refused\)"):
        updater_for(RecordingServer("http://a"), gone).update_weights(random_model(1), version="3")
    late = RecordingServer("http://b", fails_at=1, error=EngineTimeoutError("no answer within 300 s"))
    with pytest.raises(WeightSyncError, match=r"1 of 3 attempts.*no answer within 300 s"):
        updater_for(RecordingServer("http://a"), late).update_weights(random_model(1), version="3")


def test_two_runs_that_share_a_folder_write_separately_and_leave_nothing(tmp_path):
    servers = [RecordingServer("http://a"), RecordingServer("http://b")]
    transports = [DiskTransport([server], tmp_path / "shared", CPU) for server in servers]
    updaters = [updater_for(server, transport=t) for server, t in zip(servers, transports, strict=True)]
    models = [random_model(1), random_model(2)]
    for bucket_pair in zip(*(buckets_of(model) for model in models), strict=True):
        for transport, bucket in zip(transports, bucket_pair, strict=True):
            transport.start(bucket)
    for transport in transports:
        transport.deliver()
    for server, model in zip(servers, models, strict=True):
        weights = dict(model.named_parameters())
        assert torch.equal(server.tensors["model.norm.weight"], weights["decoder.final_layernorm.weight"])
        assert sorted(server.tensors) == sorted(FAMILY.hf_names(SHAPE))
    for updater in updaters:
        updater.close()
    assert list((tmp_path / "shared").iterdir()) == []


def buckets_of(model: nn.Module):
    return iter_buckets(iter_hf_tensors(model, SHAPE, FAMILY), 4096, ReusedBuffer(CPU))


def test_unwritable_disk_ends_the_weight_update_without_a_retry(tmp_path):
    (tmp_path / "file").write_text("")
    server = RecordingServer("http://a")
    transport = DiskTransport([server], tmp_path / "file", CPU)
    with pytest.raises(WeightSyncError, match=r"1 of 3 attempts.*Not a directory.*http://a is stopped"):
        updater_for(server, transport=transport).update_weights(random_model(1), version="3")


def updater_to_disk(server: RecordingServer, folder: Path, post_write) -> WeightUpdater:
    transport = DiskTransport([server], folder, CPU)
    updater = updater_for(server, transport=transport)
    updater._delivery = Delivery(updater._ranks, updater._calls, transport, post_write)
    return updater


def test_hook_sees_the_complete_update_files_before_any_server(tmp_path):
    server, seen = RecordingServer("http://a"), []

    def post_write(folder: Path) -> None:
        tensors = {}
        for file in folder.glob("*.safetensors"):
            tensors |= load_file(file)
        seen.append((folder.name, list(server.calls), tensors))

    updater, model = updater_to_disk(server, tmp_path / "weights", post_write), random_model(1)
    for version in ("3", "12"):
        updater.update_weights(model, version=version)
    assert [name for name, *_ in seen] == ["weight_v000003", "weight_v000012"]
    assert seen[0][1] == ["begin"]
    weights = dict(model.named_parameters())
    assert torch.equal(seen[0][2]["model.norm.weight"], weights["decoder.final_layernorm.weight"])
    assert sorted(seen[1][2]) == sorted(FAMILY.hf_names(SHAPE)) == sorted(server.tensors)
    updater.close()
    assert list((tmp_path / "weights").iterdir()) == []


def test_failing_hook_on_the_files_ends_the_weight_update_by_name(tmp_path):
    (tmp_path / "slimrl_uploads.py").write_text("def upload(args, version_dir, rollout_engines):\n    1 / 0\n")
    sys.path.insert(0, str(tmp_path))
    uploads = post_write("slimrl_uploads.upload", [], hook_args=Arguments())
    server = RecordingServer("http://a")
    updater = updater_to_disk(server, tmp_path / "weights", uploads)
    with pytest.raises(WeightSyncError) as caught:
        updater.update_weights(random_model(1), version="3")
    sys.path.remove(str(tmp_path))
    assert "1 of 3 attempts" in str(caught.value) and "continue" not in server.calls
    flag = "--custom-update-weight-post-write-path slimrl_uploads.upload"
    line = f"{tmp_path}/slimrl_uploads.py:2 in upload: 1 / 0"
    assert f"{flag} raised ZeroDivisionError: division by zero\n  {line}" in str(caught.value)


def test_tensors_of_every_layer_take_the_same_memory():
    places = {}
    for name, tensor in iter_hf_tensors(random_model(1), SHAPE, FAMILY):
        places.setdefault(name.split(".", 3)[-1], []).append(tensor.data_ptr())
    for projection in ("q", "k", "v"):
        first, second = places[f"self_attn.{projection}_proj.weight"]
        assert first == second


class CorruptingTransport(TensorTransport):
    """Flips one bit of one tensor in flight."""

    def start(self, bucket):
        for name, tensor in bucket.tensors():
            if name == "model.layers.1.mlp.up_proj.weight":
                tensor.view(torch.int32)[3, 5] ^= 1
        super().start(bucket)


def test_weight_verification_finds_one_wrong_bit():
    server = RecordingServer("http://a")
    transport = CorruptingTransport([EngineLink(server, 1, (0,), None)], CPU)
    updater = updater_for(server, transport=transport)
    updater.update_weights(random_model(1), version="1")
    with pytest.raises(WeightSyncError, match=r"http://a rank 0: 1 of 18 tensors differ.*layers\.1\.mlp\.gate_up_proj"):
        updater.update_weights(random_model(1), version="2", check_equal=True)


def mapped_shared_memory() -> set[str]:
    """The files of /dev/shm that this process has mapped; other processes may create some at any time."""
    maps = Path("/proc/self/maps").read_text().splitlines()
    return {line.split(maxsplit=5)[5] for line in maps if "/dev/shm/" in line}


def test_shared_memory_leaves_no_file(tmp_path):
    before = mapped_shared_memory()
    updater = updater_for(RecordingServer("http://a"))
    updater.update_weights(random_model(1), version="1")
    assert "memfd:slimrl-weights" in Path("/proc/self/maps").read_text()
    assert mapped_shared_memory() - before == set()
    updater.close()


@pytest.mark.parametrize("length", [0, 10, 100_000])
def test_ranks_exchange_values_of_any_length(length):
    ranks = RankSync(0)
    assert ranks.gather(("x" * length, None)) == [("x" * length, None)]
    ranks.close()
