"""Batched attention over a paged cache, against attention in float64 one query at a time."""

from __future__ import annotations

import dataclasses
import itertools
import json
import random
import subprocess
import sys
import types

import pytest
import torch

from slimrl.engines.sglang.operators import cpu_attention

SLOTS = 4096
SCALE = 0.2
RAGGED, ONE_QUERY, BLOCKS = "ragged", "blocks of one query", "blocks"
SHAPES = {  # query heads, KV heads, size of keys, size of values
    "grouped": (4, 2, 16, 16),
    "one KV head per head": (4, 4, 8, 8),
    "one KV head": (6, 1, 20, 20),
    "wide": (14, 2, 64, 64),
    "odd sizes": (3, 3, 7, 5),
    "values wider than keys": (4, 2, 8, 12),
}


@pytest.fixture(autouse=True)
def one_thread():
    """As in the server: with more, a product of matrices may be divided by the size of the batch."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


@dataclasses.dataclass
class Batch:
    """Requests with their tokens in random slots of one cache; slots of no request hold NaN."""

    query: torch.Tensor
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    tables: torch.Tensor
    requests: torch.Tensor
    lengths: list[int]
    new: list[int]
    ragged: bool

    def run(self, members: list[int], window: int | None = None) -> list[torch.Tensor]:
        """The result of every member of a batch of `members`, in this order."""
        starts = [sum(self.new[:member]) for member in members]
        new = [self.new[member] for member in members]
        query = torch.cat([self.query[start : start + count] for start, count in zip(starts, new, strict=True)])
        output = query.new_full((*query.shape[:2], self.v_cache.shape[2]), float("nan"))
        lengths, caches = [self.lengths[member] for member in members], (self.k_cache, self.v_cache)
        places = (self.tables, self.requests[members], window)
        if self.ragged:
            ragged = cpu_attention.ragged_of(lengths, *places, self.k_cache, self.query.shape[1])
            cpu_attention.attend_ragged(query, output, *caches, ragged, SCALE)
        else:
            groups = cpu_attention.groups_of(cpu_attention.blocks_of(lengths, new, window), *places)
            cpu_attention.attend(query, output, *caches, groups, SCALE)
        return list(output.split(new))

    def expected(self, member: int, window: int | None = None) -> torch.Tensor:
        """The same of one request in float64."""
        length, new = self.lengths[member], self.new[member]
        slots = self.tables[self.requests[member], :length].long()
        shared = self.query.shape[1] // self.k_cache.shape[1]
        keys = self.k_cache[slots].double().repeat_interleave(shared, 1)
        values = self.v_cache[slots].double().repeat_interleave(shared, 1)
        start = sum(self.new[:member])
        rows = []
        for offset, query in enumerate(self.query[start : start + new].double()):
            last = length - new + offset
            first = 0 if window is None else max(0, last - window)
            scores = SCALE * torch.einsum("hd,khd->hk", query, keys[first : last + 1])
            rows.append(torch.einsum("hk,khd->hd", scores.softmax(-1), values[first : last + 1]))
        return torch.stack(rows)


def batch_of(shape, lengths, new, *, ragged: bool, seed: int, dtype=torch.float32, latent=False) -> Batch:
    generator = torch.Generator().manual_seed(seed)
    heads, kv_heads, size, value_size = shape

    def randn(*sizes: int) -> torch.Tensor:
        return torch.randn(*sizes, generator=generator).to(dtype)

    k_cache, v_cache = (torch.full((SLOTS, kv_heads, one), float("nan"), dtype=dtype) for one in (size, value_size))
    if latent:
        v_cache = k_cache[..., :value_size]
    tables = torch.zeros(2 * len(lengths), max(lengths) + 3, dtype=torch.int32)
    requests = torch.randperm(2 * len(lengths), generator=generator)[: len(lengths)]
    free = torch.randperm(SLOTS, generator=generator)
    assert sum(lengths) <= SLOTS
    for request, length in zip(requests.tolist(), lengths, strict=True):
        slots, free = free[:length], free[length:]
        tables[request, :length] = slots.int()
        k_cache[slots] = randn(length, kv_heads, size)
        if not latent:
            v_cache[slots] = randn(length, kv_heads, value_size)
    return Batch(randn(sum(new), heads, size), k_cache, v_cache, tables, requests, list(lengths), list(new), ragged)


def mixed_batch(shape, *, seed: int, kernel: str, **options) -> Batch:
    """Seven requests: without and with a prefix, of one token and of several blocks of queries."""
    draw = random.Random(seed)
    lengths = [1, 2, 40, 129, draw.randrange(65, 500), draw.randrange(500, 700), draw.randrange(3, 64)]
    new = [1, 2, 1, 129, draw.randrange(1, 65), draw.randrange(65, 300), 1]
    new = new if kernel == BLOCKS else [1] * len(lengths)
    return batch_of(shape, lengths, new, ragged=kernel == RAGGED, seed=seed, **options)


@pytest.mark.parametrize("window", [None, 0, 50])
@pytest.mark.parametrize("kernel", [RAGGED, ONE_QUERY, BLOCKS])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_every_request_attends_only_to_its_own_keys(shape, kernel, window):
    batch = mixed_batch(shape, seed=len(str(shape)), kernel=kernel)
    members = [4, 0, 6, 3, 5, 1, 2]
    for member, result in zip(members, batch.run(members, window), strict=True):
        assert (result - batch.expected(member, window)).abs().max() < 4e-6  # which differs between processors


@pytest.mark.parametrize("kernel", [RAGGED, ONE_QUERY, BLOCKS])
@pytest.mark.parametrize("shape", [(16, 1, 72, 64), (2, 1, 24, 16)])
def test_latent_attention_takes_values_from_the_front_of_the_keys(shape, kernel):
    batch = mixed_batch(shape, seed=5, kernel=kernel, latent=True)
    for member, result in enumerate(batch.run(list(range(7)))):
        assert (result - batch.expected(member)).abs().max() < 5e-6


@pytest.mark.parametrize("kernel", [ONE_QUERY, BLOCKS])
@pytest.mark.parametrize("latent", [True, False])
def test_half_precision_differs_only_by_rounding(kernel, latent):
    shape = (8, 1, 40, 32) if latent else (4, 2, 16, 16)
    batch = mixed_batch(shape, seed=6, kernel=kernel, latent=latent, dtype=torch.bfloat16)
    for member, result in enumerate(batch.run(list(range(7)))):
        assert result.dtype == torch.bfloat16
        assert (result.double() - batch.expected(member)).abs().max() < 0.02


@pytest.mark.parametrize(
    ("dtype", "kernel"),
    [(torch.float32, RAGGED), (torch.float32, ONE_QUERY), (torch.float32, BLOCKS)]
    + [(torch.bfloat16, ONE_QUERY), (torch.bfloat16, BLOCKS)],
)
@pytest.mark.parametrize("shape", [*SHAPES.values(), (16, 1, 576, 512)], ids=[*SHAPES, "latent"])
def test_request_result_is_bit_identical_alone_and_in_any_batch(shape, kernel, dtype):
    batch = mixed_batch(shape, seed=7, kernel=kernel, dtype=dtype, latent=shape[2] == 576)
    alone = [batch.run([member])[0] for member in range(7)]
    draw = random.Random(8)
    for _ in range(6):
        members = draw.choices(range(7), k=draw.randrange(2, 40))
        for member, result in zip(members, batch.run(members), strict=True):
            assert torch.equal(result, alone[member])


def test_call_size_changes_no_bit(monkeypatch):
    batch = mixed_batch((4, 2, 16, 16), seed=9, kernel=ONE_QUERY)
    members = [index % 7 for index in range(60)]
    at_once = batch.run(members)
    monkeypatch.setattr(cpu_attention, "CHUNK_BYTES", 1)
    monkeypatch.setattr(cpu_attention, "KEPT_MASK", 0)
    assert all(torch.equal(left, right) for left, right in zip(at_once, batch.run(members), strict=True))


def test_padding_is_at_most_a_quarter_beyond_short_requests():
    for keys in range(1, 5000):
        padded = cpu_attention.padded_keys(keys)
        assert padded >= keys and padded % 32 == 0 and padded < max(keys + 32, 1.25 * keys + 1)


class Backend:
    """What SGLang's backend is to the batched attention; its own functions write 7 and remember their options."""

    use_sliding_window_kv_pool = False

    def __init__(self) -> None:
        self.calls: list[dict] = []

    def init_forward_metadata(self, forward_batch) -> None:
        self.forward_metadata = None

    def _run_sdpa_forward_decode(self, query, output, *tensors, **options):
        self.calls.append(options)
        return output.fill_(7)

    def _run_sdpa_forward_extend(self, query, output, *tensors, **options):
        self.calls.append(options)
        return output.fill_(7)


