"""The cost of a step on a device, from a model spec and a datasheet: the roofline model.

A step reads the weights and multiplies them with its tokens; it reads the keys and values of its context and multiplies
them in attention; it sums over the devices once a branch; and some time passes beside all of that. Each of the first
two takes as long as the slower of its reading and its arithmetic (Williams et al., "Roofline: an insightful visual
performance model for multicore architectures", 2009)::

    seconds = max(weights, products) + max(context, attention) + all-reduces + kernels, at least the host's time

Rates are those of the datasheet times the share that programs reach, :class:`Efficiency`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

import torch

from fastgen.lab.devices.datasheets import Datasheet, Link
from fastgen.lab.devices.shards import num_all_reduces, shard
from fastgen.models.measure import MeasuredModel, ModelBuild
from fastgen.models.spec import ModelSpec, MoeSpec
from fastgen.models.spec.tensors import linears_of
from fastgen.runtime.scheduling.policies.step_time import StepWork
from fastgen.runtime.targets import parse_quantize

# Bytes of an element of the KV cache, by the name of its type.
KV_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "fp8": 1, "int8": 1}


@dataclass(frozen=True)
class Efficiency:
    """The shares of a datasheet's rates that a whole step reaches, and times that no datasheet has."""

    # Memory bandwidth. A user's account of an RTX 4090: 1008 GB/s over 14 GB would be 72 tokens/s, and about 60 are
    # seen; with the ends of kernels below this share gives 59. (On CPUs our decodes reach 0.92 to 0.98 of the speed
    # that is measured there, not published.)
    memory: float = 0.86
    # Matrix products of hundreds of rows: cuBLAS reaches 220 to 260 of an A100's 312 TFLOPS at such shapes.
    products: float = 0.7
    # Attention of prompts over paged keys and values. FlashAttention-2 reaches 0.5 to 0.7 of an A100's rate with long
    # contiguous sequences (Dao, 2023); chunks of a prompt are shorter and read through block tables.
    attention: float = 0.4
    # Links: all-reduces of many MiB over NVLink reach 200 to 230 of an A100's 300 GB/s in nccl-tests.
    link: float = 0.75
    # Launches and the ends of kernels, which leave multiprocessors idle, for each layer: about eight kernels of 2 µs.
    layer_s: float = 16e-6
    # The host's work for a step: scheduling, input buffers, sampling parameters. It overlaps with the device's work
    # where steps run ahead; then a step takes at least so long.
    host_s: float = 1e-3
    host_overlaps: bool = True


class StepParts(NamedTuple):
    """The seconds that each part of a step would take by itself."""

    weights_s: float
    products_s: float
    context_s: float
    attention_s: float
    all_reduces_s: float
    kernels_s: float
    host_s: float

    @property
    def limit(self) -> str:
        """Returns what takes most of the step, in words."""
        reading = ("reading the weights", self.weights_s), ("reading the KV cache", self.context_s)
        computing = ("the matrix products", self.products_s), ("the arithmetic of attention", self.attention_s)
        others = ("the all-reduces", self.all_reduces_s), ("kernel launches", self.kernels_s), ("the host", self.host_s)
        return max((*reading, *computing, *others), key=lambda each: each[1])[0]


@dataclass(frozen=True)
class RooflineCost:
    """The cost of steps on each of ``tensor_parallel`` devices, which work at the same time.

    Bytes, operations and rates are those of one device. Rates are what is reached, not what is published.
    """

    tensor_parallel: int
    # Weights that every step reads, and those of experts, of which a step reads the ones that its tokens chose.
    weight_bytes: float
    expert_bytes: float
    num_experts: int
    experts_per_token: int
    # Operations of matrix products for each token, and of the head for each row of logits.
    token_flops: float
    row_flops: float
    # Keys and values of one token, and the operations of one token's attention to one other.
    kv_bytes: float
    pair_flops: float
    num_all_reduces: int
    all_reduce_bytes: float
    link: Link | None
    link_efficiency: float
    bandwidth: float
    product_rate: float
    attention_rate: float
    kernels_s: float
    host_s: float
    host_overlaps: bool

    def seconds(self, work: StepWork) -> float:
        """Returns the time of a step."""
        parts = self.parts(work)
        device_s = (
            max(parts.weights_s, parts.products_s)
            + max(parts.context_s, parts.attention_s)
            + parts.all_reduces_s
            + parts.kernels_s
        )
        return max(device_s, parts.host_s) if self.host_overlaps else device_s + parts.host_s

    def parts(self, work: StepWork) -> StepParts:
        """Returns what each part of a step takes."""
        tokens = work.num_tokens
        # In a step without chunks every token needs logits; beside chunks those few rows are nothing.
        rows = 0 if work.num_pairs else tokens
        pairs = work.num_pairs or work.num_context
        reduce_s = 0.0
        if self.link is not None:
            num_bytes = tokens * self.all_reduce_bytes
            reduce_s = self.link.all_reduce_s(num_bytes, self.tensor_parallel, self.link_efficiency)
        return StepParts(
            weights_s=self.weights_read(tokens) / self.bandwidth,
            products_s=(tokens * self.token_flops + rows * self.row_flops) / self.product_rate,
            context_s=work.num_context * self.kv_bytes / self.bandwidth,
            attention_s=pairs * self.pair_flops / self.attention_rate,
            all_reduces_s=self.num_all_reduces * reduce_s,
            kernels_s=self.kernels_s,
            host_s=self.host_s,
        )

    def weights_read(self, num_tokens: int) -> float:
        """Returns the bytes of weights that a step reads. With ``k`` of ``E`` experts chosen at random by each token,
        it reads ``1 - (1 - k/E)^T`` of them."""
        if not self.num_experts:
            return self.weight_bytes
        unread = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.weight_bytes + (1 - unread) * self.expert_bytes


