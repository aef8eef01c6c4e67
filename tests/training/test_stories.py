"""The story grammar: what is generated parses, what is corrupted does not, and stories hang together."""

from __future__ import annotations

import re
from collections.abc import Callable
from itertools import pairwise
from random import Random

import pytest

from training.cfg import Grammar, detokenize, tokenize
from training.stories import GRAMMAR, PLOTS, draw_setting, generate_chat, generate_story, parses, sentences

PRONOUNS = {"f": {"she", "her", "herself"}, "m": {"he", "his", "him", "himself"}}


@pytest.fixture(scope="module")
def corpus() -> list[str]:
    """Sentences of a few hundred stories."""
    return [sentence for seed in range(200) for sentence in sentences(generate_story(Random(seed)))]


def test_every_generated_sentence_parses(corpus: list[str]) -> None:
    assert [sentence for sentence in corpus if not parses(sentence)] == []


def test_every_reply_parses() -> None:
    replies = [
        message.content for seed in range(200) for message in generate_chat(Random(seed)) if message.role == "assistant"
    ]
    assert [reply for reply in replies if not all(map(parses, sentences(reply)))] == []


@pytest.mark.parametrize("name", PLOTS)
def test_each_plot_makes_stories_of_reasonable_length(name: str) -> None:
    lengths = [len(sentences(generate_story(Random(seed), plot=PLOTS[name]))) for seed in range(50)]
    assert min(lengths) >= 8
    assert max(lengths) <= 20


def test_same_seed_same_story_and_other_seeds_other_stories() -> None:
    assert generate_story(Random(3)) == generate_story(Random(3))
    assert len({generate_story(Random(seed)) for seed in range(300)}) == 300


def test_vocabulary_is_small_but_not_poor() -> None:
    assert 500 <= len(GRAMMAR.words) <= 800


def _swap(words: list[str], rng: Random) -> list[str]:
    at = rng.randrange(len(words) - 1)
    return [*words[:at], words[at + 1], words[at], *words[at + 2 :]]


def _drop(words: list[str], rng: Random) -> list[str]:
    at = rng.randrange(len(words))
    return words[:at] + words[at + 1 :]


def _double(words: list[str], rng: Random) -> list[str]:
    at = rng.randrange(len(words))
    return [*words[:at], words[at], *words[at:]]


def _replace(words: list[str], rng: Random) -> list[str]:
    at = rng.randrange(len(words))
    return [*words[:at], rng.choice(sorted(GRAMMAR.words - {words[at]})), *words[at + 1 :]]


def _shuffle(words: list[str], rng: Random) -> list[str]:
    return rng.sample(words, len(words))


# What still parses is English that the grammar means to accept: "a purple cup" is as good as "a striped cup".
@pytest.mark.parametrize(
    ("corrupt", "accepted"), [(_swap, 0.002), (_drop, 0.005), (_double, 0.0), (_replace, 0.01), (_shuffle, 0.0)]
)
def test_corrupted_sentences_do_not_parse(
    corpus: list[str], corrupt: Callable[[list[str], Random], list[str]], accepted: float
) -> None:
    rng = Random(0)
    originals = corpus[::3]
    corrupted = [detokenize(corrupt(tokenize(sentence), rng)) for sentence in originals]
    changed = [wrong for wrong, right in zip(corrupted, originals, strict=True) if wrong.lower() != right.lower()]
    assert len(changed) > 0.9 * len(originals)
    assert sum(map(parses, changed)) <= accepted * len(changed)


@pytest.mark.parametrize(
    "sentence",
    [
        "",
        ".",
        "Lily",
        "Lily lived",
        "lily loved to dance.",  # a name in lower case
        "Lily loved to Dance.",
        "Lily  loved to dance.",
        "Lily loved to dance .",
        "Lily loved to dance",
        "Lily loved to dance. Lily loved to dance.",
        "Lily loved to dance. ✨",
        "Lily was so sad that he could not even smile.",
        '"Hooray! shouted Lily loudly.',
        "Once upon a time, there was an fox named Lily.",
    ],
)
def test_spelling_and_agreement_matter(sentence: str) -> None:
    assert not parses(sentence)


def test_grammatical_sentence_that_was_never_generated_parses() -> None:
    assert parses("Lily loved to dance.")
    assert parses('"Hooray!" shouted Lily loudly.')


@pytest.mark.parametrize("seed", range(100))
def test_story_keeps_its_hero_and_their_pronouns(seed: int) -> None:
    rng = Random(seed)
    setting = draw_setting(rng)
    words = re.findall(r"[A-Za-z]+", generate_story(rng, setting))
    named = {word for word in words if word in GRAMMAR.words and word[0].isupper() and word != "I"}
    assert named == {setting.bound["hero"], setting.bound["friend"]}
    wrong = set().union(*(PRONOUNS[gender] for gender in {"f", "m"} - set(setting.genders.values())))
    assert wrong.isdisjoint(word.lower() for word in words)


def test_story_speaks_of_one_thing() -> None:
    setting = draw_setting(Random(5))
    story = generate_story(Random(6), setting, PLOTS["lost thing"])
    assert story.count(setting.bound["thing"]) >= 3


def test_requested_hero_appears_in_the_answer() -> None:
    asked = 0
    for seed in range(300):
        messages = generate_chat(Random(seed))
        for prompt, answer in pairwise(messages):
            request = re.search(r"(?i)about an? (?:\w+ )?(\w+) (?:named|called|whose name is) (\w+)", prompt.content)
            if prompt.role == "user" and request:
                asked += 1
                assert request[1].lower() in answer.content
                assert request[2].capitalize() in answer.content
    assert asked > 20


def test_conversations_alternate_and_end_with_an_answer() -> None:
    for seed in range(100):
        roles = [message.role for message in generate_chat(Random(seed))]
        turns = roles[1:] if roles[0] == "system" else roles
        assert turns == ["user", "assistant"] * (len(turns) // 2)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("One. Two! Three?", ["One.", "Two!", "Three?"]),
        ('"Help!" cried Tom. He ran.', ['"Help!" cried Tom.', "He ran."]),
        ('"Help! I am lost!" cried Tom.', ['"Help! I am lost!" cried Tom.']),
        ('"You are kind," said Tom. "I am glad." He left.', ['"You are kind," said Tom.', '"I am glad."', "He left."]),
        ("One line\nand another. Cut o", ["One line", "and another.", "Cut o"]),
        ("A story.<|endoftext|><|bos|>Another.", ["A story.", "Another."]),
        ('An "open quotation. Never ends.\nNext line.', ['An "open quotation. Never ends.', "Next line."]),
        (" \n\n ", []),
    ],
)
def test_sentences(text: str, expected: list[str]) -> None:
    assert sentences(text) == expected


def test_sentences_keep_every_word() -> None:
    for seed in range(50):
        story = generate_story(Random(seed))
        assert " ".join(sentences(story)) == story.replace("\n", " ")


def test_recogniser_follows_recursion_and_agreement() -> None:
    grammar = Grammar(
        {"s": ["<he:x> saw <np:y> ."], "np:g": ["<a:g>", "<a:g> and <np:g>"], "a:f": ["her"], "a:m": ["him"],
         "he:f": ["she"], "he:m": ["he"]},
        starts=["s"],
    )  # fmt: skip
    assert grammar.recognises("She saw him and him and him.")
    assert not grammar.recognises("She saw him and her.")


def test_word_that_is_also_a_name_is_refused() -> None:
    with pytest.raises(ValueError, match="rose"):
        Grammar({"s": ["Rose saw a rose ."]}, starts=["s"])
