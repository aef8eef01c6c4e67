"""Turns the nodes of a recipe into boxes of facts: norms, attentions, feed-forwards, and both ends of the model."""

from __future__ import annotations

from pydantic import BaseModel

from fastgen.models.recipe import parts as schema
from fastgen.models.recipe.expressions import Expression
from fastgen.models.recipe.layout import Axes
from fastgen.models.recipe.schema import Embedding, Head, Project
from fastgen.recipe_tools.explain.reading import Box, Fact, Reader

# ----------------------------------------------------------------------------------------------------------- norms


def norm_box(reader: Reader, norm: schema.Norm | None, node: str) -> Box | None:
    if norm is None or not reader.there(norm):
        return None
    return Box(_norm_kind(norm), node, (*_norm_facts(reader, norm), *reader.when(norm)))


def _norm_kind(norm: schema.Norm) -> str:
    return "RMS norm" if norm.kind == "rms" else "layer norm"


def _norm_facts(reader: Reader, norm: schema.Norm) -> list[Fact]:
    affine = reader.flag(norm.affine)
    facts = []
    if affine is False or norm.weight is None:
        facts.append(Fact("weight", "none"))
    else:
        words = norm.weight
        if not reader.is_always(norm.offset, 0):
            words += f", with {reader.text(norm.offset)} added to it"
        bias = reader.flag(norm.bias)
        if bias is not False:
            words += ", and a bias" if bias else f", and a bias if {reader.text(norm.bias)}"
        if affine is None:
            words += f"; only if {reader.text(norm.affine)}"
        facts.append(Fact("weight", words))
    return [*facts, Fact("eps", reader.text(norm.eps))]


def _norm_words(reader: Reader, norm: schema.Norm, over: str) -> str:
    weight, eps = _norm_facts(reader, norm)
    return f"{_norm_kind(norm)} {over}: {weight.text}, eps {eps.text}"


# -------------------------------------------------------------------------------------------------------- attention


def attention_box(reader: Reader, attention: schema.Attention, node: str) -> Box:
    facts = [Fact("heads", _heads(reader)), *_qkv(reader, attention.qkv, f"{node}.qkv")]
    for label, norm in (("q norm", attention.q_norm), ("k norm", attention.k_norm)):
        if norm is not None and reader.there(norm):
            over = "over each head" if norm.over == "head" else "over all heads together"
            own = reader.flag(norm.per_head_weight)
            over += (
                "" if own is False else ", each with its own weight" if own else ", perhaps each with its own weight"
            )
            facts.append(Fact(label, _norm_words(reader, norm, over) + reader.only(norm)))
    if attention.rotary is not None and reader.there(attention.rotary):
        facts += _rotary(reader, attention.rotary, f"{node}.rotary")
    if attention.alibi is not None and reader.there(attention.alibi):
        alibi = attention.alibi
        scaled = "scaled together with q·k" if alibi.scaled else "not scaled"
        words = f"scores fall with distance, a slope for each head; rounded to {alibi.rounding}, {scaled}"
        facts.append(Fact("ALiBi", words + reader.only(alibi)))
    facts.append(_scale(reader, attention.scale))
    if not reader.is_always(attention.softcap, None):
        facts.append(Fact("softcap", f"scores s become c·tanh(s / c), c = {reader.text(attention.softcap)}"))
    window = reader.text(attention.sliding_window)
    seen = (
        "every token up to itself"
        if reader.is_always(attention.sliding_window, None)
        else f"a window of tokens: {window}"
    )
    facts.append(Fact("sees", seen))
    return Box("attention", node, (*facts, *_output(reader, attention.output), *reader.when(attention)))


def _heads(reader: Reader) -> str:
    """Returns the number of query heads, and of key and value heads, as text."""
    num_heads, num_kv_heads = reader.number("num_heads"), reader.number("num_kv_heads")
    features = f"{reader.number('head_dim')} features each"
    expressions = [getattr(reader.numbers, name).text for name in ("num_heads", "num_kv_heads")]
    if num_heads == num_kv_heads or (not reader.scopes and expressions[0] == expressions[1]):
        return f"{num_heads}, and as many KV heads; {features}"
    return f"{num_heads}, sharing {num_kv_heads} KV head{'s' * (num_kv_heads != '1')}; {features}"


def _qkv(reader: Reader, qkv: schema.Qkv, node: str) -> list[Fact]:
    if qkv.fused is not None:
        return _fused(reader, "q, k, v", qkv.fused, qkv.layout, qkv.split, f"{node}.split") + reader.bias(qkv.bias)
    modules = [Fact(name, module) for name in ("q", "k", "v") if (module := getattr(qkv, name)) is not None]
    return modules + _layout(qkv.layout) + reader.bias(qkv.bias)


def _fused(
    reader: Reader, label: str, module: str, layout: Axes | None, split: BaseModel | None, node: str
) -> list[Fact]:
    """Describes one stored matrix that contains several, and the part of each."""
    parts = ", then ".join(f"{_bracketed(reader.text(getattr(split, name)))} of {name}" for name in reader.keys(node))
    return [Fact(label, f"{module}, all in one"), *_layout(layout), Fact("part", parts)]


