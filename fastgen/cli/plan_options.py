"""The flags of ``fastgen plan``, each stated once."""

# Annotations are not postponed: fastgen.arguments reads the types of the fields.

from dataclasses import dataclass
from typing import Annotated

from fastgen.arguments import ABOVE_0, AT_LEAST_1, Check, Option, check

# Defaults where neither the command line nor a preset says it.
PROMPT, ANSWER, DEVICES = 2600, 60, 8
_SHARE = Check("a number above 0 and at most 1", lambda value: ABOVE_0.accepts(value) and value <= 1)


@dataclass(frozen=True)
class PlanOptions:
    """Holds the question that a plan answers. Fields that are ``None`` come from the preset, or else have the
    default of the help text.
    """

    device: Annotated[
        str | None,
        Option("A100-80, A6000, H100, H200, A10G, RTX-4090, or cpu for this machine.", default="the preset's"),
    ] = None
    devices: Annotated[
        int | None, Option("Most devices to use.", check=AT_LEAST_1, default=f"{DEVICES}, or --tensor-parallel")
    ] = None
    tensor_parallel: Annotated[
        int | None, Option("Devices that share a copy of the model.", check=AT_LEAST_1, default="the best")
    ] = None
    prompt: Annotated[int | None, Option("Tokens of a prompt.", check=AT_LEAST_1, default=str(PROMPT))] = None
    answer: Annotated[int | None, Option("Tokens of an answer.", check=AT_LEAST_1, default=str(ANSWER))] = None
    slo: Annotated[
        str | None,
        Option(
            "Limits such as ttft:500,tpot:50 (ms); ttft, tpot, itl, e2el, or paper:4 (tokens/s by the paper's rule).",
            metavar="LIMITS",
            default="no limits",
        ),
    ] = None
    attainment: Annotated[float, Option("Share of the answers that keep the limits.", check=_SHARE)] = 0.99
    clients: Annotated[
        int | None, Option("Clients of each copy of the model.", check=AT_LEAST_1, default="the best number")
    ] = None
    rate: Annotated[
        float | None,
        Option(
            "Requests a second to carry, on the fewest devices.", check=ABOVE_0, default="as many as the devices carry"
        ),
    ] = None
    price: Annotated[
        float | None, Option("Dollars an hour of one device.", check=ABOVE_0, default="no price is shown")
    ] = None
    kv_dtype: Annotated[
        str | None,
        Option(
            "Type of the KV cache: float32, bfloat16, float16, fp8 or int8. So far engines use the model's dtype.",
            metavar="NAME",
            default="the model's dtype",
        ),
    ] = None
    efficiency: Annotated[
        str | None,
        Option(
            "Shares of the datasheet's rates that are reached: memory, products, attention, link; and the times "
            "layer_s and host_s.",
            metavar="NAME=NUMBER,…",
            default="memory=0.86,products=0.7,attention=0.4,link=0.75,layer_s=16e-6,host_s=1e-3",
        ),
    ] = None
    calibration: Annotated[
        str | None,
        Option(
            "A file of `fastgen calibrate`, in place of the datasheet.", metavar="FILE", default="the datasheet's rates"
        ),
    ] = None
    preset: Annotated[
        str | None,
        Option(
            "A question that was published: mistral-7b-24gb or falcon-40b-4x24gb.", metavar="NAME", default="no preset"
        ),
    ] = None
    simulate: Annotated[bool, Option("Run the best arrangements with the scheduler, in virtual time.")] = True

    def __post_init__(self) -> None:
        check(self)
