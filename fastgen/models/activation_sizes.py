"""How many bytes of intermediate results a forward pass needs at once, told before anything is built.

A pass is followed as :mod:`fastgen.layers` runs it: what is alive at a module's worst moment, and what its callers
hold. Kernels leave results of the step's tokens and nothing else, so a step of ``T`` tokens needs ``T`` times what one
does. The reference needs more for each token, copies in fp32 above all, and scores of all keys that a chunk sees.

Letters as in :mod:`fastgen.models.spec`; ``a`` is the bytes of a number between the weights.
"""

from __future__ import annotations

from functools import cached_property

from fastgen.models.spec import AttentionSpec, BranchSpec, LatentAttentionSpec, MlpSpec, MoeSpec, NormSpec, PartSpec
from fastgen.models.weight_sizes import ModelBuild

Part = AttentionSpec | LatentAttentionSpec | MlpSpec | MoeSpec
_FP32 = 4


class ActivationSizes:
    """Of a model that is built so. Shapes that recur are looked at once, so asking again costs nothing."""

    def __init__(self, build: ModelBuild):
        self._build, self._spec = build, build.spec
        self._a = build.activation_bytes
        self._by_torch = build.target.name == "torch"
        # Bytes of the copy in fp32 that the reference makes of a number in 16 bits.
        self._widened = _FP32 if self._by_torch and build.dtype.itemsize < _FP32 else 0

    def step_bytes(self, num_tokens: int, length: int, block_size: int) -> int:
        """Of a step of ``num_tokens`` tokens, of sequences of up to ``length`` in blocks of ``block_size``."""
        most = num_tokens * self.per_token
        if not self._by_torch:
            return most
        attending = [self._attending(each, num_tokens, length, block_size) for each in self._attentions]
        return max(most, *attending)

    @cached_property
    def per_token(self) -> int:
        """What each token of a step needs."""
        return max(self._embedding(), *map(self._branch, self._branches), 3 * self._hidden + self._norm(None))

    @property
    def _hidden(self) -> int:
        return self._spec.hidden_size * self._a

    @cached_property
    def _branches(self) -> list[BranchSpec]:
        """Of each kind one: layers differ in the names of their tensors, mostly in nothing else."""
        found = {self._branch_sizes(branch): branch for layer in self._spec.layers for branch in layer.branches}
        return list(found.values())

    @cached_property
    def _attentions(self) -> list[AttentionSpec | LatentAttentionSpec]:
        found = {_sizes(each): each for each in self._spec.attentions()}
        return list(found.values())

    def _branch_sizes(self, branch: BranchSpec) -> tuple[object, ...]:
        norms = [each is not None for each in (branch.norm, branch.output_norm, branch.sum_norm)]
        return (*norms, *((each.norm is not None, _sizes(each.part)) for each in branch.parts))

    def _embedding(self) -> int:
        embedding = self._spec.embedding
        size = embedding.tokens.shape[1] * self._a
        return (size if embedding.project or self._by_torch else 0) + 2 * self._hidden + self._norm(embedding.norm)

    def _branch(self, branch: BranchSpec) -> int:
        """The stream and what is added to it are each ``H``; so is what a branch reads, and each part's result."""
        one = self._hidden
        # The reference makes the stream anew, and so do norms of sums, while whoever called still holds the one before.
        held = 3 * one if self._by_torch else 2 * one if branch.sum_norm else one
        inner = held + (one if branch.norm else 0)
        moments = [held + 2 * one + self._norm(branch.norm)]
        for index, each in enumerate(branch.parts):
            before = inner + (one if index else 0)
            moments.append(before + self._part(each))
            moments.append(inner + 2 * one + (one if self._by_torch else 0))
        moments.append(inner + 2 * one + self._norm(branch.output_norm))
        moments.append(inner + 2 * one + self._norm(branch.sum_norm))
        return max(moments)

    def _part(self, spec: PartSpec) -> int:
        own = self._hidden if spec.norm else 0
        match spec.part:
            case AttentionSpec() as part:
                return own + self._attention(part)
            case LatentAttentionSpec() as part:
                return own + self._latent(part)
            case MlpSpec() as part:
                return own + self._mlp(part)
            case MoeSpec() as part:
                return own + self._moe(part)

    def _attention(self, spec: AttentionSpec) -> int:
        heads = spec.num_heads * spec.head_dim
        qkv = (heads + spec.cached_features) * self._a
        if not self._by_torch:
            return qkv + heads * self._a + self._hidden
        return qkv + self._rotating(heads, spec.cached_features // 2)

    def _latent(self, spec: LatentAttentionSpec) -> int:
        a, heads = self._a, spec.num_heads
        down = spec.q_down.out_features * a if spec.q_down else 0
        key = spec.kv_rank + spec.rope_dim
        projected = (spec.q.out_features + key) * a
        out = heads * spec.v_head_dim * a
        mixing = heads * (key + spec.kv_rank) * a + out
        if self._by_torch:
            mixing = 3 * key * a + self._rotating(heads * key, 0) + self._norm(spec.kv_norm)
        return max(2 * down + self._norm(spec.q_norm), down + projected + max(mixing, out + self._hidden))

    def _rotating(self, queries: int, keys: int) -> int:
        """Beside the projection's result, in numbers of all heads: the reference holds queries three times in fp32, and
        normed before and rotated after."""
        return queries * (3 * _FP32 + self._widened) + (queries + keys) * self._a

    def _attending(
        self, spec: AttentionSpec | LatentAttentionSpec, num_tokens: int, length: int, block_size: int
    ) -> int:
        """The reference at a chunk at the end of the longest sequence: what the module holds of each token, the scores
        and what is made of them, and the keys and values gathered."""
        num_new, seen, copies = min(num_tokens, length), length, 2
        gathered, values = spec.cached_features, spec.cached_features // 2
        if isinstance(spec, AttentionSpec):
            copies += spec.alibi is not None or spec.softcap is not None
            seen = min(length, (spec.sliding_window or length) + num_new + block_size)
            queries, projected = spec.num_heads * spec.head_dim, spec.num_heads * spec.head_dim + gathered
            mixed, keys = queries, values
        else:
            gathered += spec.kv_rank
            down = spec.q_down.out_features if spec.q_down else 0
            queries, keys = spec.num_heads * spec.cached_features, 2 * spec.cached_features
            projected, mixed = down + spec.q.out_features + spec.cached_features, spec.num_heads * spec.kv_rank
        token = 4 * self._hidden + self._a * (projected + queries + keys + mixed)
        token += self._widened * queries + 2 * _FP32 * mixed
        scores = spec.num_heads * num_new * seen * _FP32
        return (
            num_tokens * token + copies * scores + seen * gathered * (_FP32 + self._widened // 4) + 3 * num_new * seen
        )

    def _mlp(self, spec: MlpSpec, rows: int = 1) -> int:
        """Of ``rows`` for each token."""
        inner = rows * spec.up.out_features * self._a
        entering = 2 * inner if spec.gate else inner
        # Some of the reference's activations are products of several steps.
        acting = 4 * inner if self._by_torch else entering + inner
        return max(entering + acting if self._by_torch else acting, inner + rows * spec.down.out_features * self._a)

    def _moe(self, spec: MoeSpec) -> int:
        """A choice is a row. The reference moves rows to where their expert's lie, and all may lie with one."""
        one, top, first = self._hidden, spec.router.top_k, spec.experts[0]
        routing = len(spec.experts) * _FP32 * (8 if self._by_torch else 1)
        chosen = top * (8 + _FP32) + (one if spec.shared else 0) + (self._a if spec.shared_gate else 0)
        order = 2 * 8 * top
        inner = top * first.up.out_features * self._a
        entering = 2 * inner if first.gate else inner
        rows = top * one
        moments = [routing + chosen, self._mlp(spec.shared) if spec.shared else 0]
        if self._by_torch:
            moments += [chosen + order + rows + 2 * entering, chosen + order + entering + 2 * inner]
            moments += [chosen + order + inner + rows + one]
            moments += [chosen + order + 2 * rows + top * self._spec.hidden_size * 2 * _FP32 + one]
        else:
            moments += [chosen + order + entering + inner, chosen + order + inner + rows, chosen + rows + one]
        return max(moments)

    def _norm(self, spec: NormSpec | None) -> int:
        """What a norm holds beside its input and its result: where kernels compute nothing, in the reference copies in
        fp32."""
        if not self._by_torch:
            return 0
        size = self._spec.hidden_size if spec is None else spec.size
        return size * (2 * _FP32 + 2 * self._widened)


def _sizes(part: Part) -> tuple[object, ...]:
    """All of a part that activations depend on."""
    match part:
        case AttentionSpec():
            cap = part.softcap is not None or part.alibi is not None
            return (part.num_heads, part.num_kv_heads, part.head_dim, part.sliding_window, cap)
        case LatentAttentionSpec():
            down = part.q_down.out_features if part.q_down else 0
            return (part.num_heads, part.nope_dim, part.rope_dim, part.v_head_dim, part.kv_rank, down)
        case MlpSpec():
            return (part.gate is not None, part.up.out_features)
        case MoeSpec():
            shared = _sizes(part.shared) if part.shared else ()
            return (len(part.experts), part.router.top_k, *_sizes(part.experts[0]), *shared)
