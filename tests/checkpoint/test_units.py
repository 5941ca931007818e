from __future__ import annotations

import pytest

from qatpack.checkpoint.units import share, size


@pytest.mark.parametrize(
    ("nbytes", "text"),
    [
        (0, "0 B"),
        (999, "999 B"),
        (1234, "1.23 kB"),
        (4_810_620, "4.81 MB"),
        (10_208_852_878, "10.21 GB"),
        (61_000_000_000_000, "61,000.00 GB"),
    ],
)
def test_sizes(nbytes, text):
    assert size(nbytes) == text


def test_a_share_says_all_or_nothing_only_where_it_is():
    assert share(3, 3) == "100 %"
    assert share(999_999_999, 1_000_000_000) == "99.999 %"
    assert share(1, 3) == "33.333 %"
    assert share(0, 0) == "-"
    assert share(0, 3) == "0 %"
    assert share(1, 1_000_000_000) == "0.001 %"
