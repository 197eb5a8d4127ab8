from __future__ import annotations

import dataclasses
import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire.errors import CorruptPayload, Misuse, UnsupportedFormat
from thinwire.log import records
from thinwire.log.commit import AnchorFile, Commit, Manifest, PayloadRef, RunInfo, Tip, new_nonce
from thinwire.log.records import open_record, record_hash, seal_record
from thinwire.schema import Schema, schema_of
from thinwire.testing.strategies import schemas

RUN = RunInfo(
    run="0123456789abcdef" * 2,
    writer="fedcba9876543210" * 2,
    schema=Schema(
        schema_of([("embed.weight", "BF16", (4, 2)), ("é", "F32", ())]).tensors,
        {"head.weight": "embed.weight"},
    ),
    base="hf://org/name@rev",
    time_ms=1_700_000_000_000,
)
COMMIT = Commit(
    run=RUN.run,
    version=7,
    parent="ab" * 32,
    writer=RUN.writer,
    payloads=(PayloadRef("deltas/0000000007-" + "c" * 32 + ".safetensors", 1234, "cd" * 32),),
    digest="ef" * 32,
    changed=99,
    tensors=2,
    step=-3,
    time_ms=1_700_000_000_001,
    codec="raw",
)
MANIFEST = Manifest(
    run=RUN.run,
    version=7,
    digest="ef" * 32,
    files=(AnchorFile("config.json", 10, "01" * 32), AnchorFile("model.safetensors", 0, "23" * 32)),
)
RECORDS: dict[str, Any] = {"run": RUN, "commit": COMMIT, "anchor": MANIFEST}


def lines(data: bytes) -> tuple[bytes, bytes]:
    first, second, rest = data.split(b"\n")
    assert rest == b""
    return first, second


def sealed(first: bytes) -> bytes:
    """Any bytes as a line 1 with its right seal, by a second writer of the envelope."""
    seal = json.dumps({"sha256": hashlib.sha256(first).hexdigest()}, separators=(",", ":"))
    return first + b"\n" + seal.encode() + b"\n"


def changed(record: Any, **changes: Any) -> bytes:
    """The record with some of its keys replaced (or left out: ``...``), sealed again."""
    body = {**json.loads(lines(record.encode())[0]), **changes}
    body = {key: value for key, value in body.items() if value is not ...}
    return sealed(canonical(body))


def canonical(value: Any) -> bytes:
    text = json.dumps(value, sort_keys=True, separators=(",", ":"), ensure_ascii=False)
    return text.encode()


@pytest.mark.parametrize("kind", list(RECORDS))
def test_round_trip_and_canonical_form(kind: str) -> None:
    record = RECORDS[kind]
    data = record.encode()
    again = type(record).decode(data)
    assert again == record
    assert type(again) is type(record)
    assert again.encode() == data
    first, second = lines(data)
    body = json.loads(first)
    assert first == canonical(body)
    assert (body["format"], body["major"]) == (f"thinwire-{kind}", 1)
    assert json.loads(second) == {"sha256": hashlib.sha256(first).hexdigest()}
    assert record_hash(data) == hashlib.sha256(first).hexdigest()


def test_a_commit_without_a_step() -> None:
    commit = dataclasses.replace(COMMIT, step=None, payloads=())
    assert b"step" not in commit.encode()
    assert Commit.decode(commit.encode()) == commit


def test_hashes_and_tips() -> None:
    assert RUN.tip == Tip(RUN.run, -1, record_hash(RUN.encode()))
    assert COMMIT.tip == Tip(RUN.run, 7, record_hash(COMMIT.encode()))
    assert COMMIT.payload_bytes == 1234
    assert len({new_nonce() for _ in range(50)}) == 50
    assert dataclasses.replace(RUN, writer=new_nonce()).hash != RUN.hash


@pytest.mark.parametrize("flip", [0x01, 0x02, 0x20, 0x80, 0xFF])
@pytest.mark.parametrize("kind", list(RECORDS))
def test_every_flipped_byte_is_refused(kind: str, flip: int) -> None:
    record = RECORDS[kind]
    data = bytearray(record.encode())
    for at in range(len(data)):
        data[at] ^= flip
        with pytest.raises(CorruptPayload):
            type(record).decode(bytes(data))
        data[at] ^= flip


@pytest.mark.parametrize("kind", list(RECORDS))
def test_every_truncation_and_any_addition_is_refused(kind: str) -> None:
    decode, data = type(RECORDS[kind]).decode, RECORDS[kind].encode()
    for end in range(len(data)):
        with pytest.raises(CorruptPayload):
            decode(data[:end])
    for more in (data + b"\n", data + b"{}\n", b"\n" + data, data + data, data[:-1] + b"\r\n"):
        with pytest.raises(CorruptPayload):
            decode(more)


@pytest.mark.parametrize("kind", list(RECORDS))
def test_one_kind_is_not_another(kind: str) -> None:
    for other, record in RECORDS.items():
        if other != kind:
            with pytest.raises(CorruptPayload, match="format is"):
                type(RECORDS[kind]).decode(record.encode())


