"""The workload of the FastGen paper (Holmes et al., 2024), as its published benchmark scripts make it.

From those scripts (``benchmarks/inference/mii`` of microsoft/DeepSpeedExamples, read in November 2026): after
``numpy.random.seed(42)``, the lengths of all prompts are drawn from a normal distribution, then those of all answers,
with a standard deviation of 0.3 times the mean, and cut to integers towards zero. Prompts are at most 4000 tokens long
(2000 for the models whose prompts have a mean of 1900), answers have no limit. Prompt ``i`` is the tokens
``[i : i + length]`` of one text, so neighbours are shifted by one token. Each client takes a warm-up request from the
same queue first: a workload for ``n`` measured requests of ``c`` clients has ``n + c``.
"""

# Annotations are not postponed: the registry reads the types of the fields.

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, ClassVar

import numpy as np

from fastgen.arguments import AT_LEAST_0, AT_LEAST_1, Check, Option, check
from fastgen.errors import InvalidArgumentError
from fastgen.lab.workloads.named import stated
from fastgen.lab.workloads.prompts import drawn_ids, generator
from fastgen.lab.workloads.request import PlannedRequest

_SCRIPTS_SEED = 42
_LENGTHS = ("exact", "clamped")


@dataclass(frozen=True, kw_only=True)
class Paper:
    """The FastGen paper's workload: normally distributed lengths, and prompts that are windows of one text.

    With ``lengths=exact`` the lengths are those of the scripts, whatever the seed of the run. The scripts send what
    they drew, even an empty prompt or an answer of no tokens; here such a draw is an error. It is rare (one length in
    2,300) and does not occur among the first 1,024 requests of any of the paper's pairs of mean lengths. With
    ``lengths=clamped`` the seed of the run counts, and lengths are at least 1.
    """

    name: ClassVar[str] = "paper"
    mean_prompt_tokens: Annotated[int, Option("Mean tokens of a prompt.", check=AT_LEAST_1, name="prompt")] = 2600
    mean_new_tokens: Annotated[int, Option("Mean tokens of an answer.", check=AT_LEAST_1, name="answer")] = 60
    num_requests: Annotated[int, Option("Number of requests.", check=AT_LEAST_1, name="n")] = 512
    deviation: Annotated[float, Option("Standard deviation of a length, as a share of its mean.", check=AT_LEAST_0)] = (
        0.3
    )
    max_prompt_tokens: Annotated[int, Option("Most tokens of a prompt.", check=AT_LEAST_1, name="max_prompt")] = 4000
    lengths: Annotated[
        str,
        Option(
            "exact: the lengths that the scripts draw; clamped: drawn by the seed, and at least 1.",
            check=Check("exact or clamped", lambda value: value in _LENGTHS),
        ),
    ] = "exact"
    text: Annotated[
        str | None, Option("File with the text, in UTF-8, of which prompts are windows.", default="drawn tokens")
    ] = None
    # Returns the tokens of a text; needed for ``text`` only.
    encode: Callable[[str], Sequence[int]] | None = None

    def __post_init__(self) -> None:
        check(self)
        if self.text is not None and self.encode is None:
            raise InvalidArgumentError(f"text={self.text!r}: a text needs a tokenizer")

    def requests(self, *, vocab_size: int, seed: int) -> list[PlannedRequest]:
        """Returns the requests.

        :raises InvalidArgumentError: if a length is below 1, or the text is too short.
        """
        exact = self.lengths == "exact"
        prompts, answers = self._drawn_lengths(_SCRIPTS_SEED if exact else seed)
        if not exact:
            prompts, answers = np.maximum(prompts, 1), np.maximum(answers, 1)
        for what, lengths in (("prompt", prompts), ("answer", answers)):
            if (below := np.flatnonzero(lengths < 1)).size:
                number = int(below[0])
                raise InvalidArgumentError(
                    f"workload 'paper': request {number} has a {what} of {lengths[number]} tokens, which the scripts "
                    "would send; use lengths=clamped"
                )
        ids = self._text_ids(int((np.arange(self.num_requests) + prompts).max()), vocab_size, seed)
        return [
            PlannedRequest(prompt_ids=ids[number : number + int(prompt)], num_new_tokens=int(answer))
            for number, (prompt, answer) in enumerate(zip(prompts, answers, strict=True))
        ]

    def facts(self) -> dict[str, Any]:
        return stated(self)

    def _drawn_lengths(self, seed: int) -> tuple[np.ndarray, np.ndarray]:
        draw = np.random.RandomState(seed)
        prompts, answers = (
            draw.normal(mean, self.deviation * mean, self.num_requests).astype(np.int64)
            for mean in (self.mean_prompt_tokens, self.mean_new_tokens)
        )
        return np.minimum(prompts, self.max_prompt_tokens), answers

    def _text_ids(self, num_tokens: int, vocab_size: int, seed: int) -> list[int]:
        """Returns the first ``num_tokens`` tokens of the text."""
        if self.text is None or self.encode is None:
            return drawn_ids(generator(seed, "text"), num_tokens, vocab_size)
        try:
            text = Path(self.text).read_text("utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise InvalidArgumentError(f"{self.text}: the text cannot be read: {error}") from None
        ids = list(self.encode(text))
        if len(ids) < num_tokens:
            raise InvalidArgumentError(f"{self.text}: the text has {len(ids)} tokens; this workload needs {num_tokens}")
        return ids[:num_tokens]
