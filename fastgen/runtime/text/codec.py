"""Between text and token ids: the checkpoint's tokenizer, its chat template, and its defaults for generation."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fastgen.errors import CheckpointError, FastgenError, InvalidArgumentError, PromptTooLongError
from fastgen.models.checkpoint.files import read_json_object
from fastgen.runtime.requests.sampling_params import SamplingParams, default_sampling, not_followed
from fastgen.runtime.text.detokenizer import Detokenizer, TokenDecoder
from fastgen.runtime.text.panics import panics_as_errors
from fastgen.runtime.text.prompts import Conversation, Prompt, TemplateOptions, as_token_ids
from fastgen.runtime.text.token_bytes import TokenBytes
from fastgen.runtime.text.tokenizer_loading import load_tokenizer

# More characters than a token has on average, except in unusual texts.
_MANY_CHARACTERS = 8
# Most tokens by which a text that was cut may differ from the whole at the cut.
_MAX_TOKENS_OF_A_CUT = 64
# Most characters in the text of given token ids.
MAX_TEXT_CHARACTERS = 1 << 24
_USUAL = TemplateOptions()
# The error of a template that joins the arguments of a call to a text, as DeepSeek's do.
_WANTS_TEXT = 'can only concatenate str (not "dict") to str'


# Returns the text of messages, given tools and options.
RenderChat = Callable[[list[dict[str, Any]], Sequence[Mapping[str, Any]] | None, TemplateOptions], str]


class TextCodec:
    """Encodes prompts and makes detokenizers. ``tokenizer`` is ``None`` for a checkpoint that has none.

    ``eos_token_ids`` end an answer; ``default_sampling`` comes from the checkpoint's ``generation_config.json``.
    """

    def __init__(self, tokenizer: Any, *, eos_token_ids: frozenset[int], default_sampling: SamplingParams):
        self.tokenizer = tokenizer
        self.eos_token_ids = eos_token_ids
        self.default_sampling = default_sampling
        self._decoder = TokenDecoder(tokenizer) if tokenizer is not None else None
        self._token_bytes = TokenBytes(tokenizer, self._decoder) if self._decoder is not None else None
        # Keys of ``generation_config.json`` by which transformers would choose other tokens.
        self.not_followed: list[str] = []
        # Renders messages and tools by the chat template. A caller that does not trust the template replaces it.
        self.render_chat: RenderChat = self._render_chat
        # Returns the token ids of a text, with special tokens or without. A caller that does not trust the tokenizer
        # replaces it.
        self.encode_plain: Callable[[str, bool], list[int]] = self._encode_plain
        # Whether ``encode_plain`` waits for another process.
        self.waits_to_encode = False
        # Texts with more tokens are refused; one that is far longer is refused before all of it is encoded.
        self.max_tokens: int | None = None

    @classmethod
    def from_checkpoint(cls, directory: Path, config: Mapping[str, Any], *, tokenizer_class: str = "") -> TextCodec:
        """Reads the tokenizer and ``generation_config.json`` of ``directory``; no code of the checkpoint is run.
        ``tokenizer_class`` is the class of its tokenizer where that is known."""
        file = directory / "generation_config.json"
        generation = read_json_object(file) if file.is_file() else {}
        tokenizer = load_tokenizer(directory, config, tokenizer_class)
        try:
            sampling, eos_token_ids = default_sampling(generation), _eos_token_ids(generation, config, tokenizer)
        except InvalidArgumentError as error:
            raise CheckpointError(f"{directory}: {error}") from None
        codec = cls(tokenizer, eos_token_ids=eos_token_ids, default_sampling=sampling)
        codec.not_followed = not_followed(generation)
        return codec

    @property
    def has_tokenizer(self) -> bool:
        return self._decoder is not None

    def num_unknown(self, vocab_size: int) -> int:
        """Returns how many of a model's ``vocab_size`` token ids the tokenizer does not know; 0 without a tokenizer."""
        return 0 if self._decoder is None else len(frozenset(range(vocab_size)) - self._decoder.known_ids)

    @property
    def has_chat_template(self) -> bool:
        """Returns whether it can encode conversations."""
        return self.tokenizer is not None and bool(self.tokenizer.chat_template)

    def encode(self, prompt: Prompt) -> list[int]:
        """Returns the token ids of ``prompt``. Text gets the special tokens that the tokenizer puts around it."""
        if isinstance(prompt, str):
            return self.encode_text(prompt, add_special_tokens=True)
        return as_token_ids(prompt)

    def check_can_chat(self) -> None:
        """Raises ``InvalidArgumentError`` if it cannot encode conversations."""
        self._need_tokenizer("a conversation")
        if not self.has_chat_template:
            raise InvalidArgumentError(
                "this model's tokenizer has no chat template; use generate with a prompt of your own"
            )

    def chat_template(self, *, has_tools: bool) -> str:
        """Returns the checkpoint's chat template; of several, the one for conversations with or without tools. Empty if
        it has none.
        """
        if not self.has_chat_template:
            return ""
        try:
            template: str = self.tokenizer.get_chat_template(tools=[] if has_tools else None)
        except ValueError:  # there are several and no default; rendering raises an error that says so
            return ""
        return template

    def encode_chat(
        self,
        messages: Conversation,
        tools: Sequence[Mapping[str, Any]] | None = None,
        options: TemplateOptions = _USUAL,
    ) -> list[int]:
        """Returns the token ids of a conversation as the chat template renders it, up to where the answer begins.

        ``tools`` go to the template, each as ``{"type": "function", "function": {"name": …, …}}``.
        """
        text = self.rendered(messages, tools, options)
        return self.encode_text(text, add_special_tokens=options.add_special_tokens)

    def rendered(
        self, messages: Conversation, tools: Sequence[Mapping[str, Any]] | None, options: TemplateOptions
    ) -> str:
        """Returns a conversation as the chat template renders it; the arguments are those of :meth:`encode_chat`."""
        if not isinstance(messages, (list, tuple)):
            raise InvalidArgumentError(f"a conversation is a list of messages, not {messages!r:.40}")
        plain = [_plain_message(index, message) for index, message in enumerate(messages)]
        self.check_can_chat()
        try:
            try:
                return self.render_chat(plain, tools, options)
            except Exception as error:
                if _WANTS_TEXT not in str(error):
                    raise
                return self.render_chat([*map(_with_arguments_as_text, plain)], tools, options)
        except Exception as error:  # the template is the checkpoint's: division by zero, endless recursion, anything
            if isinstance(error, FastgenError) and not isinstance(error, InvalidArgumentError):
                raise  # the renderer failed, not the template
            raise InvalidArgumentError(f"the model's chat template refuses this conversation: {error}") from error

    def _render_chat(
        self, messages: list[dict[str, Any]], tools: Sequence[Mapping[str, Any]] | None, options: TemplateOptions
    ) -> str:
        text: str = self.tokenizer.apply_chat_template(
            messages,
            tools=tools,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
            tokenize=False,
            **options.variables,
        )
        return text

    def decode(self, token_ids: Sequence[int]) -> str:
        """Returns the text of ``token_ids``. Special tokens have none.

        Raises ``InvalidArgumentError`` if it has more than ``MAX_TEXT_CHARACTERS``.
        """
        return "".join(self.pieces(token_ids))

    def pieces(self, token_ids: Sequence[int]) -> Iterator[str]:
        """Yields the text of ``token_ids`` in pieces: one for each of them, and one for what is held back at the end.
        Raises what :meth:`decode` does.
        """
        self._need_tokenizer("text")
        detokenizer, num_characters = self.new_detokenizer(()), 0
        for number, token_id in enumerate(token_ids, 1):
            piece = detokenizer.append(token_id)
            num_characters += len(piece)
            if num_characters > MAX_TEXT_CHARACTERS:
                raise InvalidArgumentError(
                    f"the text of {len(token_ids)} token ids has more than {MAX_TEXT_CHARACTERS} characters after the "
                    f"first {number} of them; give fewer ids at once"
                )
            yield piece
        yield detokenizer.finish()

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of one token by itself; see :class:`~fastgen.runtime.text.token_bytes.TokenBytes`."""
        return self._token_bytes[token_id] if self._token_bytes is not None else b""

    def special_ids(self, text: str | None = None) -> dict[str, int]:
        """Returns the special tokens by their spelling; with ``text`` only those that are spelled in it."""
        if self.tokenizer is None:
            return {}
        added = self.tokenizer.added_tokens_decoder.items()
        special = {token.content: token_id for token_id, token in added if token.special}
        return {spelling: id_ for spelling, id_ in special.items() if text is None or spelling in text}

    def new_detokenizer(
        self,
        prompt_ids: Sequence[int],
        sampling: SamplingParams | None = None,
        spelled: Mapping[int, str] | None = None,
        *,
        includes_stop: bool = False,
    ) -> Detokenizer:
        """Returns a detokenizer of an answer to ``prompt_ids``. ``spelled`` are special tokens that have a text in
        it. With ``includes_stop`` its text ends with the stop string that ends it.
        """
        assert self._decoder is not None
        if sampling is None:
            return Detokenizer(self._decoder, prompt_ids, spelled=spelled)
        return Detokenizer(
            self._decoder,
            prompt_ids,
            stop=sampling.stop,
            min_new_tokens=sampling.min_new_tokens,
            spelled=spelled,
            includes_stop=includes_stop,
        )

    def encode_text(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Returns the token ids of ``text``. Raises ``InvalidArgumentError`` if the tokenizer cannot encode it, or
        ``PromptTooLongError`` if it is sure to have more than ``max_tokens``.
        """
        self._need_tokenizer("a text prompt")
        try:
            text.encode()
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"the prompt is not valid Unicode: {error}") from None
        if self.max_tokens is not None:
            self._refuse_far_more(text, self.max_tokens)
        return self.encode_plain(text, add_special_tokens)

    def _encode_plain(self, text: str, add_special_tokens: bool) -> list[int]:
        try:
            with panics_as_errors():
                return list(self.tokenizer(text, add_special_tokens=add_special_tokens, verbose=False)["input_ids"])
        except Exception as error:  # the library raises anything, since the rules are the checkpoint's
            raise InvalidArgumentError(f"the model's tokenizer cannot encode this text: {error}") from error

    def _refuse_far_more(self, text: str, max_tokens: int) -> None:
        """Raises ``PromptTooLongError`` if a beginning of ``text`` has more tokens than all of it may have. The time
        this takes depends on ``max_tokens``, not on the text.
        """
        size = _MANY_CHARACTERS * max_tokens
        while size < len(text):
            num_tokens = len(self.encode_plain(text[:size], False))
            if num_tokens > max_tokens + _MAX_TOKENS_OF_A_CUT:
                raise PromptTooLongError(
                    f"a text of {len(text)} characters has more than {max_tokens} tokens, which is all that the model "
                    "takes, the answer's included"
                )
            size *= 2

    def _need_tokenizer(self, what: str) -> None:
        if self.tokenizer is None:
            raise InvalidArgumentError(
                f"{what} needs a tokenizer, and this checkpoint has none; in Python and by the API a prompt may be a "
                "list of token ids"
            )


