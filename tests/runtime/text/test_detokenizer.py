"""The detokenizer against decoding everything at once, for every kind of tokenizer, and stop strings by brute force."""

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import decoders

from fastgen.runtime.text.detokenizer import REPLACEMENT, Detokenizer, TokenDecoder
from tests.runtime.text.tokenizer_kinds import BYTE_KINDS, CORPUS, MAKERS, SPECIAL, word_tokenizer


@pytest.fixture(scope="module")
def kinds():
    return {name: make() for name, make in MAKERS.items()}


@pytest.fixture(scope="module")
def token_decoders(kinds):
    return {name: TokenDecoder(tokenizer) for name, tokenizer in kinds.items()}


def known_ids(tokenizer):
    return sorted(tokenizer.get_vocab().values())


# --- References -----------------------------------------------------------------------------------------------------


def decode(tokenizer, ids):
    known = set(known_ids(tokenizer))
    ids = [token_id for token_id in ids if token_id in known]
    return tokenizer.decode(ids, skip_special_tokens=True, clean_up_tokenization_spaces=False)


def added_text(tokenizer, prompt, generated):
    """Returns what ``generated`` adds to the decoded prompt, whose last half character is completed or dropped."""
    before, whole = decode(tokenizer, prompt), decode(tokenizer, [*prompt, *generated])
    if whole.startswith(before):
        return whole[len(before) :]
    assert before.endswith(REPLACEMENT)
    assert whole.startswith(before[:-1])
    return whole[len(before) - 1 :]


def added_text_of_byte_fallback(tokenizer, prompt, generated):
    """The same for byte fallback, character by character with the token that ends each.

    Written out because the ``tokenizers`` decoder turns a whole run of bytes, characters that were complete included,
    into U+FFFD when a later byte fits nothing, which a stream cannot do. Here each byte counts by itself.
    """
    characters, run = [], []  # (character, index of the token that ends it)

    def end_run():
        while run:
            for length in range(1, 5):
                try:
                    character = bytes(byte for byte, _ in run[:length]).decode()
                except UnicodeDecodeError:
                    continue
                if len(character) == 1:
                    break
            else:
                character, length = REPLACEMENT, 1
            characters.append((character, run[length - 1][1]))
            del run[:length]

    special = set(tokenizer.all_special_ids)
    for index, token_id in enumerate([*prompt, *generated]):
        token = tokenizer.convert_ids_to_tokens(token_id)
        if token is None or token_id in special:
            continue
        if len(token) == 6 and token.startswith("<0x") and token != "<0xZZ>":
            run.append((int(token[3:5], 16), index))
        else:
            end_run()
            characters.extend((character, index) for character in token.replace("▁", " "))
    end_run()
    if characters and characters[0][0] == " ":
        del characters[0]
    return "".join(character for character, index in characters if index >= len(prompt))


def expected_text(kind, tokenizer, prompt, generated):
    reference = added_text_of_byte_fallback if kind == "byte-fallback BPE" else added_text
    return reference(tokenizer, prompt, generated)


def pieces(decoder, prompt, generated, **options):
    detokenizer = Detokenizer(decoder, prompt, **options)
    return [*(detokenizer.append(token_id) for token_id in generated), detokenizer.finish()]


# --- Whole characters -----------------------------------------------------------------------------------------------

TEXT = st.text(
    st.one_of(
        st.sampled_from("ab e,.\n"),
        st.sampled_from("éüßПр你好世界\u0301\u0308\u200d\ufe0f\ufffd👩👧👍🏽🏳🌈"),
        st.characters(exclude_categories=["Cs"]),
    ),
    max_size=20,
)


