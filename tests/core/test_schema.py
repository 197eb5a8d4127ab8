from __future__ import annotations

import itertools
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from thinwire import schema as schemas_module
from thinwire.digest import ZERO, state_digest
from thinwire.dtypes import DTYPES
from thinwire.errors import SchemaMismatch, UnsupportedDtype
from thinwire.schema import Schema, TensorSpec, schema_of
from thinwire.testing import strategies

BASE = Schema(
    (
        TensorSpec("embed", DTYPES["BF16"], (4, 2)),
        TensorSpec("norm", DTYPES["F32"], (2,)),
        TensorSpec("up", DTYPES["BF16"], (2, 4)),
    ),
    {"head": "embed"},
)


def test_order_is_that_of_utf8_bytes() -> None:
    # UTF-16 would put the surrogate pair of U+10000 before U+FFFD; "Z" < "a" in bytes
    ordered = ["A.10", "A.2", "Z", "a", "é", "\ufffd", "\U00010000"]
    for names in itertools.islice(itertools.permutations(ordered), 0, 5040, 101):
        assert [t.name for t in schema_of([(n, "U8", ()) for n in names])] == ordered
    schema = schema_of([(n, "U8", ()) for n in reversed(ordered)])
    assert [schema.ordinal(n) for n in ordered] == list(range(7))
    assert schema[2].name == "Z"
    assert "Z" in schema
    assert "missing" not in schema


def test_sizes() -> None:
    schema = schema_of([("a", "BF16", (3, 5)), ("b", "F64", ()), ("c", "I32", (0, 9))])
    assert [t.numel for t in schema] == [15, 1, 0]
    assert [t.nbytes for t in schema] == [30, 8, 0]
    assert (schema.numel, schema.nbytes, len(schema)) == (16, 38, 3)


def test_an_alias_has_no_ordinal() -> None:
    with pytest.raises(SchemaMismatch, match="no tensor 'head'"):
        BASE.ordinal("head")


@pytest.mark.parametrize(
    ("tensors", "aliases", "message"),
    [
        ([("up", "BF16", (2, 4))], {}, "missing embed, norm"),
        ([*BASE.to_json()["tensors"], ("x", "U8", ())], {"head": "embed"}, "unexpected x"),
        (
            [("embed", "BF16", (2, 4)), ("norm", "F32", (2,)), ("up", "F16", (2, 4))],
            {"head": "embed"},
            r"embed: BF16 \[4, 2\]  became  BF16 \[2, 4\]",
        ),
        (
            [("embed", "BF16", (4, 2)), ("norm", "BF16", (2,)), ("up", "F16", (2, 4))],
            {"head": "embed"},
            r"norm: F32 \[2\]  became  BF16 \[2\]",
        ),
        (BASE.to_json()["tensors"], {}, "tied weights changed: head"),
        (BASE.to_json()["tensors"], {"head": "up"}, "tied weights changed: head"),
        (
            [*BASE.to_json()["tensors"], ("head", "BF16", (4, 2))],
            {},
            "tied weights changed: head",
        ),
        (
            [t for t in BASE.to_json()["tensors"] if t[0] != "up"],
            {"head": "embed", "up": "embed"},
            "tied weights changed: up",
        ),
    ],
)
def test_require_same_names_the_first_difference(
    tensors: list[Any], aliases: dict[str, str], message: str
) -> None:
    other = Schema(schema_of(tensors).tensors, aliases)
    with pytest.raises(SchemaMismatch, match=message):
        BASE.require_same(other)


def test_long_differences_are_cut_short() -> None:
    many = schema_of([(f"t{k}", "U8", ()) for k in range(9)])
    with pytest.raises(SchemaMismatch, match="t0, t1, t2 and 6 more"):
        many.require_same(Schema(()))


@given(strategies.schemas())
def test_json_round_trip(schema: Schema) -> None:
    again = Schema.from_json(json.loads(json.dumps(schema.to_json())))
    assert again == schema
    schema.require_same(again)
    assert again.to_json() == schema.to_json()


def nested(depth: int) -> list[Any]:
    value: list[Any] = []
    for _ in range(depth):
        value = [value]
    return value


GOOD: dict[str, Any] = {"aliases": {}, "tensors": [["a", "U8", [2]]]}