def roofline(
    build: ModelBuild,
    device: Datasheet,
    *,
    tensor_parallel: int = 1,
    kv_dtype: str | None = None,
    efficiency: Efficiency | None = None,
) -> RooflineCost:
    """Returns the cost of steps of a model on ``tensor_parallel`` of a device. No weight is read.

    ``build`` is the whole model; its weight format and dtype count. ``kv_dtype`` is a key of :data:`KV_BYTES`, by
    default the model's dtype.

    :raises InvalidArgumentError: if the model cannot be split so, or the device has no units for its dtype.
    """
    share = shard(build.spec, tensor_parallel)
    reached = efficiency or Efficiency()
    dtype = str(build.dtype).removeprefix("torch.")
    weights = MeasuredModel(replace(build, spec=share)).weights
    head = build.spec.head.weight or build.spec.embedding.tokens
    head_bytes = math.prod(head.shape) * build.dtype.itemsize / tensor_parallel
    row_flops = 2 * math.prod(head.shape)
    experts = _experts(share)
    expert_bytes = weights.matrices * _expert_share(share) if experts else 0.0
    rate = device.rate(dtype)
    return RooflineCost(
        tensor_parallel=tensor_parallel,
        weight_bytes=weights.matrices - expert_bytes + weights.norms + head_bytes,
        expert_bytes=expert_bytes,
        num_experts=len(experts.experts) if experts else 0,
        experts_per_token=experts.router.top_k if experts else 0,
        token_flops=share.flops_per_token(0) - row_flops,
        row_flops=row_flops / tensor_parallel,
        kv_bytes=share.kv_bytes_per_token(KV_BYTES[kv_dtype or dtype]),
        pair_flops=share.flops_per_token(1) - share.flops_per_token(0),
        num_all_reduces=num_all_reduces(build.spec),
        all_reduce_bytes=build.spec.hidden_size * build.dtype.itemsize,
        link=device.link(tensor_parallel) if tensor_parallel > 1 else None,
        link_efficiency=reached.link,
        bandwidth=device.bandwidth * reached.memory,
        product_rate=rate * reached.products,
        attention_rate=rate * reached.attention,
        kernels_s=reached.layer_s * build.spec.num_layers,
        host_s=reached.host_s,
        host_overlaps=reached.host_overlaps,
    )


def model_build(spec: ModelSpec, device: Datasheet, dtype: torch.dtype, weight_format: str | None = None) -> ModelBuild:
    """Returns the model as an engine on the device would build it.

    :raises InvalidArgumentError: for a weight format that the device's kernels do not multiply.
    """
    return ModelBuild(spec, dtype, device.target, parse_quantize(weight_format, device.target.name))


def _experts(spec: ModelSpec) -> MoeSpec | None:
    """Returns one of the mixtures; those of a model are alike."""
    return next((part for part in spec.parts() if isinstance(part, MoeSpec)), None)


def _expert_share(spec: ModelSpec) -> float:
    """Returns the share of experts among the matrices."""
    mixtures = [part for part in spec.parts() if isinstance(part, MoeSpec)]
    experts = sum(_size(part.experts) for part in mixtures)
    return experts / _size(spec.layers)


def _size(node: object) -> int:
    return sum(linear.in_features * linear.out_features for linear in linears_of(node))
