"""Which weight version sampled which tokens, through generation, tools, cuts and dumps."""

from __future__ import annotations

import json

from slimrl.data.sample import Sample, SampleStatus, Span, add_span, clip_spans, format_spans
from slimrl.engines.protocol import Generation
from slimrl.rollout.generation.multi_turn import append_generation, append_tool_output, end_at_stop_string


def generated(count: int, version: str, spans=()) -> Generation:
    return Generation(list(range(count)), [-0.5] * count, "stop", version, version_spans=[list(span) for span in spans])


def test_spans_cover_requests_turns_and_tool_text_in_order():
    sample = Sample("p", tokens=[7, 8, 9])
    append_generation(sample, generated(3, "1"))
    append_generation(sample, generated(5, "2", [("1", 2), ("2", 3)]))
    append_tool_output(sample, [40, 41])
    append_generation(sample, generated(0, "3"))
    append_generation(sample, generated(4, "4", [("3", 1), ("4", 3)]))
    assert sample.version_spans == [["1", 5], ["2", 3], ["", 2], ["3", 1], ["4", 3]]
    assert sum(count for _, count in sample.version_spans) == sample.response_length == 14
    assert sample.weight_versions == ["1", "2", "4"]  # one per request that returned tokens


def test_tokens_extend_the_last_span_only_when_it_has_their_version():
    spans: list[Span] = []
    for version, count in [("1", 2), ("2", 3), ("2", 1), ("3", 0), ("1", 4)]:
        add_span(spans, version, count)
    assert spans == [["1", 2], ["2", 4], ["1", 4]]
    assert format_spans(spans) == "1: 2 tokens, 2: 4 tokens, 1: 4 tokens"


def test_externally_cut_or_extended_response_keeps_known_spans():
    spans = [["1", 3], ["2", 2]]
    assert clip_spans(spans, 4) == [["1", 3], ["2", 1]]
    assert clip_spans(spans, 3) == [["1", 3]]
    assert clip_spans(spans, 7) == [["1", 3], ["2", 2], ["", 2]]
    assert clip_spans([], 2) == [["", 2]]
    assert spans == [["1", 3], ["2", 2]]


def test_stop_string_across_requests_also_cuts_the_spans():
    sample = Sample("p", tokens=[1])
    append_generation(sample, Generation([10, 11], [-1.0, -1.0], "abort", "1"))
    append_generation(sample, Generation([12, 13, 14], [-1.0, -1.0, -1.0], "stop", "2"))
    end_at_stop_string(sample, 3, ["BC"], lambda ids: "".join(chr(55 + token) for token in ids))
    assert sample.tokens == [1, 10, 11, 12] and sample.version_spans == [["1", 2], ["2", 1]]


def test_dumps_restore_spans_and_older_dumps_have_none():
    sample = Sample("p", tokens=[1], status=SampleStatus.COMPLETED)
    append_generation(sample, generated(3, "2", [("1", 1), ("2", 2)]))
    written = json.loads(json.dumps(sample.to_dict()))
    assert Sample.from_dict(written) == sample
    del written["version_spans"]
    assert Sample.from_dict(written).version_spans == []
    assert format_spans(sample.version_spans) == "1: 1 token, 2: 2 tokens"
