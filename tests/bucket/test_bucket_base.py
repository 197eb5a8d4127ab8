"""What every bucket builds on: data in pieces, sizes, keys."""

from __future__ import annotations

import array
from collections.abc import Iterator
from pathlib import Path

import pytest

from thinwire.bucket import Data, check_key, data_size, iter_data
from thinwire.errors import InvalidKey, Misuse
from thinwire.testing.conformance import BAD_KEYS, DATA_FORMS

WIDE = array.array("Q", range(10))


def pieces(data: Data, chunk: int) -> Iterator[bytes]:
    return (bytes(piece) for piece in iter_data(data, chunk=chunk))


@pytest.mark.parametrize("form", list(DATA_FORMS))
def test_every_form_of_data(form: str) -> None:
    data, expected = DATA_FORMS[form]
    assert b"".join(pieces(data, 3)) == expected
    assert data_size(data) == len(expected)


@pytest.mark.parametrize(
    "data",
    [memoryview(WIDE), [memoryview(WIDE)], memoryview(WIDE.tobytes()).cast("B", shape=[8, 10])],
    ids=["wide", "part", "two-dimensional"],
)
def test_pieces_count_bytes_not_elements(data: Data) -> None:
    assert [len(piece) for piece in pieces(data, 32)] == [32, 32, 16]
    assert b"".join(pieces(data, 32)) == WIDE.tobytes()
    assert data_size(data) == 80


def test_buffers_are_not_copied() -> None:
    buffer = bytearray(10)
    for piece in iter_data([buffer], chunk=4):
        piece[:] = b"x" * len(piece)
    assert buffer == b"x" * 10


def test_a_file_is_read_in_pieces(tmp_path: Path) -> None:
    source = tmp_path / "source"
    source.write_bytes(b"0123456789")
    assert list(pieces(source, 4)) == [b"0123", b"4567", b"89"]
    assert data_size(source) == 10


def test_a_file_that_cannot_be_read(tmp_path: Path) -> None:
    missing = tmp_path / "missing"
    with pytest.raises(Misuse, match="missing"):
        data_size(missing)
    with pytest.raises(Misuse, match="missing"):
        list(iter_data(missing))


@pytest.mark.parametrize("bad", list(BAD_KEYS))
def test_bad_keys(bad: str) -> None:
    with pytest.raises(InvalidKey):
        check_key(BAD_KEYS[bad])


@pytest.mark.parametrize("key", ["a", "-a/_b/=c@d+e.f", "commits/0000000001.json", "a..b"])
def test_good_keys(key: str) -> None:
    assert check_key(key) is key
