"""Every family in a real server: its answers before and after weight updates from Megatron ranks are those of
transformers.

The server starts with one set of weights, receives a second through shared memory, a third by broadcast, a fourth
point to point and a fifth as changes. The weight update itself verifies every tensor in the server bit for bit; the
log-probabilities prove that names, layouts and settings have the same meaning on all sides.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import json
import shutil
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import PIL.Image
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoTokenizer

from slimrl.data.routed_experts import RoutingShape
from slimrl.data.sample import Sample
from slimrl.engines.sglang.inputs import videos
from slimrl.engines.sglang.server import ServerProcess
from slimrl.engines.sglang.server_args import delta_options, point_to_point_options
from slimrl.rollout.dataset.images import ImageProcessor, SampleImages, data_uri
from slimrl.rollout.dataset.videos import Video
from slimrl.weights.update.topology import EngineEndpoint
from tests.families.conftest import Pools
from tests.families.layouts import LAYOUTS, WITH_EXPERTS, flags, of_folder
from tests.families.toys import TOYS, Toy
from tests.weights import ranks

pytestmark = pytest.mark.slow

BY_NAME = {layout.name: layout for layout in LAYOUTS}
OPTIONS: dict[str, Any] = {
    "skip_tokenizer_init": True,
    "max_total_tokens": 2048,
    "max_running_requests": 4,
    "context_length": 512,
}
PROMPT_TOKENS = 40
NEW_TOKENS = 12
# transformers adds 1e-6 to the variance of latent vectors whatever rms_norm_eps is; the server and Megatron add that
LIMITS = {"moonlight": 3e-5, "glm4-moe-lite": 3e-5}
LIMIT = 2e-6


class Servers:
    """At most two servers: the requested one, and the next of `order`, which starts in the background."""

    def __init__(self, root: Path, order: list[str]) -> None:
        self.root = root
        self._order = order
        self._running: dict[str, ServerProcess] = {}

    def url(self, name: str) -> str:
        """Waits until the server of this toy model answers."""
        wanted = self._order[self._order.index(name) :][:2]
        for other in self._running.keys() - set(wanted):
            self._running.pop(other).stop()
        for each in wanted:
            if each not in self._running:
                self._start(TOYS[each])
        self._running[name].wait_ready(120)
        return self._running[name].url

    def stop(self) -> None:
        for server in self._running.values():
            server.stop()

    def _start(self, toy: Toy) -> None:
        folder = toy.save(self.root / toy.name / "0", seed=0, tokenizer=False)
        options = OPTIONS if toy.code is None else OPTIONS | {"trust_remote_code": True}
        options = options | point_to_point_options(delta_options({})) | {"skip_tokenizer_init": not toy.sees}
        options["enable_return_routed_experts"] = toy.name in WITH_EXPERTS
        self._running[toy.name] = ServerProcess(folder, log_path=self.root / f"{toy.name}.log", options=options)
        self._running[toy.name].start()


@dataclasses.dataclass
class Served:
    """One toy model, its server, and its checkpoints by seed."""

    toy: Toy
    url: str
    root: Path
    returns_experts: bool = False

    def folder(self, seed: int | str) -> Path:
        """The checkpoint of random weights by a seed, or one made by `changed`, by its name."""
        folder = self.root / self.toy.name / str(seed)
        if isinstance(seed, int) and not folder.exists():
            self.toy.save(folder, seed=seed, tokenizer=False)
        return folder

    def changed(self, seed: int, other: int, name: str) -> Path:
        """The checkpoint `name`: that of `seed` with a hundredth of the elements of `other`'s."""
        return changed_folder(self.folder(seed), self.folder(other), self.root / self.toy.name / name)


