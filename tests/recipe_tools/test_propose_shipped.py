"""Every shipped recipe is hidden and then proposed for a checkpoint of its architecture, under its and other names."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any, Final

import pytest
import torch
import yaml

import fastgen
from fastgen.models.checkpoint.checkpoint import Checkpoint
from fastgen.models.recipe.recipe import load_recipe
from fastgen.models.resolve.resolve import resolve
from fastgen.recipe_tools.propose.propose import Proposal, propose
from tests.recipe_tools.hidden import all_but
from tests.recipe_tools.renamed import rename
from tests.recipe_tools.tiny_checkpoints import CHECKPOINTS, make
from tests.reference import log_probs

TOLERANCE: Final = 1e-4
others_than = functools.cache(all_but)
NORM_OFFSETS: Final[dict[str, Any]] = {
    "model.final_norm.offset": 1,
    "model.layers.residual.attend.norm.offset": 1,
    "model.layers.residual.transform.norm.offset": 1,
}
BY_HEAD: Final[dict[str, Any]] = {
    "layout": "(num_kv_heads part head_dim) in",
    "split": {"q": "num_heads // num_kv_heads", "k": 1, "v": 1},
}
PARTS_FIRST: Final[dict[str, Any]] = {
    "layout": "(part head_dim) in",
    "split": {"q": "num_heads", "k": "num_kv_heads", "v": "num_kv_heads"},
}


def below(path: str, values: dict[str, Any]) -> dict[str, Any]:
    return {f"{path}.{key}": value for key, value in values.items()}


ATTEND: Final = "model.layers.residual.attend.attention"
BOTH: Final = "model.layers.residual.both.attention"
BLOOM: Final[dict[str, Any]] = {
    f"{ATTEND}.rotary": None,
    f"{ATTEND}.alibi.rounding": "float32",
    f"{ATTEND}.alibi.scaled": False,
    "model.layers.residual.transform.mlp.activation": "'gelu_new'",
}
# Values of the hidden recipe where the proposal asks and its default differs. All others need no answer.
ANSWERS: Final[dict[tuple[str, str], dict[str, Any]]] = {
    ("gemma", "published"): NORM_OFFSETS | {"model.embedding.scale": "sqrt(hidden_size)"},
    ("gemma", "renamed"): NORM_OFFSETS | {"model.embedding.scale": "sqrt(hidden_size)"},
    ("cohere", "published"): {f"{BOTH}.rotary.kind": "interleaved"},
    ("cohere", "renamed"): {
        f"{BOTH}.rotary.kind": "interleaved",
        "model.layers.residual.both.norm.kind": "layer",
        "model.final_norm.kind": "layer",
    },
    ("olmo2", "renamed"): {
        "model.embedding.scale": 1,
        "model.final_norm.offset": 0,
        "model.layers.residual.attend.output_norm.offset": 0,
        f"{ATTEND}.q_norm.offset": 0,
        f"{ATTEND}.k_norm.offset": 0,
        "model.layers.residual.transform.output_norm.offset": 0,
    },
    ("bloom", "published"): BLOOM,
    ("bloom", "renamed"): BLOOM | below(f"{ATTEND}.qkv", BY_HEAD),
    ("falcon", "renamed"): below(f"{BOTH}.qkv", BY_HEAD),
    ("gptj", "published"): {f"{BOTH}.rotary.kind": "interleaved"},
    ("gptj", "renamed"): {f"{BOTH}.rotary.kind": "interleaved"},
    ("phi3", "renamed"): below(f"{ATTEND}.qkv", PARTS_FIRST),
    ("gpt_neox", "renamed"): below(f"{BOTH}.qkv", BY_HEAD),
}

Tiny = tuple[Path, Any]


def proposed(name: str, directory: Path) -> Proposal:
    opened = Checkpoint.open(directory)
    shapes = {tensor: header.shape for tensor, header in opened.tensors.items()}
    return propose(opened.config, shapes, others_than(name, directory.parent / "others"))


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Any:
    """Returns the checkpoint of a recipe under its own names, and the model of transformers."""
    at = tmp_path_factory.mktemp("tiny")
    made: dict[str, Any] = {}

    def checkpoint(name: str, words: str) -> Tiny:
        if name not in made:
            made[name] = make(name, at / name / "published")
            rename(at / name / "published", at / name / "renamed")
        return at / name / words, made[name]

    return checkpoint


# Most kinds of structure once: these are proposed in every run, renamed; all others only in slow runs.
FAST: Final = frozenset(("cohere", "gpt2", "mistral", "opt", "phi", "qwen3"))


@pytest.mark.parametrize(
    ("name", "words"),
    [
        pytest.param(name, words, marks=() if name in FAST and words == "renamed" else pytest.mark.slow)
        for name in CHECKPOINTS
        for words in ("published", "renamed")
    ],
)
def test_a_hidden_recipe_is_proposed_anew(name: str, words: str, tiny: Any, tmp_path: Path) -> None:
    directory, model = tiny(name, words)
    proposal = proposed(name, directory)
    opened = Checkpoint.open(directory)

    # with the unread keys allowed it resolves to exactly the checkpoint's tensors
    assert not proposal.unclaimed
    assert not proposal.missing
    spec = resolve(proposal.recipe, opened.config, allow_config_keys=proposal.unread)
    claimed = {each.names: each.stored_shape for each in spec.tensors()}
    found = {next(tensor for tensor in names if tensor in opened.tensors): shape for names, shape in claimed.items()}
    assert found == {tensor: header.shape for tensor, header in opened.tensors.items()}

    # a question is at its line
    lines = proposal.text.splitlines()
    for question in proposal.questions:
        line = lines[question.line - 1]
        assert line.strip(" #").startswith(question.path.rpartition(".")[2] + ":")
        assert question.text[:20] in line

    answers = ANSWERS.get((name, words), {})
    difference = _difference(name, proposal, directory, model, answers, tmp_path)
    assert difference <= TOLERANCE, (name, words, difference, proposal.text)
    if answers:  # so that the figures of docs/status.md are neither better nor worse than they are
        assert _difference(name, proposal, directory, model, {}, tmp_path) > TOLERANCE, (name, words)


def _difference(name: str, proposal: Proposal, directory: Path, model: Any, answers: dict[str, Any], at: Path) -> float:
    """Returns the largest difference of a log-probability with these answers to the questions."""
    content = yaml.safe_load(proposal.text)
    for path, value in answers.items():
        *parents, last = path.split(".")
        node = content
        for key in parents:
            node = node.setdefault(key, {})
        node[last] = value
        if value is None:
            del node[last]
    file = at / "answered.yaml"
    file.write_text(yaml.safe_dump(content, sort_keys=False))
    others = {recipe.name: recipe.file for recipe in others_than(name, directory.parent / "others")}
    recipe = load_recipe(file, find=lambda wanted, _: others[wanted])
    prompt = torch.randint(90, (30,), generator=torch.Generator().manual_seed(1)).tolist()
    with fastgen.load(
        directory,
        recipe=recipe,  # type: ignore[arg-type]
        dtype="float32",
        max_model_len=48,
        device="cpu",
        allow_config_keys=proposal.unread,
    ) as llm:
        output = llm.generate(prompt, max_new_tokens=1, temperature=0, prompt_logprobs=97, ignore_eos=True)
    assert output.prompt_logprobs is not None
    rows = torch.tensor([[row[token] for token in range(97)] for row in output.prompt_logprobs[1:] if row])
    return float((rows - log_probs(model, prompt[:-1])).abs().max())


def test_the_page_has_both_figures() -> None:
    page = " ".join((Path(__file__).parents[2] / "docs" / "status.md").read_text().split())
    right = {
        words: len(CHECKPOINTS) - sum(asked == words for _, asked in ANSWERS) for words in ("published", "renamed")
    }
    count = len(CHECKPOINTS)
    assert f"{right['published']} of {count} were right under published names" in page
    assert f"{right['renamed']} of {count} under other names" in page
    assert f"{2 * count} checkpoints" in page
    assert f"`make test` runs {len(FAST)} of these cases" in page
