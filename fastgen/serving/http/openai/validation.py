"""Types and checks that request bodies share.

Every model forbids unknown fields. ``null`` means that a field was not given. A field without effect here is accepted
only if ignoring it cannot change the client's result; other such fields are refused as "cannot be honoured".
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Final

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StringConstraints,
    ValidationError,
    model_validator,
)
from pydantic_core import PydanticCustomError

from fastgen.serving.admission.request_limits import MAX_STOP_CHARACTERS, MAX_TOKEN_IDS

MAX_INT32 = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
# An identifier for the caller's own records.
Label = Annotated[str, StringConstraints(max_length=512)]
Metadata = dict[Annotated[str, StringConstraints(max_length=64)], Label]
MAX_METADATA = 16
_LONGEST_NAME: Final = 64  # of a field that is compared with the known ones


class _Refused(BeforeValidator):
    """Marks a field that is always refused, so that no error suggests it."""


def refused(why: str, *, unless: Any = None) -> BeforeValidator:
    """Returns a validator for a field that would change the answer: it accepts ``null``, and ``unless``, the value that
    means the same.
    """

    def check(value: Any) -> Any:
        if value is not None and not (type(value) is type(unless) and value == unless):
            raise PydanticCustomError("cannot_be_honoured", "cannot be honoured: {why}", {"why": why})
        return value

    return _Refused(check)


def at_most(number: int) -> BeforeValidator:
    """Returns a validator that limits the members of an object before each of them is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > number:
            raise PydanticCustomError(
                "too_many_members", "at most {max} members, not {found}", {"max": number, "found": len(value)}
            )
        return value

    return BeforeValidator(check)


def check_num_token_ids(prompts: Iterable[Any]) -> None:
    """Raises ``PydanticCustomError`` if these have more than ``MAX_TOKEN_IDS`` token ids together."""
    if sum(len(each) for each in prompts if isinstance(each, list)) > MAX_TOKEN_IDS:
        raise PydanticCustomError("too_many_token_ids", "at most {max} token ids in all", {"max": MAX_TOKEN_IDS})


@functools.cache
def _known(model: type[BaseModel]) -> frozenset[str]:
    return frozenset(field.alias or name for name, field in model.model_fields.items())


@functools.cache
def _useful(model: type[BaseModel]) -> list[str]:
    """Returns the names of the fields that are not refused."""
    fields = model.model_fields.items()
    return sorted(
        field.alias or name
        for name, field in fields
        if field.annotation is not type(None) and not any(isinstance(each, _Refused) for each in field.metadata)
    )


def _nearest(name: str, model: type[BaseModel]) -> str:
    """Returns the question whether the nearest useful name is meant, if one is near; not for a name as long as a text,
    which would take long to compare.
    """
    near = difflib.get_close_matches(name, _useful(model), n=1, cutoff=0.8) if len(name) <= _LONGEST_NAME else []
    return f"did you mean {near[0]!r}?" if near else ""


class FewErrors(BaseModel):
    """A body that takes no longer to refuse than to accept."""

    # Fields of other servers' bodies, and what to do instead.
    elsewhere: ClassVar[Mapping[str, str]] = {}

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: Any) -> Any:
        """Keeps only the first unknown field if there are more fields than the model has. Each unknown field would be
        an error of its own, and thousands of errors help no reader. If that field is spelled nearly like a known one,
        or is another server's, it is refused with what to write instead.
        """
        known = _known(cls)
        unknown = next((name for name in value if name not in known), None) if isinstance(value, dict) else None
        if unknown is None:
            return value
        advice = cls.elsewhere.get(unknown) or _nearest(unknown, cls)
        if advice and cls.model_config.get("extra") == "forbid":
            error = PydanticCustomError("unknown_field", "this field is not known; {advice}", {"advice": advice})
            raise ValidationError.from_exception_data(
                cls.__name__, [{"type": error, "loc": (unknown,), "input": value[unknown]}]
            )
        if len(value) <= len(known):
            return value
        return {name: each for name, each in value.items() if name in known or name == unknown}


class Strict(FewErrors):
    """A model without unknown fields, numbers as text, or numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