def _layout(layout: Axes | None) -> list[Fact]:
    return [] if layout is None else [Fact("stored", str(layout))]


def _rotary(reader: Reader, rotary: schema.Rotary, node: str) -> list[Fact]:
    pairs = "i with i + dim/2" if rotary.kind == "half" else "2i with 2i + 1"
    facts = [Fact("rotary", f"rotates features by position, {pairs}{reader.only(rotary)}")]
    facts.append(Fact("θ", reader.text(rotary.theta)))
    if rotary.dim is not None:
        facts.append(Fact("rotated", f"the first {_bracketed(reader.text(rotary.dim))} features of each head"))
    elif rotary.fraction is not None and not reader.is_always(rotary.fraction, 1):
        facts.append(Fact("rotated", f"this part of each head: {reader.text(rotary.fraction)}"))
    resolved = reader.rotaries.get(node)
    if resolved is None:
        return (
            facts if reader.is_always(rotary.scaling, None) else [*facts, Fact("stretch", reader.text(rotary.scaling))]
        )
    if scaling := resolved.scaling:
        words = f"{scaling.factor:g} times, beyond {scaling.original_max_positions:,} positions ({scaling.kind})"
        facts.append(Fact("stretch", words))
    return facts


def _scale(reader: Reader, scale: Expression | None) -> Fact:
    root = f"/ √{reader.number('head_dim')}"  # head_dim of a latent attention is nope_dim + rope_dim
    return Fact("scores", f"q·k {root if scale is None else f'× {_bracketed(reader.text(scale))}'}")


def _bracketed(text: str) -> str:
    return f"({text})" if " " in text else text


def _output(reader: Reader, output: schema.Output) -> list[Fact]:
    bias = reader.flag(output.bias)
    words = "" if bias is False else ", with a bias" if bias else f", with a bias if {reader.text(output.bias)}"
    stored = "" if output.layout is None else f", stored as {output.layout}"
    return [Fact("output", output.weight + words + stored)]


def latent_attention_box(reader: Reader, attention: schema.LatentAttention, node: str) -> Box:
    nope, rope = reader.text(attention.nope_dim), reader.text(attention.rope_dim)
    value = reader.text(attention.v_head_dim)
    words = f"{reader.number('num_heads')}, each of {nope} features + {rope} that are rotated; values of {value}"
    facts = [Fact("heads", words)]
    if (query := attention.q) is not None and reader.there(query):
        facts.append(Fact("q", query.weight + reader.only(query)))
    if (latent := attention.q_latent) is not None and reader.there(latent):
        words = f"{latent.down} narrows to {reader.text(latent.rank)}, {latent.up} widens{reader.only(latent)}"
        facts += [Fact("q latent", words), Fact("q norm", _norm_words(reader, latent.norm, "of the narrow vector"))]
    kept = attention.kv_latent
    words = f"{kept.down} makes the {reader.text(kept.rank)} + {rope} features that the cache keeps"
    facts += [Fact("latent", words), Fact("norm", _norm_words(reader, kept.norm, "of the latent vector"))]
    facts += _fused(reader, "k, v", kept.fused, kept.layout, kept.split, f"{node}.kv_latent.split")
    facts += reader.bias(attention.bias, "biases")
    facts += _rotary(reader, attention.rotary, f"{node}.rotary")
    facts.append(_scale(reader, attention.scale))
    facts.append(Fact("sees", "every token up to itself"))
    return Box("latent attention", node, (*facts, *_output(reader, attention.output), *reader.when(attention)))


# ----------------------------------------------------------------------------------------------------- feed-forward


def mlp_box(reader: Reader, mlp: schema.Mlp, node: str) -> Box:
    return Box(f"{mlp.kind} feed-forward", node, (*_feed_forward(reader, mlp, node), *reader.when(mlp)))


def _feed_forward(reader: Reader, mlp: schema.FeedForward, node: str) -> list[Fact]:
    made = "down(act(gate(x)) × up(x))" if mlp.kind == "gated" else "down(act(up(x)))"
    facts = [Fact("makes", made), Fact("act", reader.text(mlp.activation))]
    facts.append(Fact("width", f"{reader.number('hidden_size')} → {_bracketed(reader.text(mlp.size))} → back"))
    if mlp.fused is not None:
        facts += _fused(reader, "gate, up", mlp.fused, mlp.layout, mlp.split, f"{node}.split")
    facts += [Fact(name, module) for name in ("gate", "up", "down") if (module := getattr(mlp, name)) is not None]
    if mlp.fused is None:
        facts += _layout(mlp.layout)
    return facts + reader.bias(mlp.bias)


