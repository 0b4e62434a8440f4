"""How results and values of a dump become plain JSON, for programs and for a page."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import numpy as np

from rl_dump.columns.ragged import RaggedArray

__all__ = ["plain_json"]


def plain_json(value: object, *, largest: float = math.inf) -> Any:
    """Turn a value into what JSON can hold: records as objects, arrays as lists.

    Args:
        value: anything; what JSON has no form for becomes its text, as NaN and infinity do.
        largest: whole numbers beyond this become text, too: JavaScript would round them.
    """

    def plain(value: object) -> Any:
        if dataclasses.is_dataclass(value) and not isinstance(value, (type, RaggedArray)):
            fields = dataclasses.fields(value)
            return {field.name: plain(getattr(value, field.name)) for field in fields}
        if isinstance(value, dict):
            return {str(key): plain(item) for key, item in value.items()}
        if isinstance(value, (list, tuple, RaggedArray)):
            return [plain(item) for item in value]
        if isinstance(value, (np.ndarray, np.generic)):
            return plain(value.tolist())
        if value is None or isinstance(value, (str, bool)):
            return value
        is_number = isinstance(value, int) or (isinstance(value, float) and math.isfinite(value))
        too_large = isinstance(value, int) and abs(value) > largest
        return value if is_number and not too_large else str(value)

    return plain(value)
