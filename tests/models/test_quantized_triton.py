"""Models with weights in few bits on the ``triton`` target, every kernel interpreted and every step replayed, against
the reference of the same arithmetic: whole distributions, and the tokens of requests alone and in company.

``runtime/test_same_answer_triton.py`` has the engine's other promises for one of the formats.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import transformers

import fastgen
from fastgen import SamplingParams
from fastgen.compile.backends.modules.reference import HeadMaps, Linear, Router
from fastgen.compile.backends.modules.stored import StoredGroups
from tests.kernel_device import DEVICE
from tests.reference import randomise, save
from tests.runtime.checkpoints import save_checkpoint
from tests.runtime.test_same_answer import num_certain_tokens
from tests.runtime.test_same_answer_cpp import FAMILIES, checkpoint
from tests.runtime.test_same_answer_triton import SIZES as SMALL
from tests.runtime.test_same_answer_triton import watch

FORMATS = ("int8_weight_only", "int4_weight_only", "fp8_weight_only")
# Two layers each.
LARGER = (*FAMILIES, "opt")
SIZES: dict[str, Any] = {"dtype": "float32", "block_size": 4, "max_num_seqs": 3, "max_model_len": 40}
PROMPTS = [[5, 3, 20, 7, 11, 2, 9], [8], [30, 31, 4, 4, 12]]
ANSWER = {"max_new_tokens": 3, "temperature": 0, "ignore_eos": True, "logprobs": 20, "prompt_logprobs": 20}


def tied(directory: Path) -> Path:
    """A Gemma 2 of one layer: a head that is the embedding too, scaled, soft caps."""
    config = transformers.Gemma2Config(**SMALL, head_dim=8, attn_implementation="eager")
    return save(randomise(transformers.Gemma2ForCausalLM(config), seed=3), directory)


def same_distributions(found: Any, expected: Any, num_tokens: int) -> None:
    """``expected`` has all tokens, ``found`` the likeliest."""
    for mine, theirs in zip(found[:num_tokens], expected[:num_tokens], strict=True):
        assert (mine or {}) == pytest.approx({key: theirs[key] for key in mine or {}}, abs=1e-4)


def check(directory: Path, weight_format: str, *, watches: bool = False) -> None:
    options = SIZES | {"quantize": weight_format}
    with fastgen.load(directory, target="torch", token_budget=64, **options) as llm:
        whole = dict.fromkeys(("logprobs", "prompt_logprobs"), llm.spec.vocab_size)
        expected = [llm.generate(prompt, **(ANSWER | whole)) for prompt in PROMPTS]
    with fastgen.load(directory, target="triton", device=DEVICE, token_budget=4, **options) as llm:
        watched = watch(llm) if watches else None
        found = llm.generate(PROMPTS, **ANSWER)
    assert watched is None or {size for _, size in watched.num_tokens} >= {1, 4}
    num_tokens = 0
    for mine, theirs in zip(found, expected, strict=True):
        same_distributions(mine.prompt_logprobs, theirs.prompt_logprobs, len(theirs.prompt_logprobs or []))
        certain = num_certain_tokens(theirs, SamplingParams(temperature=0))
        assert mine.token_ids[:certain] == theirs.token_ids[:certain]
        same_distributions(mine.logprobs, theirs.logprobs, certain)
        num_tokens += certain
    assert num_tokens > 0.7 * len(PROMPTS) * ANSWER["max_new_tokens"]


def test_against_the_reference(tmp_path: Path) -> None:
    check(tied(tmp_path), "int4_weight_only", watches=True)


@pytest.mark.kernels
@pytest.mark.slow
@pytest.mark.parametrize("weight_format", FORMATS)
@pytest.mark.parametrize("family", LARGER)
def test_larger_models_against_the_reference(family: str, weight_format: str, tmp_path: Path) -> None:
    directory = checkpoint(family, tmp_path) if family in FAMILIES else save_checkpoint(family, tmp_path)
    check(directory, weight_format)


@pytest.mark.slow
def test_prompts_that_the_library_multiplies(tmp_path: Path) -> None:
    """Steps of 64 rows and fewer, of some in pieces, and of so many that weights are laid out whole."""
    directory = tied(tmp_path)
    options = SIZES | {"quantize": "int4_weight_only", "token_budget": 256, "max_model_len": 64}
    prompts = [[(7 * each + start) % 40 for each in range(62)] for start in (1, 5, 9)]
    prompts += [[8, *prompt[1:]] for prompt in prompts]
    asked = ANSWER | {"max_new_tokens": 1}
    with fastgen.load(directory, target="torch", **options | {"max_num_seqs": 6}) as llm:
        expected = llm.generate(prompts, **asked | {"prompt_logprobs": llm.spec.vocab_size})
    with fastgen.load(directory, target="triton", **options | {"max_num_seqs": 6}) as llm:
        watched = watch(llm)
        found = [*llm.generate(prompts[:3], **asked), *llm.generate(prompts[2:], **asked)[1:]]
    assert {size for _, size in watched.num_tokens} >= {192, 256}
    for mine, theirs in zip(found, expected, strict=True):
        same_distributions(mine.prompt_logprobs, theirs.prompt_logprobs, len(prompts[0]))


def test_what_stays_in_the_model_s_dtype(tmp_path: Path) -> None:
    """Routers and experts, and latent attention's maps of heads; all other matrices are in few bits."""
    directory = checkpoint("DeepseekV3", tmp_path)
    with fastgen.load(directory, target="torch", quantize="int8_weight_only", **SIZES) as llm:
        assert llm._engine is not None
        modules = dict(llm._engine.runner.model.named_modules())
        whole = {name for name, each in modules.items() if any(p.ndim > 1 for p in each.parameters(recurse=False))}
    exact = {f"{name}.linear" for name, each in modules.items() if isinstance(each, Router)}
    experts = {name for name, each in modules.items() if isinstance(each, StoredGroups)}
    heads = {name for name, each in modules.items() if isinstance(each, HeadMaps)}
    assert exact
    assert experts
    assert heads
    assert whole == exact | experts | heads | {"embedding.tokens.tokens"}
    assert sum(isinstance(each, Linear) for each in modules.values()) > len(exact)


