"""Biases of logits that cannot be changed once they are checked."""

from __future__ import annotations

from typing import Any, NoReturn


class Biases(dict[int, float]):
    """Token ids and what is added to their logits. Changing it raises ``TypeError``."""

    def _refuse(self, *_: object, **__: object) -> NoReturn:
        raise TypeError(
            "the logit_bias of sampling parameters cannot be changed; make new ones with dataclasses.replace(sampling, "
            "logit_bias=...)"
        )

    __setitem__ = __delitem__ = __ior__ = clear = pop = popitem = setdefault = update = _refuse

    def __reduce__(self) -> tuple[Any, ...]:
        return Biases, (dict(self),)


NO_BIASES = Biases()
