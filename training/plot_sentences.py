"""Sentences that belong to one plot each (notation of ``training.cfg``; see ``training.sentences``)."""

from __future__ import annotations

LOST_THING: dict[str, list[str]] = {
    "treasure": [
        "<hero:h> had a <thing> that <he:h> loved very much .",
        "<his:h> <elder> had given <him:h> a <thing> .",
        "the best thing <he:h> had was a <thing> .",
    ],
    "gone": [
        "but <when> , the <thing> was gone .",
        "<when> , <hero:h> could not find the <thing> anywhere .",
        "<when> , <he:h> went to the <place> and dropped the <thing> on the way .",
    ],
    "search": [
        "<he:h> looked <indoors> and <outdoors> , but it was not there .",
        "<hero:h> searched <indoors> , and then <he:h> searched <outdoors> .",
        "<he:h> asked <his:h> <elder> , but nobody had seen it .",
    ],
    "tell_lost": [
        '" I have lost my <thing> , " said <hero:h> .',
        '" my <thing> is gone , and I miss it , " <he:h> said .',
        '" I cannot find my <thing> , " <hero:h> answered .',
    ],
    "search_together": [
        "together they walked <path> and looked <outdoors> .",
        "they went to the <place> and searched <outdoors> .",
        "<friend:k> looked <outdoors> , and <hero:h> looked in the <place> .",
    ],
    "found": [
        "<finally> , they saw the <thing> <outdoors> .",
        "<finally> , <friend:k> pointed at something , and it was the <thing> .",
        "and there , <outdoors> , was the <thing> .",
    ],
}

FEAR: dict[str, list[str]] = {
    "fear": [
        "but <hero:h> was afraid of <scary> .",
        "there was only one problem , because <hero:h> was afraid of <scary> .",
        "nobody knew that <he:h> was afraid of <scary> .",
    ],
    "fear_shows": [
        "<when> , <hero:h> wanted to go to the <place> , but <he:h> began to shake .",
        "<when> , <he:h> was alone in the <place> , and <his:h> knees began to shake .",
        "<when> , <he:h> ran home and hid under a blanket .",
    ],
    "tell_fear": [
        '" I am afraid of <scary> , " said <hero:h> .',
        '" please do not laugh , but I am afraid of <scary> , " <he:h> said .',
    ],
    "advice": [
        '" I was afraid of <scary> too , " said <friend:k> .',
        '" take a deep breath and stay close to me , " said the <pal> .',
        '" when I am afraid , I sing a little song , " <friend:k> said <softly> .',
    ],
    "try_brave": [
        "<hero:h> closed <his:h> eyes and counted to <number> .",
        "<his:h> heart beat fast , but <he:h> did not run away .",
        "step by step , <hero:h> and <friend:k> walked <path> .",
    ],
    "overcome": [
        "<finally> , <hero:h> was not afraid anymore .",
        "<soon> , <scary> did not seem so bad .",
        "<hero:h> opened <his:h> eyes and began to smile .",
    ],
}

SHARING: dict[str, list[str]] = {
    "pack_food": [
        "<when> , <hero:h> packed some <food> and walked to the <place> .",
        "<when> , <his:h> <elder> gave <him:h> some <food> for the way .",
        "<when> , <hero:h> filled a basket with <food> all by <himself:h> .",
    ],
    "hungry": [
        '" I am so hungry , " said <friend:k> .',
        '" I have not eaten for <number> days , " said the <pal> .',
        "<friend:k> looked at the <food> , and <his:k> stomach growled .",
    ],
    "doubt": [
        "<hero:h> looked at the <food> and thought for a moment .",
        "there was not much left , and <hero:h> was hungry too .",
        "<hero:h> wanted to keep it all , but then <he:h> saw how thin <friend:k> was .",
    ],
    "share": [
        '" you may have half of my <food> , " said <hero:h> .',
        "so <hero:h> gave half of the <food> to <friend:k> .",
        '" come and eat with me , " <he:h> said <softly> .',
    ],
    "eat": [
        "they sat down <slot> and ate the <food> together .",
        "the <food> had never tasted so good .",
        "<friend:k> ate and ate and was <glad> again .",
    ],
    "food_thanks": [
        '" thank you , <hero:h> , you are <very> kind , " said <friend:k> .',
        '" I have never eaten better <food> , " said the <pal> .',
    ],
    "return_gift": [
        "the next day , <friend:k> came back with some <treat> .",
        "then <friend:k> showed <him:h> a secret place full of <treat> .",
        '" I have something for you too , " said <friend:k> and gave <him:h> a <thing> .',
    ],
}

