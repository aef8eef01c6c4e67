"""Names what is no checkpoint that fastgen runs, and says what to do instead.

Names of files show other formats, and ``config.json`` shows other kinds of models. Each is a table, of which the first
row that fits counts.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, Final

from fastgen.errors import CheckpointError
from fastgen.models.checkpoint.files import read_json_object

_ADAPTER_CONFIG = "adapter_config.json"
_GGUF_MAGIC = b"GGUF"
_MODEL_FILES = (".safetensors", ".bin", ".json", ".onnx", ".pt", ".pth")


@dataclass(frozen=True)
class _Format:
    """A format of other programs."""

    # Globs; one file whose name matches shows the format.
    files: tuple[str, ...]
    # Completes the sentence "it is …".
    what: str
    instead: str


@dataclass(frozen=True)
class _OtherModel:
    """A kind of model that is no decoder of text."""

    # Keys of ``config.json``; one that is there and neither null, false nor empty shows the kind.
    keys: tuple[str, ...]
    # Ends of the architecture's name; one shows the kind.
    endings: tuple[str, ...]
    # Completes the sentence "it is …".
    what: str
    instead: str


_GGUF: Final = _Format(
    ("*.gguf",),
    "a model in GGUF, the format of llama.cpp, which fastgen does not read",
    "Take the checkpoint in safetensors that it was made from; quantize= quantizes that while it is loaded",
)
_FORMATS: Final = (
    _Format(
        (_ADAPTER_CONFIG, "adapter_model.safetensors", "adapter_model.bin"),
        "an adapter such as LoRA's (PEFT), which changes another model, and fastgen runs no adapters",
        "Merge it into that model with merge_and_unload() of the package peft, save the result with save_pretrained(), "
        "and give that directory",
    ),
    _GGUF,
    _Format(
        ("model_index.json",),
        "a pipeline of diffusers, which makes images",
        "fastgen generates text; give a language model",
    ),
    _Format(
        ("consolidated*.pth", "consolidated*.safetensors", "params.json"),
        "a model in its maker's own format",
        "Take the version for transformers, with config.json and model.safetensors",
    ),
    _Format(
        ("*.onnx",),
        "a model in ONNX, which fastgen does not read",
        "Take the checkpoint in safetensors that it was made from",
    ),
)
_OTHER_MODELS: Final = (
    _OtherModel(
        ("vision_config", "audio_config", "speech_config", "vision_tower", "mm_vision_tower", "img_processor"),
        (),
        "a multimodal model, with parts for images or sound",
        "fastgen reads text only; take a text-only model of the same family",
    ),
    _OtherModel(
        ("is_encoder_decoder", "add_cross_attention", "tie_encoder_decoder"),
        (),
        "an encoder-decoder, whose decoder attends to an encoder",
        "fastgen runs decoders only; take a decoder-only model, such as one whose architecture ends in ForCausalLM",
    ),
    _OtherModel(
        (),
        ("ForSequenceClassification", "ForTokenClassification", "ForQuestionAnswering", "ForMultipleChoice"),
        "a classifier, whose head scores texts and predicts no tokens",
        "fastgen generates text; take a model whose architecture ends in ForCausalLM",
    ),
    _OtherModel(
        (),
        ("ForMaskedLM", "ForPreTraining", "ForNextSentencePrediction"),
        "an encoder, which sees the tokens on both sides and generates no text",
        "fastgen runs decoders only; take a model whose architecture ends in ForCausalLM",
    ),
)
# Ends of architectures without a head. If such a model generates text, its ``auto_map`` names the code for that.
_HEADLESS: Final = _OtherModel(
    (),
    ("Model",),
    "a model without a head that predicts tokens, such as an encoder or a model for embeddings",
    "fastgen generates text; take a model whose architecture ends in ForCausalLM",
)

# Globs of tensors that only quantized weights have.
_QUANTIZED: Final = (
    *("*.qweight", "*.qzeros", "*.g_idx"),  # GPTQ, AWQ
    *("*.SCB", "*.absmax", "*.quant_map", "*.quant_state.*"),  # bitsandbytes
    *("*.weight_scale", "*.weight_scale_inv", "*.weight_packed", "*_proj_scales", "*_proj_blocks"),  # fp8, int4, mxfp4
)


def other_format(names: Collection[str], directory: Path | None = None) -> str | None:
    """Returns what a directory with files of these ``names`` is, and what to do instead; ``None`` if nothing shows it.

    If the ``directory`` is on this machine, an adapter's configuration is read for the model that it changes.
    """
    for row in _FORMATS:
        shown_by = next((name for name in sorted(names) if any(fnmatchcase(name, each) for each in row.files)), None)
        if shown_by is not None:
            base = _base_model(directory) if directory is not None and _ADAPTER_CONFIG in names else ""
            return f"{shown_by} shows that it is {row.what}. {row.instead}{base}"
    return None


def other_file(file: Path) -> str | None:
    """Returns what ``file`` is, which was given in place of a directory, and what to do instead.

    Returns ``None`` if it is not evidently a model's file, because its name may be that of a model elsewhere.
    """
    try:
        with file.open("rb") as opened:
            is_gguf = opened.read(len(_GGUF_MAGIC)) == _GGUF_MAGIC
    except OSError:
        is_gguf = False
    if is_gguf or file.suffix == ".gguf":
        return f"it is {_GGUF.what}. {_GGUF.instead}"
    return "it is one file of a model; give the directory it is in" if file.suffix in _MODEL_FILES else None


def other_model(config: Mapping[str, Any]) -> str | None:
    """Returns what kind of model ``config.json`` describes if it is no decoder of text, and what to do instead.

    Returns ``None`` if nothing shows another kind.

    Do not call this to load an architecture that a recipe claims: the recipe knows better.
    """
    stated = config.get("architectures")
    architectures = [name for name in stated if isinstance(name, str)] if isinstance(stated, list) else []
    for kind in _OTHER_MODELS:
        if any(config.get(key) for key in kind.keys) or any(name.endswith(kind.endings) for name in architectures):
            return f"it is {kind.what}. {kind.instead}"
    code = config.get("auto_map")
    has_own_head = isinstance(code, Mapping) and "AutoModelForCausalLM" in code
    headless = [name for name in architectures if name.endswith(_HEADLESS.endings) and not name.endswith("HeadModel")]
    if headless and len(headless) == len(architectures) and not has_own_head:
        return f"it is {_HEADLESS.what}. {_HEADLESS.instead}"
    return None


def quantized(config: Mapping[str, Any], tensors: Iterable[str]) -> str:
    """Returns sentences about quantized weights, which ``config.json`` or the names of ``tensors`` show, and what to
    take instead; the text is empty if nothing shows them.
    """
    stated = config.get("quantization_config")
    if isinstance(stated, Mapping) and stated:
        method = str(stated.get("quant_method") or "quantization_config")
    else:
        method = next((name for name in tensors for glob in _QUANTIZED if fnmatchcase(name, glob)), "")
    return method and (
        f"It is quantized ({method}), but fastgen reads plain weights. Take the checkpoint with unquantized weights; "
        "quantize= quantizes it while it is loaded"
    )


def _base_model(directory: Path) -> str:
    """Returns the name of the model that an adapter changes, as the end of a sentence; empty if it is not known."""
    try:
        name = read_json_object(directory / _ADAPTER_CONFIG).get("base_model_name_or_path")
    except CheckpointError:
        return ""
    return f" (the model it changes is {name!r:.200})" if isinstance(name, str) and name else ""
