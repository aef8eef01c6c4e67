"""The sampler: one token for each row of logits, by each sequence's own parameters.

Penalties follow from a sequence's tokens, and draws from its request's seed, its index and the position. So a sequence
that was preempted and computed again gets the same tokens; what is kept between steps only saves time. Kernels sample
where there are any, torch elsewhere.

``R`` rows, ``V`` vocabulary.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from collections.abc import Sequence as SequenceOf

import numpy as np
import torch
from torch import Tensor

from fastgen.compile.host.device import to_device
from fastgen.compile.ops.sampling.cpp import RowLogprobs, SampledRow, SamplingKernel
from fastgen.compile.ops.sampling.reference import (
    Adjustments,
    Draws,
    RowStatus,
    adjust,
    log_probabilities,
    row_status,
    sample,
)
from fastgen.errors import GenerationError
from fastgen.runtime.requests.outputs import Logprobs
from fastgen.runtime.requests.request import Sequence
from fastgen.runtime.requests.sampled import SampledToken
from fastgen.runtime.sampling.beam_candidates import beam_candidates
from fastgen.runtime.sampling.beam_search import num_candidates
from fastgen.runtime.sampling.host_copy import HostCopies
from fastgen.runtime.sampling.sampled_rows import PLAIN_ROW, BiasLists, RowHistory, is_plain
from fastgen.runtime.sampling.slot_sampler import SlotSampler, gives_logprobs
from fastgen.runtime.scheduling.drafts import SampledSequence

_MAX_INT64 = 2**63 - 1
_FP32 = torch.finfo(torch.float32)
_ERRORS = {
    RowStatus.NOT_FINITE: "the model's logits hold NaN or +inf; the weights are damaged, or too large for this dtype",
    RowStatus.NOTHING_LEFT: "no token can be chosen: every logit is -inf, or min_new_tokens forbids all that are not",
}
_NO_TOKEN_FITS = "no token can be chosen: response_format allows none of the model's tokens here, or only at logit -inf"


class Sampler:
    """Chooses tokens. ``eos_token_ids`` are the model's end-of-text ids; ``kernel``, if given, is for its vocabulary.
    With ``slots`` the device chooses tokens where it computes logits, and they are read here.

    While a sequence has fewer than ``min_new_tokens`` generated tokens, its stop token ids and the end-of-text ids are
    forbidden. With ``ignore_eos`` the latter are ordinary tokens: never forbidden, and may be sampled. For a sequence
    with a matcher, the matcher alone decides what is allowed.
    """

    def __init__(
        self,
        eos_token_ids: Iterable[int] = (),
        kernel: SamplingKernel | None = None,
        slots: SlotSampler | None = None,
    ):
        self.eos_token_ids = frozenset(eos_token_ids)
        self.kernel, self.slots = kernel, slots
        self._bias_lists = None if kernel is None else BiasLists(kernel.vocab_size)
        self._histories: dict[Sequence, RowHistory | None] = {}

    def prepare(self, sequences: SequenceOf[SampledSequence]) -> None:
        """Prepares for ``sequences`` before the step that computes their logits."""
        for sequence in sequences:
            if sequence.matcher is not None:
                sequence.matcher.prepare()
        if self.slots is not None:
            self.slots.prepare(_undrafted(sequences), self._early_ids)

    def constrain(self, sequences: SequenceOf[SampledSequence]) -> None:
        """Sends the masks of ``sequences`` to the device. Call it last before their logits are computed."""
        if self.slots is not None:
            self.slots.constrain(_undrafted(sequences))

    def sample(self, logits: Tensor, sequences: SequenceOf[SampledSequence]) -> list[SampledToken]:
        """Returns one token per row: row ``i`` of ``logits [R, V]`` is for the next token of ``sequences[i]``. The
        drafts of a sequence follow it.

        A drawn (not greedy) sequence's request must have its seed; see ``resolve_seed``. A row that cannot be sampled
        gets an error and affects no other.
        """
        return self.launch(logits, sequences)()

    def launch(self, logits: Tensor, sequences: SequenceOf[SampledSequence]) -> Callable[[], list[SampledToken]]:
        """Launches the sampling of ``logits [R, V]``, and returns a function that returns the tokens of :meth:`sample`.
        With ``slots`` the function waits for them; otherwise they are complete already. ``logits`` may be overwritten
        before it is called. A row whose sequence has no slot any more gets an arbitrary token.
        """
        candidates = self._launch_candidates(logits, sequences)
        if self.slots is not None:  # even without rows: the step must have ended before its inputs are overwritten
            answers = _launch_answers(logits, self.slots.chosen(sequences), sequences, self.slots)
            return lambda: candidates(answers())
        if not sequences:
            return list
        tokens = self._choose(logits, sequences)
        return lambda: candidates(tokens)

    def _choose(self, logits: Tensor, sequences: SequenceOf[SampledSequence]) -> list[SampledToken]:
        if self.kernel is not None:
            return self._sample_by_kernel(self.kernel, logits, sequences)
        status = row_status(logits)
        scores = self._adjusted(logits, sequences)
        if all(sequence.request.sampling.greedy for sequence in sequences) and scores is logits:
            token_ids = logits.argmax(dim=-1)
        else:
            token_ids, adjusted_status = sample(scores, _draws(sequences, logits.device))
            status = torch.where(status == RowStatus.OK, adjusted_status, status)
        return _launch_answers(logits, torch.where(status == RowStatus.OK, token_ids, -status), sequences)()

    def _launch_candidates(
        self, logits: Tensor, sequences: SequenceOf[SampledSequence]
    ) -> Callable[[list[SampledToken]], list[SampledToken]]:
        """Returns a function that adds candidates to the tokens of beams, and leaves other tokens as they are."""
        rows = [row for row, each in enumerate(sequences) if each.request.sampling.beam_width > 1]
        if not rows:
            return lambda tokens: tokens
        beams = [sequences[row] for row in rows]
        logits, forbidden = _take(logits, rows), [self._forbidden(beam) for beam in beams]
        adjusts = any(forbidden) or any(map(_adjusts, beams))
        candidates = beam_candidates(
            logits,
            [num_candidates(beam.request.sampling.beam_width, self._early_ids(beam)) for beam in beams],
            _adjustments(beams, forbidden, logits.shape[1], logits.device) if adjusts else None,
            [beam.request.sampling.logprobs for beam in beams],
        )

        def give(tokens: list[SampledToken]) -> list[SampledToken]:
            for row, found in zip(rows, candidates(), strict=True):
                if tokens[row].error is None:
                    tokens[row] = SampledToken(tokens[row].token_id, candidates=found)
            return tokens

        return give

    def _sample_by_kernel(
        self, kernel: SamplingKernel, logits: Tensor, sequences: SequenceOf[SampledSequence]
    ) -> list[SampledToken]:
        logits = logits.float().contiguous()
        known, current = self._histories, _undrafted(sequences)
        if list(known) != current:
            # Only this step's sequences: others have ended, or wait so long that making theirs again does not matter.
            self._histories = {each: known[each] if each in known else self._history(each) for each in current}
        if not any(self._histories.values()):
            ids = kernel.greedy(logits)
            if min(ids) >= 0:
                return list(map(SampledToken, ids))
            logprobs: SequenceOf[RowLogprobs | None] = [None] * len(ids)
        else:
            ids, logprobs = kernel(logits, [self._row(sequence) for sequence in sequences])
        return [
            sampled_token(token_id, sequence, None if token_id < 0 else _logprobs_by_kernel(found, sequence))
            for token_id, found, sequence in zip(ids, logprobs, sequences, strict=True)
        ]  # fmt: skip

    def rows(self, sequences: SequenceOf[Sequence]) -> list[SampledRow]:
        """Returns the kernel's parameters for the next token of ``sequences``, whose last tokens it sampled."""
        return list(map(self._row, sequences))

    def _row(self, sequence: SampledSequence) -> SampledRow:
        owner, drafts = (sequence, ()) if isinstance(sequence, Sequence) else (sequence.sequence, sequence.drafts)
        history = self._histories[owner]
        row = PLAIN_ROW if history is None else history.row(drafts)
        return row if sequence.matcher is None else row._replace(mask=sequence.matcher.mask())

    def _history(self, sequence: Sequence) -> RowHistory | None:
        if is_plain(sequence.request.sampling):
            return None
        assert self._bias_lists is not None
        return RowHistory(sequence, self._early_ids, self._bias_lists)

    def _adjusted(self, logits: Tensor, sequences: SequenceOf[SampledSequence]) -> Tensor:
        """Returns ``logits`` itself if no sequence adjusts them, else a copy in fp32 with the adjustments applied."""
        forbidden = [self._forbidden(sequence) for sequence in sequences]
        rows = [row for row, sequence in enumerate(sequences) if forbidden[row] or _adjusts(sequence)]
        if not rows:
            return logits
        adjustments = _adjustments(
            [sequences[row] for row in rows], [forbidden[row] for row in rows], logits.shape[1], logits.device
        )
        scores = logits.to(torch.float32, copy=True)
        adjusted = adjust(_take(logits, rows), adjustments)
        return scores.index_copy_(0, to_device(torch.tensor(rows), logits.device), adjusted)

    def _forbidden(self, sequence: SampledSequence) -> frozenset[int]:
        if sequence.num_tokens - sequence.num_prompt_tokens >= sequence.request.sampling.min_new_tokens:
            return frozenset()
        return self._early_ids(sequence)

    def _early_ids(self, sequence: SampledSequence) -> frozenset[int]:
        """Returns the tokens that ``min_new_tokens`` forbids."""
        if sequence.matcher is not None:
            return frozenset()
        sampling = sequence.request.sampling
        return (frozenset() if sampling.ignore_eos else self.eos_token_ids).union(sampling.stop_token_ids)


