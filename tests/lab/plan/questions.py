"""Questions to plan for, with few budgets, so that they are answered soon."""

from __future__ import annotations

from functools import cache
from typing import Any

from fastgen.lab.devices.datasheets import datasheet
from fastgen.lab.models import DescribedModel, describe
from fastgen.lab.plan.arrangements import Question
from fastgen.lab.plan.capacity import Capacity, Shape, ShardMemory, Sizes, capacity


@cache
def model(name: str, dtype: str = "float16") -> DescribedModel:
    return describe(name, dtype=dtype)


def question(name: str, device: str, *, prompt: int, answer: int, num_devices: int = 1, **options: Any) -> Question:
    given = {"token_budget": 512} | options
    return Question(
        model=model(name),
        device=datasheet(device),
        num_devices=num_devices,
        shape=Shape(prompt, answer),
        **given,
    )


def fits(
    name: str,
    device: str,
    shape: Shape,
    *,
    size: int = 1,
    kv_dtype: str | None = None,
    weight_format: str | None = None,
    token_budget: int = 512,
    **sizes: Any,
) -> Capacity:
    memory = ShardMemory(model(name), datasheet(device), size=size, weight_format=weight_format, kv_dtype=kv_dtype)
    return capacity(memory, shape, Sizes(**sizes), token_budget)
