"""The posts' arithmetic by rules of thumb, exactly."""

from __future__ import annotations

from dataclasses import replace

import pytest

from fastgen.errors import InvalidArgumentError
from fastgen.lab.plan.sheet import PRESETS, BlockSheet, SplitSheet, preset


def test_the_spreadsheet_of_throughput_is_all_you_need() -> None:
    sheet = preset("mistral-7b-24gb").sheet
    assert isinstance(sheet, BlockSheet)
    assert sheet.weights_gb == 14
    assert sheet.cache_gb == 7
    assert sheet.token_mib == 0.125
    assert sheet.block_mib == 2
    assert sheet.blocks == 3584
    assert sheet.chat_tokens == 5000
    assert sheet.chat_blocks == 313
    assert sheet.chats == 11
    assert sheet.chats_reserved == 7
    # The prose counts with "about 3500" blocks, which makes no difference to the chats.
    assert 3500 // 313 == 11


def test_its_lines_show_every_step() -> None:
    assert PRESETS["mistral-7b-24gb"].sheet.lines() == [
        "weights: 7 billion parameters x 2 bytes = 14 GB",
        "left for the KV cache: 24 GB x 100% - 14 GB - 3 GB overhead = 7 GB",
        "a token: 2 x 2 bytes x 32 layers x 8 KV heads x 128 = 0.125 MiB",
        "a block: 16 tokens x 0.125 MiB = 2 MiB",
        "blocks: 7 x 1024 MiB / 2 MiB = 3584",
        "a chat: 10 turns x (150 + 350) = 5000 tokens = 313 blocks",
        "chats at once: 3584 / 313 = 11",
        "with the whole context reserved: 3584 / (8192 / 16) = 7",
    ]


def test_the_arithmetic_of_falcon() -> None:
    sheet = preset("falcon-40b-4x24gb").sheet
    assert isinstance(sheet, SplitSheet)
    assert sheet.weights_gb == (160, 80)
    assert sheet.device_gb == (20, 20.5)
    # "Roughly 84 %": of 24 GB, the weights alone are 83.3 %, and 85.4 % with the overhead that the post names.
    assert sheet.used == pytest.approx((0.833, 0.854), abs=0.001)


def test_weights_that_leave_nothing_are_refused() -> None:
    sheet = PRESETS["mistral-7b-24gb"].sheet
    assert isinstance(sheet, BlockSheet)
    with pytest.raises(InvalidArgumentError, match="weights of 26 GB leave no memory of 24 GB"):
        _ = replace(sheet, parameters_b=13).cache_gb


def test_an_unknown_preset_is_refused_with_the_known_ones() -> None:
    with pytest.raises(InvalidArgumentError, match="preset 'x': expected one of mistral-7b-24gb, falcon-40b-4x24gb"):
        preset("x")
