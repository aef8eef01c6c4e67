"""Accounts for every key of ``config.json``: the recipe uses it, it is known to change nothing, or it is an error.

A key is *inert* if none of its values changes what the model computes at inference. If only some values are harmless,
:data:`HARMLESS` lists them; any other value is an error.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from typing import Any, Final

from fastgen.errors import InvalidArgumentError, RecipeError
from fastgen.models.recipe.expression_grammar import Path
from fastgen.models.recipe.lacking import lacks
from fastgen.models.recipe.spelling import close_to, quoted, shown

INERT: Final = frozenset(
    (
        # Description and origin of the file
        *("architectures", "model_type", "transformers_version", "_name_or_path", "name_or_path"),
        *("_commit_hash", "unsloth_version", "unsloth_fixed", "is_llama_config", "transformers.js_config"),
        # The dtype of the weights: fastgen reads it itself; it is not part of the architecture
        *("torch_dtype", "dtype", "use_bfloat16"),
        # The tokenizer, and the text before a prompt
        *("bos_token_id", "eos_token_id", "pad_token_id", "sep_token_id", "unk_token_id"),
        *("decoder_start_token_id", "tokenizer_class", "forced_bos_token_id", "forced_eos_token_id", "prefix"),
        *("task_specific_params",),
        # Training
        *("attention_dropout", "activation_dropout", "dropout", "hidden_dropout", "hidden_dropout_prob"),
        *("attention_probs_dropout_prob", "embd_pdrop", "attn_pdrop", "resid_pdrop", "classifier_dropout"),
        *("layerdrop", "initializer_range", "init_std", "initializer_factor", "gradient_checkpointing"),
        *("finetuning_task",),
        # How a computation is carried out
        *("use_cache", "is_decoder", "pretraining_tp", "chunk_size_feed_forward"),
        *("_attn_implementation_autoset", "_attn_implementation", "attn_implementation"),
        *("_flash_attn_2_enabled", "torchscript", "tf_legacy_loss", "experts_implementation"),
        # The outputs of a forward pass
        *("output_hidden_states", "output_attentions", "output_scores", "return_dict"),
        *("return_dict_in_generate", "output_past", "tie_last_hidden_states"),
        # Classification heads, which a language model does not have
        *("id2label", "label2id", "num_labels", "problem_type"),
        # Defaults of generation, which have their own file since transformers 4.25
        *("do_sample", "temperature", "top_k", "top_p", "min_p", "typical_p", "max_length", "min_length"),
        *("max_new_tokens", "min_new_tokens", "num_beams", "num_beam_groups", "num_return_sequences"),
        *("diversity_penalty", "length_penalty", "repetition_penalty", "early_stopping"),
        *("no_repeat_ngram_size", "encoder_no_repeat_ngram_size", "bad_words_ids", "suppress_tokens"),
        *("begin_suppress_tokens", "exponential_decay_length_penalty", "remove_invalid_values"),
        *("encoder_repetition_penalty", "epsilon_cutoff", "eta_cutoff", "assistant_confidence_threshold"),
        *("assistant_lookbehind", "target_lookbehind", "num_assistant_tokens", "num_assistant_tokens_schedule"),
    )
)

HARMLESS: Final[dict[str, tuple[tuple[Any, ...], str]]] = {  # key: harmless values, the meaning of any other value
    "is_encoder_decoder": ((False,), "the model has an encoder"),
    "add_cross_attention": ((False,), "the layers attend to an encoder"),
    "cross_attention_hidden_size": ((None,), "the layers attend to an encoder"),
    "is_causal": ((True,), "a token sees the tokens behind it too"),
    "tie_encoder_decoder": ((False,), "the model has an encoder"),
    "pruned_heads": (({}, None), "some attention heads are removed"),
    "quantization_config": ((None,), "the weights are quantized, and fastgen reads plain weights"),
    "auto_map": ((None, {}), "the checkpoint has its own code, which may compute something else and is never run"),
    "partial_rotary_factor": ((None, 1), "only a part of each head is rotated"),
    "sliding_window": ((None,), "a token sees only the tokens in a window before it"),
    "rope_interleaved": ((False,), "features are rotated in another order"),
    "per_layer_config": ((None, {}), "layers differ from one another"),
    "output_projection": ((True, None), "there is no output projection"),
    "learned_embeddings": ((True,), "positions are not learned"),
    "scale_embeddings": ((False,), "token embeddings are scaled"),
}

# Keys that nobody should allow, and what to do instead.
_INSTEAD: Final = {
    "quantization_config": "Take the checkpoint with unquantized weights. quantize= quantizes it while it is loaded: "
    "quantize='int4' or quantize='int8' on a CPU, quantize='int4_weight_only' on a GPU (docs/quantization.md)",
}
_ALLOW: Final = (
    "If a key changes nothing for this model, list it in the recipe's `ignores.config`, or allow it once with "
    "allow_config_keys="
)

# Most keys that an error lists.
_MAX_LISTED: Final = 20


def check_config_keys(
    config: Mapping[str, Any], mentioned: Collection[Path], ignored: Collection[str], *, config_file: str, recipe: str
) -> None:
    """Raises one :class:`RecipeError` that lists every key of ``config`` that is not accounted for.

    ``mentioned`` are the paths in the recipe's expressions: a path to a mapping accounts for everything in it, a path
    to a key inside it only for that key. ``ignored`` are names of keys, dotted for keys inside a mapping.
    """
    problems: list[str] = []
    advice: dict[str, None] = {}
    num_left = 0
    used = {tuple(name.split(".")) for name in ignored} | {(name,) for name in ignored} | set(mentioned)
    for path, value in _unaccounted(config, used):
        key = ".".join(map(str, path))
        if len(problems) == _MAX_LISTED:
            num_left += key not in INERT
        elif key in HARMLESS:
            harmless, meaning = HARMLESS[key]
            if not any(value == other and isinstance(value, bool) == isinstance(other, bool) for other in harmless):
                wanted = " or ".join("null" if other is None else str(other).lower() for other in harmless)
                problems.append(f"{quoted(key)} is {shown(value)}: {meaning}; only {wanted} is known to change nothing")
                advice[_INSTEAD.get(key, _ALLOW)] = None
        elif key not in INERT:
            near = close_to(key, {".".join(path) for path in mentioned} - config.keys())
            lacking = lacks(str(path[-1])) if value else ""  # a key that is null, false or 0 turns its part off
            problems.append(f"{quoted(key)} is not known to the recipe{lacking}{near}")
            advice[_ALLOW] = None
    if num_left:
        problems.append(f"and {num_left:,} more")
    if problems:
        raise RecipeError(
            f"recipe {recipe!r} does not account for the whole configuration:\n- "
            + "\n- ".join(problems)
            + "".join(f"\n{each}" for each in advice),
            file=config_file,
        )


def _unaccounted(config: Mapping[str, Any], used: Collection[Path], at: Path = ()) -> Iterator[tuple[Path, Any]]:
    for key, value in config.items():
        path = (*at, key)
        if path in used:
            continue
        if any(other[: len(path)] == path for other in used):  # something inside it is used
            if isinstance(value, Mapping):
                yield from _unaccounted(value, used, path)
        else:
            yield path, value


def allowed_paths(config: Mapping[str, Any], names: Collection[str], config_file: str) -> set[Path]:
    """Returns the paths of the keys that ``allow_config_keys`` names: a key of the top level, else a dotted path.

    Raises :class:`~fastgen.errors.InvalidArgumentError` for a key that ``config`` does not have.
    """
    is_list = isinstance(names, Collection) and not isinstance(names, str)
    if not is_list or not all(isinstance(name, str) for name in names):
        raise InvalidArgumentError(f"allow_config_keys={shown(names)}: expected a list of key names")
    return {_path_to(name, config, config_file) for name in names}


def _path_to(name: str, config: Mapping[str, Any], config_file: str) -> Path:
    if name in config:
        return (name,)
    path, found = tuple(name.split(".")), config
    for key in path:
        if not isinstance(found, Mapping) or key not in found:
            inner = {f"{outer}.{key}" for outer, value in config.items() if isinstance(value, Mapping) for key in value}
            near = close_to(name, inner | config.keys())
            raise InvalidArgumentError(f"allow_config_keys: {config_file} has no key {shown(name)}{near}")
        found = found[key]
    return path


def without_paths(config: Mapping[str, Any], paths: Collection[Path]) -> Mapping[str, Any]:
    """Returns a copy of ``config`` without the keys at ``paths``."""
    for path in paths:
        config = _without(config, path)
    return config


def _without(mapping: Mapping[str, Any], path: Path) -> Mapping[str, Any]:
    first, *rest = path
    if not rest:
        return {key: value for key, value in mapping.items() if key != first}
    inner = mapping.get(first)  # absent if the whole mapping is allowed too
    return {**mapping, first: _without(inner, tuple(rest))} if isinstance(inner, Mapping) else mapping
