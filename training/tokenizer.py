"""The byte-level BPE tokenizer that all built-in models share."""

from __future__ import annotations

from random import Random

from tokenizers import Tokenizer, decoders, models, pre_tokenizers, processors, trainers
from transformers import PreTrainedTokenizerFast

from training.stories import generate_chat, generate_story

VOCAB_SIZE = 1536
CONTEXT = 2048  # tokens
BOS, EOS, PAD, END = "<|bos|>", "<|endoftext|>", "<|pad|>", "<|end|>"
SPECIAL_TOKENS = [BOS, EOS, PAD, "<|system|>", "<|user|>", "<|assistant|>", END]

# One header token per role, the text, and ``<|end|>``: what the model writes after ``<|assistant|>`` is its answer.
# Tools are described in a system message, and calls are written as by Hermes' models. The models never saw either, but
# a grammar can make them call, so that a server's tools can be tried.
CHAT_TEMPLATE = """\
{{- bos_token -}}
{%- if tools -%}
{{- '<|system|>These functions may be called:\\n<tools>' -}}
{%- for tool in tools -%}
{{- '\\n' + tool | tojson -}}
{%- endfor -%}
{{- '\\n</tools>\\nA call is written so:\\n<tool_call>\\n{"name": "a function", "arguments": {}}' -}}
{{- '\\n</tool_call><|end|>' -}}
{%- endif -%}
{%- for message in messages -%}
{%- if message['role'] not in ['system', 'user', 'assistant', 'tool'] -%}
{{- raise_exception("roles are system, user, assistant and tool, not " + message['role']) -}}
{%- endif -%}
{%- if message['role'] == 'tool' -%}
{{- '<|user|><tool_response>\\n' + message['content'] | trim + '\\n</tool_response><|end|>' -}}
{%- else -%}
{{- '<|' + message['role'] + '|>' + (message['content'] or '') | trim -}}
{%- for call in message['tool_calls'] or [] -%}
{{- '\\n<tool_call>\\n{"name": "' + call['function']['name'] + '", "arguments": ' -}}
{{- call['function']['arguments'] | tojson + '}\\n</tool_call>' -}}
{%- endfor -%}
{{- '<|end|>' -}}
{%- endif -%}
{%- endfor -%}
{%- if add_generation_prompt -%}
{{- '<|assistant|>' -}}
{%- endif -%}
"""


def build_tokenizer(seed: int) -> PreTrainedTokenizerFast:
    """Learns the merges from generated text.

    All 256 bytes are in the vocabulary, so every text has an encoding and decodes to itself.
    """
    rng = Random(f"{seed}/tokenizer")
    corpus = [generate_story(rng) for _ in range(5000)]
    corpus += [message.content for _ in range(5000) for message in generate_chat(rng)]

    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        corpus,
        trainers.BpeTrainer(
            vocab_size=VOCAB_SIZE,
            special_tokens=SPECIAL_TOKENS,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    tokenizer.post_processor = processors.Sequence(
        [
            processors.ByteLevel(trim_offsets=False),
            processors.TemplateProcessing(
                single=f"{BOS} $A",
                pair=f"{BOS} $A {BOS} $B",
                special_tokens=[(BOS, tokenizer.token_to_id(BOS))],
            ),
        ]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token=BOS,
        eos_token=EOS,
        pad_token=PAD,
        model_max_length=CONTEXT,
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE,
    )
