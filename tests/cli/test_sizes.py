"""Sizes on the command line."""

from __future__ import annotations

import pytest

from thinwire.cli.sizes import parse_size


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("5000", 5000),
        ("5000B", 5000),
        ("20MB", 20_000_000),
        ("20 MB", 20_000_000),
        (" 20mb ", 20_000_000),
        ("20M", 20_000_000),
        ("1.2GB", 1_200_000_000),
        (".5k", 500),
        ("32MiB", 32 << 20),
        ("1Ti", 1 << 40),
        ("2e3kB", 2_000_000),
    ],
)
def test_sizes(text: str, expected: int) -> None:
    assert parse_size(text) == expected


@pytest.mark.parametrize(
    "text", ["", "MB", "-5MB", "5XB", "5iB", "0", "0.1B", "1e400", "nan", "5MB5", "1,2GB", "٣MB"]
)
def test_not_sizes(text: str) -> None:
    with pytest.raises(ValueError, match=r"is not a (size|positive number)"):
        parse_size(text)


@pytest.mark.parametrize("text", ["20Mb", "1Gb"])
def test_bits_are_not_taken_for_bytes(text: str) -> None:
    with pytest.raises(ValueError, match=r"means bits; write .*B for bytes"):
        parse_size(text)
