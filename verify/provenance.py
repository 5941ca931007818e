"""What a manifest claims, proven again from the source by whoever runs this."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class Provenance:
    """What was proven, and what was not looked at."""

    proven: tuple[str, ...]
    unproven: tuple[str, ...]

    def to_json(self) -> dict[str, Any]:
        """As in verify_report.json."""
        return {"proven": list(self.proven), "unproven": list(self.unproven)}
