"""Memory by rules of thumb: a model's nominal size, a flat overhead, and blocks of what is left.

Users' posts compute so, and their figures can be checked line by line. The ledger of a plan counts exactly instead.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any, Final

from fastgen.errors import InvalidArgumentError

_MIB_IN_GIB = 1024


@dataclass(frozen=True, kw_only=True)
class BlockSheet:
    """The spreadsheet of "Throughput is all you need" (Jain, 2024): from a GPU's memory to chats at once.

    Gigabytes are those of the post: of weights ``10^9`` bytes, of the cache 1024 MiB.
    """

    parameters_b: float
    bytes_per_parameter: float
    layers: int
    kv_heads: int
    head_size: int
    context: int
    memory_gb: float
    utilization: float
    overhead_gb: float
    block_size: int
    turns: int
    prompt: int
    answer: int

    @property
    def weights_gb(self) -> float:
        return self.parameters_b * self.bytes_per_parameter

    @property
    def cache_gb(self) -> float:
        """Returns what the weights and the overhead leave.

        :raises InvalidArgumentError: if that is nothing.
        """
        left = self.memory_gb * self.utilization - self.weights_gb - self.overhead_gb
        if left <= 0:
            raise InvalidArgumentError(f"weights of {self.weights_gb:g} GB leave no memory of {self.memory_gb:g} GB")
        return left

    @property
    def token_mib(self) -> float:
        """Returns the memory of a token's keys and values in all layers."""
        return 2 * self.bytes_per_parameter * self.layers * self.kv_heads * self.head_size / 2**20

    @property
    def block_mib(self) -> float:
        return self.token_mib * self.block_size

    @property
    def blocks(self) -> int:
        return int(self.cache_gb * _MIB_IN_GIB / self.block_mib)

    @property
    def chat_tokens(self) -> int:
        return self.turns * (self.prompt + self.answer)

    @property
    def chat_blocks(self) -> int:
        return -(-self.chat_tokens // self.block_size)

    @property
    def chats(self) -> int:
        """Returns how many chats run at once, each to its end."""
        return self.blocks // self.chat_blocks

    @property
    def chats_reserved(self) -> int:
        """Returns how many run at once if each reserves the whole context."""
        return self.blocks // -(-self.context // self.block_size)

    def lines(self) -> list[str]:
        """Returns the arithmetic, line by line."""
        weights = f"{self.parameters_b:g} billion parameters x {self.bytes_per_parameter:g} bytes"
        return [
            f"weights: {weights} = {self.weights_gb:g} GB",
            f"left for the KV cache: {self.memory_gb:g} GB x {self.utilization:.0%} - {self.weights_gb:g} GB - "
            f"{self.overhead_gb:g} GB overhead = {self.cache_gb:g} GB",
            f"a token: 2 x {self.bytes_per_parameter:g} bytes x {self.layers} layers x {self.kv_heads} KV heads x "
            f"{self.head_size} = {self.token_mib:g} MiB",
            f"a block: {self.block_size} tokens x {self.token_mib:g} MiB = {self.block_mib:g} MiB",
            f"blocks: {self.cache_gb:g} x 1024 MiB / {self.block_mib:g} MiB = {self.blocks}",
            f"a chat: {self.turns} turns x ({self.prompt} + {self.answer}) = {self.chat_tokens} tokens = "
            f"{self.chat_blocks} blocks",
            f"chats at once: {self.blocks} / {self.chat_blocks} = {self.chats}",
            f"with the whole context reserved: {self.blocks} / ({self.context} / {self.block_size}) = "
            f"{self.chats_reserved}",
        ]

    def as_json(self) -> dict[str, Any]:
        """Returns the inputs and all results."""
        names = ("weights_gb", "cache_gb", "token_mib", "block_mib", "blocks", "chat_tokens", "chat_blocks")
        return asdict(self) | {name: getattr(self, name) for name in (*names, "chats", "chats_reserved")}


@dataclass(frozen=True, kw_only=True)
class SplitSheet:
    """The arithmetic of AWS's post about Falcon-40B (2023): weights in two formats, split evenly over GPUs."""

    parameters_b: float
    bytes_per_parameter: tuple[float, ...]
    devices: int
    memory_gb: float
    # The memory that frameworks take beside the weights, over all devices.
    overhead_gb: float

    @property
    def weights_gb(self) -> tuple[float, ...]:
        """Returns the weights in each format."""
        return tuple(self.parameters_b * each for each in self.bytes_per_parameter)

    @property
    def device_gb(self) -> tuple[float, float]:
        """Returns what one device holds before a request, in the last format: the weights, and with the overhead."""
        weights = self.weights_gb[-1]
        return weights / self.devices, (weights + self.overhead_gb) / self.devices

    @property
    def used(self) -> tuple[float, float]:
        """Returns both as shares of its memory."""
        weights, both = self.device_gb
        return weights / self.memory_gb, both / self.memory_gb

    def lines(self) -> list[str]:
        """Returns the arithmetic, line by line."""
        weights = [
            f"weights: {self.parameters_b:g} billion parameters x {each:g} bytes = {total:g} GB"
            for each, total in zip(self.bytes_per_parameter, self.weights_gb, strict=True)
        ]
        (alone_gb, both_gb), (alone, both), total = self.device_gb, self.used, self.weights_gb[-1]
        return [
            *weights,
            f"each of {self.devices} devices: {total:g} GB / {self.devices} = {alone_gb:g} GB, {alone:.0%} of "
            f"{self.memory_gb:g} GB before a request",
            f"with the overhead: ({total:g} GB + {self.overhead_gb:g} GB) / {self.devices} = {both_gb:g} GB, "
            f"{both:.0%}",
        ]

    def as_json(self) -> dict[str, Any]:
        """Returns the inputs and all results."""
        return asdict(self) | {"weights_gb": self.weights_gb, "device_gb": self.device_gb, "used": self.used}


@dataclass(frozen=True, kw_only=True)
class Preset:
    """A plan of someone's post: the rules of thumb, and the same question to the ledger."""

    title: str
    sheet: BlockSheet | SplitSheet
    # What the post says of the result.
    says: str
    # Arguments of a plan.
    model: str
    device: str
    prompt: int
    answer: int
    dtype: str
    devices: int = 1
    tensor_parallel: int = 1
    max_model_len: int | None = None
    kv_cache_memory: str | None = None
    block_size: int | None = None


PRESETS: Final = {
    "mistral-7b-24gb": Preset(
        title='Mistral-7B on 24 GB, of "Throughput is all you need" (R. Jain)',
        sheet=BlockSheet(
            parameters_b=7,
            bytes_per_parameter=2,
            layers=32,
            kv_heads=8,
            head_size=128,
            context=8192,
            memory_gb=24,
            utilization=1.0,
            overhead_gb=3,
            block_size=16,
            turns=10,
            prompt=150,
            answer=350,
        ),
        says="3584 blocks (in the prose about 3500), 313 a chat; 11 chats at once, 7 with reservation",
        model="mistral-7b-v0.2",
        device="RTX-4090",
        # The last turn of a chat: all before it is its prompt.
        prompt=4650,
        answer=350,
        dtype="float16",
        max_model_len=8192,
        block_size=16,
    ),
    "falcon-40b-4x24gb": Preset(
        title='Falcon-40B over 4 GPUs of 24 GB, of AWS\'s "Improve performance of Falcon models with SageMaker"',
        sheet=SplitSheet(parameters_b=40, bytes_per_parameter=(4, 2), devices=4, memory_gb=24, overhead_gb=2),
        says="160 GB in fp32, about 80 in bf16; about 20 of 24 GB, roughly 84 %, before a request",
        model="falcon-40b",
        device="A10G",
        prompt=32,
        answer=128,
        dtype="bfloat16",
        devices=4,
        tensor_parallel=4,
        # More than a tenth of the memory is left, but not of what CUDA reports.
        kv_cache_memory="1GiB",
    ),
}


def preset(name: str) -> Preset:
    """Returns the preset of that name.

    :raises InvalidArgumentError: with the names that exist.
    """
    if name not in PRESETS:
        raise InvalidArgumentError(f"preset {name!r}: expected one of {', '.join(PRESETS)}")
    return PRESETS[name]
