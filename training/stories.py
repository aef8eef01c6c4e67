"""Stories and conversations drawn from one grammar, and the exact recogniser of its sentences.

``generate_story`` and ``generate_chat`` make the training text.  ``sentences`` cuts any text into sentences, and
``parses`` decides whether a sentence belongs to the grammar, so that samples of a model can be scored.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from random import Random

from training.cfg import GENDERS, Grammar, detokenize
from training.conversations import PROMPTS, REPLIES
from training.lexicon import LEXICON, NAMES, with_article
from training.plots import PLOTS, Plot
from training.sentences import SENTENCES

GRAMMAR = Grammar({**LEXICON, **SENTENCES, **REPLIES, **PROMPTS}, starts=[*SENTENCES, *REPLIES])

# What stays the same through one story.  Everything else is drawn anew for each sentence.
_STORY_WIDE = ("thing", "place", "house", "house_part", "near", "food", "project", "material", "skill", "scary", "trap",
               "tool", "follow", "elder", "sibling")  # fmt: skip

# Words that a reader can know from what was said before: those kept through a story, the characters and their pronouns.
RECALLED_WORDS = frozenset(
    word
    for rule, phrases in LEXICON.items()
    if rule.partition(":")[0] in {"name", "kind", "he", "his", "him", "himself", "toy", "color", *_STORY_WIDE}
    for phrase in phrases
    for word in phrase.split()
    if word.isalpha() and word not in {"a", "in", "on", "the", "with"}
)

_SPECIAL_TOKEN = re.compile(r"<\|\w+\|>")
_SENTENCE_END = re.compile(r'[.!?]"?(?=\s|$)')


@dataclass(frozen=True)
class Message:
    """One turn of a conversation; ``role`` is "system", "user" or "assistant"."""

    role: str
    content: str


@dataclass
class Setting:
    """The setting of a story: the genders of hero (h) and friend (k), and the text of bound nonterminals."""

    genders: dict[str, str]
    bound: dict[str, str] = field(default_factory=dict)


def generate_story(rng: Random, setting: Setting | None = None, plot: Plot | None = None) -> str:
    """A story of about 8 to 20 sentences: paragraphs separated by line ends, no line end after the last."""
    setting = setting or draw_setting(rng)
    plot = plot or PLOTS[rng.choice(list(PLOTS))]
    bound = {**setting.bound, "lesson": plot.lesson}
    paragraphs = []
    for steps in plot.paragraphs:
        rules = [rule for step in steps for rule in _choose_step(step, rng)]
        paragraphs.append(" ".join(_sentence(rule, rng, setting.genders, bound) for rule in rules))
    return "\n".join(paragraphs)


def draw_setting(rng: Random) -> Setting:
    """A hero and a friend that differ in name and kind, and one choice for everything a story keeps."""
    genders = {"h": rng.choice(GENDERS), "k": rng.choice(GENDERS)}
    hero = rng.choice(NAMES[genders["h"]])
    friend = rng.choice([name for name in NAMES[genders["k"]] if name != hero])
    kind = rng.choice(LEXICON[f"kind:{genders['h']}"])
    pal = rng.choice([animal for animal in LEXICON["pal"] if animal != kind])
    bound = {"hero": hero, "friend": friend, "kind": kind, "a_kind": with_article(kind),
             "pal": pal, "a_pal": with_article(pal)}  # fmt: skip
    for rule in _STORY_WIDE:
        bound[rule] = " ".join(GRAMMAR.expand(rule, rng, genders, {}))
    return Setting(genders, bound)


def generate_chat(rng: Random) -> list[Message]:
    """A conversation of one to four exchanges, most of them requests for a story."""
    messages = []
    if rng.random() < 0.3:
        messages.append(Message("system", _sentence("system_prompt", rng, {}, {})))
    for _ in range(rng.choice((1, 1, 1, 2, 2, 3, 4))):
        prompt, answer = _story_exchange(rng) if rng.random() < 0.55 else _small_talk(rng)
        messages += [Message("user", _casual(prompt, rng)), Message("assistant", answer)]
    return messages


def sentences(text: str) -> list[str]:
    """The sentences of ``text``, in order.

    A sentence ends at ``.``, ``!`` or ``?`` outside quotation marks, or at a closing quotation mark after one of
    these unless the sentence goes on in lower case (``"Help!" cried Tom.``).  Line ends and special tokens such as
    ``<|endoftext|>`` end a sentence as well.  Text after the last end is a sentence too, if only a cut-off one.
    """
    found = []
    for line in _SPECIAL_TOKEN.sub("\n", text).splitlines():
        begin = 0
        for match in _SENTENCE_END.finditer(line):
            inside_quotation = line.count('"', begin, match.end()) % 2 == 1
            goes_on = line[match.end() :].lstrip()[:1].islower()
            if not inside_quotation and not goes_on:
                found.append(line[begin : match.end()].strip())
                begin = match.end()
        found.append(line[begin:].strip())
    return [sentence for sentence in found if sentence]


@lru_cache(maxsize=65536)
def parses(sentence: str) -> bool:
    """Returns whether the grammar of the stories derives exactly this sentence, spelling and punctuation included."""
    return GRAMMAR.recognises(sentence)


_SMALL_TALK: dict[str, tuple[str, ...]] = {
    "greeting_prompt": ("greeting_reply", "offer_reply"),
    "name_prompt": ("name_reply",),
    "self_prompt": ("self_reply",),
    "mood_prompt": ("mood_reply", "offer_reply"),
    "thanks_prompt": ("welcome_reply",),
    "goodbye_prompt": ("goodbye_reply",),
    "unknown_prompt": ("unknown_reply", "only_stories_reply"),
}

_STORY_PROMPTS = ("any_story_prompt", "hero_prompt", "hero_prompt", "kind_prompt", "pair_prompt", "thing_prompt")


def _small_talk(rng: Random) -> tuple[str, str]:
    prompt = rng.choice(list(_SMALL_TALK))
    genders = {"g": rng.choice(GENDERS)}
    reply = " ".join(_sentence(rule, rng, genders, {}) for rule in _SMALL_TALK[prompt])
    return _sentence(prompt, rng, genders, {}), reply


def _story_exchange(rng: Random) -> tuple[str, str]:
    setting = draw_setting(rng)
    prompt = rng.choice(_STORY_PROMPTS)
    plot = PLOTS["lost thing"] if prompt == "thing_prompt" else None
    return _sentence(prompt, rng, setting.genders, setting.bound), generate_story(rng, setting, plot)


def _casual(prompt: str, rng: Random) -> str:
    """``prompt`` as a user in a hurry may type it: now and then without the final mark or in lower case."""
    if rng.random() < 0.25:
        prompt = prompt.rstrip(".!?")
    return prompt.lower() if rng.random() < 0.15 else prompt


def _choose_step(step: str, rng: Random) -> list[str]:
    """The rules to use for ``step`` (see ``training.plots``)."""
    if step.endswith("?") and rng.random() < 0.5:
        return []
    return rng.choice(step.rstrip("?").split("|")).split()


def _sentence(rule: str, rng: Random, genders: Mapping[str, str], bound: Mapping[str, str]) -> str:
    return detokenize(GRAMMAR.expand(rule, rng, genders, bound))
