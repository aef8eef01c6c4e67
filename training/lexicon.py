"""Words and phrases of the story grammar, in the notation of ``training.cfg``."""

from __future__ import annotations

NAMES = {
    "f": ["Lily", "Mia", "Anna", "Rosie", "Ella", "Ruby", "Nora", "Lucy", "Zoe", "Clara", "Emma", "Luna"],
    "m": ["Tom", "Max", "Ben", "Leo", "Sam", "Finn", "Oscar", "Jack", "Theo", "Hugo", "Otto", "Milo"],
}
ANIMALS = [
    "fox", "rabbit", "bear", "mouse", "owl", "cat", "dog", "duck", "frog", "hedgehog",
    "squirrel", "turtle", "badger", "pony", "lamb", "panda", "otter", "beaver", "goat", "wolf",
]  # fmt: skip


def with_article(noun: str) -> str:
    """``noun`` after "a" or "an"."""
    return f"{'an' if noun[0] in 'aeiou' else 'a'} {noun}"


LEXICON: dict[str, list[str]] = {
    # Who.  ``h`` is the hero's gender in the sentence rules and ``k`` the friend's.
    "name:f": NAMES["f"],
    "name:m": NAMES["m"],
    "hero:g": ["<name:g>"],
    "friend:g": ["<name:g>"],
    "kind:f": [*ANIMALS, "girl"],
    "kind:m": [*ANIMALS, "boy"],
    "pal": ANIMALS,
    "he:f": ["she"],
    "he:m": ["he"],
    "his:f": ["her"],
    "his:m": ["his"],
    "him:f": ["her"],
    "him:m": ["him"],
    "himself:f": ["herself"],
    "himself:m": ["himself"],
    "elder": ["mother", "father", "grandmother", "grandfather", "aunt", "uncle"],
    "sibling": ["little sister", "big sister", "little brother", "big brother"],
    "small": ["small", "little", "tiny", "young", "brave", "kind", "clever", "gentle", "shy", "curious", "cheerful"],
    "trait": ["kind", "friendly", "polite", "gentle", "helpful"],
    "spirit": ["curious", "cheerful", "brave", "full of ideas", "ready for an adventure"],
    # Where.
    "house": ["house", "cottage", "cabin", "hut", "lodge"],
    "nice": ["cozy", "warm", "tiny", "quiet", "pretty", "round", "wooden", "stone"],
    "near": [
        "by the sea", "near the river", "at the edge of the woods", "on a green hill", "next to a windmill",
        "beside a clear lake", "behind the old mill", "under a tall oak tree",
    ],
    "home": ["in a <nice> <house> <near>"],
    "house_part": ["a red door", "a round window", "a little garden", "a blue roof", "a soft bed", "a big fireplace"],
    "place": [
        "forest", "meadow", "garden", "village", "market", "orchard", "valley", "park", "field", "woods", "vineyard",
    ],
    "indoors": ["under the bed", "behind the door", "in the kitchen", "inside every drawer", "on every shelf"],
    "outdoors": [
        "in the tall grass", "behind a big rock", "under a bush", "next to an old wall", "between the flowers",
        "beside a fallen tree",
    ],
    "path": ["along the stream", "over the bridge", "across the field", "through the trees", "down the path"],
    "slot": ["on a mossy log", "under a tree", "on a flat stone", "on the grass", "by the path"],
    # When.
    "weather": ["sunny", "rainy", "windy", "cold", "warm", "foggy", "bright", "snowy"],
    "daytime": ["morning", "afternoon", "day", "evening"],
    "when": ["one <weather> <daytime>", "one day", "early one morning"],
    "soon": ["soon", "after a while", "a little later", "just then", "at that moment"],
    "finally": ["at last", "finally", "in the end", "after a long time"],
    "until": ["until the sun went down", "until the stars came out", "all afternoon", "for the rest of the day"],
    # What.
    "color": ["red", "blue", "green", "yellow", "golden", "silver", "purple", "white", "shiny", "striped"],
    "toy": [
        "ball", "kite", "drum", "hat", "scarf", "book", "key", "bell", "lantern", "blanket", "whistle", "ring", "cup",
        "flute", "coin", "feather",
    ],
    "thing": ["<color> <toy>"],
    "food": [
        "bread", "honey", "soup", "cake", "cheese", "berries", "nuts", "plums", "carrots", "cookies", "pancakes",
        "apple pie",
    ],
    "treat": ["sweet cherries", "fresh milk", "warm rolls", "ripe pears", "hot chocolate"],
    "project": ["boat", "raft", "cart", "sled", "wagon", "bridge", "swing", "tent"],
    "material": ["planks", "branches", "ropes", "nails", "sticks", "boards"],
    "tool": ["long rope", "strong branch", "wooden ladder", "heavy stick", "thick vine"],
    "skill": [
        "swim", "whistle", "juggle", "skate on the ice", "jump over the stream", "climb the tall tree", "play the drum",
        "ride a bicycle",
    ],
    "hobby": [
        "sing", "dance", "read books", "paint pictures", "pick flowers", "watch the clouds", "look at the stars",
        "tell jokes", "play in the <place>", "collect shells", "chase butterflies",
    ],
    "scary": ["thunder", "the dark", "deep water", "loud noises", "strange shadows", "the big waves", "spiders"],
    "trap": [
        "in a deep hole", "under a heavy branch", "in the thick mud", "high up in a tree", "between two rocks",
        "in an old net",
    ],
    "follow": ["butterfly", "firefly", "dragonfly", "bluebird", "falling leaf", "rainbow"],
    # How.
    "sad": ["sad", "worried", "lonely", "upset", "unhappy"],
    "glad": ["happy", "glad", "proud", "thankful", "joyful", "delighted"],
    "softly": ["softly", "quietly", "gently", "kindly", "in a soft voice", "with a smile"],
    "loudly": ["loudly", "happily", "with joy"],
    "moving": ["walking", "running", "hopping", "dancing", "strolling"],
    "very": ["very", "so", "really", "terribly"],
    "number": ["two", "three", "four", "five", "ten"],
    "lesson": [
        "a good friend is worth more than gold", "being brave means trying even when you are afraid",
        "sharing makes everything taste better", "nobody is lost when a friend is near",
        "two heads are better than one", "even someone small can do something big",
        "true friends never forget you", "saying sorry can mend a broken heart",
        "every master was once a beginner", "it is always good to ask for help",
    ],
}  # fmt: skip

LEXICON["a_kind:f"] = [with_article(kind) for kind in LEXICON["kind:f"]]
LEXICON["a_kind:m"] = [with_article(kind) for kind in LEXICON["kind:m"]]
LEXICON["a_pal"] = [with_article(kind) for kind in ANIMALS]