def test_a_copy_of_a_tied_head_must_be_the_same(tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    directory = checkpoint("Gemma2", tmp_path)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    options = SIZES | {"target": "torch", "quantize": "fp8_weight_only"}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()
    save_file(tensors, file, metadata={"format": "pt"})
    fastgen.load(directory, **options).close()
    tensors["lm_head.weight"][1] *= 2
    save_file(tensors, file, metadata={"format": "pt"})
    with pytest.raises(fastgen.errors.CheckpointError, match=r"'lm_head.weight' differs"):
        fastgen.load(directory, **options)


def test_what_a_target_does_not_know() -> None:
    with pytest.raises(fastgen.errors.InvalidArgumentError) as raised:
        fastgen.load("tiny-llama", target="torch", quantize="int4")
    assert str(raised.value) == (
        "quantize='int4': target='torch' knows 'int8_weight_only', 'int4_weight_only', 'fp8_weight_only' "
        "(target='cpp' knows 'int8', 'int8_weight_only', 'int4'; target='triton' knows 'int8_weight_only', "
        "'int4_weight_only', 'fp8_weight_only')"
    )


def with_weight(value: float, directory: Path) -> Path:
    """A model with this number in its head."""
    from safetensors.torch import load_file, save_file

    save_checkpoint("llama", directory)
    file = directory / "model.safetensors"
    tensors = load_file(file)
    tensors["lm_head.weight"][3, 3] = value
    save_file(tensors, file, metadata={"format": "pt"})
    return directory


def test_a_weight_that_16_bits_cannot_hold(tmp_path: Path) -> None:
    """Codes could; what is made of them for many rows could not."""
    directory = with_weight(1e5, tmp_path)
    with pytest.raises(fastgen.errors.CheckpointError, match=r"reaches 100000 .*torch.float16 cannot hold"):
        fastgen.load(directory, **SIZES | {"dtype": "float16", "target": "torch", "quantize": "int8_weight_only"})


@pytest.mark.parametrize(("target", "quantize"), [("torch", "int4_weight_only"), ("cpp", "int4")])
def test_a_weight_that_no_scale_in_16_bits_holds(tmp_path: Path, target: str, quantize: str) -> None:
    """Its group's scale would be infinite."""
    options = SIZES | {"target": target, "quantize": quantize}
    fastgen.load(with_weight(-524159, tmp_path), **options).close()
    directory = with_weight(-524160, tmp_path)
    message = (
        rf"'lm_head.weight' reaches 524160 \(torch.float32\), which the scales of '{quantize}', in float16, cannot"
    )
    with pytest.raises(fastgen.errors.CheckpointError, match=message):
        fastgen.load(directory, **options)
