"""Plots: which sentences of the grammar follow each other to make a story.

A plot is a list of paragraphs, a paragraph a list of steps.  A step names a rule of ``training.sentences``; a step
that ends in ``?`` is left out half of the time, and ``a|b`` takes either.
"""

from __future__ import annotations

from dataclasses import dataclass

_INTRODUCTION = ["opening_home|opening home_sentence", "likes?"]
_FRIENDS = ["opening_home|opening home_sentence", "best_friend", "likes?"]


@dataclass(frozen=True)
class Plot:
    """The paragraphs of a story, and the lesson its moral may draw."""

    lesson: str
    paragraphs: list[list[str]]


PLOTS: dict[str, Plot] = {
    "lost thing": Plot(
        "a good friend is worth more than gold",
        [
            [*_INTRODUCTION, "treasure"],
            ["gone", "search", "sad_sentence"],
            ["meet", "ask_why", "tell_lost", "comfort?", "search_together", "found", "cheer?"],
            ["thanks", "welcome?", "feast?", "closing", "moral?"],
        ],
    ),
    "fear": Plot(
        "being brave means trying even when you are afraid",
        [
            [*_INTRODUCTION, "fear"],
            ["fear_shows", "sad_sentence?"],
            ["meet", "ask_why", "tell_fear", "comfort?", "advice", "try_brave", "overcome", "cheer?"],
            ["thanks?", "feast?", "closing", "moral"],
        ],
    ),
    "sharing": Plot(
        "sharing makes everything taste better",
        [
            _INTRODUCTION,
            ["pack_food", "meet", "hungry", "doubt"],
            ["share", "eat", "food_thanks", "return_gift"],
            ["closing", "moral?"],
        ],
    ),
    "lost way": Plot(
        "nobody is lost when a friend is near",
        [
            _INTRODUCTION,
            ["wander", "too_far", "call_out", "sad_sentence?"],
            ["meet", "ask_why?", "tell_way", "comfort?", "guide", "walk_home", "home_again"],
            ["thanks", "welcome?", "feast?", "closing", "moral?"],
        ],
    ),
    "building": Plot(
        "two heads are better than one",
        [
            _INTRODUCTION,
            ["plan", "work", "breaks", "sad_sentence?"],
            ["meet", "ask_why", "give_up", "try_again", "rework", "works", "cheer?"],
            ["thanks?", "feast", "closing", "moral?"],
        ],
    ),
    "rescue": Plot(
        "even someone small can do something big",
        [
            _INTRODUCTION,
            ["hear", "stuck", "cry_help"],
            ["promise", "find_tool", "pull", "free"],
            ["cheer?", "friend_thanks", "feast?", "closing", "moral?"],
        ],
    ),
    "birthday": Plot(
        "true friends never forget you",
        [
            _FRIENDS,
            ["birthday", "forgotten", "alone", "sad_sentence"],
            ["come_along", "surprise", "present", "cheer?"],
            ["thanks", "welcome?", "feast?", "closing", "moral?"],
        ],
    ),
    "quarrel": Plot(
        "saying sorry can mend a broken heart",
        [
            _FRIENDS,
            ["both_want", "break_it", "blame"],
            ["regret", "visit", "sorry", "sorry_too", "mend"],
            ["feast?", "closing", "moral"],
        ],
    ),
    "learning": Plot(
        "every master was once a beginner",
        [
            _INTRODUCTION,
            ["cannot", "try_fail", "sad_sentence?"],
            ["meet", "ask_why", "tell_skill", "comfort?", "teach", "practice", "success", "cheer?"],
            ["thanks", "welcome?", "closing", "moral?"],
        ],
    ),
}
