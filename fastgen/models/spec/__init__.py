"""A model spec: a recipe resolved against one checkpoint's ``config.json``, with every number known.

A spec is pure data. It gives the tensors and their shapes, the parameter count, the KV bytes per token and the FLOPs
per token before a weight is read. The builder turns it into modules.

Shape letters: ``H`` hidden, ``N`` query heads, ``K`` KV heads, ``D`` head size, ``F`` feed-forward, ``V`` vocabulary,
``L`` layers.
"""

from fastgen.models.spec.layer import (
    AlibiSpec,
    AttentionSpec,
    BranchSpec,
    LatentAttentionSpec,
    LayerSpec,
    MlpSpec,
    MoeSpec,
    NormSpec,
    PartSpec,
    QkNormSpec,
    RotaryScaling,
    RotarySpec,
    RouterSpec,
)
from fastgen.models.spec.model import EmbeddingSpec, HeadSpec, ModelSpec, PositionsSpec, Rank
from fastgen.models.spec.tensors import Layout, LinearSpec, NodeRef, TensorSpec, tensors_of

__all__ = [
    "AlibiSpec",
    "AttentionSpec",
    "BranchSpec",
    "EmbeddingSpec",
    "HeadSpec",
    "LatentAttentionSpec",
    "LayerSpec",
    "Layout",
    "LinearSpec",
    "MlpSpec",
    "ModelSpec",
    "MoeSpec",
    "NodeRef",
    "NormSpec",
    "PartSpec",
    "PositionsSpec",
    "QkNormSpec",
    "Rank",
    "RotaryScaling",
    "RotarySpec",
    "RouterSpec",
    "TensorSpec",
    "tensors_of",
]
