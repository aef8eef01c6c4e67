"""Sentences of the story grammar: those that any plot may use, and the table of all (notation of ``training.cfg``).

Each rule derives whole sentences.  ``h`` is the gender of the hero and ``k`` that of the friend.
"""

from __future__ import annotations

from training.plot_sentences import PLOT_SENTENCES

BEGINNING: dict[str, list[str]] = {
    "opening": [
        "once upon a time , there was a <small> <kind:h> named <hero:h> .",
        "long ago , there lived a <small> <kind:h> called <hero:h> .",
        "there once was <a_kind:h> named <hero:h> .",
        "this is the story of <hero:h> , a <small> <kind:h> .",
    ],
    "home_sentence": [
        "<he:h> lived <home> .",
        "<he:h> lived <home> with <his:h> <elder> and <his:h> <sibling> .",
        "<his:h> home was a <nice> <house> with <house_part> .",
    ],
    "opening_home": [
        "once upon a time , a <small> <kind:h> named <hero:h> lived <home> .",
        "<hero:h> was a <small> <kind:h> who lived <home> .",
        "once there was <a_kind:h> named <hero:h> , who lived <home> with <his:h> <elder> .",
    ],
    "likes": [
        "<hero:h> loved to <hobby> .",
        "every day , <he:h> liked to <hobby> with <his:h> <sibling> .",
        "<he:h> was always <trait> and <spirit> .",
        "more than anything , <hero:h> liked to <hobby> and to eat <food> .",
    ],
    "best_friend": [
        "<his:h> best friend was a <small> <pal> named <friend:k> .",
        "<hero:h> and <friend:k> the <pal> did everything together .",
        "next door lived <friend:k> , a <small> <pal> , and the two were best friends .",
    ],
}

MEETING: dict[str, list[str]] = {
    "sad_sentence": [
        "<hero:h> felt <very> <sad> .",
        "<he:h> sat down <slot> and began to cry .",
        "a big tear rolled down <his:h> cheek .",
        "<he:h> was so <sad> that <he:h> could not even smile .",
        "poor <hero:h> did not know what to do .",
    ],
    "meet": [
        "<soon> , a <small> <pal> named <friend:k> came <moving> <path> .",
        "<soon> , <he:h> met <friend:k> , a <small> <pal> .",
        "<friend:k> , a <small> <pal> , was <moving> nearby and stopped .",
        "<soon> , <a_pal> named <friend:k> sat down next to <him:h> .",
    ],
    "ask_why": [
        '" why are you so <sad> ? " asked <friend:k> .',
        '" what is wrong , <hero:h> ? " asked the <pal> <softly> .',
        '" can I help you ? " asked <friend:k> <softly> .',
        '" you look <sad> , " said the <pal> <softly> .',
        '" hello , little <kind:h> , what happened ? " asked <friend:k> .',
    ],
    "comfort": [
        '" do not worry , " said <friend:k> <softly> .',
        '" do not cry , <hero:h> , " said the <pal> .',
        '" we can do it together , " said <friend:k> .',
        '" I will help you , " <friend:k> said <softly> .',
        "<friend:k> thought for a moment and had an idea .",
    ],
}

ENDING: dict[str, list[str]] = {
    "cheer": [
        '" hooray ! " shouted <hero:h> <loudly> .',
        '" we did it ! " cried <friend:k> <loudly> .',
        "<hero:h> jumped up and down and laughed .",
        "<he:h> was so <glad> that <he:h> danced around <friend:k> .",
        "they both laughed and clapped .",
    ],
    "thanks": [
        '" thank you , <friend:k> , " said <hero:h> .',
        '" you are a true friend , " <he:h> said to <friend:k> .',
        "<hero:h> hugged <friend:k> and thanked <him:k> <number> times .",
        '" how can I ever thank you ? " asked <hero:h> .',
    ],
    "welcome": [
        '" you are welcome , " said <friend:k> <softly> .',
        '" that is what friends are for , " said the <pal> .',
        "<friend:k> smiled and said it was nothing .",
    ],
    "feast": [
        "they ate some <food> and played <until> .",
        "then they went to the <place> and played <until> .",
        "<his:h> <elder> gave them some <food> and <treat> .",
        "they sat <slot> , ate <treat> , and talked <until> .",
    ],
    "closing": [
        "from that day on , <hero:h> and <friend:k> were best friends .",
        "that night , <hero:h> fell asleep with a smile .",
        "<hero:h> never forgot that day .",
        "and so <hero:h> and <friend:k> lived happily ever after .",
        "<hero:h> went home and felt <very> <glad> .",
    ],
    "moral": [
        "<hero:h> had learned that <lesson> .",
        "now <he:h> knew that <lesson> .",
        '" always remember that <lesson> , " said <his:h> <elder> .',
    ],
}

SENTENCES: dict[str, list[str]] = {**BEGINNING, **MEETING, **ENDING, **PLOT_SENTENCES}
