"""What a checkpoint is made of: named tensors of fixed dtype and shape, and the ties among them.

A schema is fixed for a whole run. Tensors are ordered by the UTF-8 bytes of their names, so that
the order (and with it every ordinal and the state digest) depends on nothing else.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from thinwire.dtypes import DTYPES, DType, dtype
from thinwire.errors import SchemaMismatch, ThinwireError

__all__ = ["Schema", "TensorSpec"]

MAX_TENSORS = 4_000_000
MAX_NAME_BYTES = 1024
MAX_DIMS = 32


@dataclass(frozen=True)
class TensorSpec:
    """One tensor: canonical name, element type and shape (elements per dimension, row-major)."""

    name: str
    dtype: DType
    shape: tuple[int, ...]

    @property
    def numel(self) -> int:
        """Elements; 1 for a 0-d tensor."""
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        """Bytes when stored densely."""
        return self.numel * self.dtype.itemsize

    def __str__(self) -> str:
        return f"{self.name}: {self.dtype} {list(self.shape)}"


def _check_name(name: object) -> str:
    if not isinstance(name, str) or not name:
        kind = type(name).__name__
        raise SchemaMismatch(f"a tensor name must be a non-empty string, not a {kind}")
    if any(ord(c) < 32 for c in name) or name == "__metadata__":
        raise SchemaMismatch(f"tensor name {name!r} cannot be stored in a safetensors file")
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        raise SchemaMismatch(f"tensor name {name!r} is not valid Unicode") from None
    if size > MAX_NAME_BYTES:
        raise SchemaMismatch(f"tensor name {name[:40]!r}… is longer than {MAX_NAME_BYTES} bytes")
    return name


def _check_spec(spec: TensorSpec) -> None:
    _check_name(spec.name)
    counts = all(type(n) is int and 0 <= n < 1 << 63 for n in spec.shape)
    if len(spec.shape) > MAX_DIMS or not counts:
        raise SchemaMismatch(f"tensor {spec.name!r} has an impossible shape")
    # the digest joins index and bits into 64 bits; 64-bit elements count as two 32-bit words
    words, width = (2, 32) if spec.dtype.width == 64 else (1, spec.dtype.width)
    if words * spec.numel > 1 << min(64 - width, 48):
        raise SchemaMismatch(f"tensor {spec.name!r} has too many elements: {spec.numel}")


def _spec_from_json(name: object, code: object, shape: object) -> TensorSpec:
    name = _check_name(name)
    if not isinstance(code, str) or code not in DTYPES or not isinstance(shape, list):
        raise SchemaMismatch(f"tensor {name!r} has no known dtype, or no shape")
    return TensorSpec(name, DTYPES[code], tuple(shape))


@dataclass(frozen=True)
class Schema:
    """The tensors of a checkpoint, ordered by name, and its ties.

    Attributes:
        tensors: every stored tensor, in schema order.
        aliases: further names of stored tensors (tied weights): alias -> stored name.
    """

    tensors: tuple[TensorSpec, ...]
    aliases: Mapping[str, str] = field(default_factory=dict)
    _ordinals: dict[str, int] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        if len(self.tensors) > MAX_TENSORS:
            raise SchemaMismatch(f"{len(self.tensors)} tensors are more than {MAX_TENSORS}")
        for spec in self.tensors:
            _check_spec(spec)
        ordered = tuple(sorted(self.tensors, key=lambda t: t.name.encode()))
        object.__setattr__(self, "tensors", ordered)
        object.__setattr__(self, "aliases", dict(sorted(self.aliases.items())))
        object.__setattr__(self, "_ordinals", {t.name: i for i, t in enumerate(ordered)})
        if len(self._ordinals) != len(ordered):
            twice = next(a.name for a, b in itertools.pairwise(ordered) if a.name == b.name)
            raise SchemaMismatch(f"two tensors are named {twice!r}")
        for alias, name in self.aliases.items():
            _check_name(alias)
            if name not in self._ordinals or alias in self._ordinals:
                raise SchemaMismatch(f"alias {alias!r} -> {name!r} does not fit the tensors")

    def __iter__(self) -> Iterator[TensorSpec]:
        return iter(self.tensors)

    def __len__(self) -> int:
        return len(self.tensors)

    def __getitem__(self, ordinal: int) -> TensorSpec:
        return self.tensors[ordinal]

    def __contains__(self, name: object) -> bool:
        return name in self._ordinals

    def ordinal(self, name: str) -> int:
        """Position of a stored tensor (not an alias) in schema order.

        Raises:
            SchemaMismatch: the run has no such tensor.
        """
        try:
            return self._ordinals[name]
        except KeyError:
            raise SchemaMismatch(f"the run has no tensor {name!r}") from None

    @property
    def numel(self) -> int:
        """Elements over all stored tensors."""
        return sum(t.numel for t in self.tensors)

    @property
    def nbytes(self) -> int:
        """Bytes of a dense checkpoint, tied weights counted once."""
        return sum(t.nbytes for t in self.tensors)

    def require_same(self, other: Schema) -> None:
        """Check that ``other`` describes the same checkpoint.

        Raises:
            SchemaMismatch: naming the first difference in names, dtypes, shapes or ties.
        """
        mine, theirs = set(self._ordinals), set(other._ordinals)
        tied, untied = mine & other.aliases.keys(), theirs & self.aliases.keys()
        if tied or untied:
            raise SchemaMismatch(f"tied weights changed: {_some(tied | untied)}")
        gone, new = mine - theirs, theirs - mine
        if gone or new:
            missing = f" missing {_some(gone)};" if gone else ""
            surplus = f" unexpected {_some(new)};" if new else ""
            raise SchemaMismatch(f"tensor names changed:{missing}{surplus}".rstrip(";"))
        for a, b in zip(self.tensors, other.tensors):
            if a != b:
                raise SchemaMismatch(f"tensor changed: {a}  became  {b.dtype} {list(b.shape)}")
        if dict(self.aliases) != dict(other.aliases):
            changed = set(self.aliases.items()) ^ set(other.aliases.items())
            raise SchemaMismatch(f"tied weights changed: {_some({a for a, _ in changed})}")

    def to_json(self) -> dict[str, Any]:
        """The form stored in ``run.json``: JSON-able, integers and strings only."""
        return {
            "aliases": dict(self.aliases),
            "tensors": [[t.name, t.dtype.name, list(t.shape)] for t in self.tensors],
        }

    @classmethod
    def from_json(cls, data: object) -> Schema:
        """Inverse of :meth:`to_json`, for untrusted input.

        Raises:
            SchemaMismatch: the value does not describe a schema.
        """
        try:
            rows, aliases = data["tensors"], data["aliases"]  # type: ignore[index]
            if not isinstance(rows, list) or len(rows) > MAX_TENSORS:
                raise SchemaMismatch("the schema is not a list of tensors of reasonable size")
            if not isinstance(aliases, dict):
                raise SchemaMismatch("the schema's aliases are not an object")
            return cls(tuple(_spec_from_json(*row) for row in rows), aliases)
        except (KeyError, TypeError, ValueError) as error:
            if isinstance(error, ThinwireError):
                raise
            raise SchemaMismatch(f"not a schema: {str(error)[:100]}") from None


def schema_of(tensors: Iterable[tuple[str, object, Iterable[int]]]) -> Schema:
    """A schema without ties from (name, dtype, shape) triples."""
    return Schema(tuple(TensorSpec(n, dtype(d), tuple(s)) for n, d, s in tensors))


def _some(names: set[str]) -> str:
    shown = ", ".join(sorted(names)[:3])
    return shown + (f" and {len(names) - 3} more" if len(names) > 3 else "")
