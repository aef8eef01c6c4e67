"""Counts the fields of a request before it is decoded.

Two bytes may be a message of their own. Decoded, it takes a hundred bytes, and code that looks at each of millions of
them would stop every stream for seconds.
"""

from __future__ import annotations

from typing import Any

from fastgen.serving.admission.json_limits import FREE_BYTES
from fastgen.serving.refusals import TooLargeError

# Fields of a request and of the messages in it. An entry of a map, such as a bias, is one, and packed numbers are one.
MAX_FIELDS = 5 << 15
_VARINT, _FIXED_64, _BYTES, _BEGIN_GROUP, _END_GROUP, _FIXED_32 = range(6)
# Bits of the longest number that protobuf writes.
_MAX_BITS = 64


def check_num_fields(encoded: bytes, descriptor: Any) -> None:
    """Raises ``TooLargeError`` if a message of the kind ``descriptor`` has more than ``MAX_FIELDS`` fields.

    Short messages are not looked at, since they cannot have many. Nor is what cannot be decoded: the decoder says why.
    """
    if len(encoded) <= FREE_BYTES:
        return
    num_fields, left = 0, [(0, len(encoded), descriptor)]
    try:
        while left:
            place, end, described = left.pop()
            while place < end:
                num_fields += 1
                if num_fields > MAX_FIELDS:
                    raise TooLargeError(f"the request has more than {MAX_FIELDS} fields; send it in parts")
                tag, place = _number(encoded, place)
                kind = tag & 7
                if kind == _BYTES:
                    size, place = _number(encoded, place)
                    field = described.fields_by_number.get(tag >> 3)
                    if field is not None and field.message_type is not None:
                        inner = field.message_type
                        if not inner.GetOptions().map_entry:
                            left.append((place, min(place + size, end), inner))
                    place += size
                elif kind == _VARINT:
                    _, place = _number(encoded, place)
                else:
                    place += {_FIXED_64: 8, _FIXED_32: 4, _BEGIN_GROUP: 0, _END_GROUP: 0}[kind]
    except LookupError:  # it ends too early, or has a kind of field that there is not
        return


def _number(encoded: bytes, place: int) -> tuple[int, int]:
    """Returns the number at ``place``, of which each byte has seven bits, and the place behind it. Raises
    ``IndexError`` if it has no end.
    """
    value = 0
    for shift in range(0, _MAX_BITS, 7):
        byte = encoded[place]
        place += 1
        value |= (byte & 127) << shift
        if byte < 128:
            return value, place
    raise IndexError