def split_at_random(draw, tokenizer, data):
    """Spell ``data`` with any byte-level tokens that fit, not only those the tokenizer itself would choose."""
    to_character = dict(zip(sorted(BYTE_ORDER), (BYTE_ORDER[byte] for byte in sorted(BYTE_ORDER)), strict=True))
    spelled = "".join(to_character[byte] for byte in data)
    vocabulary, ids, start = tokenizer.get_vocab(), [], 0
    while start < len(spelled):
        fitting = [
            end for end in range(start + 1, min(start + 9, len(spelled) + 1)) if spelled[start:end] in vocabulary
        ]
        end = draw.choice(fitting)
        ids.append(vocabulary[spelled[start:end]])
        start = end
    return ids


def byte_order():
    """GPT-2's spelling of bytes as printable characters."""
    printable = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in printable]
    return {byte: chr(byte) for byte in printable} | {byte: chr(256 + i) for i, byte in enumerate(others)}


BYTE_ORDER = byte_order()


@settings(deadline=None, max_examples=150)
@given(text=TEXT, seed=st.integers(0, 2**32))
def test_text_split_anywhere_comes_out_whole(kinds, token_decoders, text, seed):
    draw = random.Random(seed)
    tokenizer = kinds["byte-level BPE"]
    ids = split_at_random(draw, tokenizer, text.encode())
    cut = draw.randint(0, len(ids))
    found = "".join(pieces(token_decoders["byte-level BPE"], ids[:cut], ids[cut:]))
    assert found == added_text(tokenizer, ids[:cut], ids[cut:])
    assert "".join(pieces(token_decoders["byte-level BPE"], [], ids)) == text


@settings(deadline=None, max_examples=150)
@given(text=TEXT, seed=st.integers(0, 2**32))
def test_text_through_byte_fallback_comes_out_as_the_tokenizer_decodes_it(kinds, token_decoders, text, seed):
    tokenizer = kinds["byte-fallback BPE"]
    ids = tokenizer.encode("the" + text, add_special_tokens=False)
    assert tokenizer.decode(ids) == "the" + text.replace("▁", " ")
    cut = random.Random(seed).randint(0, len(ids))
    found = "".join(pieces(token_decoders["byte-fallback BPE"], ids[:cut], ids[cut:]))
    assert found == added_text_of_byte_fallback(tokenizer, ids[:cut], ids[cut:])
    assert "".join(pieces(token_decoders["byte-fallback BPE"], [], ids)) == tokenizer.decode(ids)


@pytest.mark.parametrize("kind", MAKERS)
@settings(deadline=None, max_examples=80)
@given(seed=st.integers(0, 2**32), num_prompt=st.integers(0, 40), num_generated=st.integers(0, 40))
def test_random_tokens_come_out_as_decoded_at_once(kinds, token_decoders, kind, seed, num_prompt, num_generated):
    """Tokens that are no sensible text, special ones, ids in holes and ids beyond the vocabulary among them."""
    draw = random.Random(seed)
    tokenizer = kinds[kind]
    ordinary = known_ids(tokenizer)
    odd = [*tokenizer.all_special_ids, max(ordinary) + 1, max(ordinary) + 1000, 1, 3]
    favourites = draw.sample(ordinary, min(4, len(ordinary)))

    def ids(count):
        return [draw.choice(draw.choice([ordinary, favourites, favourites, odd])) for _ in range(count)]

    prompt, generated = ids(num_prompt), ids(num_generated)
    found = pieces(token_decoders[kind], prompt, generated)
    assert "".join(found) == expected_text(kind, tokenizer, prompt, generated)

    # Nothing is held that could be known: at most the one character that the last bytes may begin.
    if kind in BYTE_KINDS:
        for count in range(num_generated + 1):
            so_far = added_text(tokenizer, prompt, generated[:count])
            assert "".join(found[:count]) in (so_far, so_far.removesuffix(REPLACEMENT))


def spelled(tokenizer):
    return {token_id: tokenizer.convert_ids_to_tokens(token_id) for token_id in tokenizer.all_special_ids}


