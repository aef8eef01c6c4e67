"""The arithmetic of a plan, line by line, so that people can check it with a pocket calculator."""

from __future__ import annotations

from fastgen.arguments import shown_bytes
from fastgen.lab.devices.datasheets import GB, TERA, Link
from fastgen.lab.devices.roofline import KV_BYTES, Roofline
from fastgen.lab.plan.arrangements import Arrangement, Question
from fastgen.lab.plan.capacity import Capacity
from fastgen.lab.plan.steady import decode_work_of
from fastgen.models.spec import AttentionSpec
from fastgen.runtime.step_cost.sight import seen_pairs
from fastgen.runtime.step_cost.work import StepWork, decode_work

_MIB = 2**20


def memory_lines(question: Question, arrangement: Arrangement, fits: Capacity) -> list[str]:
    """Returns how the cache divides into blocks and requests, for each device of a copy."""
    config, shape, size = fits.config, question.shape, arrangement.tensor_parallel
    block, kv_bytes = fits.block_bytes, fits.ledger.size_bytes("KV cache")
    weights, idle, device = fits.weight_bytes, fits.idle_bytes, question.device
    longest = f"{config.max_model_len} tokens = {fits.blocks_of_longest} blocks"
    each = " on each device" if size > 1 else ""
    return [
        f"before a request{each}: weights {shown_bytes(weights)} + the rest {shown_bytes(idle - weights)} = "
        f"{shown_bytes(idle)}, {idle / device.memory_bytes:.0%} of {shown_bytes(device.memory_bytes)}, of which "
        f"{shown_bytes(device.reported_bytes)} are reported to programs",
        _token_line(question, arrangement, fits),
        f"a block{each}: {config.block_size} tokens x {_mib(fits.block_bytes / config.block_size)} = {_mib(block)}",
        f"blocks: {shown_bytes(kv_bytes)} / {_mib(block)} = {config.num_blocks:,}, one of them for padding",
        f"a request: {shape.prompt} + {shape.answer} = {shape.total} tokens = {fits.blocks_of_request} blocks",
        f"requests at once: {fits.num_blocks:,} / {fits.blocks_of_request} = "
        f"{fits.num_blocks // fits.blocks_of_request:,}, at most max_num_seqs={config.max_num_seqs}",
        f"with the whole context reserved: {longest}, so {fits.num_blocks // fits.blocks_of_longest:,}",
    ]


def _token_line(question: Question, arrangement: Arrangement, fits: Capacity) -> str:
    spec, size = question.model.spec, arrangement.tensor_parallel
    itemsize = KV_BYTES[question.kv_dtype] if question.kv_dtype else question.model.dtype.itemsize
    total = _mib(fits.bytes_per_token)
    first, *others = spec.attentions()
    split = f" / {size} devices" if size > 1 else ""
    if not isinstance(first, AttentionSpec) or any(each.cached_features != first.cached_features for each in others):
        elements = sum(each.cached_features for each in spec.attentions())
        return f"a token: {elements:,} cached features x {itemsize} bytes{split} = {total}"
    if first.num_kv_heads % size:
        split = f", of which a device has {max(1, first.num_kv_heads // size)}"
    return (
        f"a token: 2 x {first.num_kv_heads} KV heads x {first.head_dim} x {len(others) + 1} layers x {itemsize} bytes"
        f"{split} = {total}"
    )


def time_lines(question: Question, arrangement: Arrangement) -> list[str]:
    """Returns what bounds a decode and a prompt on one copy: first by the datasheet, then as it is reached. Where steps
    were measured there are none.
    """
    device, found, shape, size = question.device, arrangement.roofline, question.shape, arrangement.tensor_parallel
    if found is None:
        return []
    reached = question.efficiency
    weights = found.weights_read(1)
    one = decode_work_of(shape, 1, found.sights) if found.sights else decode_work([int(shape.mean_context)])
    pairs = round(seen_pairs(0, shape.prompt, found.sights)) if found.sights else shape.prompt**2 // 2
    counted = f"{pairs:,} pairs within the window" if found.sights else f"{shape.prompt}^2 / 2 pairs"
    parts = found.parts(one)
    each = f" of each of {size} devices" if size > 1 else ""
    prompt_tera = shape.prompt * found.token_flops / TERA
    rate = device.rate(_dtype(question)) / TERA
    ridge = device.rate(_dtype(question)) * reached.products / (device.bandwidth * reached.memory) * weights
    lines = [
        f"one answer: {device.bandwidth / GB:,.0f} GB/s over {weights / GB:.1f} GB{each} = "
        f"{device.bandwidth / weights:.0f} tokens/s; {reached.memory:.0%} of the bandwidth is reached",
        f"its step: {_ms(parts.weights_s)} weights + {_ms(parts.context_s)} KV cache + {_ms(parts.all_reduces_s)} "
        f"all-reduces + {_ms(parts.kernels_s)} launches = {_ms(parts.device_s)}, {1 / parts.device_s:.0f} tokens/s",
        f"a prompt: {shape.prompt} tokens x {found.token_flops / GB:.1f} GFLOP = {prompt_tera:.1f} TFLOP{each}, over "
        f"{rate:,.0f} TFLOPS = {_ms(prompt_tera / rate)}; {reached.products:.0%} of the rate is reached",
        f"its attention: {counted} x {found.pair_flops / 1e3:.0f} kFLOP at {reached.attention:.0%} = "
        f"{_ms(found.parts(StepWork(0, 0, pairs)).attention_s)}",
        f"products take as long as reading the weights from {ridge / found.token_flops:.0f} tokens a step on",
    ]
    if found.link is not None:
        lines.insert(2, _link_line(found, found.link))
    if found.sights:
        lines.insert(1, _window_line(question, one.num_context))
    return lines


def _window_line(question: Question, num_context: int) -> str:
    attentions = list(question.model.spec.attentions())
    windows = [each.sliding_window for each in attentions if isinstance(each, AttentionSpec) and each.sliding_window]
    found = ", ".join(
        f"{window:,} positions in {windows.count(window)} of {len(attentions)} layers"
        for window in sorted(set(windows))
    )
    return (
        f"its context: layers with a sliding window read at most the window, {found}; so of "
        f"{question.shape.mean_context:,.0f} tokens on average {num_context:,} are read"
    )


def _link_line(found: Roofline, link: Link) -> str:
    size = found.tensor_parallel
    return (
        f"an all-reduce of a token: {link.latency_s * 1e6:.0f} µs + {found.all_reduce_bytes / 1024:.0f} KiB x "
        f"2 x {size - 1}/{size} over {link.bandwidth * found.link_efficiency / GB:.0f} GB/s of {link.name}, "
        f"{found.num_all_reduces} times a step"
    )


def _dtype(question: Question) -> str:
    return str(question.model.dtype).removeprefix("torch.")


def _mib(size_bytes: float) -> str:
    return f"{size_bytes / _MIB:.4g} MiB"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.3g} ms"
