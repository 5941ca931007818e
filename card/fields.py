"""Reading result files: every value has the type that is expected, or one sentence says not."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from dataclasses import dataclass

_LARGEST = 2**63 - 1


class FieldError(ValueError):
    """A value of a result file that is missing or not what it should be."""


@dataclass(frozen=True)
class Fields:
    """A JSON object and where it stands, for the error: `Fields(report)["verdict"].text("kind")`.

    Every method raises `FieldError` for a key that is missing or of another type. Strings come
    back as they are: what prints them escapes them.
    """

    value: object
    path: str = ""

    def __getitem__(self, key: str) -> Fields:
        return Fields(self._get(key), self._name(key))

    def _name(self, key: str) -> str:
        return f"{self.path}.{key}" if self.path else key

    def _get(self, key: str) -> object:
        if not isinstance(self.value, Mapping):
            raise FieldError(f"{self.path or 'the file'} is no JSON object")
        if key not in self.value:
            raise FieldError(f"{self._name(key)} is missing")
        return self.value[key]

    def has(self, key: str) -> bool:
        """Whether there is something other than null under the key."""
        return isinstance(self.value, Mapping) and self.value.get(key) is not None

    def items(self) -> list[Fields]:
        """The elements of a list."""
        if not isinstance(self.value, list):
            raise FieldError(f"{self.path} is no list")
        return [Fields(item, f"{self.path}[{i}]") for i, item in enumerate(self.value)]

    def integer(self, key: str) -> int:
        """A count: 0 or more, of 63 bits at most."""
        value = self._get(key)
        if type(value) is not int or not 0 <= value <= _LARGEST:
            raise FieldError(f"{self._name(key)} is no count")
        return value

    def part(self, key: str, whole: int) -> int:
        """A count that is no more than `whole`."""
        value = self.integer(key)
        if value > whole:
            raise FieldError(f"{self._name(key)} is {value:,} of {whole:,}")
        return value

    def integer_or_none(self, key: str) -> int | None:
        """A count, or None for null."""
        return None if self._get(key) is None else self.integer(key)

    def number(self, key: str, *, most: float = math.inf) -> float:
        """A finite number from 0 to `most`: nothing that is measured is below 0."""
        value = self._get(key)
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise FieldError(f"{self._name(key)} is no number")
        try:
            number = float(value)
        except OverflowError:
            number = math.inf
        if not math.isfinite(number):
            raise FieldError(f"{self._name(key)} is not finite")
        if not 0 <= number <= most:
            raise FieldError(f"{self._name(key)} is {number:g}, outside of 0 to {most:g}")
        return number

    def number_or_none(self, key: str) -> float | None:
        """A finite number from 0, or None for null."""
        return None if self._get(key) is None else self.number(key)

    def flag(self, key: str) -> bool:
        """True or false."""
        value = self._get(key)
        if not isinstance(value, bool):
            raise FieldError(f"{self._name(key)} is neither true nor false")
        return value

    def text(self, key: str, form: re.Pattern[str] | None = None) -> str:
        """A string; of the given form where one is given."""
        value = self._get(key)
        if not isinstance(value, str):
            raise FieldError(f"{self._name(key)} is no text")
        if form is not None and not form.fullmatch(value):
            raise FieldError(f"{self._name(key)} is no valid {key}")
        return value

    def text_or_none(self, key: str, form: re.Pattern[str] | None = None) -> str | None:
        """A string, or None for null."""
        return None if self._get(key) is None else self.text(key, form)

    def texts(self, key: str) -> tuple[str, ...]:
        """A list of strings."""
        value = self._get(key)
        if not isinstance(value, list) or not all(isinstance(item, str) for item in value):
            raise FieldError(f"{self._name(key)} is no list of texts")
        return tuple(value)

    def mapping(self, key: str) -> dict[str, str]:
        """An object whose values are strings."""
        value = self._get(key)
        if not isinstance(value, Mapping) or not all(isinstance(v, str) for v in value.values()):
            raise FieldError(f"{self._name(key)} is no object of texts")
        return dict(value)