def changed_folder(source: Path, other: Path, folder: Path) -> Path:
    """A copy of `source` in which a hundredth of each tensor's elements, at least one, are those of `other`."""
    shutil.copytree(source, folder)
    draw = torch.Generator().manual_seed(0)
    for file in sorted(folder.glob("*.safetensors")):
        tensors, others = load_file(file), load_file(other / file.name)
        for name, tensor in tensors.items():
            places = torch.randint(0, tensor.numel(), (max(tensor.numel() // 100, 1),), generator=draw)
            tensor.view(-1)[places] = others[name].view(-1)[places]
        save_file(tensors, file, metadata={"format": "pt"})
    return folder


@pytest.fixture(scope="module")
def servers(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    selected = {item.callspec.params.get("served") for item in request.session.items if hasattr(item, "callspec")}
    started = Servers(tmp_path_factory.mktemp("servers"), [name for name in TOYS if name in selected])
    with pytest.MonkeyPatch.context() as patch:
        # where transformers copies the config class of a folder
        patch.setenv("HF_MODULES_CACHE", str(started.root / "modules"))
        try:
            yield started
        finally:
            started.stop()


@pytest.fixture(scope="module", params=TOYS)
def served(request: pytest.FixtureRequest, servers: Servers) -> Served:
    return Served(TOYS[request.param], servers.url(request.param), servers.root, request.param in WITH_EXPERTS)


def ask(
    url: str, prompt: list[int], image: str | None = None, seen: dict[str, Any] | None = None
) -> tuple[list[int], list[float], dict[str, Any]]:
    """(sampled tokens, log-probabilities of prompt[1:] and of the sample, the response's meta_info)."""
    body = {
        "return_routed_experts": True,  # only servers of models with experts return them
        **({} if image is None else {"image_data": [image]}),
        "input_ids": prompt,
        **(seen or {}),
        "sampling_params": {"max_new_tokens": NEW_TOKENS, "temperature": 1.0, "ignore_eos": True},
        "return_logprob": True,
        "logprob_start_len": 0,
    }
    request = urllib.request.Request(url + "/generate", json.dumps(body).encode(), {"Content-Type": "application/json"})
    with urllib.request.build_opener(urllib.request.ProxyHandler({})).open(request, timeout=60) as response:
        answer = json.loads(response.read())
    meta = answer["meta_info"]
    logprobs = [entry[0] for entry in meta["input_token_logprobs"][1:] + meta["output_token_logprobs"]]
    return answer["output_ids"], logprobs, meta


def assert_serves(served: Served, seed: int | str, version: str) -> None:
    """Asserts that the server's log-probabilities match transformers for the weights of the checkpoint `seed`."""
    vocab_size = served.toy.decoder["vocab_size"]
    draw = torch.Generator().manual_seed(seed if isinstance(seed, int) else len(seed))
    prompt = torch.randint(0, vocab_size, (PROMPT_TOKENS,), generator=draw).tolist()
    for _ in range(2):  # the second time most of the prompt is cached
        tokens, logprobs, meta = ask(served.url, prompt)
        ids = torch.tensor([prompt + tokens])
        logits = served.toy.reference_logits(served.folder(seed), ids)[0, :-1]
        expected = logits.log_softmax(-1).gather(1, ids[0, 1:, None])[:, 0]
        difference = (torch.tensor(logprobs) - expected).abs()
        print(f"{served.toy.name}: weights {version}, mean {difference.mean():.1e}, largest {difference.max():.1e}")
        assert meta["weight_version"] == version
        assert difference.mean() < LIMITS.get(served.toy.name, LIMIT)
        if served.returns_experts:
            assert_routes(served, seed, ids, meta["routed_experts"])
    if served.toy.sees:
        assert_sees(served, seed)
        assert_sees_videos(served, seed)


def assert_routes(served: Served, seed: int, ids: torch.Tensor, returned: str) -> None:
    """Asserts that the server's experts of every token but the last are those that transformers chooses."""
    model, decoder = served.toy.load(served.folder(seed)), served.toy.decoder
    experts = decoder.get("num_experts") or decoder["n_routed_experts"]
    shape = RoutingShape(decoder["num_hidden_layers"], decoder["num_experts_per_tok"], experts)
    routes = torch.from_numpy(shape.decoded(returned))
    assert len(routes) == ids.numel() - 1
    chosen: dict[int, torch.Tensor] = {}
    for name, module in model.named_modules():
        if name.endswith(".mlp.experts"):
            layer = int(name.split(".layers.")[1].split(".")[0])
            keep = functools.partial(chosen.__setitem__, layer)
            module.register_forward_pre_hook(lambda _, inputs, keep=keep: keep(inputs[1]))
    with torch.no_grad():
        model(ids)
    assert chosen
    for layer, own in chosen.items():
        assert own[:-1].sort(-1).values.equal(routes[:, layer].long().sort(-1).values), layer


def assert_sees(served: Served, seed: int | str) -> None:
    """Asserts the same for prompts with images: each has its own log-probabilities, of equal text after it."""
    processor, model = ImageProcessor(str(served.folder(0))), served.toy.load(served.folder(seed))
    draw = np.random.default_rng(0)  # equal images with all weights: their features must not outlive an update
    found = []
    for width, height in ((84, 56), (84, 56), (100, 71)):  # the last one is resized
        image = PIL.Image.fromarray(draw.integers(0, 255, (height, width, 3), dtype=np.uint8))
        ids = [5, 6, 281, 283, 282, *range(40, 60)]
        tokens, logprobs = [283], []
        while 283 in tokens:  # a sampled image token is text for the server and a place of an image for transformers
            tokens, logprobs, _ = ask(served.url, ids, data_uri(image))
        whole = torch.tensor([[*processor.expand(ids, [processor.count(image.height, image.width)]), *tokens]])
        seen = processor.train_inputs([data_uri(image)]) | {"mm_token_type_ids": (whole == 283).int()}
        with torch.no_grad():
            expected = model(whole, **seen).logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0]
        text = len(tokens) + 19  # tokens after the image, but for the first
        difference = (torch.tensor(logprobs[-text:]) - expected[-text:]).abs()
        print(f"{served.toy.name}: image of {width} x {height}, largest {difference.max():.1e}")
        assert difference.max() < 1e-5
        found.append(torch.tensor(logprobs[-text : -text + 19]))
    assert all((one - other).abs().max() > 1e-3 for one, other in itertools.combinations(found, 2))


def assert_sees_videos(served: Served, seed: int) -> None:
    """The same for prompts with a video of five frames, alone and with an image, sent as the rollout sends them."""
    folder = served.folder(0)
    processor, model = ImageProcessor(str(folder)), served.toy.load(served.folder(seed))
    tokenizer, draw, found = AutoTokenizer.from_pretrained(folder), np.random.default_rng(1), []
    side = processor.videos.frames.patch_size * processor.tokens.merge_size
    for with_image in (False, False, True):
        frames = [
            data_uri(PIL.Image.fromarray(draw.integers(0, 255, (2 * side, 3 * side, 3), dtype=np.uint8)))
            for _ in range(5)
        ]
        video = Video(tuple(frames), fps=1.6, seconds=(0.0, 0.5, 1.2, 1.9, 2.5))
        images = [data_uri(PIL.Image.fromarray(draw.integers(0, 255, (64, 64, 3), dtype=np.uint8)))] * with_image
        counts = [processor.decoded(uri)[1] for uri in images]
        ids = [5, 6, *[281, 283, 282, 9] * with_image, 281, 284, 282, *range(40, 60)]
        ids = list(processor.expand(ids, counts, [processor.videos.token_ids(video, tokenizer)]))
        sample = Sample("p", tokens=ids, multimodal_inputs={"images": images, "videos": [video.stored()]})
        request = videos.payload(ids, SampleImages(str(folder)).of(sample)["images"])
        tokens, logprobs = [284], []
        while {283, 284} & set(tokens):
            tokens, logprobs, _ = ask(served.url, ids, seen=request)
        whole = torch.tensor([[*ids, *tokens]])
        kinds = (whole == 283).int() + 2 * (whole == 284).int()
        with torch.no_grad():
            logits = model(whole, **processor.train_inputs(images, [video]), mm_token_type_ids=kinds).logits
        expected = logits[0, :-1].log_softmax(-1).gather(1, whole[0, 1:, None])[:, 0]
        text = len(tokens) + 19  # tokens after the video, but for the first
        difference = (torch.tensor(logprobs[-text:]) - expected[-text:]).abs()
        print(f"{served.toy.name}: a video, {len(images)} images, largest {difference.max():.1e}")
        assert len(logprobs) == len(ids) + len(tokens) - 1 and difference.max() < 1e-5
        found.append(torch.tensor(logprobs[-text : -text + 19]))
    assert all((one - other).abs().max() > 1e-3 for one, other in itertools.combinations(found, 2))


def test_fresh_server_gives_transformers_log_probs(served: Served):
    assert_serves(served, 0, "default")


@pytest.mark.parametrize(("way", "gpu", "seed"), [("colocated", 0, 1), ("split", 2, 2), ("p2p", 2, 3), ("disk", 2, 6)])
def test_updated_server_gives_transformers_log_probs(
    served: Served, pools: Pools, way: str, gpu: int, seed: int, tmp_path: Path
):
    """Through shared memory or files from ranks that shard the experts (or the tensors); by broadcast from a pipeline.

    Point to point from ranks that shard tensors, those of experts too.
    """
    has_experts = served.toy.name in WITH_EXPERTS
    sharing = "expert 2" if has_experts else "tensor 2, sequence"
    peers = "tensor 2, expert tensor 2" if has_experts else "tensor 2, sequence"
    layout = BY_NAME[{"colocated": sharing, "split": "pipeline 2", "p2p": peers, "disk": sharing}[way]]
    results = pools[layout.ranks].run(
        ranks.update_weights,
        flags(served.toy, layout, *of_folder(served.folder(seed))),
        served.folder(seed),
        [EngineEndpoint(served.url, [gpu])],
        way,
        str(seed),
        tmp_path,
        timeout_s=100,
    )
    assert all(not isinstance(result, str) for result in results), results
    assert max(buckets for _, buckets in results) > 5
    assert_serves(served, seed, str(seed))


def test_changes_of_a_hundredth_arrive_bit_for_bit_with_transformers_log_probs(served: Served, pools: Pools):
    """A full update, then the changed elements alone; each compares every tensor of the server with the trainer's."""
    layout = BY_NAME["expert 2" if served.toy.name in WITH_EXPERTS else "tensor 2, sequence"]
    folders = [served.folder(4), served.changed(4, 5, "changed")]
    args = flags(served.toy, layout, *of_folder(folders[0]))
    engines = [EngineEndpoint(served.url, [2])]
    results = pools[layout.ranks].run(ranks.delta_updates_from, args, folders, engines, timeout_s=100)
    assert all(not isinstance(one, str) for result in results for one in result), results
    whole, changes = (report.bytes for report in results[0])
    print(f"{served.toy.name}: {changes} of {whole} bytes")
    assert changes < whole / 4
    assert_serves(served, "changed", "changed.1")


@pytest.mark.parametrize("way", ["split", "delta"])
def test_half_precision_with_float32_router_biases_arrives_bit_for_bit(pools: Pools, tmp_path: Path, way: str):
    toy, layout = TOYS["glm4-moe"], BY_NAME["expert 2"]
    first, second = (toy.save(tmp_path / str(n), seed=n, dtype="bf16", tokenizer=False) for n in range(2))
    options = OPTIONS | {"dtype": "bfloat16"} | delta_options({})
    server = ServerProcess(first, log_path=tmp_path / "log", options=options)
    try:
        server.start()
        server.wait_ready(120)
        engines, args = [EngineEndpoint(server.url, [2])], flags(toy, layout, "--bf16")
        if way == "split":
            results = pools[2].run(
                ranks.weight_updates, args, second, engines, way, ["changed.1"], tmp_path, timeout_s=100
            )
        else:
            folders = [second, changed_folder(second, first, tmp_path / "changed")]
            results = pools[2].run(ranks.delta_updates_from, args, folders, engines, timeout_s=100)
        assert all(not isinstance(one, str) for result in results for one in result), results
        assert ask(server.url, [5, 17, 90])[2]["weight_version"] == "changed.1"
    finally:
        server.stop()
