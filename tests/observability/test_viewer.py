"""Rollout dumps as a web page: its content, and its rendering in a real browser."""

from __future__ import annotations

import dataclasses
import html.parser
import json
import math
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from slimrl.data.sample import Sample, SampleStatus
from slimrl.observability import show
from slimrl.observability.rollout_dump import RolloutDump, save_rollout
from slimrl.observability.show import page, token_pieces

ROOT = Path(__file__).resolve().parents[2]
HOSTILE = "4 é😀 </script><script>document.title='taken over'</script>"


class Bytes:
    """One token per byte: the hardest case for text token by token."""

    def decode(self, token_ids: list[int]) -> str:
        return bytes(token_ids).decode("utf-8", errors="replace")


def sample(index: int, response: str, reward: float) -> Sample:
    prompt, tokens = b"2+2=", list(response.encode())
    return Sample(
        prompt=[{"role": "user", "content": prompt.decode()}],
        group_index=index // 2,
        index=index,
        tokens=[*prompt, *tokens],
        response=response,
        response_length=len(tokens),
        loss_mask=[1] * (len(tokens) - 1) + [0],
        rollout_log_probs=[math.log(0.5)] * len(tokens),
        weight_versions=["3", "4"],
        reward=reward,
        status=SampleStatus.TRUNCATED if index else SampleStatus.COMPLETED,
    )


def dump(rollout_id: int = 7, metric: float = 0.5) -> RolloutDump:
    samples = [sample(0, HOSTILE, 1.0), sample(1, "five", 0.0)]
    return RolloutDump({"rollout_id": rollout_id, "evaluation": False, "metrics": {"raw_reward": metric}}, samples)


def data_of(text: str) -> list[dict]:
    """The samples in the page, as its script reads them."""

    class Reader(html.parser.HTMLParser):
        inside, found = False, ""

        def handle_starttag(self, tag, attrs):
            self.inside = tag == "script" and dict(attrs).get("id") == "samples"

        def handle_data(self, data):
            self.found += data if self.inside else ""

    reader = Reader()
    reader.feed(text)
    return json.loads(reader.found)


def test_pieces_end_at_character_boundaries():
    assert list(token_pieces(Bytes(), list("aé😀".encode()))) == [("a", 1), ("é", 2), ("😀", 4)]


def test_invalid_bytes_are_shown_and_counted():
    mark = "\N{REPLACEMENT CHARACTER}"
    assert list(token_pieces(Bytes(), [0x80] * 6 + [0x41])) == [(mark * 4, 4), (mark * 2 + "A", 3)]


def test_every_piece_has_its_log_probs_and_loss_mask():
    hostile, five = data_of(page([dump()], Bytes()))
    assert "".join(text for text, _, _ in hostile["response"]) == HOSTILE
    assert hostile["response"][3] == ["😀", [-0.6931] * 4, True]
    assert [trained for _, _, trained in five["response"]] == [True, True, True, False]
    assert five["facts"]["weight versions"] == "3, 4"
    assert five["facts"]["status"] == "truncated"


def test_response_is_one_text_without_a_tokenizer():
    hostile, _ = data_of(page([dump()], None))
    assert hostile["response"] == [[HOSTILE, [], True]]


def test_pieces_mark_changes_of_the_weight_version():
    several = dataclasses.replace(sample(1, "five", 0.0), version_spans=[["3", 1], ["4", 2], ["", 1]])
    one = dataclasses.replace(sample(0, "five", 0.0), version_spans=[["3", 4]])
    shown, plain = data_of(page([RolloutDump(dump().header, [several, one])], Bytes()))
    assert [(piece[0], piece[3:]) for piece in shown["response"]] == [
        ("f", ["3"]),
        ("i", ["4"]),
        ("v", []),
        ("e", [""]),
    ]
    assert [len(piece) for piece in plain["response"]] == [3] * 4


def test_page_has_each_image_and_the_first_frame_of_each_video_once():
    one, other, first, second = (f"data:image/png;base64,{name}" for name in ("QQ==", "Qg==", "Qw==", "RA=="))
    video = {"frames": [first, second], "fps": 2.0, "seconds": [0.0, 0.5]}
    seen = [{"images": [one]}, {"images": [one, other], "videos": [video]}, None, {"images": ["javascript:alert(1)"]}]
    samples = [dataclasses.replace(sample(index, "4", 1.0), multimodal_inputs=own) for index, own in enumerate(seen)]
    text = page([RolloutDump(dump().header, samples)], None)
    shown = [row["pictures"] for row in data_of(text)]
    assert shown == [[["image 1", 0]], [["image 1", 0], ["image 2", 1], ["video 1: 2 frames", 2]], [], []]
    assert text.count(one) == text.count(other) == text.count(first) == 1 and second not in text and "alert" not in text


