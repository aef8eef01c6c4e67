"""Fixed limits on single requests, for HTTP and gRPC alike. Limits that can be configured are in the options."""

from __future__ import annotations

from collections.abc import Iterator

from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.refusals import BadRequestError

# The HTTP header, and the gRPC metadata, that names the session of a request; and the most characters of a name.
SESSION_HEADER, MAX_SESSION_LENGTH = "x-session-id", 512
# Messages of a conversation.
MAX_MESSAGES = 4096
# Requests that one call may check without running them.
MAX_CHECKED = 64
# Completions of one prompt: OpenAI's limit.
MAX_N = 128
MAX_BEAMS = 256
# Answers to all prompts of one call: each of its prompts may have several.
MAX_CALL_ANSWERS = 4096
# Answers beyond the first of each request, of all requests that have not ended. Requests are few, so this bounds the
# memory and the time that a few calls can take with answers.
MAX_MORE_ANSWERS = 1 << 14
# Token ids of all prompts of one request: more would take too long to check.
MAX_TOKEN_IDS = 1 << 20
MAX_BIASES = 1 << 16
MAX_STOP_STRINGS = 64
# Characters of one stop string.
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 1024
# Alternatives for each token, of the answer or of the prompt.
MAX_LOGPROBS = 128
# Log-probabilities of one request, if its answers get as long as they may.
MAX_REQUEST_LOGPROBS = 1 << 21
# The same for all requests that have not ended.
MAX_OPEN_LOGPROBS = 1 << 23
# They take at most the machine's memory divided by this.
LOGPROBS_SHARE = 16
# Bytes of each log-probability, and of each token that has any, in the engine's process and the server's together, as
# measured when most was held, before they were packed. They take less now.
LOGPROB_BYTES, LOGPROBS_TOKEN_BYTES = 280, 1000
# Characters of prompts that the answers of one call repeat.
MAX_ECHOED_CHARACTERS = 1 << 24
# With more of them, a request's log-probabilities are sent and collected in pieces.
MANY_LOGPROBS = 1 << 14
# Answers of a call with more tokens and log-probabilities together are encoded in turns, in pieces.
MANY_VALUES = 1 << 14
# The same for echoed prompts with more characters.
MANY_CHARACTERS = 1 << 20


def check_limits(sampling: SamplingParams) -> None:
    """Raises ``BadRequestError`` if a request asks for too much work that delays the steps it shares with other
    requests.

    Most of that work is done for every token. The library itself has no such limits.
    """
    _check("n", sampling.n, MAX_N, "completions")
    _check("beam_width", sampling.beam_width or 0, MAX_BEAMS, "beams")
    _check("stop", len(sampling.stop), MAX_STOP_STRINGS, "strings")
    _check("stop", max(map(len, sampling.stop), default=0), MAX_STOP_CHARACTERS, "characters each")
    _check("stop_token_ids", len(sampling.stop_token_ids), MAX_STOP_TOKEN_IDS, "ids")
    _check("logprobs", sampling.logprobs or 0, MAX_LOGPROBS, "alternatives")
    _check("prompt_logprobs", sampling.prompt_logprobs or 0, MAX_LOGPROBS, "alternatives")


def num_sequences(sampling: SamplingParams) -> int:
    """Returns how many sequences a request has: its answers, or the beams of its search."""
    return max(sampling.n, sampling.beam_width)


def num_logprobs(num_prompt_tokens: int, sampling: SamplingParams) -> int:
    """Returns the most log-probabilities that the answers to a request hold: for each token of an answer and of the
    prompt its own and those of the alternatives, as far as they are requested.
    """
    return sum(count * (1 + alternatives) for count, alternatives, _ in _logprob_terms(num_prompt_tokens, sampling))


def logprob_bytes(num_prompt_tokens: int, sampling: SamplingParams) -> int:
    """Returns the most memory that these log-probabilities take."""
    num_tokens = sum(count for count, _, _ in _logprob_terms(num_prompt_tokens, sampling))
    return LOGPROB_BYTES * num_logprobs(num_prompt_tokens, sampling) + LOGPROBS_TOKEN_BYTES * num_tokens


def max_logprob_bytes(memory_bytes: int) -> int:
    """Returns the most memory that the log-probabilities of all open requests take, on a machine with
    ``memory_bytes``: a 16th part of it, or less if ``MAX_OPEN_LOGPROBS`` take less.
    """
    return min(memory_bytes // LOGPROBS_SHARE, MAX_OPEN_LOGPROBS * (LOGPROB_BYTES + LOGPROBS_TOKEN_BYTES))


def check_num_logprobs(num_prompt_tokens: int, sampling: SamplingParams, max_bytes: int) -> None:
    """Raises ``BadRequestError`` with the arithmetic if a request may hold more than ``MAX_REQUEST_LOGPROBS``, or more
    of them than ``max_bytes`` have room for.
    """
    found, found_bytes = num_logprobs(num_prompt_tokens, sampling), logprob_bytes(num_prompt_tokens, sampling)
    if found > MAX_REQUEST_LOGPROBS:
        most = f"this server takes at most {MAX_REQUEST_LOGPROBS} in one request"
    elif found_bytes > max_bytes:
        most = f"they take up to {found_bytes} bytes, and this server has {max_bytes} bytes for those of all requests"
    else:
        return
    terms = list(_logprob_terms(num_prompt_tokens, sampling))
    sums = " + ".join(f"{text} × (1 + {alternatives})" for _, alternatives, text in terms)
    raise BadRequestError(
        f"logprobs: the answer may hold {sums} = {found} log-probabilities; {most}: ask for fewer tokens, alternatives "
        "or completions",
        param="logprobs" if sampling.logprobs is not None else "prompt_logprobs",
    )


def _logprob_terms(num_prompt_tokens: int, sampling: SamplingParams) -> Iterator[tuple[int, int, str]]:
    """Yields for answers and prompt: how many tokens, how many alternatives for each, and the tokens as text."""
    num_seqs = num_sequences(sampling)
    if sampling.logprobs is not None:
        text = f"{num_seqs} answers × {sampling.max_new_tokens} tokens"
        yield num_seqs * sampling.max_new_tokens, sampling.logprobs, text
    if sampling.prompt_logprobs is not None:
        yield num_prompt_tokens, sampling.prompt_logprobs, f"{num_prompt_tokens} tokens of the prompt"


def _check(name: str, found: int, most: int, unit: str) -> None:
    if found > most:
        raise BadRequestError(f"{name}: this server takes at most {most} {unit}, not {found}", param=name)