def moe_box(reader: Reader, moe: schema.Moe, node: str) -> Box:
    router = moe.router
    count = _bracketed(reader.text(moe.experts.count))
    facts = [
        Fact("router", router.weight),
        Fact("chooses", f"{_bracketed(reader.text(router.top_k))} of {count} experts"),
    ]
    if not reader.is_always(router.num_groups, 1):
        groups = _bracketed(reader.text(router.num_groups))
        best = "all" if router.top_groups is None else _bracketed(reader.text(router.top_groups))
        facts.append(Fact("groups", f"from the best {best} of {groups}"))
    scores = {"softmax": "softmax over all experts", "softmax_top_k": "softmax over the chosen", "sigmoid": "sigmoid"}
    facts.append(Fact("weights", scores[router.scoring] + _weighing(reader, router)))
    if router.correction is not None:
        facts.append(Fact("choice", f"by the weights plus {router.correction}"))
    facts.append(Fact("expert", f"{moe.experts.at}, a {moe.experts.kind} feed-forward:"))
    facts += _below(_feed_forward(reader, moe.experts, f"{node}.experts"))
    if moe.shared is not None and reader.there(moe.shared):
        facts.append(Fact("shared", f"a {moe.shared.kind} feed-forward for every token{reader.only(moe.shared)}:"))
        facts += _below(_feed_forward(reader, moe.shared, f"{node}.shared"))
        if moe.shared_gate is not None:
            facts.append(Fact("· weight", f"the sigmoid of {moe.shared_gate}"))
    return Box("mixture of experts", node, (*facts, *reader.when(moe)))


def _below(facts: list[Fact]) -> list[Fact]:
    """Indents facts that belong to the fact before them."""
    return [Fact(f"· {fact.label}", fact.text) for fact in facts]


def _weighing(reader: Reader, router: schema.Router) -> str:
    normalize = reader.flag(router.normalize)
    words = "" if normalize is False else ", divided by their sum"
    words += "" if normalize is not None else f" if {reader.text(router.normalize)}"
    return words if reader.is_always(router.scale, 1) else f"{words}, × {_bracketed(reader.text(router.scale))}"


# --------------------------------------------------------------------------------------------------- scale, the ends


def scale_box(reader: Reader, scale: Expression, node: str) -> Box | None:
    return None if reader.is_always(scale, 1) else Box("scale", node, (Fact("times", reader.text(scale)),))


def embedding_boxes(reader: Reader, embedding: Embedding, node: str) -> tuple[Box, ...]:
    facts = [Fact("table", embedding.tokens)]
    project = _project_box(reader, embedding.project, f"{node}.project", "to the stream's width, from")
    hidden = reader.number("hidden_size")
    width = hidden
    if project is not None and embedding.project is not None:
        width = _bracketed(reader.text(embedding.project.size))
        width += "" if reader.flag(embedding.project.when) else f", or of {hidden} without the projection"
    facts.append(Fact("size", f"{reader.number('vocab_size')} rows of {width}"))
    if not reader.is_always(embedding.scale, 1):
        facts.append(Fact("times", reader.text(embedding.scale)))
    boxes = [Box("token embedding", node, tuple(facts)), project]
    positions = embedding.positions
    if positions is not None and reader.there(positions):
        learned = [
            Fact("table", positions.weight),
            Fact("size", f"{reader.text(positions.rows)} rows"),
            Fact("row", f"position + {_bracketed(reader.text(positions.offset))}"),
        ]
        boxes.append(Box("learned positions", f"{node}.positions", (*learned, *reader.when(positions)), added=True))
    boxes.append(norm_box(reader, embedding.norm, f"{node}.norm"))
    return tuple(box for box in boxes if box is not None)


def head_boxes(reader: Reader, head: Head, node: str) -> tuple[Box, ...]:
    project = _project_box(reader, head.project, f"{node}.project", "from the stream's width to")
    tied = reader.flag(head.tied)
    facts = [Fact("matrix", "that of the token embedding (tied)" if tied else head.weight)]
    if tied is None:
        facts.append(Fact("tied", f"to the token embedding if {reader.text(head.tied)}"))
    bias = reader.flag(head.bias)
    if bias is not False:
        words = f"{head.weight}.bias"
        facts.append(Fact("bias", words if bias else f"{words} if {reader.text(head.bias)}"))
    facts.append(Fact("makes", f"a logit for each of {reader.number('vocab_size')} tokens"))
    if not reader.is_always(head.scale, 1):
        facts.append(Fact("times", reader.text(head.scale)))
    if not reader.is_always(head.softcap, None):
        facts.append(Fact("softcap", f"logits l become c·tanh(l / c), c = {reader.text(head.softcap)}"))
    return tuple(box for box in (project, Box("head", node, tuple(facts))) if box is not None)


def _project_box(reader: Reader, project: Project | None, node: str, direction: str) -> Box | None:
    if project is None or not reader.there(project):
        return None
    facts = [Fact("matrix", project.weight), Fact("width", f"{direction} {reader.text(project.size)}")]
    return Box("projection", node, (*facts, *reader.bias(project.bias), *reader.when(project)))
