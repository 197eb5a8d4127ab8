"""Xet's formats: what the server reads, on bytes by hand and on what hf_xet really sends."""

from __future__ import annotations

import os
import random
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest

pytest.importorskip("huggingface_hub")
pytest.importorskip("hf_xet")

from huggingface_hub import HfApi, constants

from servers.hub import lz4
from servers.hub.access import Account, parse_account
from servers.hub.cas import EMPTY, Cas
from servers.hub.hub import Hub
from servers.hub.server import HubServer
from servers.hub.xet import Term, hash_text, pack_xorb, read_shard, read_xorb, unpack_chunk

pytestmark = pytest.mark.stores

BOOKEND = b"\xff" * 32 + bytes(16)
HEADER = b"HFRepoMetaData".ljust(32, b"\0") + struct.pack("<QQ", 2, 0)
XORB = bytes(range(32))
FILE = bytes(range(32, 64))


def shard(
    terms: list[tuple[bytes, int, int, int]], chunks: list[int], flags: int = 1 << 31
) -> bytes:
    """One file of ``terms``, and the xorb ``XORB`` of ``chunks``."""
    parts = [HEADER, struct.pack("<32sIIQ", FILE, flags, len(terms), 0)]
    parts += [struct.pack("<32s4I", xorb, 0, size, first, end) for xorb, size, first, end in terms]
    parts += [bytes(48)] * len(terms) + [BOOKEND]
    parts += [struct.pack("<32s4I", XORB, 0, len(chunks), sum(chunks), 0)]
    parts += [struct.pack("<32sIIQ", bytes(32), 0, size, 0) for size in chunks] + [BOOKEND]
    return b"".join(parts)


# --- LZ4 ----------------------------------------------------------------------------------------


def frame(*blocks: bytes, flags: int = 0x60) -> bytes:
    sized = [len(block).to_bytes(4, "little") + block for block in blocks]
    return lz4.MAGIC + bytes([flags, 0x40, 0]) + b"".join(sized) + bytes(4)


@pytest.mark.parametrize(
    ("block", "content"),
    [
        (b"\x50hello", b"hello"),
        (b"\x11a\x01\x00\x10b", b"a" * 6 + b"b"),  # one literal, a match of 5 that overlaps itself
        (b"\x30abc\x03\x00\x10d", b"abcabcad"),  # the same four bytes and on
        (b"\xf0\x01" + b"0123456789abcdef", b"0123456789abcdef"),  # a length of more than 15
        (b"\x1fa\x01\x00\x00\x10b", b"a" * 20 + b"b"),  # a match longer than 15
    ],
)
def test_lz4_blocks(block: bytes, content: bytes) -> None:
    assert lz4.decompress(frame(block)) == content


def test_lz4_frames() -> None:
    raw = (5 | 1 << 31).to_bytes(4, "little") + b"hello"
    assert lz4.decompress(lz4.MAGIC + b"\x60\x40\x00" + raw + bytes(4)) == b"hello"
    assert lz4.decompress(frame(b"\x50hello", b"\x00\x05\x00")) == b"hellohell"  # reaches back
    with_size = lz4.MAGIC + b"\x68\x40" + (5).to_bytes(8, "little") + b"\0"
    assert lz4.decompress(with_size + frame(b"\x50hello")[7:]) == b"hello"


@pytest.mark.parametrize(
    "damaged",
    [
        b"not a frame at all",
        frame(b"\x50hello")[:12],
        frame(b"\x50hello")[:3],
        frame(b"\x11a\x02\x00\x10b"),
        frame(b"\x11a\x00\x00\x10b"),
        frame(b"\xf0"),
    ],
)
def test_damaged_lz4(damaged: bytes) -> None:
    with pytest.raises(ValueError, match="LZ4"):
        lz4.decompress(damaged)


# --- xorbs and shards ---------------------------------------------------------------------------