@settings(deadline=None, max_examples=300)
@given(seed=st.integers(0, 2**32), num_generated=st.integers(0, 12))
def test_special_tokens_with_a_text_end_characters_as_in_a_decode_of_everything(
    kinds, token_decoders, seed, num_generated
):
    draw = random.Random(seed)
    tokenizer = kinds["byte-level BPE"]
    vocabulary = tokenizer.get_vocab()
    halves = [vocabulary[BYTE_ORDER[byte]] for byte in b"\xff\xf0\x9f\x91\x8d\xc3\xa9"]
    odd = [*tokenizer.all_special_ids, *halves]
    generated = [draw.choice(draw.choice([odd, odd, known_ids(tokenizer)])) for _ in range(num_generated)]
    found = pieces(token_decoders["byte-level BPE"], [], generated, spelled=spelled(tokenizer))
    whole = tokenizer.decode(generated, skip_special_tokens=False, clean_up_tokenization_spaces=False)
    assert "".join(found) == whole


def test_a_special_token_with_a_text_ends_a_half_character(kinds, token_decoders):
    """The half in the prompt has no text in the answer. Bytes after the special token do not complete it."""
    for kind in (*BYTE_KINDS, "byte-fallback BPE"):
        tokenizer = kinds[kind]
        spell = {
            "byte-level BPE": lambda byte: BYTE_ORDER[byte],
            "slow bytes": lambda byte: f"{byte:02x}",
            "byte-fallback BPE": lambda byte: f"<0x{byte:02X}>",
        }[kind]
        x, first, second = tokenizer.convert_tokens_to_ids([spell(byte) for byte in b"x\xc3\xa9"])
        end = tokenizer.eos_token_id
        for prompt, generated, expected in (
            ([x], [first, end, second, x], "\ufffd</s>\ufffdx"),
            ([x, first], [end, second, x], "</s>\ufffdx"),
            ([x, first], [end, first, second], "</s>é"),
            ([first], [end, x], "</s>x"),
        ):
            found = pieces(token_decoders[kind], prompt, generated, spelled=spelled(tokenizer))
            assert "".join(found) == expected, kind


def test_a_character_is_given_out_by_the_token_that_completes_it(kinds, token_decoders):
    for kind in (*BYTE_KINDS, "byte-fallback BPE"):
        tokenizer = kinds[kind]
        vocabulary = tokenizer.get_vocab()
        if kind == "byte-level BPE":
            ids = [vocabulary[BYTE_ORDER[byte]] for byte in "é👍x".encode()]
        elif kind == "slow bytes":
            ids = list("é👍x".encode())
        else:
            ids = [vocabulary[f"<0x{byte:02X}>"] for byte in "é👍x".encode()]
        assert pieces(token_decoders[kind], [], ids) == ["", "é", "", "", "", "👍", "x", ""], kind
        # A prompt that ends inside a character: the character is given out once, whole, or not at all.
        for cut in (1, 3, 4, 5):
            found = pieces(token_decoders[kind], ids[:cut], ids[cut:])
            assert "".join(found) == ("é👍x" if cut == 1 else "👍x"), (kind, cut)
            assert "".join(pieces(token_decoders[kind], ids[:cut], [])) == "", (kind, cut)
            assert "".join(pieces(token_decoders[kind], ids[:cut], [ids[-1]])) == "x", (kind, cut)


def test_what_can_be_no_character_is_given_out_as_it_comes(kinds, token_decoders):
    """A stream of bytes that never make a character is neither held for ever nor decoded all over again."""
    for kind in (*BYTE_KINDS, "byte-fallback BPE"):
        vocabulary = kinds[kind].get_vocab()
        spelled = {"byte-level BPE": BYTE_ORDER[0xFF], "slow bytes": "ff", "byte-fallback BPE": "<0xFF>"}[kind]
        found = pieces(token_decoders[kind], [], [vocabulary[spelled]] * 50)
        assert "".join(found) == REPLACEMENT * 50
        assert len("".join(found[:50])) >= 49


