"""Tokenizers, one of each kind, made here."""

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizer, PreTrainedTokenizerFast

CORPUS = [
    "Once upon a time there was a little fox, and the fox said: hello!",
    "Le garçon a mangé une crème brûlée à Noël. Größe, Maß, über.",
    "Привет, мир! 你好，世界。 こんにちは 👩‍👩‍👧‍👦 🏳️‍🌈 👍🏽 e\u0301 a\u0308",
    "the the the fox fox time 你好 世界 👍🏽 👍🏽 ü ü é é \ufffd",
]
SPECIAL = ["<unk>", "<s>", "</s>"]


def wrapped(tokenizer, **names):
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer, unk_token="<unk>", bos_token="<s>", eos_token="</s>", **names
    )


def byte_level():
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(
        vocab_size=360, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    tokenizer.add_tokens([AddedToken("<tool>", special=False), AddedToken("é à", special=False)])
    return wrapped(tokenizer)


def byte_fallback():
    """Makes one like Llama's. It has ▁ for a space and bytes for text without pieces, and strips one leading space."""
    pieces = ["▁", "▁the", "the", "▁fox", "f", "o", "x", "e", "▁e", "é", "\ufffd", ",", "▁▁", "世", "<0xZZ>"]
    vocabulary = [*SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256)), *pieces]
    ids = {token: index for index, token in enumerate(vocabulary)}
    tokenizer = Tokenizer(models.BPE(vocab=ids, merges=[], byte_fallback=True, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(SPECIAL)
    return wrapped(tokenizer)


def word_tokenizer(words, decoder):
    """Words with holes in their ids: 0, 2, 4 …"""
    ids = {token: 2 * index for index, token in enumerate([*SPECIAL, *words])}
    tokenizer = Tokenizer(models.WordLevel(ids, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    if decoder is not None:
        tokenizer.decoder = decoder
    tokenizer.add_special_tokens(SPECIAL)
    return wrapped(tokenizer, clean_up_tokenization_spaces=True)


class SlowBytes(PreTrainedTokenizer):
    """A tokenizer in Python: one token a byte, and some that hold several or half of a character."""

    def __init__(self, **names):
        self.pieces = [bytes([byte]) for byte in range(256)] + ["é".encode(), b"\xf0\x9f", b"\x91\x8d ab", b"c\xe4\xbd"]
        self.spelling = {piece.hex(): index for index, piece in enumerate(self.pieces)}
        super().__init__(unk_token="<unk>", bos_token="<s>", eos_token="</s>", **names)

    @property
    def vocab_size(self):
        return len(self.pieces)

    def get_vocab(self):
        return {**self.spelling, **self.added_tokens_encoder}

    def _tokenize(self, text, **_):
        return [bytes([byte]).hex() for byte in text.encode()]

    def _convert_token_to_id(self, token):
        return self.spelling.get(token)

    def _convert_id_to_token(self, index):
        return self.pieces[index].hex()

    def convert_tokens_to_string(self, tokens):
        return b"".join(bytes.fromhex(token) for token in tokens).decode("utf-8", errors="replace")


WORDS = ["fox", "##es", "##\ufffd", "the", ".", ",", "n't", "do", "é", "👍🏽", "\ufffd", "I", "'m"]
MAKERS = {
    "byte-level BPE": byte_level,
    "byte-fallback BPE": byte_fallback,
    "Metaspace": lambda: word_tokenizer(["▁fox", "▁the", "es", "▁", "▁▁", "é", ",", "👍🏽"], decoders.Metaspace()),
    "WordPiece": lambda: word_tokenizer(WORDS, decoders.WordPiece("##", cleanup=True)),
    "word endings": lambda: word_tokenizer(["fox</w>", "f", "ox</w>", "é</w>", ",</w>"], decoders.BPEDecoder("</w>")),
    "words": lambda: word_tokenizer(WORDS, None),
    "slow bytes": SlowBytes,
}
BYTE_KINDS = ("byte-level BPE", "slow bytes")
