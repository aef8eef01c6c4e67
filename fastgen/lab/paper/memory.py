"""Arithmetic of memory that two posts print: Falcon-40B over four GPUs, and blocks of Mistral-7B on 24 GB."""

from __future__ import annotations

from dataclasses import dataclass

from fastgen.lab.models import describe

GB = 10**9
GIB = 2**30


@dataclass(frozen=True)
class WeightMemory:
    """The weights of a model over some devices; sizes are in GB of 10⁹ bytes."""

    parameters: float
    fp32_gb: float
    bf16_gb: float
    # Of each device, with bf16.
    device_gb: float
    # Part of a device's memory that the weights take.
    share: float


def weight_memory(model: str, *, devices: int, device_gb: float, parameters: float | None = None) -> WeightMemory:
    """Returns the memory of a model's weights, counted from its configuration, or for a round number of
    ``parameters``.
    """
    count = describe(model).spec.num_parameters() if parameters is None else parameters
    each_gb = count * 2 / GB / devices
    return WeightMemory(count, count * 4 / GB, count * 2 / GB, each_gb, each_gb / device_gb)


@dataclass(frozen=True)
class ChatMemory:
    """Blocks of the KV cache that conversations need."""

    bytes_per_token: int
    block_bytes: int
    num_blocks: int
    blocks_per_chat: int
    # Chats that fit at their full length, in blocks.
    chats: int
    # Chats that fit if each reserves the whole context.
    chats_reserved: int


def chat_memory(
    model: str, *, kv_bytes: int, context: int, turns: int, prompt: int, answer: int, block_size: int = 16
) -> ChatMemory:
    """Returns how many chats of ``turns`` times ``prompt + answer`` tokens fit into ``kv_bytes`` in fp16."""
    bytes_per_token = int(describe(model).spec.kv_bytes_per_token(2))
    block_bytes = bytes_per_token * block_size
    num_blocks = kv_bytes // block_bytes
    blocks_per_chat = -(-turns * (prompt + answer) // block_size)
    return ChatMemory(
        bytes_per_token,
        block_bytes,
        num_blocks,
        blocks_per_chat,
        num_blocks // blocks_per_chat,
        num_blocks // -(-context // block_size),
    )