@pytest.fixture
def backend():
    patched = type("Patched", (Backend,), {})
    cpu_attention.install(patched)
    instance = patched()
    instance.init_forward_metadata(types.SimpleNamespace())
    return instance


def decode(backend, batch: Batch, seq_lens: torch.Tensor, encoder_lens=None, **options) -> torch.Tensor:
    output = torch.zeros_like(batch.query)
    tables = (batch.tables, batch.requests, seq_lens, encoder_lens)
    return backend._run_sdpa_forward_decode(
        batch.query,
        output,
        batch.k_cache,
        batch.v_cache,
        *tables,
        scaling=SCALE,
        enable_gqa=True,
        causal=False,
        **options,
    )


def extend(backend, batch: Batch, encoder_lens=None, **options) -> torch.Tensor:
    output = torch.zeros_like(batch.query)
    lengths, new = torch.tensor(batch.lengths), torch.tensor(batch.new)
    tables = (batch.tables, batch.requests, lengths, lengths - new, new, encoder_lens)
    return backend._run_sdpa_forward_extend(
        batch.query, output, batch.k_cache, batch.v_cache, *tables, scaling=SCALE, **options
    )


def test_backend_functions_are_replaced(backend):
    batch = mixed_batch((4, 2, 16, 16), seed=10, kernel=RAGGED)
    result = decode(backend, batch, torch.tensor(batch.lengths), is_cross_attn=False, sliding_window_size=None)
    assert (result - torch.cat([batch.expected(member) for member in range(7)])).abs().max() < 2e-6
    backend.init_forward_metadata(types.SimpleNamespace())
    batch = mixed_batch((4, 2, 16, 16), seed=11, kernel=BLOCKS)
    result = extend(backend, batch, causal=True, sliding_window_size=9)
    assert (result - torch.cat([batch.expected(member, 9) for member in range(7)])).abs().max() < 2e-6
    assert backend.calls == []


