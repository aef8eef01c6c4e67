"""The arguments of :func:`fastgen.load`, each stated once: :class:`LoadOptions`."""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from fastgen.arguments import AT_LEAST_1, SECONDS, TRUE_OR_FALSE, Check, Flag, Option, check

if TYPE_CHECKING:
    from fastgen.models.recipe.recipe import Recipe
    from fastgen.runtime.scheduling.policies.policy import Policy

# Tokens of the shortest request: one of a prompt, and one of its answer.
MIN_MODEL_LEN = 2


@dataclass(frozen=True)
class LoadOptions:
    """The arguments of :func:`fastgen.load`."""

    model: Annotated[
        str | Path,
        Option("A built-in such as tiny-llama, a local directory, or a hub id.", lmi_key="option.model_id"),
    ]
    _: KW_ONLY
    recipe: Annotated[
        "str | Path | Recipe | None",
        Option(
            "A recipe's name or file, in place of the one that claims the architecture.",
            '"checkpoint" asks for the fastgen.yaml beside the weights.',
            default="the one that claims the checkpoint's architecture",
        ),
    ] = None
    device: Annotated[str, Option("cpu, cuda, cuda:1, or auto.")] = "auto"
    dtype: Annotated[
        str,
        Option(
            "float32, bfloat16 or float16; auto is the checkpoint's own.",
            "On the cpp target activations are fp32 between matrices. Where the CPU multiplies bf16, the inputs of "
            "matrices in bf16, and of attention over a KV cache in bf16, are rounded to it.",
            lmi_key="option.dtype",
        ),
    ] = "auto"
    token_budget: Annotated[
        int | None,
        Option(
            "Most tokens that one step computes.",
            check=AT_LEAST_1,
            default="512 on a CPU, 2048 on a GPU",
            lmi_key="option.max_rolling_batch_prefill_tokens",
        ),
    ] = None
    max_num_seqs: Annotated[
        int | None,
        Option(
            "Most sequences that run at once.",
            check=AT_LEAST_1,
            default="64 on a CPU, 256 on a GPU",
            lmi_key="option.max_rolling_batch_size",
        ),
    ] = None
    kv_cache_memory: Annotated[
        int | str | None,
        Option(
            "Memory for the KV cache: bytes, or a size such as 4GiB.",
            "A cache never gets more than max_num_seqs sequences of max_model_len tokens can use.",
            default="on a CPU half of the memory that all else leaves, on a GPU what all else leaves of nine tenths",
        ),
    ] = None
    memory: Annotated[
        int | str | None,
        Option(
            "Memory that the engine may count on: bytes, or a size such as 8GiB.",
            "The ledger keeps to it, so that several engines fit on one device.",
            default="all that the device has",
        ),
    ] = None
    block_size: Annotated[
        int | None, Option("Tokens in a block of the KV cache.", check=AT_LEAST_1, default="16 on a CPU, 64 on a GPU")
    ] = None
    max_model_len: Annotated[
        int | None,
        Option(
            "Longest prompt and answer together, in tokens.",
            check=Check(
                f"an integer of at least {MIN_MODEL_LEN}: a token of a prompt and one of its answer",
                lambda value: AT_LEAST_1.accepts(value) and value >= MIN_MODEL_LEN,
            ),
            default="the length that the model was trained for",
            lmi_key="option.max_model_len",
        ),
    ] = None
    policy: Annotated[
        "str | Policy",
        Option(
            "How steps are filled: splitfuse, prefill_first, orca, dynamic or static.",
            "The last four are there to compare with. In Python also a "
            "fastgen.runtime.scheduling.policies.Policy, such as DynamicBatching(batch_size=8, max_delay_s=0.1).",
            lmi_key="option.rolling_batch",
        ),
    ] = "splitfuse"
    itl_target_ms: Annotated[
        float | None,
        Option(
            "Longest gap between two tokens of an answer that prompts of other requests may cause, in ms.",
            "With a target, loading writes the whole KV cache once.",
            default="no bound",
        ),
    ] = None
    aging_s: Annotated[
        float, Option("Seconds after which a waiting request moves up a priority class.", check=SECONDS)
    ] = 30.0
    prefix_caching: Annotated[
        bool,
        Option(
            "Reuse the KV cache of prompts that begin with the same tokens.",
            "Blocks that are no longer in use are kept until their memory is needed. Answers do not depend on it.",
            check=TRUE_OR_FALSE,
        ),
    ] = True
    kv_reservation: Annotated[
        str | None,
        Option(
            "Keep KV blocks for running requests as without paging: request or context.",
            "request keeps what the prompt and max_new_tokens may need, context what max_model_len tokens need. A "
            "request waits until all of that is free, so fewer run at once and none is preempted. Answers do not "
            "depend on it; it is there to compare with.",
            check=Check("'request', 'context' or None", lambda value: value in (None, "request", "context")),
            default="blocks are taken as tokens need them",
        ),
    ] = None
    num_threads: Annotated[
        int | None,
        Option("CPU threads that compute, for the whole model.", check=AT_LEAST_1, default="one for each core"),
    ] = None
    tensor_parallel: Annotated[
        int,
        Option(
            "Devices that share the model: GPUs of this machine, or parts of its CPUs, such as sockets.",
            "Each has a process and a part of every layer; fastgen info MODEL --tensor-parallel N shows the parts. "
            "parallel.md says more.",
            check=AT_LEAST_1,
        ),
    ] = 1
    target: Annotated[
        str,
        Option(
            "The kernels that run: cpp, triton, torch (the reference), or auto.",
            "cpp has kernels built for this CPU, triton those of a GPU (on a CPU they are interpreted, in a process "
            "started with TRITON_INTERPRET=1). auto is triton on a GPU; on a CPU cpp where there is a compiler, else "
            "torch.",
        ),
    ] = "auto"
    quantize: Annotated[
        str | None,
        Option(
            "Quantize matrices: int8_weight_only; on cpp also int8, int4; else int4_weight_only, fp8_weight_only.",
            "int8 and int4 quantize activations to 8 bits too. int4_weight_only and fp8_weight_only leave embeddings "
            "that are no head, routers, experts and latent attention's maps of heads in dtype.",
            default="matrices in dtype",
        ),
    ] = None
    speculative: Annotated[
        str | None,
        Option(
            "ngram: draft the next tokens from repetitions in prompt and answer.",
            "A step may then give several tokens; the answer is the same.",
        ),
    ] = None
    num_draft_tokens: Annotated[
        int | None, Option("With speculative: most drafts for a sequence in one step.", check=AT_LEAST_1, default="4")
    ] = None
    sealed: Annotated[
        bool | str | Path,
        Option(
            "Compile nothing: run from the bundle beside the weights.",
            "Bundles are written by fastgen kernels build. In Python the directory of another bundle may be given, on "
            "the command line by --bundle.",
            check=Check(
                "True, False, or the directory of a sealed bundle", lambda value: isinstance(value, bool | str | Path)
            ),
            flag_type=bool,
            second_flag=Flag("--bundle", str, "Compile nothing: run from the bundle in this directory.", "DIR"),
        ),
    ] = False
    revision: Annotated[str | None, Option("Branch, tag or commit of a hub repository.", lmi_key="option.revision")] = (
        None
    )
    allow_config_keys: Annotated[
        Sequence[str],
        Option(
            "Keys of config.json to accept although the recipe does not know them.",
            "config.json must have them.",
            flag_help="Repeatable.",
            flag="--allow-config-key",
            metavar="KEY",
        ),
    ] = ()

    def __post_init__(self) -> None:
        check(self)
