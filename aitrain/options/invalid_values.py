"""Messages about values that pydantic refuses."""

from __future__ import annotations

import re

from pydantic_core import ErrorDetails

from aitrain.errors import did_you_mean
from aitrain.options.value_types import shown

_EXPECTED = {
    "greater_than": "above {gt}",
    "greater_than_equal": "at least {ge}",
    "less_than": "below {lt}",
    "less_than_equal": "at most {le}",
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "literal_error": "{expected}",
    "string_type": "text (in YAML: in quotes)",
}
"""pydantic's types of errors, and what a value must be."""


def invalid_value(error: ErrorDetails) -> str:
    """What the value of an option must be, and what was given."""
    if error["type"] == "value_error":  # raised by a validator of value_types
        return str(error["ctx"]["error"])
    keys, context = "its keys " if len(error["loc"]) > 1 else "", dict[str, object](error.get("ctx", {}))
    for key, value in context.items():
        if isinstance(value, float) and value.is_integer():  # `above 0.0` reads badly
            context[key] = int(value)
    expected = _EXPECTED.get(error["type"], error["msg"]).format(**context)
    message = f"{keys}must be {expected}, not {shown(error['input'])}"
    if error["type"] == "literal_error":
        near = did_you_mean(str(error["input"]), re.findall("'(.+?)'", error["ctx"]["expected"]))
        message += f".{near}" if near else ""
    return message