def test_hashes_are_four_little_endian_words() -> None:
    # The example of hub-docs docs/xet/api.md, which lacks the digits "10".
    expected = "07060504030201000f0e0d0c0b0a090817161514131211101f1e1d1c1b1a1918"
    assert hash_text(bytes(range(32))) == expected


@pytest.mark.parametrize("size", [1, 1000, 128 << 10, (128 << 10) + 1, 300_000])
def test_plain_xorbs(size: int) -> None:
    content = os.urandom(size)
    data = pack_xorb(content)
    layout = read_xorb(data)
    assert sum(layout.sizes) == size
    chunks = [unpack_chunk(data, start) for start in layout.offsets[:-1]]
    assert b"".join(chunks) == content
    assert read_xorb(data + b"XETBLOB footer").sizes == layout.sizes


@pytest.mark.parametrize("cut", [0, 1, 7, 8, 100, -1])
def test_xorbs_cut_short(cut: int) -> None:
    with pytest.raises(ValueError, match="xorb"):
        read_xorb(pack_xorb(bytes(1000))[:cut])


def test_things_that_are_no_xorb() -> None:
    for data in (b"\1" + bytes(7), b"\0\0\0\0\7\0\0\0", b"\0\0\0\0\0\xff\xff\xff"):
        with pytest.raises(ValueError, match="no chunk"):
            read_xorb(data)


def test_a_shard() -> None:
    found = read_shard(shard([(XORB, 30, 0, 2), (XORB, 5, 2, 3)], [10, 20, 5]))
    name = hash_text(XORB)
    assert found.xorbs == {name: [10, 20, 5]}
    assert found.files == {hash_text(FILE): [Term(name, 30, 0, 2), Term(name, 5, 2, 3)]}


def test_shards_that_are_none() -> None:
    good = shard([(XORB, 30, 0, 2)], [10, 20])
    for bad in (b"", good[:100], good[:-48], b"x" + good, good[:32] + b"\3" + good[33:]):
        with pytest.raises(ValueError, match="shard"):
            read_shard(bad)
    with pytest.raises(ValueError, match="verification"):
        read_shard(shard([(XORB, 30, 0, 2)], [10, 20], flags=0))


@pytest.mark.parametrize(
    "terms",
    [
        [(FILE, 30, 0, 2)],  # another xorb
        [(XORB, 31, 0, 2)],
        [(XORB, 30, 0, 3)],
        [(XORB, 0, 1, 1)],
        [(XORB, 30, 0, 2), (XORB, 20, 2, 1)],
    ],
)
def test_a_shard_must_fit_its_xorbs(terms: list[tuple[bytes, int, int, int]]) -> None:
    cas = Cas()
    chunks = [b"\0\x0a\0\0\0\x0a\0\0" + bytes(10), b"\0\x14\0\0\0\x14\0\0" + bytes(20)]
    cas.add_xorb(hash_text(XORB), b"".join(chunks))
    with pytest.raises(ValueError, match="xorb"):
        cas.add_shard(shard(terms, [10, 20]))
    with pytest.raises(ValueError, match="not those uploaded"):
        cas.add_shard(shard([(XORB, 30, 0, 2)], [20, 10]))
    assert cas.size(hash_text(FILE)) is None
    assert cas.add_shard(shard([(XORB, 30, 0, 2)], [10, 20])) == 1
    assert cas.read(hash_text(FILE)) == bytes(30)


@pytest.mark.parametrize("version", [1, 2])
def test_reconstructions_cover_the_range(version: int) -> None:
    cas = Cas()
    content = os.urandom(500_000)
    name = cas.write(content)
    draw = random.Random(0)
    for _ in range(50):
        start = draw.randrange(len(content))
        end = draw.randrange(start, len(content)) + 1
        answer = cas.reconstruction(name, start, end, version=version, base="")
        got = b"".join(rebuilt(cas, answer, version))
        assert got[answer["offset_into_first_range"] :][: end - start] == content[start:end]
        assert answer["offset_into_first_range"] < 128 << 10


