"""A Llama of any size with random weights, drawn on the device, and an engine for it: no file is read or written.

The model spec is what the recipe `llama` makes of such a `config.json`; it is written out here, so that measuring
needs none of what reads recipes.
"""

from __future__ import annotations

import random
from collections.abc import Generator, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor

from fastgen.compile.backends.choose import choose_backend, target_facts
from fastgen.compile.host.device import Device
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.tensor_files import Read, TensorHeader
from fastgen.models.measure import ModelBuild
from fastgen.models.spec import (
    AttentionSpec,
    BranchSpec,
    EmbeddingSpec,
    HeadSpec,
    LayerSpec,
    LinearSpec,
    MlpSpec,
    ModelSpec,
    NodeRef,
    NormSpec,
    PartSpec,
    RotarySpec,
    TensorSpec,
)
from fastgen.options import LoadOptions
from fastgen.runtime.answers.generation import Generation
from fastgen.runtime.assembly import build_engine
from fastgen.runtime.config import resolve_engine_config
from fastgen.runtime.engine import Engine
from fastgen.runtime.memory.ledger import MemoryModel
from fastgen.runtime.requests.sampling_params import SamplingParams
from fastgen.runtime.scheduling.policies.splitfuse import SplitFuse
from fastgen.runtime.step.model_runner import PROMPT_LOGITS_ROWS
from fastgen.runtime.text.codec import TextCodec


@dataclass(frozen=True)
class LlamaShape:
    hidden: int
    layers: int
    heads: int
    kv_heads: int
    ffn: int
    vocab: int
    max_positions: int
    dtype: torch.dtype
    eps: float = 1e-5

    @property
    def head_dim(self) -> int:
        return self.hidden // self.heads


LLAMA_2_7B = LlamaShape(4096, 32, 32, 32, 11008, 32000, 4096, torch.bfloat16)
TOY = LlamaShape(32, 1, 2, 1, 48, 60, 128, torch.float32)


def llama_spec(shape: LlamaShape) -> ModelSpec:
    layers = tuple(LayerSpec(index, _branches(shape, f"model.layers.{index}")) for index in range(shape.layers))
    tokens = _tensor("model.embed_tokens", shape.vocab, shape.hidden, at="model.embedding.tokens")
    return ModelSpec(
        recipe="llama",
        architecture="LlamaForCausalLM",
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        num_layers=shape.layers,
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        max_positions=shape.max_positions,
        embedding=EmbeddingSpec(tokens, None, None, _node("model.embedding")),
        layers=layers,
        final_norm=_norm(shape, "model.norm", at="model.final_norm"),
        head=HeadSpec(_tensor("lm_head", shape.vocab, shape.hidden, at="model.head.weight"), None, _node("model.head")),
        ignored_tensors=("*.rotary_emb.inv_freq",),
    )


def _branches(shape: LlamaShape, prefix: str) -> tuple[BranchSpec, ...]:
    here, heads = "model.layers.residual.attend.attention", (shape.heads, shape.kv_heads, shape.kv_heads)
    q, k, v = (
        _linear(f"{prefix}.self_attn.{name}_proj", shape.hidden, count * shape.head_dim, at=f"{here}.qkv.{name}")
        for name, count in zip("qkv", heads, strict=True)
    )
    attention = AttentionSpec(
        num_heads=shape.heads,
        num_kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        scale=shape.head_dim**-0.5,
        q=q,
        k=k,
        v=v,
        output=_linear(f"{prefix}.self_attn.o_proj", shape.hidden, shape.hidden, at=f"{here}.output"),
        rotary=RotarySpec(10000.0, shape.head_dim, None, _node(f"{here}.rotary")),
        sliding_window=None,
        node=_node(here),
    )
    here = "model.layers.residual.transform.mlp"
    gate, up = (
        _linear(f"{prefix}.mlp.{name}_proj", shape.hidden, shape.ffn, at=f"{here}.{name}") for name in ("gate", "up")
    )
    down = _linear(f"{prefix}.mlp.down_proj", shape.ffn, shape.hidden, at=f"{here}.down")
    mlp = MlpSpec("gated", "silu", gate, up, down, _node(here), _node(f"{here}.activation"))
    norms = ("attend", "input_layernorm"), ("transform", "post_attention_layernorm")
    parts: tuple[AttentionSpec | MlpSpec, ...] = (attention, mlp)
    return tuple(
        BranchSpec(
            name=name,
            norm=_norm(shape, f"{prefix}.{norm}", at=f"model.layers.residual.{name}.norm"),
            parts=(PartSpec(None, part),),
            output_norm=None,
            scale=1.0,
            sum_norm=None,
            node=_node(f"model.layers.residual.{name}"),
        )
        for (name, norm), part in zip(norms, parts, strict=True)
    )