def test_several_rollouts_have_their_own_samples_and_mean_metrics():
    text = page([dump(7, 0.5), dump(8, 0.25)], None)
    assert [entry["name"] for entry in data_of(text)] == ["7/0", "7/1", "8/0", "8/1"]
    assert "<dt>raw_reward</dt><dd>0.375</dd>" in text


@pytest.mark.parametrize(("flag", "rewards"), [(None, [0.25, 7.0]), ("length", [3.0, 7.0])])
def test_page_sorts_by_the_trained_reward_entry_or_another(monkeypatch, flag, rewards):
    rows: list[dict] = []
    monkeypatch.setattr(show, "_table", lambda of_page: rows.extend(of_page) or "")
    header, samples = dump()
    samples[0].reward, samples[1].reward = {"score": 0.25, "length": 3}, {"length": 7}
    text = page([RolloutDump({**header, "reward_keys": [["score", 1], ["length", 1]]}, samples)], None, reward_key=flag)
    assert [entry["facts"]["reward"] for entry in data_of(text)] == ['{"score": 0.25, "length": 3}', '{"length": 7}']
    assert [row["reward"] for row in rows] == rewards


def test_page_makes_no_network_request():
    assert not re.search(r"<(script|link|img)[^>]*\s(src|href)=[\"']?https?:", page([dump()], None))


def test_existing_page_is_replaced_only_on_request(tmp_path):
    path = save_rollout(str(tmp_path / "{rollout_id}.jsonl"), 7, dump().samples)
    path.with_suffix(".html").write_text("mine")
    command = [sys.executable, str(ROOT / "tools/show_rollouts.py"), str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, cwd=ROOT)
    assert done.returncode == 2 and "7.html already exists: choose another file, or add --force" in done.stderr
    assert path.with_suffix(".html").read_text() == "mine"


def in_a_browser(text: str, tmp_path: Path, fragment: str = "") -> str:
    """The HTML of a page 5 seconds after a real browser loaded it."""
    browser = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
    if browser is None:
        pytest.skip("there is no Chromium on this machine")
    path = tmp_path / "rollout.html"
    path.write_text(text, encoding="utf-8")
    options = ["--headless", "--no-sandbox", "--disable-gpu", f"--user-data-dir={tmp_path}/profile"]
    options += ["--virtual-time-budget=5000", "--dump-dom", path.as_uri() + fragment]
    return subprocess.run([browser, *options], capture_output=True, text=True, timeout=120).stdout


@pytest.mark.slow
def test_browser_lists_the_samples_and_shows_one_as_text(tmp_path):
    shown = in_a_browser(page([dump()], Bytes()), tmp_path, "#7%2F0")
    assert "<title>Rollout 7</title>" in shown  # the response's script did not run
    assert re.search(r'<h2 id="sample-title">Sample 7/0</h2>', shown)
    assert "Showing 1 to 2 of 2 entries" in shown
    # of at most 0.75 red at probability 0.01: 0.75 * ln 2 / ln 100 = 0.1129 at 0.5, of the rounded -0.6931 likewise
    first = re.search(
        r'<pre id="response"><span title="([^"]*)" style="background-color: rgba\(([^)]*)\);">4</span>', shown
    )
    assert first is not None
    assert first[1] == "log-probability -0.6931, probability 0.5000"
    assert [float(part) for part in first[2].split(",")] == pytest.approx([220, 38, 38, 0.1129], abs=0.003)


@pytest.mark.slow
def test_browser_search_covers_hidden_text_and_a_key_selects_the_next_sample(tmp_path):
    long = "x" * 500
    samples = [
        sample(n, text, 0.0) for n, text in enumerate((f"needle {long}", long, f"a Needle{long}", f"needle{long}"))
    ]
    action = """<script>setTimeout(() => {
        const find = document.getElementById("find");
        find.value = "needle truncated";  // sample 0 is completed
        find.dispatchEvent(new Event("input"));
        for (const key of ["ArrowDown", "ArrowDown"]) {
            find.dispatchEvent(new KeyboardEvent("keydown", { key, bubbles: true }));
        }
    }, 2000)</script></body>"""
    shown = in_a_browser(page([RolloutDump(dump().header, samples)], Bytes()).replace("</body>", action), tmp_path)
    assert "Showing 1 to 2 of 2 entries (filtered from 4 total entries)" in shown
    assert '<h2 id="sample-title">Sample 7/3</h2>' in shown
    assert re.findall(r'<tr class="chosen"[^>]*><td[^>]*>([^<]*)', shown) == ["7/3"]
    assert "… cut off at the longest response" in shown