@pytest.mark.parametrize(
    "hostile",
    [
        None,
        [],
        "schema",
        {},
        {"tensors": []},
        {"aliases": {}},
        {"aliases": {}, "tensors": {"a": 1}},
        {"aliases": {}, "tensors": "abc"},
        {"aliases": {}, "tensors": 7},
        {"aliases": {}, "tensors": [7]},
        {"aliases": {}, "tensors": ["abc"]},
        {"aliases": {}, "tensors": [["a", "U8"]]},
        {"aliases": {}, "tensors": [["a", "U8", [2], 0]]},
        {"aliases": [], "tensors": []},
        {"aliases": [["b", "a"]], "tensors": GOOD["tensors"]},
        {"aliases": None, "tensors": []},
        {"aliases": {"b": "x"}, "tensors": GOOD["tensors"]},
        {"aliases": {"a": "a"}, "tensors": GOOD["tensors"]},
        {"aliases": {"b": ["a"]}, "tensors": GOOD["tensors"]},
        {"aliases": {"": "a"}, "tensors": GOOD["tensors"]},
        {"aliases": {7: "a"}, "tensors": GOOD["tensors"]},
        {"aliases": {"b": "a", "c": "b"}, "tensors": GOOD["tensors"]},
        *(
            {"aliases": {}, "tensors": [row]}
            for row in (
                ["", "U8", [2]],
                [None, "U8", [2]],
                [nested(5000), "U8", [2]],
                ["__metadata__", "U8", [2]],
                ["a\nb", "U8", [2]],
                ["\ud800", "U8", [2]],
                ["é" * 513, "U8", [2]],
                ["a", "u8", [2]],
                ["a", "uint8", [2]],
                ["a", "X8", [2]],
                ["a", None, [2]],
                ["a", ["U8"], [2]],
                ["a", nested(5000), [2]],
                ["a", "U8", 2],
                ["a", "U8", "2"],
                ["a", "U8", {"2": 2}],
                ["a", "U8", None],
                ["a", "U8", [-1]],
                ["a", "U8", [-1, -1]],
                ["a", "U8", [True]],
                ["a", "U8", [2.0]],
                ["a", "U8", ["2"]],
                ["a", "U8", [None]],
                ["a", "U8", nested(5000)],
                ["a", "U8", [1] * 33],
                ["a", "U8", [10**5000]],
                ["a", "U8", [2**40, 2**40]],
                ["a", "U8", [0, 2**63]],
            )
        ),
        {"aliases": {}, "tensors": GOOD["tensors"] * 2},
    ],
)
def test_hostile_schemas(hostile: object) -> None:
    with pytest.raises(SchemaMismatch) as caught:
        Schema.from_json(hostile)
    assert len(str(caught.value)) < 300


def test_too_many_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(schemas_module, "MAX_TENSORS", 1)
    Schema.from_json(GOOD)
    with pytest.raises(SchemaMismatch, match="reasonable size"):
        Schema.from_json({**GOOD, "tensors": [["a", "U8", []], ["b", "U8", []]]})
    with pytest.raises(SchemaMismatch, match="more than 1"):
        schema_of([("a", "U8", ()), ("b", "U8", ())])


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=2), inner),
        max_leaves=12,
    ).flatmap(lambda junk: st.sampled_from([junk, [junk], [["a", "U8", junk]], [["a", junk, []]]]))
)
def test_any_json_is_a_schema_or_refused(rows: object) -> None:
    try:
        schema = Schema.from_json({"tensors": rows, "aliases": {}})
    except SchemaMismatch:
        return
    # what is accepted can be written, and hashed
    assert Schema.from_json(schema.to_json()) == schema
    state_digest(schema, [ZERO] * len(schema))


@pytest.mark.parametrize(
    ("name", "limit"), [("U8", 2**48), ("BF16", 2**48), ("F32", 2**32), ("F64", 2**31)]
)
def test_elements_fit_the_digest(name: str, limit: int) -> None:
    assert schema_of([("a", name, (limit,))]).numel == limit
    with pytest.raises(SchemaMismatch, match="too many elements"):
        schema_of([("a", name, (limit + 1,))])


def test_schema_of_refuses_unknown_dtypes() -> None:
    with pytest.raises(UnsupportedDtype):
        schema_of([("a", "U7", ())])