def test_batch_metadata_is_computed_once_for_all_layers(backend, monkeypatch):
    batch = mixed_batch((4, 2, 16, 16), seed=12, kernel=RAGGED)
    seq_lens, calls = torch.tensor(batch.lengths), []
    own = cpu_attention.ragged_of
    monkeypatch.setattr(cpu_attention, "ragged_of", lambda *args: calls.append(args) or own(*args))
    first = decode(backend, batch, seq_lens)
    assert torch.equal(first, decode(backend, batch, seq_lens)) and len(calls) == 1
    decode(backend, batch, seq_lens, sliding_window_size=4)
    assert len(calls) == 2
    seq_lens -= torch.tensor([0, 1, 1, 1, 1, 1, 1])  # the same tensor for the next batch, as SGLang may have it
    backend.init_forward_metadata(types.SimpleNamespace())
    batch.lengths = seq_lens.tolist()
    expected = torch.cat([batch.expected(member) for member in range(7)])
    assert (decode(backend, batch, seq_lens) - expected).abs().max() < 2e-6


def test_encoders_cross_attention_and_split_caches_use_sglang(backend):
    batch = mixed_batch((4, 2, 16, 16), seed=13, kernel=RAGGED)
    seq_lens = torch.tensor(batch.lengths)
    assert (decode(backend, batch, seq_lens, is_cross_attn=True) == 7).all()
    assert (decode(backend, batch, seq_lens, torch.ones(7, dtype=torch.int64)) == 7).all()
    assert (extend(backend, batch, causal=False) == 7).all()
    assert (extend(backend, batch, causal=True) != 7).all()
    backend.use_sliding_window_kv_pool = True
    assert (extend(backend, batch, causal=True) == 7).all()
    assert (decode(backend, batch, seq_lens) == 7).all()
    assert [options["scaling"] for options in backend.calls] == [SCALE] * 5


def test_unknown_options_use_sglang(backend):
    batch = mixed_batch((4, 2, 16, 16), seed=14, kernel=RAGGED)
    assert (decode(backend, batch, torch.tensor(batch.lengths), logit_cap=30.0) == 7).all()
    assert (extend(backend, batch, causal=True, sinks=None) == 7).all()
    assert [set(options) & {"logit_cap", "sinks"} for options in backend.calls] == [{"logit_cap"}, {"sinks"}]


def differences_from_sglang() -> dict[str, float]:
    """Largest difference from SGLang's own functions, by batch; in a process with SGLang's placeholders."""
    from slimrl.engines.sglang import cpu_patches

    cpu_patches.install()
    from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend

    patched = type("Patched", (TorchNativeAttnBackend,), {})
    cpu_attention.install(patched)
    found = {}
    for kernel, window, dtype in itertools.product((RAGGED, BLOCKS), (None, 50), (torch.float32, torch.bfloat16)):
        batch, results = mixed_batch((4, 2, 16, 16), seed=15, kernel=kernel, dtype=dtype), []
        for kind in (TorchNativeAttnBackend, patched):
            instance = object.__new__(kind)
            instance.use_sliding_window_kv_pool, instance.forward_metadata = False, None
            options = {"sliding_window_size": window, "is_cross_attn": False}
            if kernel == RAGGED:
                results.append(decode(instance, batch, torch.tensor(batch.lengths), **options))
            else:
                results.append(extend(instance, batch, causal=True, enable_gqa=True, **options))
        found[f"{kernel} {window} {dtype}"] = float((results[0] - results[1]).abs().max())
    return found


@pytest.mark.slow
def test_results_equal_those_of_sglang():
    program = f"import json; from {__name__} import differences_from_sglang as run; print(json.dumps(run()))"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-4000:]
    found = json.loads(done.stdout.splitlines()[-1])
    assert len(found) == 8
    assert {name: value for name, value in found.items() if value > (0.02 if "bfloat16" in name else 2e-6)} == {}