@pytest.mark.parametrize("kind", list(RECORDS))
@pytest.mark.parametrize("major", [2, 0, -1, "1"])
def test_other_majors_are_refused(kind: str, major: object) -> None:
    with pytest.raises(UnsupportedFormat, match="major"):
        type(RECORDS[kind]).decode(changed(RECORDS[kind], major=major))


@pytest.mark.parametrize("kind", list(RECORDS))
def test_keys_of_a_newer_minor_are_ignored(kind: str) -> None:
    record = RECORDS[kind]
    data = changed(record, zz_later={"list": [1, "x"]}, aa_later=1)
    again = type(record).decode(data)
    fields = [f.name for f in dataclasses.fields(record)]
    assert [getattr(again, f) for f in fields] == [getattr(record, f) for f in fields]
    if kind != "anchor":  # what others point at is what is stored, not what was understood
        assert again.hash == again.tip.hash == record_hash(data) != record.hash


def test_unknown_keys_inside_and_beside() -> None:
    payload = {"key": "k", "size": 1, "sha256": "cd" * 32}
    plain = Commit.decode(changed(COMMIT, payloads=[payload]))
    data = changed(COMMIT, payloads=[{**payload, "later": 1}])
    again = Commit.decode(data)
    assert again.payloads == plain.payloads
    assert again.hash == record_hash(data) != plain.hash
    # a signature, say, in line 2
    first, second = lines(COMMIT.encode())
    signed = first + b"\n" + canonical({**json.loads(second), "signature": "s"}) + b"\n"
    assert Commit.decode(signed) == COMMIT


def test_a_schema_in_another_order_keeps_the_stored_hash() -> None:
    schema = RUN.schema.to_json()
    data = changed(RUN, schema={**schema, "tensors": schema["tensors"][::-1]})
    run = RunInfo.decode(data)
    assert run.schema == RUN.schema
    assert run.tip.hash == record_hash(data)


NOT_CANONICAL: dict[str, Callable[[bytes], bytes]] = {
    "space": lambda line: line.replace(b":", b": ", 1),
    "leading space": lambda line: b" " + line,
    "tab inside": lambda line: line.replace(b",", b",\t", 1),
    "escape": lambda line: line.replace(b"run", rb"\u0072un", 1),
    "order": lambda line: b'{"zz":1,' + line[1:],
    "repeated key": lambda line: line.replace(b'"major":1', b'"major":1,"major":1'),
    "float": lambda line: b'{"a":1.0,' + line[1:],
    "exponent": lambda line: b'{"a":1e2,' + line[1:],
    "minus zero": lambda line: b'{"a":-0,' + line[1:],
    "true": lambda line: b'{"a":true,' + line[1:],
    "null": lambda line: b'{"a":null,' + line[1:],
    "NaN": lambda line: b'{"a":NaN,' + line[1:],
    "null in a list": lambda line: b'{"a":[null],' + line[1:],
    "false in an object": lambda line: b'{"a":{"b":false},' + line[1:],
    "surrogate": lambda line: b'{"a":"\\ud800",' + line[1:],
    "not UTF-8": lambda line: b'{"a":"\xff",' + line[1:],
    "byte order mark": lambda line: b"\xef\xbb\xbf" + line,
    "ten thousand digits": lambda line: b'{"a":' + b"9" * 10_000 + b"," + line[1:],
    "deep lists": lambda line: b'{"a":' + b"[" * 50_000 + b"]" * 50_000 + b"," + line[1:],
    "deep objects": lambda line: b'{"a":' + b'{"a":' * 9000 + b"1" + b"}" * 9000 + b"," + line[1:],
    "a list": lambda line: b"[" + line + b"]",
    "empty": lambda line: b"",
}


@pytest.mark.parametrize("way", list(NOT_CANONICAL))
@pytest.mark.parametrize("kind", list(RECORDS))
def test_nothing_but_the_canonical_form_is_read(kind: str, way: str) -> None:
    data = sealed(NOT_CANONICAL[way](lines(RECORDS[kind].encode())[0]))
    with pytest.raises(CorruptPayload, match="not canonical JSON"):
        type(RECORDS[kind]).decode(data)


@pytest.mark.parametrize(
    "second", [b"{}", b"[]", b"null", b'{"sha256":1}', b'{ "sha256":"x"}', b""]
)
def test_seals_that_are_none(second: bytes) -> None:
    with pytest.raises(CorruptPayload):
        Commit.decode(lines(COMMIT.encode())[0] + b"\n" + second + b"\n")


DEEP: Any = "x"
for _ in range(200):
    DEEP = [DEEP]