LOST_WAY: dict[str, list[str]] = {
    "wander": [
        "<when> , <he:h> followed a <follow> into the <place> .",
        "<when> , <hero:h> saw a <follow> and ran after it <path> .",
    ],
    "too_far": [
        "<he:h> walked farther and farther and forgot the time .",
        "soon the sun went down , and the <place> grew dark .",
        "all the paths looked the same , and <hero:h> was lost .",
    ],
    "call_out": [
        '" hello ! is anybody there ? " called <hero:h> .',
        '" I want to go home , " <he:h> cried .',
        "<hero:h> called <number> times , but nobody answered .",
    ],
    "tell_way": [
        '" I am lost , and I want to go home , " said <hero:h> .',
        '" I cannot find the way to my <house> , " <he:h> said .',
    ],
    "guide": [
        '" follow me , " said <friend:k> .',
        '" I know every path here , " said the <pal> .',
        '" we will follow the stars , " <friend:k> said <softly> .',
    ],
    "walk_home": [
        "they walked <path> and up the hill .",
        "<friend:k> carried a lantern and walked in front .",
        "side by side , they went <path> and sang a song .",
    ],
    "home_again": [
        "<finally> , <hero:h> saw the lights of <his:h> <house> .",
        "<his:h> <elder> ran out of the <house> and hugged <him:h> .",
        "and there was the <house> with <house_part> .",
    ],
}

BUILDING: dict[str, list[str]] = {
    "plan": [
        "<when> , <hero:h> wanted to build a <project> .",
        "<hero:h> had a big dream , and it was to build a <project> .",
        '" I will build a <project> , " <he:h> said <when> .',
    ],
    "work": [
        "<he:h> found some <material> and began to work .",
        "<he:h> worked hard <until> .",
        "<his:h> <elder> gave <him:h> some old <material> .",
    ],
    "breaks": [
        "but the <project> broke with a loud crack .",
        "but the wind came , and the <project> fell apart .",
        "but the <project> was crooked and would not hold .",
    ],
    "give_up": [
        '" it will never work , " said <hero:h> .',
        '" I broke my <project> , " <he:h> said .',
        '" I give up ! " cried <hero:h> .',
    ],
    "try_again": [
        '" let us try again , but slowly , " said <friend:k> .',
        '" I think we need more <material> , " said the <pal> .',
        '" I have some <material> at home , " <friend:k> said .',
    ],
    "rework": [
        "<friend:k> held the <material> , and <hero:h> tied the knots .",
        "<hero:h> and <friend:k> worked side by side <until> .",
        "they measured the <material> <number> times .",
    ],
    "works": [
        "this time , the <project> was strong .",
        "<finally> , the <project> was ready .",
        "the new <project> was the best in the whole valley .",
    ],
}

RESCUE: dict[str, list[str]] = {
    "hear": [
        "<when> , <hero:h> heard a strange cry from the <place> .",
        "<when> , <he:h> was <moving> <path> and heard a cry .",
    ],
    "stuck": [
        "a <small> <pal> named <friend:k> was stuck <trap> .",
        "it was <friend:k> the <pal> , who was stuck <trap> .",
    ],
    "cry_help": [
        '" help ! I cannot get out ! " cried <friend:k> .',
        '" please help me ! " called the <pal> .',
        '" I am stuck , and I am afraid , " said <friend:k> .',
    ],
    "promise": [
        '" I will get you out , " said <hero:h> .',
        '" hold on , <friend:k> ! " shouted <hero:h> .',
        '" stay calm , I have a plan , " <he:h> said .',
    ],
    "find_tool": [
        "<hero:h> looked around and found a <tool> .",
        "<he:h> ran to the <house> and came back with a <tool> .",
    ],
    "pull": [
        "<he:h> held out the <tool> and pulled and pulled .",
        "<hero:h> pulled with all <his:h> strength , but <friend:k> did not move .",
        "<friend:k> held on to the <tool> , and <hero:h> counted to <number> .",
    ],
    "free": [
        "with one last pull , <friend:k> was free .",
        "<finally> , the <pal> was safe again .",
        "little by little , <friend:k> came out and was safe .",
    ],
    "friend_thanks": [
        '" you saved me , " said <friend:k> .',
        '" thank you , <hero:h> , you are so brave , " said the <pal> .',
        "<friend:k> hugged <him:h> and gave <him:h> a <thing> .",
    ],
}

