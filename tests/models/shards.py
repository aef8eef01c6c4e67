"""Small models of every shipped recipe, their random checkpoints, and ranks that are threads of this process."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors.torch import save_file
from torch import Tensor

from fastgen.compile.backends.backend import Backend
from fastgen.compile.backends.choose import choose_backend, target_facts
from fastgen.compile.backends.reference import ReferenceBackend
from fastgen.compile.host.device import current
from fastgen.compile.host.rank_memory import AREA_BYTES, RankMemory, SharedRanks
from fastgen.compile.host.ranks import Ranks
from fastgen.compile.weights.formats import QuantizedFormat
from fastgen.layers.kv_cache import PagedKVCache
from fastgen.layers.ragged_batch import RaggedBatch
from fastgen.models.builder import build, kv_groups, kv_shapes
from fastgen.models.causal_lm import CausalLM
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.checkpoint.tensor_files import read_headers
from fastgen.models.checkpoint.weights import load_weights
from fastgen.models.registry.registry import find_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.models.shard.shard import shards
from fastgen.models.spec import ModelSpec
from tests.recipe_tools.published import CONFIGS

T = TypeVar("T")

NUM_HEADS = 24
NUM_LAYERS = 3
BLOCK_SIZE = 4
# Prompts of a step, in tokens.
LENGTHS = (9, 1, 14)
_WAIT_S = 60.0
_SIZES: dict[str, Any] = {
    **dict.fromkeys(("hidden_size", "n_embd", "n_embed"), NUM_HEADS * 8),
    "word_embed_proj_dim": 40,
    **dict.fromkeys(("num_hidden_layers", "n_layer"), NUM_LAYERS),
    **dict.fromkeys(("num_attention_heads", "n_head"), NUM_HEADS),
    **dict.fromkeys(("head_dim", "v_head_dim", "query_pre_attn_scalar"), 8),
    **dict.fromkeys(("intermediate_size", "ffn_dim", "ffn_hidden_size", "n_inner"), 96),
    **dict.fromkeys(("moe_intermediate_size",), 48),
    **dict.fromkeys(("q_lora_rank", "kv_lora_rank"), 20),
    **dict.fromkeys(("num_experts", "n_routed_experts", "num_local_experts"), 8),
    **dict.fromkeys(("rotary_dim", "qk_nope_head_dim", "qk_rope_head_dim"), 4),
    "vocab_size": 67,
    "max_position_embeddings": 64,
    "sliding_window": 6,
    "partial_rotary_factor": 0.5,
    "rope_scaling": None,
}
_SMALLER = {"num_experts_per_tok": 3, "n_group": 4, "topk_group": 2}


def small_spec(recipe: str, *, num_kv_heads: int, **changes: Any) -> ModelSpec:
    """Returns a small model of a recipe. Models whose queries share keys have ``num_kv_heads``, or one if they have."""
    config = CONFIGS[recipe][1]
    num_heads = next(config[key] for key in ("num_attention_heads", "n_head") if key in config)
    num_layers = next(config[key] for key in ("num_hidden_layers", "n_layer") if key in config)
    reduced = {key: _SIZES.get(key, value) if value is not None else None for key, value in config.items()}
    reduced |= {key: min(config[key], most) for key, most in _SMALLER.items() if config.get(key) is not None}
    for key in ("num_key_value_heads", "num_kv_heads"):
        if config.get(key) is not None:
            reduced[key] = {num_heads: NUM_HEADS, 1: 1}.get(config[key], num_kv_heads)
    by_layer = [key for key, value in config.items() if isinstance(value, list) and len(value) == num_layers]
    reduced |= {key: config[key][:NUM_LAYERS] for key in by_layer} | changes
    return resolve(find_recipe(reduced), reduced)


def write_checkpoint(spec: ModelSpec, directory: Path) -> Checkpoint:
    """Writes random weights for ``spec``: matrices keep the size of activations, norms are around 1, biases near 0."""
    generator = torch.Generator().manual_seed(1)
    tensors = {}
    for tensor in spec.tensors():
        noise = torch.randn(tensor.stored_shape, generator=generator)
        if len(tensor.shape) == 2 and "norm" not in tensor.names[0]:
            table = tensor is spec.embedding.tokens and spec.head.weight is not None
            noise *= 1.0 if table else 1.2 * tensor.shape[1] ** -0.5
        else:
            noise = noise * 0.3 + (1 if "norm" in tensor.names[0] and tensor.names[0].endswith("weight") else 0)
        tensors[tensor.names[0]] = noise
    directory.mkdir(exist_ok=True)
    save_file(tensors, directory / "model.safetensors")
    return Checkpoint(directory, {}, read_headers(directory / "model.safetensors"))


class Meeting:
    """The meeting point of the threads of one model: each leaves its tensor and waits for those of the others."""

    def __init__(self, count: int):
        self.barrier = threading.Barrier(count, timeout=_WAIT_S)
        self.given: list[Tensor] = [torch.empty(0)] * count
        self.num_exchanges = 0


class ThreadRanks:
    """The rank of one thread."""

    def __init__(self, index: int, count: int, meeting: Meeting):
        self.index, self.count, self._meeting = index, count, meeting

    def all_max(self, x: Tensor) -> None:
        """Finds the largest of all threads' numbers."""
        largest = torch.stack(self._exchange(x)).amax(0)
        self._meeting.barrier.wait()
        x.copy_(largest)

    def all_gather(self, x: Tensor, out: Tensor) -> None:
        """Gives all threads' numbers to each."""
        together = torch.stack(self._exchange(x))
        self._meeting.barrier.wait()
        out.copy_(together.view(out.shape))
        if self.index == 0:
            self._meeting.num_exchanges += 1

    def all_to_all(self, x: Tensor, out: Tensor) -> None:
        raise AssertionError("steps are too small for two shots")

    def broadcast(self, x: Tensor) -> None:
        raise AssertionError("these models sample nothing")

    def _exchange(self, x: Tensor) -> list[Tensor]:
        self._meeting.given[self.index] = x
        self._meeting.barrier.wait()
        return list(self._meeting.given)


