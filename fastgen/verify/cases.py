"""Random-weight checkpoints of drawn configurations, made by transformers, whose models are the references."""

from __future__ import annotations

import json
import warnings
from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from fastgen.errors import FastgenError, RecipeError
from fastgen.models.recipe.recipe import Recipe
from fastgen.models.resolve.resolve import mentioned_paths, resolve, unread_keys
from fastgen.verify.configs import DERIVED, Draws, is_filled_in, is_old
from fastgen.verify.coverage import Place, Series
from fastgen.verify.keys import needed_keys, reading_of
from fastgen.verify.old_files import make_old
from fastgen.verify.published import published
from fastgen.verify.reference import ModuleReference, Prompts, Reference, Trace

_PROMPT_LENGTHS = (23, 41, 17)
_SCALE = 1.2


@dataclass(frozen=True)
class Case:
    """One checkpoint on disk and its reference. ``numbers`` are the sizes that the reference states.

    ``trace`` holds the activations of the reference for ``prompts``. ``filled_in`` means that ``config`` has every key
    that the reference knows.
    """

    index: int
    directory: Path
    config: dict[str, Any]
    reference: Reference
    prompts: Prompts
    trace: Trace
    numbers: dict[str, Any]
    filled_in: bool = False
    # Tensors in the file that are not weights.
    surplus: frozenset[str] = frozenset()
    # Only numbers, names and shapes are compared; no model is run.
    headers_only: bool = False


@dataclass(frozen=True)
class Looks:
    """The form of the files of a case: a configuration with all keys, weights as in old files, or without the prefix of
    the base model."""

    filled_in: bool = False
    old: bool = False
    bare: bool = False


class Cases:
    """Draws ``num_configs`` cases for a recipe and writes their files to ``directory``.

    The models are those of ``model_class``, or in turn those of the classes that transformers has for the recipe's
    architectures. A case that several recipes share is made once.
    """

    def __init__(
        self,
        directory: Path,
        *,
        num_configs: int,
        seed: int,
        base: dict[str, Any] | None = None,
        model_class: Any = None,
    ):
        self.directory, self.num_configs, self.seed, self.base = directory, num_configs, seed, base
        self.model_class = model_class
        self._made: dict[str, Case | Exception] = {}
        self._series: dict[tuple[str, frozenset[str]], Series] = {}

    def of(self, recipe: Recipe) -> Iterator[Case]:
        """Yields the cases for ``recipe``.

        Raises :class:`FastgenError` if transformers knows none of its architectures, or refuses all configurations.
        """
        classes = self.classes(recipe)
        mentioned = {path[0] for path in mentioned_paths(recipe)}
        num_made, refusal = 0, ""
        needed = needed_keys(recipe)
        all_series = [self.series(cls, mentioned) for cls in classes]
        taken: list[tuple[Place, ...]] = [()] * len(classes)
        for index in range(self.num_configs):
            turn = index % len(classes)
            cls, series = classes[turn], all_series[turn]
            draws = series.draws
            bare = bool(recipe.schema.aliases) or published(cls.__name__).bare
            attempts = series.order(index, taken[turn])
            for attempt in attempts:
                config = dict(series.configs[index][attempt])
                stated = {draws.reading.spellings.get(key, key) for key in config}
                config |= {key: draws.usual(key, index) for key in sorted(_to_state(needed, draws) - stated)}
                if attempt != attempts[-1] and _excluded(recipe, config):
                    refusal = "the recipe's own `requires`"
                    continue
                taken[turn] += ((index, attempt),)
                case = self.case(cls, config, index, bare=bare)
                if isinstance(case, Exception):
                    refusal = f"{type(case).__name__}: {case}"
                    continue
                yield case
                num_made += 1
                break
        if not num_made:
            names = ", ".join(recipe.architectures)
            raise FastgenError(f"transformers refused all drawn configurations for {names}: {refusal}")

    def series(self, cls: Any, mentioned: Collection[str]) -> Series:
        """Returns the configurations of ``cls`` to draw from for a recipe that mentions the keys ``mentioned``."""
        known = cls.__name__, frozenset(mentioned)
        if known not in self._series:
            draws = draws_of(cls, mentioned, seed=self.seed, base=self.base)
            self._series[known] = Series(draws, self.num_configs)
        return self._series[known]

    def classes(self, recipe: Recipe) -> list[Any]:
        """Returns the classes whose models are drawn. Raises :class:`FastgenError` if there are none."""
        return model_classes(recipe) if self.model_class is None else [self.model_class]

    def case(self, cls: Any, config: dict[str, Any], index: int, *, bare: bool = False) -> Case | Exception:
        """Makes the model of ``cls`` for ``config``; returns the error if transformers refuses it.

        Every fourth ``config.json`` has all keys that the class fills in; the others are written as drawn. Every fourth
        file of weights looks old: it has tensors that are not weights, and if ``bare`` no base model prefix.
        """
        key = json.dumps([cls.__name__, index, config, bare], sort_keys=True)
        if key not in self._made:
            try:
                with quiet():
                    directory = self.directory / str(len(self._made))
                    looks = Looks(is_filled_in(index), is_old(index), bare)
                    self._made[key] = make_case(cls, config, index, self.seed * 1000 + index, directory, looks)
            except Exception as error:  # transformers refuses some combinations, each in its own way
                self._made[key] = error
        return self._made[key]


