"""Results of ``vllm bench serve --save-result``, by its source as of November 2026 (vLLM 0.33 and the main branch).

Its names are ours, so its figures are taken as they are. What differs in their definition says ``docs/lab-metrics.md``.
With ``--save-detailed`` the file has what each request measured, and the figures get intervals.
"""

from __future__ import annotations

from itertools import accumulate
from pathlib import Path
from typing import Any

from fastgen.lab.imports.reading import Fields, is_figure, read_json
from fastgen.lab.imports.requests import ForeignRequest, figures
from fastgen.lab.metrics.figures import UNITS
from fastgen.lab.metrics.summary import Summary

# Lists with an entry for each request, failed ones included.
_DETAILS = ("start_times", "ttfts", "itls", "input_lens", "output_lens", "errors")
# What says how requests were sent.
_LOAD = ("request_rate", "burstiness", "max_concurrency", "num_prompts")
_TARGET = ("endpoint_type", "backend", "model_id", "tokenizer_id", "label")


def read_vllm_bench(path: str | Path) -> list[Summary]:
    """Returns the summaries in a file: one, or more where results were appended to it.

    :raises RecordingError: if the file cannot be read, or is none of these results.
    """
    return [_summary(Fields(data, str(path))) for data in read_json(path)]


def is_vllm_bench(data: Any) -> bool:
    """Returns whether a JSON value is a result of ``vllm bench serve``."""
    return isinstance(data, dict) and {"duration", "completed", "request_throughput"} <= data.keys()


def _summary(fields: Fields) -> Summary:
    if not is_vllm_bench(fields.data):
        fields.fail("", "this is no result of vllm bench serve: duration, completed or request_throughput is missing")
    values = {name: fields.number(name) for name in UNITS}
    completed = values["completed"] or 0
    num_prompts = fields.number("num_prompts")
    if num_prompts is not None and completed > num_prompts:
        fields.fail("completed", f"expected at most the {num_prompts:g} of num_prompts, not {completed:g}")
    if values["failed"] is None and num_prompts is not None:
        values["failed"] = num_prompts - completed
    num_gaps = (values["total_output_tokens"] or 0) - completed
    counts = {"ttft": completed, "tpot": completed, "e2el": completed, "itl": num_gaps}
    data = fields.data
    return Summary(
        source="vllm bench",
        figures=figures(values, _requests(fields), counts),
        about={
            "target": {name: data[name] for name in _TARGET if data.get(name) is not None},
            "load": {name: data[name] for name in _LOAD if data.get(name) is not None},
            "began": data.get("date"),
        },
    )


def _requests(fields: Fields) -> list[ForeignRequest]:
    """Returns the answered requests, where the file has them. An entry with an error was not answered."""
    lists = [fields.items(name) for name in _DETAILS]
    if not all(lists):
        return []
    if len({len(one) for one in lists}) > 1:
        fields.fail(_DETAILS[0], "the lists of requests have different lengths")
    found = []
    for sent_s, ttft_s, gaps_s, num_prompt, num_output, error in zip(*lists, strict=True):
        if error:
            continue
        if not isinstance(gaps_s, list) or not all(map(is_figure, (sent_s, ttft_s, num_prompt, num_output, *gaps_s))):
            fields.fail("itls", "expected numbers of each request")
        *_, last_s = accumulate(gaps_s, initial=ttft_s)
        found.append(
            ForeignRequest(
                sent_s=sent_s,
                ended_s=sent_s + last_s,
                num_prompt_tokens=num_prompt,
                num_generated=num_output,
                latencies_ms={
                    "ttft": (ttft_s * 1e3,),
                    "itl": tuple(gap_s * 1e3 for gap_s in gaps_s),
                    "tpot": ((last_s - ttft_s) * 1e3 / (num_output - 1),) if num_output > 1 else (),
                    "e2el": (last_s * 1e3,),
                },
            )
        )
    return found