def reference_backend(ranks: Ranks | None) -> Backend:
    """Returns a backend of torch's ops for one rank, or for a whole model."""
    backend = ReferenceBackend()
    if ranks is not None:
        backend.ranks = ranks
    return backend


def cpp_backends(count: int) -> Callable[[Ranks | None], Backend]:
    """Returns what makes a backend of C++ kernels for one of ``count`` ranks, or for a whole model."""
    memory = RankMemory(count, AREA_BYTES)

    def new_backend(ranks: Ranks | None) -> Backend:
        device = current("cpu")
        backend = choose_backend(
            target_facts("cpp", device, num_threads=2),
            device,
            token_budget=sum(LENGTHS),
            max_num_seqs=len(LENGTHS),
            max_prompt_rows=1,
            num_threads=2,
        )
        if ranks is not None:
            backend.ranks = SharedRanks(memory, ranks.index, _WAIT_S)
        return backend

    return new_backend


def together(functions: Sequence[Callable[[Ranks], T]], meeting: Meeting) -> list[T]:
    """Returns what the functions return, each called in a thread of its own with that thread's rank."""

    def call(index: int) -> T:
        try:
            with torch.inference_mode():
                return functions[index](ThreadRanks(index, len(functions), meeting))
        except BaseException:
            meeting.barrier.abort()  # the others must not wait
            raise

    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(call, index) for index in range(len(functions))]
        failures = [error for each in futures if (error := each.exception()) is not None]
        causes = [error for error in failures if not isinstance(error, threading.BrokenBarrierError)]
        for error in (*causes, *failures):
            raise error
        return [each.result() for each in futures]


def loaded(
    spec: ModelSpec, checkpoint: Checkpoint, backend: Backend, weight_format: QuantizedFormat | None = None
) -> CausalLM:
    """Returns the model, or the rank's part of it, with its weights in place."""
    model, slots = build(
        spec,
        dtype=torch.float32,
        device=torch.device("cpu"),
        max_model_len=64,
        block_size=BLOCK_SIZE,
        backend=backend,
        weight_format=weight_format,
    )
    backend.build()
    load_weights(checkpoint, slots, ignored=spec.ignored_tensors)
    return model


def log_probs(model: CausalLM, spec: ModelSpec, backend: Backend) -> Tensor:
    """Returns the log-probabilities ``[T, V]`` after every token of a step of random prompts."""
    groups = kv_groups(spec)
    cache = PagedKVCache(
        groups,
        kv_shapes(spec),
        num_blocks=1 + len(LENGTHS) * 4 * len(set(groups)),
        block_size=BLOCK_SIZE,
        dtype=torch.float32,
        device=torch.device("cpu"),
        backend=backend,
    )
    cache.touch()
    hidden: Tensor = model(_batch(spec, len(set(groups))), cache)
    return model.logits(hidden).log_softmax(-1)


def _batch(spec: ModelSpec, num_groups: int) -> RaggedBatch:
    positions = torch.cat([torch.arange(length, dtype=torch.int32) for length in LENGTHS])
    slots = torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS))
    tables = 1 + torch.arange(num_groups * len(LENGTHS) * 4, dtype=torch.int32).view(num_groups, len(LENGTHS), 4)
    blocks = tables[:, slots, positions.long() // BLOCK_SIZE].long()
    generator = torch.Generator().manual_seed(2)
    return RaggedBatch(
        input_ids=torch.randint(spec.vocab_size, positions.shape, generator=generator, dtype=torch.int32),
        token_source=torch.full_like(positions, -1),
        positions=positions,
        cu_seqlens_q=torch.tensor([0, *torch.tensor(LENGTHS).cumsum(0).tolist()], dtype=torch.int32),
        seq_lens=torch.tensor(LENGTHS, dtype=torch.int32),
        block_tables=tables,
        slot_mapping=blocks * BLOCK_SIZE + positions % BLOCK_SIZE,
        logits_indices=torch.empty(0, dtype=torch.int32),
        sampled_ids=torch.zeros(len(LENGTHS), dtype=torch.int32),
    )


def summed_log_probs(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    count: int,
    new_backend: Callable[[Ranks | None], Backend] = reference_backend,
    weight_format: QuantizedFormat | None = None,
) -> tuple[Tensor, int]:
    """Returns the log-probabilities that ``count`` ranks compute together, and how often they summed."""
    meeting = Meeting(count)

    def run(own: ModelSpec, ranks: Ranks) -> Tensor:
        backend = new_backend(ranks)
        model = loaded(own, checkpoint, backend, weight_format)
        return log_probs(model, own, backend)

    functions = [lambda ranks, own=own: run(own, ranks) for own in shards(spec, count, weight_format)]
    return together(functions, meeting)[0], meeting.num_exchanges - 1


def whole_log_probs(
    spec: ModelSpec,
    checkpoint: Checkpoint,
    new_backend: Callable[[Ranks | None], Backend] = reference_backend,
    weight_format: QuantizedFormat | None = None,
) -> Tensor:
    """Returns the log-probabilities of the whole model."""
    backend = new_backend(None)
    with torch.inference_mode():
        return log_probs(loaded(spec, checkpoint, backend, weight_format), spec, backend)