def _node(path: str) -> NodeRef:
    return NodeRef(path, "llama.yaml", 1)


def _tensor(module: str, *shape: int, at: str) -> TensorSpec:
    return TensorSpec((f"{module}.weight",), shape, _node(at))


def _linear(module: str, in_features: int, out_features: int, *, at: str) -> LinearSpec:
    return LinearSpec(_tensor(module, out_features, in_features, at=at), None, in_features, out_features, _node(at))


def _norm(shape: LlamaShape, module: str, *, at: str) -> NormSpec:
    return NormSpec("rms", shape.hidden, shape.eps, _tensor(module, shape.hidden, at=f"{at}.weight"), None, _node(at))


@dataclass(frozen=True)
class RandomWeights(Checkpoint):
    """A checkpoint without files: its tensors are drawn where they are needed, scaled so that activations keep their
    magnitude.
    """

    device: torch.device = field(default_factory=lambda: torch.device("cpu"))

    @classmethod
    def of(cls, spec: ModelSpec, dtype: torch.dtype, device: torch.device) -> RandomWeights:
        nowhere = Path("random weights")
        headers = {tensor.names[0]: TensorHeader(nowhere, tensor.shape, dtype) for tensor in spec.tensors()}
        return cls(nowhere, {}, headers, (), device)

    def stream(self, reads: Sequence[Read]) -> Generator[tuple[Read, Tensor]]:
        generator = torch.Generator(self.device).manual_seed(0)
        for read in reads:
            name, header = read.name, read.header
            tensor = torch.ones(header.shape, dtype=header.dtype, device=self.device)
            if len(header.shape) > 1:
                # logits of a deviation of 3 are seldom won by a hair
                gain = {"model.embed_tokens.weight": header.shape[1] ** 0.5, "lm_head.weight": 3.0}.get(name, 1.0)
                tensor.normal_(0, gain * header.shape[1] ** -0.5, generator=generator)
            yield read, tensor


def llama_engine(
    shape: LlamaShape,
    device: Device,
    *,
    kv_tokens: int,
    max_num_seqs: int,
    token_budget: int,
    target: str = "triton",
) -> Engine:
    """Returns an engine of that model, whose KV cache has room for ``kv_tokens``. Raises what building one raises."""
    spec = llama_spec(shape)
    per_token = spec.kv_bytes_per_token(shape.dtype.itemsize)
    described = ModelBuild(spec, shape.dtype, target_facts(target, device, num_threads=None, dtype=shape.dtype))
    memory = MemoryModel(described, device)
    options = LoadOptions(
        "a Llama with random weights",
        token_budget=token_budget,
        max_num_seqs=max_num_seqs,
        kv_cache_memory=per_token * (kv_tokens + 64),  # and the block of the padding
        max_model_len=shape.max_positions,
        prefix_caching=False,
    )
    config = resolve_engine_config(memory, options)
    return build_engine(
        described,
        config,
        RandomWeights.of(spec, shape.dtype, device.torch_device),
        TextCodec(None, eos_token_ids=frozenset(), default_sampling=SamplingParams()),
        device.torch_device,
        choose_backend(
            described.target,
            device,
            token_budget=config.token_budget,
            max_num_seqs=config.max_num_seqs,
            max_prompt_rows=PROMPT_LOGITS_ROWS,
            num_threads=None,
        ),
        ledger=memory.ledger(config),
        policy=SplitFuse(),
        aging_s=options.aging_s,
    )


def kv_tokens_that_fit(shape: LlamaShape, device: Device) -> int:
    """Returns the tokens of KV cache that fit beside the weights in nine tenths of the device's memory."""
    spec = llama_spec(shape)
    room = 0.9 * device.memory_bytes - spec.num_parameters * shape.dtype.itemsize
    return max(0, int(room) // spec.kv_bytes_per_token(shape.dtype.itemsize))


def submit(engine: Engine, prompts: Iterable[tuple[int, int]], seed: int) -> list[Generation]:
    """Submits requests with these numbers of prompt and answer tokens; an end of text is an ordinary token."""
    draw = random.Random(seed)
    return [
        engine.submit(
            [draw.randrange(engine.vocab_size) for _ in range(length)],
            SamplingParams(max_new_tokens=num_new, temperature=0.0, ignore_eos=True),
        )
        for length, num_new in prompts
    ]