def rebuilt(cas: Cas, answer: dict[str, object], version: int) -> Iterator[bytes]:
    """What a client puts together: the chunks of every term, from the ranges it may fetch."""
    for term in answer["terms"]:  # type: ignore[attr-defined]
        xorb = cas.xorbs[term["hash"]]
        fetches = answer["xorbs" if version == 2 else "fetch_info"][term["hash"]]  # type: ignore[index]
        ranges = [
            (item["range"], item["url_range"])
            if version == 1
            else (item["ranges"][0]["chunks"], item["ranges"][0]["bytes"])
            for item in fetches
        ]
        first, last = term["range"]["start"], term["range"]["end"]
        chunks, span = next(
            pair for pair in ranges if pair[0]["start"] <= first and last <= pair[0]["end"]
        )
        fetched = xorb.data[span["start"] : span["end"] + 1]
        layout = read_xorb(fetched)
        starts = layout.offsets[first - chunks["start"] : last - chunks["start"]]
        yield b"".join(unpack_chunk(fetched, start) for start in starts)


def test_the_empty_file() -> None:
    cas = Cas()
    assert cas.write(b"") == EMPTY
    assert (cas.size(EMPTY), cas.read(EMPTY)) == (0, b"")


# --- what hf_xet sends --------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[HubServer]:
    with pytest.MonkeyPatch.context() as patch:
        home = tmp_path_factory.mktemp("hf-home")
        patch.setenv("HF_HOME", str(home))
        patch.setattr(constants, "HF_TOKEN_PATH", str(home / "token"))
        patch.setenv("HF_HUB_DISABLE_PROGRESS_BARS", "1")
        with HubServer(Hub([Account("hf_writer", "me")])) as server:
            HfApi(server.url, token="hf_writer").create_bucket("me/b")
            yield server


def floats(count: int) -> bytes:
    draw = random.Random(1)
    return b"".join(struct.pack("<f", draw.gauss(0, 0.02)) for _ in range(count))


CONTENTS = {
    "random": os.urandom(1_000_000),
    "text": b"".join(b"line %d of a text\n" % number for number in range(50_000)),
    "floats": floats(200_000),
    "zeros": bytes(3_000_000),
    "tiny": b"x",
    "odd": floats(1001) + b"abc",
    "empty": b"",
}


@pytest.mark.parametrize("kind", list(CONTENTS))
def test_uploads_are_understood(server: HubServer, kind: str, tmp_path: Path) -> None:
    content = CONTENTS[kind]
    api = HfApi(server.url, token="hf_writer")
    api.batch_bucket_files("me/b", add=[(content, kind)])
    bucket = server.hub.buckets.find("me/b")
    assert bucket is not None
    file = bucket.files[kind]
    assert file.size == len(content)
    assert server.hub.cas.read(file.xet_hash) == content
    api.download_bucket_files("me/b", [(kind, tmp_path / "file")])
    assert (tmp_path / "file").read_bytes() == content


def test_every_compression_was_seen(server: HubServer) -> None:
    """Plain, LZ4 and grouped LZ4: otherwise the test above shows less than it seems to."""
    api = HfApi(server.url, token="hf_writer")
    api.batch_bucket_files("me/b", add=[(CONTENTS[kind], kind) for kind in CONTENTS])
    schemes = {
        xorb.data[start + 4]
        for xorb in server.hub.cas.xorbs.values()
        for start in xorb.layout.offsets[:-1]
    }
    assert schemes == {0, 1, 2}


def test_accounts_on_the_command_line() -> None:
    assert parse_account("hf_a=me") == Account("hf_a", "me", "write")
    assert parse_account("hf_a=me:read") == Account("hf_a", "me", "read")
    for bad in ("hf_a", "=me", "hf_a=", "hf_a=me:admin"):
        with pytest.raises(ValueError, match="TOKEN=NAME"):
            parse_account(bad)