def _undrafted(sequences: SequenceOf[SampledSequence]) -> list[Sequence]:
    return [each for each in sequences if isinstance(each, Sequence)]


def _launch_answers(
    logits: Tensor, found: Tensor, sequences: SequenceOf[SampledSequence], slots: SlotSampler | None = None
) -> Callable[[], list[SampledToken]]:
    """Returns a function that returns the result of each row: a token or the error of a ``-status``, as ``found [R]``
    says, with the log-probabilities that are requested. The kernels of ``slots`` compute some of these, torch the rest.
    """
    by_kernel: dict[int, int] = {}
    by_torch: dict[int, int] = {}
    for row, sequence in enumerate(sequences):
        if (count := sequence.request.sampling.logprobs) is not None:
            (by_kernel if slots is not None and gives_logprobs(sequence.request.sampling) else by_torch)[row] = count
    token_ids = HostCopies([found])
    parts: list[tuple[dict[int, int], Callable[[], list[Logprobs]]]] = []
    if slots is not None and by_kernel:
        computed = [_take(each, list(by_kernel)) for each in (found, *slots.logprobs(len(sequences)))]
        parts.append((by_kernel, _copy_logprobs(computed, list(by_kernel.values()))))
    if by_torch:
        rows = _take(logits, list(by_torch)), _take(found, list(by_torch)).clamp(min=0).long()
        parts.append((by_torch, _launch_logprobs(*rows, list(by_torch.values()))))

    def answers() -> list[SampledToken]:
        ids: list[int] = token_ids.wait()[0].tolist()
        logprobs = {row: each for counts, given in parts for row, each in zip(counts, given(), strict=True)}
        return [
            sampled_token(token_id, sequences[row], logprobs.get(row) if token_id >= 0 else None)
            for row, token_id in enumerate(ids)
        ]

    return answers


