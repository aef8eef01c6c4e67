"""The cost of a step on a device, from a model spec and a datasheet: the roofline model.

A step reads the weights and multiplies its tokens with them, and takes as long as the slower of the two (Williams et
al., "Roofline: an insightful visual performance model for multicore architectures", 2009). It reads the keys and values
of its context (at most the window, in layers with a sliding one), multiplies those of chunks with each other, sums over
the devices once a branch, and launches kernels::

    seconds = max(weights, products) + all-reduces + kernels + logits + context + attention

Rates are those of the datasheet times the share that programs reach, :class:`Efficiency`. The result is the
:class:`~fastgen.runtime.step_cost.cost.StepCost` by which the simulated device, too, computes.
"""

from __future__ import annotations

import math
import re
from dataclasses import dataclass, fields, replace
from typing import Final, NamedTuple

import torch

from fastgen.errors import InvalidArgumentError
from fastgen.lab.devices.datasheets import Datasheet, Link
from fastgen.lab.devices.shards import num_all_reduces, shard
from fastgen.lab.devices.sights import sights_of
from fastgen.models.measure import MeasuredModel, ModelBuild
from fastgen.models.spec import ModelSpec, MoeSpec
from fastgen.models.spec.tensors import linears_of
from fastgen.runtime.scheduling.policies.splitfuse import captured_sizes
from fastgen.runtime.step_cost.cost import StepCost
from fastgen.runtime.step_cost.sight import Sight
from fastgen.runtime.step_cost.work import StepWork
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
    # The host's work for a step: scheduling, input buffers, sampling parameters. Where steps run ahead, it passes while
    # the device computes the step before.
    host_s: float = 1e-3


def parse_efficiency(text: str | None) -> Efficiency:
    """Returns the efficiency with the changes that ``text`` names, such as ``"memory=0.8,products=0.6"``.

    :raises InvalidArgumentError: for an unknown name, or a value that no device can have.
    """
    changes: dict[str, float] = {}
    known = [each.name for each in fields(Efficiency)]
    for word in text.split(",") if text else ():
        name, _, value = word.partition("=")
        number = float(value) if re.fullmatch(r"\d*\.?\d+(e-?\d+)?", value) else -1.0
        is_time = name.endswith("_s")
        if name not in known or number < 0 or not (is_time or 0 < number <= 1):
            raise InvalidArgumentError(
                f"efficiency {word!r}: expected NAME=NUMBER with a name of {', '.join(known)}; shares are above 0 and "
                "at most 1, times are seconds"
            )
        changes[name] = number
    return replace(Efficiency(), **changes)


class StepParts(NamedTuple):
    """The seconds of each part of a step on the device. Of the first two only the larger counts."""

    weights_s: float
    products_s: float
    all_reduces_s: float
    kernels_s: float
    context_s: float
    attention_s: float

    @property
    def device_s(self) -> float:
        """Returns the time of the step."""
        return max(self.weights_s, self.products_s) + sum(self[2:])

    @property
    def limit(self) -> str:
        """Returns what takes most of the step, in words."""
        return max(zip(_LIMITS, self, strict=True), key=lambda each: each[1])[0]


_LIMITS: Final = (
    "reading the weights",
    "the matrix products",
    "the all-reduces",
    "the launches of kernels",
    "reading the KV cache",
    "the arithmetic of attention",
)


@dataclass(frozen=True)
class Roofline:
    """Holds the time of a step on each of ``tensor_parallel`` devices, which work at the same time.

    Bytes and operations are those of one device. Rates are what is reached, not what is published.
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
    # The windows of the layers.
    sights: tuple[Sight, ...] = ()

    def parts(self, work: StepWork) -> StepParts:
        """Returns the time of each part of a step. ``work`` must be counted by ``sights``."""
        tokens = work.num_tokens
        reduce_s = 0.0
        if self.link is not None:
            num_bytes = tokens * self.all_reduce_bytes
            reduce_s = self.link.all_reduce_s(num_bytes, self.tensor_parallel, self.link_efficiency)
        return StepParts(
            weights_s=self.weights_read(tokens) / self.bandwidth,
            products_s=(tokens * self.token_flops + work.num_rows * self.row_flops) / self.product_rate,
            all_reduces_s=self.num_all_reduces * reduce_s,
            kernels_s=self.kernels_s,
            context_s=work.num_context * self.kv_bytes / self.bandwidth,
            attention_s=work.num_pairs * self.pair_flops / self.attention_rate,
        )

    def weights_read(self, num_tokens: int) -> float:
        """Returns the bytes of weights that a step reads. With ``k`` of ``E`` experts chosen at random by each token,
        it reads ``1 - (1 - k/E)^T`` of them."""
        if not self.num_experts:
            return self.weight_bytes
        unread = (1 - self.experts_per_token / self.num_experts) ** num_tokens
        return self.weight_bytes + (1 - unread) * self.expert_bytes

    def cost(self, token_budget: int) -> StepCost:
        """Returns the cost of steps of up to ``token_budget`` tokens, which are padded to captured sizes.

        There the rows of logits add their arithmetic even where reading the weights takes longer; that is little.
        """
        sizes = captured_sizes(token_budget)
        tokens = tuple((size, self.parts(StepWork(size, 0, 0)).device_s) for size in sizes)
        return StepCost(
            tokens=tokens,
            host_s=self.host_s,
            row_s=self.row_flops / self.product_rate,
            context_s=self.kv_bytes / self.bandwidth,
            pair_s=self.pair_flops / self.attention_rate,
            sizes=sizes,
            sights=self.sights,
        )


def roofline(
    build: ModelBuild,
    device: Datasheet,
    *,
    tensor_parallel: int = 1,
    kv_dtype: str | None = None,
    efficiency: Efficiency | None = None,
) -> Roofline:
    """Returns what steps of a model take on ``tensor_parallel`` of a device. No weight is read.

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
    return Roofline(
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
        sights=sights_of(share),
    )


def step_cost(build: ModelBuild, device: Datasheet, *, token_budget: int, tensor_parallel: int = 1) -> StepCost:
    """Returns the cost of steps of up to ``token_budget`` tokens; the other arguments are those of
    :func:`roofline`."""
    return roofline(build, device, tensor_parallel=tensor_parallel).cost(token_budget)


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