def _plain_message(index: int, message: object) -> dict[str, Any]:
    """Returns ``message`` with its content as one text, since not every template reads content in parts."""
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str) or "content" not in message:
        raise InvalidArgumentError(f"message {index} must be {{'role': …, 'content': …}}, not {message!r:.80}")
    content = message["content"]
    parts = [{"type": "text", "text": content}] if isinstance(content, str) else content
    if not isinstance(parts, list):
        raise InvalidArgumentError(f"message {index}: content must be text, not {content!r:.40}")
    for part in parts:
        if not isinstance(part, Mapping) or part.get("type") != "text" or not isinstance(part.get("text"), str):
            raise InvalidArgumentError(
                f"message {index}: content must be text, or parts {{'type': 'text', 'text': …}}, not {part!r:.60}"
            )
    return {**message, "content": "".join(part["text"] for part in parts)}


def _with_arguments_as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    """Returns ``message`` with the arguments of its calls as JSON text. Most templates take them as objects."""
    found = dict(message)
    if isinstance(calls := message.get("tool_calls"), list):
        found["tool_calls"] = [_call_with_text(call) for call in calls]
    return found


def _call_with_text(call: Any) -> Any:
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(arguments := function.get("arguments"), Mapping):
        return call
    return {**call, "function": {**function, "arguments": json.dumps(arguments, ensure_ascii=False)}}


def _eos_token_ids(generation: Mapping[str, Any], config: Mapping[str, Any], tokenizer: Any) -> frozenset[int]:
    """Returns the end-of-text ids of the first of the three sources that has any. Raises ``InvalidArgumentError``."""
    for source, named in (
        ("generation_config.json", generation.get("eos_token_id")),
        ("config.json", config.get("eos_token_id")),
        ("the tokenizer", getattr(tokenizer, "eos_token_id", None)),
    ):
        if named is None or named == []:
            continue
        ids = named if isinstance(named, list) else [named]
        if not all(isinstance(token_id, int) and not isinstance(token_id, bool) and token_id >= 0 for token_id in ids):
            raise InvalidArgumentError(
                f"{source}: eos_token_id must be a token id or a list of them, not {named!r:.60}"
            )
        return frozenset(ids)
    return frozenset()
