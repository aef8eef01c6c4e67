"""OpenVINO GenAI's pipeline with arithmetic and KV cache in the precision that OpenVINO chooses for the CPU."""

from __future__ import annotations

from benchmarks.cpu.engines.openvino_pipeline import Pipeline
from benchmarks.cpu.engines.protocol import Engine, Settings


def load(settings: Settings) -> Engine:
    return Pipeline(settings, {})