def sampled_token(found: int, sequence: SampledSequence, logprobs: Logprobs | None = None) -> SampledToken:
    """Returns the meaning of the token or ``-status`` that was ``found`` for ``sequence``."""
    if found >= 0:
        return SampledToken(found, logprobs)
    status = RowStatus(-found)
    if status is RowStatus.NOTHING_LEFT and sequence.matcher is not None:
        reason = sequence.matcher.error
        return SampledToken(0, error=f"response_format cannot be followed: {reason}" if reason else _NO_TOKEN_FITS)
    return SampledToken(0, error=_ERRORS[status], is_damaged=status is RowStatus.NOT_FINITE)


def token_logprobs(logits: Tensor, token_ids: SequenceOf[int], counts: SequenceOf[int]) -> list[Logprobs]:
    """Returns log-probabilities of each row's token and of its ``counts[row]`` likeliest alternatives to it.

    They are the model's own distribution, the log-softmax of the raw ``logits [R, V]`` before penalties, bias,
    temperature and filters: comparable between requests and with the prompt's. A row's token comes first, then the
    alternatives from likely to unlikely, the lower id first among equals.
    """
    return _launch_logprobs(logits, to_device(torch.tensor(token_ids, dtype=torch.int64), logits.device), counts)()


def _launch_logprobs(logits: Tensor, token_ids: Tensor, counts: SequenceOf[int]) -> Callable[[], list[Logprobs]]:
    """Returns a function that waits for :func:`token_logprobs`."""
    most = max(counts, default=0)
    # One more than requested, since the token itself may be among the likeliest.
    num_top = min(most + 1, logits.shape[1]) if most else 0
    return _copy_logprobs([token_ids, *log_probabilities(logits, token_ids, num_top)], counts)


def _copy_logprobs(computed: SequenceOf[Tensor], counts: SequenceOf[int]) -> Callable[[], list[Logprobs]]:
    """Returns a function that waits for them. ``computed`` are each row's token, its log-probability, the likeliest
    log-probabilities and their ids.
    """
    copies = HostCopies(computed)

    def logprobs() -> list[Logprobs]:
        return [
            _token_first(token_id, actual, zip(top_ids, top, strict=True), count)
            for token_id, actual, top, top_ids, count in zip(*map(Tensor.tolist, copies.wait()), counts, strict=True)
        ]

    return logprobs