def test_an_unfinished_character_becomes_the_replacement_character_at_the_end(kinds, token_decoders):
    thumb = "👍".encode()
    assert pieces(token_decoders["slow bytes"], [], list(thumb[:3])) == ["", "", "", REPLACEMENT]
    # One for each byte where tokens are bytes, as the tokenizers decode it.
    ids = [kinds["byte-fallback BPE"].get_vocab()[f"<0x{byte:02X}>"] for byte in thumb[:3]]
    assert pieces(token_decoders["byte-fallback BPE"], [], ids) == ["", "", "", REPLACEMENT * 3]
    assert kinds["byte-fallback BPE"].decode(ids) == REPLACEMENT * 3


def test_a_half_character_of_the_prompt_is_no_text_when_generated_bytes_lead_on_but_do_not_complete_it(token_decoders):
    decoder, thumb = token_decoders["slow bytes"], list("👍".encode())
    for cut, end in ((1, 2), (1, 3), (2, 3)):
        assert "".join(pieces(decoder, thumb[:cut], thumb[cut:end])) == ""
        assert "".join(pieces(decoder, thumb[:cut], [*thumb[cut:end], ord("x")])) == "x"


def test_a_space_that_begins_the_text_is_stripped_in_every_spelling(kinds, token_decoders):
    tokenizer = kinds["byte-fallback BPE"]
    the, space, byte, bos = tokenizer.convert_tokens_to_ids(["▁the", "▁", "<0x20>", "<s>"])
    for first in (space, byte):
        assert pieces(token_decoders["byte-fallback BPE"], [bos], [first, the]) == ["", " the", ""]
        assert pieces(token_decoders["byte-fallback BPE"], [bos, the], [first, the]) == [" ", " the", ""]
        assert tokenizer.decode([bos, first, the], skip_special_tokens=True) == " the"


def test_finishing_twice_gives_nothing_more(token_decoders):
    detokenizer = Detokenizer(token_decoders["slow bytes"], [], stop=["abc"])
    assert [detokenizer.append(byte) for byte in b"zab\xf0"] == ["z", "", "", ""]
    assert detokenizer.finish() == "ab" + REPLACEMENT
    assert detokenizer.finish() == ""


class Counting:
    """A tokenizer that notes how many ids it is asked to decode at once."""

    def __init__(self, tokenizer):
        self.tokenizer, self.lengths = tokenizer, []

    def __getattr__(self, name):
        return getattr(self.tokenizer, name)

    def decode(self, ids, **options):
        self.lengths.append(len(ids))
        return self.tokenizer.decode(ids, **options)


@pytest.mark.parametrize("kind", MAKERS)
def test_the_work_per_token_is_bounded(kinds, kind):
    tokenizer = Counting(kinds[kind])
    decoder = TokenDecoder(tokenizer)
    draw = random.Random(4)
    ordinary = known_ids(tokenizer)
    garbage = draw.choice(ordinary)
    for generated in ([draw.choice(ordinary) for _ in range(400)], [garbage] * 400, [max(ordinary) + 5] * 400):
        tokenizer.lengths.clear()
        pieces(decoder, [draw.choice(ordinary) for _ in range(3000)], generated)
        assert max(tokenizer.lengths) <= 20
        assert len(tokenizer.lengths) <= 2 * len(generated) + 2


# --- Stop strings ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def fragments():
    """A tokenizer whose tokens are short strings of two letters."""
    words = [a + b + c for a in "xy" for b in ["", "x", "y"] for c in ["", "x", "y"]]
    tokenizer = word_tokenizer(sorted(set(words)), decoders.Fuse())
    ids = [token_id for token, token_id in tokenizer.get_vocab().items() if token not in SPECIAL]
    return tokenizer, TokenDecoder(tokenizer), sorted(ids)


def stopped_by_brute_force(text, stop):
    """The text before the first completed stop string, the longest of those completed together; and whether one was."""
    for end in range(len(text) + 1):
        lengths = [len(string) for string in stop if text[:end].endswith(string)]
        if lengths:
            return text[: end - max(lengths)], True
    return text, False


