"""Compares what two formats allow, token by token."""

from __future__ import annotations

import random
from typing import Any

from fastgen.runtime.sampling.finite.emptiness import Emptiness
from fastgen.runtime.sampling.structured_output import Grammars
from tests.runtime.constrained import EOS
from tests.runtime.sampling.matching_tokens import allowed, matcher

# Tokens that bring an answer nearer to its end, the best first.
TO_THE_END = ["}", "]", '"', "n", "u", "l", "1", ":", ",", "e", "d", "c", "b", "a", "[", "{"]
# Tokens of an answer that are drawn.
DRAWN = 25


def of_schema(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "schema": schema, "disable_any_whitespace": True}


def of_grammar(text: str) -> dict[str, Any]:
    return {"type": "grammar", "grammar": text}


def check_same(
    grammars: Grammars,
    tokenizer: Any,
    given: dict[str, Any],
    meant: dict[str, Any],
    seed: int = 0,
    *,
    to_end: bool = True,
) -> None:
    """Follows drawn answers in both formats, and with ``to_end`` brings each to its end."""
    rng = random.Random(seed)
    end_ids = tokenizer.convert_tokens_to_ids(TO_THE_END)
    brace, quote = tokenizer.convert_tokens_to_ids(["}", '"'])
    for _ in range(6):
        both = [matcher(grammars, each) for each in (given, meant)]
        token_id = 0
        for step in range(400 if to_end else DRAWN):
            own, other = (sorted(allowed(each)) for each in both)
            if not to_end and any("max is 2000" in each.error for each in both):
                break
            assert own == other, tokenizer.convert_ids_to_tokens(set(own) ^ set(other))
            assert own, both[0].error
            if EOS in own and (len(own) == 1 or step > DRAWN):
                break
            others = [token_id for token_id in own if token_id != EOS]
            if step < DRAWN:
                token_id = rng.choice(others)
            elif token_id == brace and quote in own:  # in a string
                token_id = quote
            else:
                token_id = next((token_id for token_id in end_ids if token_id in own), others[0])
            is_complete, is_other_complete = (each.advance(token_id) for each in both)
            assert is_complete == is_other_complete
            if is_complete:
                break
        else:
            assert not to_end


def emptiness_of(grammars: Grammars) -> Emptiness:
    grammars.prepare()
    assert grammars._vocabulary is not None
    return grammars._vocabulary.emptiness()