def launch_prompt_logprobs(logits: Tensor, token_ids: SequenceOf[int], count: int) -> Callable[[], list[Logprobs]]:
    """Launches log-probabilities of prompt tokens; row ``i`` of ``logits [R, V]`` predicts ``token_ids[i]``.

    Returns a function that waits for them. Each entry has the token and ``count`` alternatives. The function raises
    ``GenerationError`` if logits hold NaN or +inf, or all are −inf. ``logits`` may be overwritten before it is called.
    """
    states = HostCopies([row_status(logits)])
    given = to_device(torch.tensor(token_ids, dtype=torch.int64), logits.device)
    logprobs = _launch_logprobs(logits, given, [count] * len(token_ids))

    def answers() -> list[Logprobs]:
        for state in states.wait()[0].tolist():
            if state != RowStatus.OK:
                raise GenerationError(_ERRORS[RowStatus(state)])
        return logprobs()

    return answers


def _logprobs_by_kernel(found: RowLogprobs | None, sequence: SampledSequence) -> Logprobs | None:
    if found is None:
        return None
    (token_id, value), *likeliest = zip(found.token_ids, found.values, strict=True)
    return _token_first(token_id, value, likeliest, sequence.request.sampling.logprobs or 0)


def _token_first(token_id: int, value: float, likeliest: Iterable[tuple[int, float]], count: int) -> Logprobs:
    alternatives = [(other, each) for other, each in likeliest if other != token_id][:count]
    return {token_id: value, **dict(alternatives)}


def _take(values: Tensor, rows: list[int]) -> Tensor:
    return values if len(rows) == len(values) else values.index_select(0, to_device(torch.tensor(rows), values.device))


def _adjusts(sequence: SampledSequence) -> bool:
    sampling = sequence.request.sampling
    return bool(
        sampling.logit_bias
        or sampling.response_format is not None
        or sampling.repetition_penalty != 1.0
        or sampling.presence_penalty
        or sampling.frequency_penalty
    )


def _adjustments(
    sequences: SequenceOf[SampledSequence],
    forbidden: SequenceOf[frozenset[int]],
    vocab_size: int,
    device: torch.device,
) -> Adjustments:
    shape = (len(sequences), vocab_size)
    seen, counts, bias = torch.zeros(shape, dtype=torch.bool), torch.zeros(shape), torch.zeros(shape)
    for row, sequence in enumerate(sequences):
        sampling = sequence.request.sampling
        # Prompts and parameters may hold ids that the head does not have; these are left out.
        if sampling.repetition_penalty != 1.0:
            seen[row, _within(sequence.token_ids, vocab_size)] = True
        generated = sequence.token_ids[sequence.num_prompt_tokens :]
        if generated and (sampling.presence_penalty or sampling.frequency_penalty):
            counts[row] = torch.tensor(generated).bincount(minlength=vocab_size)[:vocab_size]
        for token_id in _within(sampling.logit_bias, vocab_size):
            bias[row, token_id] = sampling.logit_bias[token_id]
        bias[row, _within(forbidden[row], vocab_size)] = -torch.inf
        if sequence.matcher is not None:
            allowed = np.unpackbits(sequence.matcher.mask().view(np.uint8), count=vocab_size, bitorder="little")
            bias[row, torch.from_numpy(allowed == 0)] = -torch.inf
    parameters = [sequence.request.sampling for sequence in sequences]

    def column(values: list[float]) -> Tensor:
        return to_device(torch.tensor(values, dtype=torch.float32), device)

    return Adjustments(
        seen=to_device(seen, device),
        counts=to_device(counts, device),
        # Clamped to the range of fp32, so that an extreme penalty becomes neither 0 nor infinite.
        repetition=column([min(max(sampling.repetition_penalty, _FP32.tiny), _FP32.max) for sampling in parameters]),
        presence=column([sampling.presence_penalty for sampling in parameters]),
        frequency=column([sampling.frequency_penalty for sampling in parameters]),
        bias=to_device(bias, device),
    )


def _within(token_ids: Iterable[int], vocab_size: int) -> list[int]:
    return [token_id for token_id in token_ids if token_id < vocab_size]


def _draws(sequences: SequenceOf[SampledSequence], device: torch.device) -> Draws:
    parameters = [sequence.request.sampling for sequence in sequences]
    reals = torch.tensor([(item.temperature, item.top_p, item.min_p) for item in parameters], dtype=torch.float64)
    integers = torch.tensor(
        [
            (min(item.top_k, _MAX_INT64), _seed_bits(item.greedy, item.seed), sequence.num_tokens, sequence.index)
            for item, sequence in zip(parameters, sequences, strict=True)
        ]
    )
    temperature, top_p, min_p = to_device(reals, device).unbind(1)
    top_k, seeds, positions, indices = to_device(integers, device).unbind(1)
    return Draws(temperature, top_k, top_p, min_p, seeds, positions, indices)


def _seed_bits(greedy: bool, seed: int | None) -> int:
    """Returns the seed modulo 2**64 as the signed number with the same bits."""
    if greedy:
        return 0
    assert seed is not None, "a request that draws has its seed resolved when it is submitted"
    return (seed + 2**63) % 2**64 - 2**63
