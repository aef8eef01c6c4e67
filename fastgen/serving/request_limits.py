"""Fixed limits on single requests, for HTTP and gRPC alike. Limits that can be configured are in the options."""

from __future__ import annotations

from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.serving.refusals import BadRequestError

# Requests that one call may check without running them.
MAX_CHECKED = 64
# Completions of one prompt: OpenAI's limit.
MAX_N = 128
MAX_BEAMS = 256
MAX_STOP_STRINGS = 64
# Characters of one stop string.
MAX_STOP_CHARACTERS = 1000
MAX_STOP_TOKEN_IDS = 1024
# Alternatives for each token, of the answer or of the prompt.
MAX_LOGPROBS = 128


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


def _check(name: str, found: int, most: int, unit: str) -> None:
    if found > most:
        raise BadRequestError(f"{name}: this server takes at most {most} {unit}, not {found}", param=name)
