"""Types and checks that request bodies share.

Every model forbids unknown fields. ``null`` means that a field was not given. A field without effect here is accepted
only if ignoring it cannot change the client's result; other such fields are refused as "cannot be honoured".
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, StringConstraints, model_validator
from pydantic_core import PydanticCustomError

from fastgen.serving.admission.request_limits import MAX_STOP_CHARACTERS

MAX_INT32 = 2**31 - 1

TokenId = Annotated[int, Field(ge=0, le=MAX_INT32)]
StopString = Annotated[str, StringConstraints(min_length=1, max_length=MAX_STOP_CHARACTERS)]
# An identifier for the caller's own records.
Label = Annotated[str, StringConstraints(max_length=512)]
Metadata = dict[Annotated[str, StringConstraints(max_length=64)], Label]
MAX_METADATA = 16


def refused(why: str, *, unless: Any = None) -> BeforeValidator:
    """Returns a validator for a field that would change the answer: it accepts ``null``, and ``unless``, the value that
    means the same.
    """

    def check(value: Any) -> Any:
        if value is not None and not (type(value) is type(unless) and value == unless):
            raise PydanticCustomError("cannot_be_honoured", "cannot be honoured: {why}", {"why": why})
        return value

    return BeforeValidator(check)


def at_most(number: int) -> BeforeValidator:
    """Returns a validator that limits the members of an object before each of them is validated."""

    def check(value: Any) -> Any:
        if isinstance(value, dict) and len(value) > number:
            raise PydanticCustomError(
                "too_many_members", "at most {max} members, not {found}", {"max": number, "found": len(value)}
            )
        return value

    return BeforeValidator(check)


class FewErrors(BaseModel):
    """A body that takes no longer to refuse than to accept."""

    @model_validator(mode="before")
    @classmethod
    def _keep_one_unknown(cls, value: Any) -> Any:
        """Keeps only the first unknown field if there are more fields than the model has. Each unknown field would be
        an error of its own, and thousands of errors help no reader.
        """
        if not isinstance(value, dict) or len(value) <= len(cls.model_fields):
            return value
        known = {field.alias or name for name, field in cls.model_fields.items()}
        unknown = next(name for name in value if name not in known)
        return {name: each for name, each in value.items() if name in known or name == unknown}


class Strict(FewErrors):
    """A model without unknown fields, numbers as text, or numbers that are not finite."""

    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)