BIRTHDAY: dict[str, list[str]] = {
    "birthday": [
        "<when> , it was <hero:h> 's birthday , but nobody said a word about it .",
        "it was <hero:h> 's birthday , and <he:h> woke up very early .",
    ],
    "forgotten": [
        '" maybe everybody forgot my birthday , " thought <hero:h> .',
        "<his:h> <elder> was busy , and <his:h> <sibling> was not at home .",
        "there was no cake , no song , and no present .",
    ],
    "alone": [
        "<he:h> walked to the <place> all alone .",
        "<hero:h> went <path> and looked at the ground .",
    ],
    "come_along": [
        '" come with me , quickly ! " said <friend:k> .',
        '" close your eyes and follow me , " said the <pal> .',
        '" I want to show you something , " <friend:k> said <softly> .',
    ],
    "surprise": [
        "and there , in the <place> , stood all of <his:h> friends with a big cake .",
        '" surprise ! " they all shouted <loudly> .',
        "there were lights in every tree and a table full of <treat> .",
    ],
    "present": [
        "<friend:k> gave <him:h> a <thing> .",
        "the best present was a <thing> from <friend:k> .",
        "<his:h> <elder> had made some <food> for everybody .",
    ],
}

QUARREL: dict[str, list[str]] = {
    "both_want": [
        "<when> , they both wanted to play with the <thing> .",
        "<when> , they found a <thing> , and each of them wanted to keep it .",
    ],
    "break_it": [
        "<hero:h> pulled , and <friend:k> pulled , and the <thing> broke .",
        "then the <thing> fell down and broke .",
    ],
    "blame": [
        '" it is your fault ! " shouted <friend:k> .',
        '" I do not want to play with you anymore ! " cried <hero:h> .',
        "they both went home without a word .",
    ],
    "regret": [
        "that night , <hero:h> could not sleep .",
        '" I was not kind to <friend:k> , " <he:h> thought .',
        "without <friend:k> , the <place> was empty and quiet .",
    ],
    "visit": [
        "the next morning , <he:h> ran to <friend:k> 's house .",
        "the next day , <he:h> took some <food> and went to <friend:k> .",
    ],
    "sorry": [
        '" I am sorry , " said <hero:h> .',
        '" please forgive me , " <he:h> said <softly> .',
    ],
    "sorry_too": [
        '" I am sorry too , " said <friend:k> .',
        '" of course I forgive you , " said the <pal> .',
    ],
    "mend": [
        "together they mended the <thing> .",
        "they mended the <thing> , and it looked like new .",
        "they mended the <thing> and took turns <until> .",
    ],
}

LEARNING: dict[str, list[str]] = {
    "cannot": [
        "<hero:h> wanted to <skill> , but <he:h> did not know how .",
        "everybody could <skill> , only <hero:h> could not .",
    ],
    "try_fail": [
        "<he:h> tried <number> times , but it did not work .",
        "<when> , <he:h> tried it alone and fell on <his:h> nose .",
        "<hero:h> tried again and again , but it was too hard .",
    ],
    "tell_skill": [
        '" I will never learn to <skill> , " said <hero:h> .',
        '" I want to <skill> , but I do not know how , " <he:h> said .',
    ],
    "teach": [
        '" I can show you how to <skill> , " said <friend:k> .',
        '" nobody can do it the first time , " said the <pal> .',
        '" try it slowly , and watch me , " <friend:k> said <softly> .',
    ],
    "practice": [
        "every day , they practiced in the <place> .",
        "they practiced <until> , and <friend:k> never grew tired .",
        "<hero:h> fell down <number> times , but <he:h> always stood up again .",
    ],
    "success": [
        "<finally> , <hero:h> could <skill> .",
        "then , one <weather> <daytime> , <hero:h> could <skill> all alone .",
    ],
}

PLOT_SENTENCES: dict[str, list[str]] = {
    **LOST_THING, **FEAR, **SHARING, **LOST_WAY, **BUILDING, **RESCUE, **BIRTHDAY, **QUARREL, **LEARNING,
}  # fmt: skip