WRONG_VALUES: list[tuple[str, str, Any]] = [
    ("run", "run", "0" * 31),
    ("run", "run", "G" * 32),
    ("run", "run", 7),
    ("run", "run", ...),
    ("run", "writer", "0" * 33),
    ("run", "writer", "A" * 32),
    ("run", "schema", ...),
    ("run", "schema", []),
    ("run", "schema", {"aliases": {}, "tensors": [["a", "U9", []]]}),
    ("run", "base", 7),
    ("run", "base", DEEP),
    ("run", "time_ms", "now"),
    ("run", "time_ms", -1),
    ("run", "time_ms", 2**63),
    ("commit", "run", "0" * 32 + "\u0660"),
    ("commit", "version", -1),
    ("commit", "version", 10**10),
    ("commit", "version", "7"),
    ("commit", "version", ...),
    ("commit", "parent", "ab" * 31),
    ("commit", "parent", "AB" * 32),
    ("commit", "parent", "ab" * 31 + "é"),
    ("commit", "payloads", ...),
    ("commit", "payloads", "abc"),
    ("commit", "payloads", 7),
    ("commit", "payloads", {"key": "k", "size": 1, "sha256": "cd" * 32}),
    ("commit", "payloads", ["k"]),
    ("commit", "payloads", [["k", 1, "cd" * 32]]),
    ("commit", "payloads", [{"key": "k", "size": 1}]),
    ("commit", "payloads", [{"key": 1, "size": 1, "sha256": "cd" * 32}]),
    ("commit", "payloads", [{"key": "k", "size": -1, "sha256": "cd" * 32}]),
    ("commit", "payloads", [{"key": "k", "size": "1", "sha256": "cd" * 32}]),
    ("commit", "payloads", [{"key": "k", "size": 1, "sha256": "cd" * 31}]),
    ("commit", "payloads", DEEP),
    ("commit", "digest", DEEP),
    ("commit", "changed", -1),
    ("commit", "tensors", "2"),
    ("commit", "step", "3"),
    ("commit", "step", 2**63),
    ("commit", "step", -(2**63)),
    ("commit", "time_ms", ...),
    ("commit", "codec", 1),
    ("anchor", "version", -1),
    ("anchor", "digest", ""),
    ("anchor", "files", ...),
    ("anchor", "files", {"path": "p"}),
    ("anchor", "files", [{"path": "p", "size": 1}]),
    ("anchor", "files", [{"path": ["p"], "size": 1, "sha256": "cd" * 32}]),
]


@pytest.mark.parametrize(("kind", "key", "value"), WRONG_VALUES)
def test_wrong_values_under_a_right_seal(kind: str, key: str, value: Any) -> None:
    with pytest.raises(CorruptPayload, match="record") as caught:
        type(RECORDS[kind]).decode(changed(RECORDS[kind], **{key: value}))
    assert len(str(caught.value)) < 400


JSON = st.recursive(
    st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=6,
)


@given(st.sampled_from(list(RECORDS)), st.data())
def test_any_value_anywhere(kind: str, data: st.DataObject) -> None:
    record = RECORDS[kind]
    key = data.draw(st.sampled_from(sorted(json.loads(lines(record.encode())[0]))))
    written = changed(record, **{key: data.draw(JSON)})
    try:
        again = type(record).decode(written)
    except (CorruptPayload, UnsupportedFormat):
        return
    if kind != "anchor":
        assert again.hash == record_hash(written)


@given(JSON.filter(lambda value: isinstance(value, dict)))
def test_envelope_round_trip(body: Any) -> None:
    data = seal_record("thing", body)
    assert open_record("thing", data) == {**body, "format": "thinwire-thing", "major": 1}
    assert data == sealed(lines(data)[0])


@given(schemas())
def test_run_info_of_any_schema(schema: Schema) -> None:
    run = dataclasses.replace(RUN, schema=schema)
    again = RunInfo.decode(run.encode())
    assert (again, again.hash) == (run, run.hash)


def test_records_have_a_size_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    data = COMMIT.encode()
    monkeypatch.setattr(records, "MAX_RECORD", len(data))
    assert Commit.decode(data) == COMMIT
    monkeypatch.setattr(records, "MAX_RECORD", len(data) - 1)
    with pytest.raises(CorruptPayload, match="more than any real one"):
        Commit.decode(data)


def test_frozen_vectors(vectors: Path) -> None:
    names = {"run.json": "run", "commit.json": "commit", "manifest.json": "anchor"}
    for name, kind in names.items():
        record = RECORDS[kind]
        data = (vectors / name).read_bytes()
        assert type(record).decode(data) == record
        assert record.encode() == data
    assert (RUN.hash, COMMIT.hash) == (
        "29104995d778e94b09009f2bbfb54b68758452e1b923ed9bea99e0a9dd99b86f",
        "0f1a674c6766f50e99e4a6dee3ef8bfd2f8924bc86c77dea41e3a708dcf8b76f",
    )


@pytest.mark.parametrize("value", [1.0, True, None, (1,), b"x", Path("x")])
def test_what_no_reader_would_take_is_not_written(value: object) -> None:
    with pytest.raises(Misuse, match="integers, strings"):
        records.seal_record("commit", {"step": value})