@settings(deadline=None, max_examples=400)
@given(
    seed=st.integers(0, 2**32),
    stop=st.lists(st.text("xy", min_size=1, max_size=7), max_size=4),
    min_new_tokens=st.sampled_from([0, 0, 1, 2, 5]),
)
def test_stop_strings_end_the_text_where_brute_force_finds_them(fragments, seed, stop, min_new_tokens):
    tokenizer, decoder, ids = fragments
    draw = random.Random(seed)
    generated = [draw.choice(ids) for _ in range(draw.randint(0, 12))]
    detokenizer = Detokenizer(decoder, [ids[0]], stop=stop, min_new_tokens=min_new_tokens)
    free = max(min_new_tokens - 1, 0)
    freely, emitted = "".join(tokenizer.convert_ids_to_tokens(generated[:free])), ""
    for count, token_id in enumerate(generated, start=1):
        emitted += detokenizer.append(token_id)
        text = "".join(tokenizer.convert_ids_to_tokens(generated[free:count]))
        expected, stopped = stopped_by_brute_force(text, stop)
        assert detokenizer.stopped == stopped
        if not stopped:
            # Held back is the longest end of the text that begins a stop string, and no more.
            suffixes = (text[start:] for start in range(len(text) + 1))
            held = next(suffix for suffix in suffixes if any(string.startswith(suffix) for string in [*stop, ""]))
            expected = expected.removesuffix(held)
        if count <= free:
            assert emitted == "".join(tokenizer.convert_ids_to_tokens(generated[:count]))
        else:
            assert emitted == freely + expected
    text = "".join(tokenizer.convert_ids_to_tokens(generated[free:]))
    assert emitted + detokenizer.finish() == freely + stopped_by_brute_force(text, stop)[0]


@settings(deadline=None, max_examples=100)
@given(text=TEXT.filter(bool), seed=st.integers(0, 2**32))
def test_stop_strings_of_any_characters_across_tokens(kinds, token_decoders, text, seed):
    draw = random.Random(seed)
    ids = split_at_random(draw, kinds["byte-level BPE"], text.encode())
    start = draw.randrange(len(text))
    stop = [text[start : start + draw.randint(1, 4)], draw.choice(CORPUS)[:5], "👍🏽!"]
    detokenizer = Detokenizer(token_decoders["byte-level BPE"], ids, stop=stop)
    found = "".join([*(detokenizer.append(token_id) for token_id in ids), detokenizer.finish()])
    assert (found, detokenizer.stopped) == stopped_by_brute_force(text, stop)


def test_a_stop_string_is_not_sought_in_the_prompt_and_ends_all_text(token_decoders):
    decoder = token_decoders["slow bytes"]
    detokenizer = Detokenizer(decoder, list(b"one EN"), stop=["END", "STOP"])
    emitted = [detokenizer.append(byte) for byte in b"D STOP and more"]
    assert "".join(emitted) == "D "
    assert detokenizer.stopped
    assert detokenizer.finish() == ""


def test_of_stop_strings_completed_together_the_longest_goes_and_else_the_first_completed(token_decoders):
    decoder = token_decoders["slow bytes"]
    for stop in (["ab", "zab"], ["zab", "ab"]):
        assert "".join(pieces(decoder, [], list(b"xxzabyy"), stop=stop)) == "xx"
    # A prefix of another is completed first, though the longer begins no later.
    assert "".join(pieces(decoder, [], list(b"xxabcd"), stop=["abcd", "bc"])) == "xxa"
    assert "".join(pieces(decoder, [], list(b"xxabc"), stop=["abcd"])) == "xxabc"


def test_a_very_long_stop_string_costs_no_more_than_the_text(token_decoders):
    """A near miss of ten thousand characters is passed through whole."""
    text = b"a" * 3000 + b"b"
    assert "".join(pieces(token_decoders["slow bytes"], [], list(text), stop=["a" * 10_000])) == text.decode()