def model_classes(recipe: Recipe) -> list[Any]:
    import transformers

    found = [getattr(transformers, name, None) for name in recipe.architectures]
    classes = [cls for cls in found if cls is not None and getattr(cls, "config_class", None) is not None]
    if not classes:
        raise FastgenError(
            f"{recipe.file}: transformers knows none of {', '.join(recipe.architectures)}; give a model's directory "
            f"and a reference: fastgen verify DIRECTORY --recipe {recipe.file} --reference FILE.py:FUNCTION "
            f"(or FILE.safetensors with recorded activations)"
        )
    return classes


def draws_of(cls: Any, mentioned: Collection[str], *, seed: int, base: Mapping[str, Any] | None = None) -> Draws:
    """Returns the draws of configurations of ``cls`` for a recipe that mentions the keys ``mentioned``."""
    defaults, reading = cls.config_class().to_dict(), reading_of(cls.config_class, mentioned)
    said = published(cls.__name__).config
    return Draws(defaults, mentioned, seed=seed, base=base, reading=reading, published=said)


def _to_state(needed: set[str], draws: Draws) -> set[str]:
    """Returns the keys among ``needed`` that a file has to state: all but flags, which old files leave out."""
    return {key for key in needed & draws.defaults.keys() - DERIVED if not isinstance(draws.defaults[key], bool)}


def _excluded(recipe: Recipe, config: Mapping[str, Any]) -> bool:
    """Returns whether the recipe's own ``requires`` excludes such a model."""
    if not recipe.schema.requires:
        return False
    try:
        resolve(recipe, config, allow_config_keys=unread_keys(recipe, config))
    except RecipeError as error:
        return (error.node or "").startswith("requires")
    return False


def make_case(cls: Any, config: dict[str, Any], index: int, seed: int, directory: Path, looks: Looks) -> Case:
    """Makes the model of ``cls`` for ``config`` with weights drawn from ``seed``, and writes its files.

    Raises whatever transformers raises if it refuses the configuration.
    """
    hf_config = class_config(cls, config)
    # the plain loop over experts: transformers' grouped product requires sizes that are multiples of 16 bytes
    hf_config._experts_implementation = "eager"
    if getattr(hf_config, "dtype", None) is not None:  # a checkpoint's own file may ask for fewer bits
        hf_config.dtype = torch.float32
    # the eager Falcon of transformers adds ALiBi twice, once with the mask
    attention = "sdpa" if getattr(hf_config, "alibi", False) else "eager"
    model = cls._from_config(hf_config, attn_implementation=attention)
    randomise(model, seed)
    model.save_pretrained(directory)
    surplus: frozenset[str] = frozenset()
    if looks.old:
        known = published(cls.__name__).tensors
        surplus = make_old(directory / "model.safetensors", model, bare=looks.bare, known=known)
    file = directory / "config.json"
    written = json.loads(file.read_text())
    if not looks.filled_in:  # write the configuration as drawn, without what transformers fills in
        written = {"architectures": [cls.__name__], "model_type": hf_config.model_type, **config}
        file.write_text(json.dumps(written, indent=2))
    prompts = draw_prompts(hf_config.vocab_size, seed)
    reference = ModuleReference(model)
    trace = reference.trace(prompts)
    numbers = stated_numbers(hf_config, model)
    return Case(index, directory, written, reference, prompts, trace, numbers, looks.filled_in, surplus)


