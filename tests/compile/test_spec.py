"""Kernel specs: exactly their contents distinguish them."""

from __future__ import annotations

import itertools
import subprocess
import sys

import pytest
import torch

from fastgen.compile.spec import DTYPES, Argument, KernelSpec, dtype_name, torch_dtype

ARGUMENTS = (Argument("x", "bf16", "in"), Argument("out", "bf16", "out"), Argument("num_rows", "i32", "scalar"))
PARAMETERS = {"H": 4096, "dtype": "bf16", "eps": 1e-5, "window": None, "residual": True, "bias": False}


def spec(**changed) -> KernelSpec:
    fields = {"op": "rms_norm", "target": "triton", "parameters": PARAMETERS, "arguments": ARGUMENTS}
    return KernelSpec(**{**fields, **changed})


def test_the_name_says_what_is_set_and_is_an_identifier() -> None:
    assert spec().name == "rms_norm_h4096_bf16_eps1e_05_residual"
    odd = spec(parameters={"H": -1, "kind": "a b/c"})
    assert odd.name == "rms_norm_h_1_a_b_c"
    assert odd.name.isidentifier()


def test_a_long_name_is_cut_and_still_distinct() -> None:
    many = [spec(parameters={f"a_rather_long_feature_{i}": True for i in range(20)} | {"H": h}) for h in (1, 2)]
    assert many[0].name == many[1].name
    assert len(many[0].name) <= 120
    assert many[0] != many[1]


def test_every_difference_makes_another_spec() -> None:
    different = [
        spec(),
        spec(op="layer_norm"),
        spec(target="cpp"),
        spec(template="norm"),
        spec(parameters=PARAMETERS | {"H": 4097}),
        spec(parameters=PARAMETERS | {"bias": None}),
        spec(parameters=PARAMETERS | {"residual": 1}),  # 1 and True, 4096 and 4096.0 render differently
        spec(parameters=PARAMETERS | {"H": 4096.0}),
        spec(arguments=ARGUMENTS[:2]),
        spec(arguments=(ARGUMENTS[1], ARGUMENTS[0], ARGUMENTS[2])),
        spec(arguments=(Argument("x", "fp16", "in"), *ARGUMENTS[1:])),
        spec(arguments=(Argument("x", "bf16", "out"), *ARGUMENTS[1:])),
        spec(options={"num_warps": 4}),
        spec(options={"num_warps": 8}),
    ]
    for one, other in itertools.combinations(different, 2):
        assert one != other
        assert one.digest != other.digest
    assert len(set(different)) == len(different)


def test_what_needs_it_makes_no_difference() -> None:
    assert spec(needed_by=("llama: model.final_norm",)) == spec(needed_by=("opt: model.final_norm",)) == spec()
    assert len({spec(), spec(needed_by=("llama: model.final_norm",))}) == 1
    assert spec() != "rms_norm"


def test_the_digest_is_the_same_in_another_process() -> None:
    code = f"""
from fastgen.compile.spec import *
arguments = tuple(Argument(*each) for each in {[(a.name, a.dtype, a.kind) for a in ARGUMENTS]})
print(KernelSpec("rms_norm", "triton", {PARAMETERS}, arguments).digest)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == spec().digest


def test_a_spec_cannot_be_changed() -> None:
    given = dict(PARAMETERS)
    one = spec(parameters=given)
    given["H"] = 1
    assert one.parameters["H"] == 4096
    with pytest.raises(TypeError):
        one.parameters["H"] = 1  # type: ignore[index]


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({"target": "cuda"}, ValueError, "target 'cuda' is neither"),
        ({"op": "rms norm"}, ValueError, "'rms norm' is not an identifier"),
        ({"parameters": {"head dim": 1}}, ValueError, "'head dim' is not an identifier"),
        ({"parameters": {"größe": 1}}, ValueError, "is not an identifier"),
        ({"parameters": {"dtype": torch.float32}}, TypeError, "dtype is a dtype, not a plain value"),
        ({"parameters": {"sizes": [1]}}, TypeError, "sizes is a list"),
        ({"options": {"num_warps": (4,)}}, TypeError, "num_warps is a tuple"),
        ({"arguments": (ARGUMENTS[0], ARGUMENTS[0])}, ValueError, "occurs twice in x, x"),
        ({"arguments": (Argument("n", "i64", "scalar"),)}, ValueError, "scalar n is i64"),
        ({"target": "cpp", "arguments": (Argument("n", "bf16", "scalar"),)}, ValueError, "scalar n is bf16"),
    ],
)
def test_what_is_not_plain_is_refused(changed, error, message) -> None:
    with pytest.raises(error, match=message):
        spec(**changed)


def test_an_argument_knows_its_dtypes() -> None:
    with pytest.raises(ValueError, match="dtype 'bfloat16' is none of fp32, fp16, bf16"):
        Argument("x", "bfloat16", "in")
    with pytest.raises(ValueError, match="not an identifier"):
        Argument("x ptr", "bf16", "in")


@pytest.mark.parametrize("name", DTYPES.values())
def test_dtype_names_go_both_ways(name) -> None:
    assert dtype_name(torch_dtype(name)) == name


def test_a_spec_is_printed_as_text() -> None:
    text = str(spec(options={"num_warps": 4}))
    assert text == "rms_norm(H=4096, dtype=bf16, eps=1e-05, residual=True, bias=False, num_warps=4) for triton"
