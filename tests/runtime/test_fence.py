"""The fence of a loaded engine is closed: whatever comes, it builds no kernel and captures no step any more."""

from __future__ import annotations

from pathlib import Path

import pytest

import fastgen
from fastgen.compile.ops.norm.shape import NormShape
from fastgen.compile.ops.norm.triton import norm_spec
from fastgen.errors import KernelError
from fastgen.runtime.step.forward import CapturedForward
from tests.runtime.checkpoints import save_checkpoint

# A kernel that no model needs.
OTHER = norm_spec(NormShape("layer", 77, "fp32", 1e-3))


def test_after_warm_up_nothing_is_built_and_nothing_is_captured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FASTGEN_CACHE", str(tmp_path / "kernels"))  # what is cached may always be loaded
    sizes = {"token_budget": 8, "max_num_seqs": 2, "max_model_len": 24, "block_size": 4}
    with fastgen.load(save_checkpoint("llama", tmp_path / "model"), target="triton", **sizes) as llm:
        assert llm._engine is not None
        runner = llm._engine.runner
        assert isinstance(runner.forward, CapturedForward)
        loader, pool = runner.model.ops.backend.loader, runner.forward._pool
        assert loader is not None
        with pytest.raises(KernelError, match=r"warm-up is over: .* too late to build it"):
            loader.load(OTHER)
        with pytest.raises(KernelError, match=r"warm-up is over: one more step .* too late to capture it"):
            pool.capture("one more step", lambda: None)
        assert len(llm.generate([5, 6, 7], max_new_tokens=4).token_ids) > 0