def class_config(cls: Any, config: dict[str, Any]) -> Any:
    """Returns the configuration object of ``cls`` for this content of ``config.json``."""
    hf_config = cls.config_class.from_dict(config)
    for key in (key for key in config if key.startswith("_")):
        setattr(hf_config, key, config[key])
    return hf_config


def stated_numbers(hf_config: Any, model: nn.Module) -> dict[str, Any]:
    """Returns the sizes and the rotation that the reference states, as far as it states them."""
    return _numbers(hf_config) | _rotation(hf_config, model)


def draw_prompts(vocab_size: int, seed: int) -> list[list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return [torch.randint(vocab_size, (length,), generator=generator).tolist() for length in _PROMPT_LENGTHS]


def randomise(model: nn.Module, seed: int) -> None:
    """Draws weights so large that a wrong eps, scale, bias or norm changes the answer.

    Matrices have a standard deviation of ``1.2 / sqrt(fan in)``, so that scores and logits vary by several units but
    rounding is not amplified; embeddings that are not the head have 1. Norms, biases and router corrections get random
    offsets from their initial values.
    """
    generator = torch.Generator().manual_seed(seed)
    head = getattr(model, "get_output_embeddings", lambda: None)()
    tables = [module.weight for module in model.modules() if isinstance(module, nn.Embedding)]
    looked_up = {id(weight) for weight in tables if head is None or weight is not head.weight}
    turned = {id(module.weight) for module in model.modules() if type(module).__name__ == "Conv1D"}
    corrections = [(name, buffer) for name, buffer in model.named_buffers() if name.endswith("correction_bias")]
    with torch.no_grad():
        for name, parameter in [*model.named_parameters(), *corrections]:
            noise = torch.randn(parameter.shape, generator=generator, dtype=torch.float32)
            if id(parameter) in looked_up:
                parameter.copy_(noise)
            elif parameter.ndim > 1 and "norm" not in name:
                fan_in = parameter.shape[0 if id(parameter) in turned else -1]
                parameter.copy_(noise * (_SCALE / fan_in**0.5))
            else:
                parameter.copy_(noise * 0.3 + parameter.mean())


def _numbers(config: Any) -> dict[str, Any]:
    """Returns the sizes in the reference's configuration, under the names that recipes use."""
    names = {
        "vocab_size": "vocab_size",
        "hidden_size": "hidden_size",
        "num_layers": "num_hidden_layers",
        "num_heads": "num_attention_heads",
        "num_kv_heads": "num_key_value_heads",
        "head_dim": "head_dim",
        "max_positions": "max_position_embeddings",
        "sliding_window": "sliding_window",
    }
    if hasattr(config, "kv_lora_rank"):
        del names["head_dim"]  # latent attention has several head sizes, and this key means the rotated part
    numbers = {word: getattr(config, name, None) for word, name in names.items()}
    if hasattr(config, "sliding_window"):
        kinds = getattr(config, "layer_types", None) or ["sliding_attention"] * config.num_hidden_layers
        window = numbers["sliding_window"]
        numbers["windowed"] = [kind == "sliding_attention" and window is not None for kind in kinds]
    return numbers


def _rotation(config: Any, model: nn.Module) -> dict[str, Any]:
    """Returns theta, the trained length and the frequencies, if all layers have the same rotation."""
    stated = getattr(config, "rope_parameters", None) or {}
    buffers = [module.inv_freq for module in model.modules() if isinstance(getattr(module, "inv_freq", None), Tensor)]
    whole = config.max_position_embeddings if stated.get("rope_type") == "dynamic" else None
    numbers = {
        "rope_theta": stated.get("rope_theta"),
        "trained_positions": stated.get("original_max_position_embeddings", whole),
        "frequencies": buffers[0] if len(buffers) == 1 else None,
    }
    return {name: value for name, value in numbers.items() if value is not None}


@contextmanager
def quiet() -> Iterator[None]:
    from transformers.utils import logging

    log: Any = logging  # its functions have no types
    verbosity, bars = log.get_verbosity(), log.is_progress_bar_enabled()
    log.set_verbosity_error()
    log.disable_progress_bar()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            yield
    finally:
        log.set_verbosity(verbosity)
        if bars:
            log.enable_progress_bar()
