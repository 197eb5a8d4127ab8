"""Weights as their owner holds them: a module, a state dict, or (name, tensor) pairs.

Turns any of these into named, flat, read-only runs of bits under canonical names, with ties found
by shared storage, never by equal values. Nothing is copied here but what the integer view needs:
contiguous CPU tensors and numpy arrays are seen in place; strided and device tensors come over
in bounded pieces.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

from thinwire.casts import cast_between
from thinwire.dtypes import DType, dtype
from thinwire.dtypes import dtype as _dtype
from thinwire.errors import Misuse, SchemaMismatch, UnsupportedDtype
from thinwire.patch import Bits
from thinwire.schema import Schema, TensorSpec

__all__ = [
    "PIECE",
    "FlatTensor",
    "ServingDtype",
    "Source",
    "Tensor",
    "Weights",
    "named_tensors",
    "names_one",
]

Source: TypeAlias = Any
"""A ``torch.nn.Module``, a mapping or an iterable of (name, torch tensor or numpy array)."""

ServingDtype: TypeAlias = Any
"""Serving dtype: anything :func:`~thinwire.dtypes.dtype` takes, for every tensor that has a cast to
it; a mapping from names to such; a function from the trainer's spec to one; or None."""

PIECE = 1 << 20
"""Elements per piece: large enough that Python costs nothing, small enough to stay in cache."""

_INNER = {
    "DataParallel": "module",
    "DistributedDataParallel": "module",
    "OptimizedModule": "_orig_mod",
}
_WRAPPERS = {"_orig_mod", "_fsdp_wrapped_module", "_checkpoint_wrapped_module"}


@dataclass(frozen=True, eq=False)
class FlatTensor:
    """A tensor known by its bits alone, such as one in a mapped file: usable in any source.

    Attributes:
        bits: ``(numel,)`` unsigned.
        dtype: what the bits mean.
        shape: row-major.
    """

    bits: Bits
    dtype: DType
    shape: tuple[int, ...]


class Tensor:
    """One tensor in its owner's memory, readable as flat runs of unsigned bits.

    Attributes:
        dtype: its element type (the trainer's, before any cast).
        shape: its shape.
    """

    def __init__(self, value: Any) -> None:
        self.dtype = dtype(value.dtype)
        self.shape = tuple(int(n) for n in value.shape)
        flat = isinstance(value, FlatTensor)
        self._value: Any = value.bits.reshape(self.shape) if flat else value
        self._is_torch = not isinstance(self._value, np.ndarray)

    @property
    def value(self) -> Any:
        """The owner's torch tensor or numpy array itself."""
        return self._value

    @property
    def numel(self) -> int:
        """Elements; 1 for a 0-d tensor."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def in_place(self) -> bool:
        """Whether :meth:`flat` sees the owner's memory without a copy."""
        if self._is_torch:
            value = self._value
            return value.device.type == "cpu" and value.is_contiguous() and not value.is_neg()
        return bool(self._value.flags.c_contiguous) and self._value.dtype.isnative

    def identity(self) -> tuple[object, ...] | None:
        """What two tensors share exactly when they are one: storage, layout and dtype."""
        if self.numel == 0:
            return None
        value = self._value
        if self._is_torch:
            place = (str(value.device), value.data_ptr(), value.is_neg())
            return (*place, value.stride(), self.shape, self.dtype)
        return ("cpu", value.ctypes.data, value.strides, self.shape, self.dtype)

    def flat(self) -> Bits:
        """All elements, ``(numel,)``; a view where :attr:`in_place`, else a copy."""
        return _bits(self._value, self.dtype, self._is_torch)

    def pieces(self, limit: int = PIECE) -> Iterator[tuple[int, Bits]]:
        """(index of the first element, bits) runs of at most ``limit`` elements, in order."""
        if self.in_place:
            flat = self.flat()
            for start in range(0, flat.size, limit):
                yield start, flat[start : start + limit]
        elif self.numel:
            yield from _strided(self._value, self.dtype, self._is_torch, 0, limit)


def _strided(
    value: Any, kind: DType, is_torch: bool, start: int, limit: int
) -> Iterator[tuple[int, Bits]]:
    numel = int(np.prod(value.shape, dtype=np.int64))
    if numel <= limit:
        yield start, _bits(value, kind, is_torch)
        return
    row = numel // value.shape[0]
    rows = max(1, limit // row)
    for first in range(0, value.shape[0], rows):
        block = value[first : first + rows]
        at = start + first * row
        if row > limit:
            yield from _strided(block[0], kind, is_torch, at, limit)
        else:
            yield at, _bits(block, kind, is_torch)


def _bits(value: Any, kind: DType, is_torch: bool) -> Bits:
    if not is_torch:
        array = np.ascontiguousarray(value).reshape(-1)
        if not array.dtype.isnative:
            array = array.astype(array.dtype.newbyteorder("="))
        return array.view(kind.bits)
    torch = sys.modules["torch"]
    flat = value.detach().resolve_neg().contiguous().reshape(-1).cpu()
    integer = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}[kind.width]
    bits: Bits = flat.view(integer).numpy().view(kind.bits)
    return bits


@dataclass(frozen=True)
class Weights:
    """Tensors in schema order, with the schema they are served under.

    Attributes:
        schema: names, *serving* dtypes, shapes and ties.
        tensors: the owner's tensors, one for each of ``schema.tensors``.
    """

    schema: Schema
    tensors: tuple[Tensor, ...]

    @classmethod
    def of(cls, source: Source, *, dtype: ServingDtype = None) -> Weights:
        """Weights of a new run.

        Args:
            source: a module, a mapping or an iterable of (name, tensor).
            dtype: serving dtype; None keeps the owner's. A single dtype applies to every tensor
                that has a cast to it (fp32 masters served in bf16) and leaves the others as
                they are; a mapping or a function names one per tensor, or None to keep it.

        Raises:
            Misuse: the source is none of these, or holds something that is not a tensor.
            UnsupportedDtype: an element type or a cast that thinwire does not handle.
            SchemaMismatch: two tensors have one name.
        """
        stored, aliases = _untie(*_read(source))
        specs = {
            name: TensorSpec(name, tensor.dtype, tensor.shape) for name, tensor in stored.items()
        }
        if isinstance(dtype, Mapping) and (unknown := sorted(dtype.keys() - specs.keys())):
            raise Misuse(f"a serving dtype is given for {unknown[0]!r}, which is not there")
        schema = Schema(
            tuple(TensorSpec(n, _serving(s, dtype), s.shape) for n, s in specs.items()), aliases
        )
        if (
            names_one(dtype)
            and schema.tensors
            and not any(spec.dtype == _dtype(dtype) for spec in schema)
        ):
            raise UnsupportedDtype(
                f"no tensor is {_dtype(dtype)} or has a cast to it",
                hint="leave the dtype out to serve the weights as they are",
            )
        return cls(schema, tuple(stored[spec.name] for spec in schema))

    @classmethod
    def matching(cls, source: Source, schema: Schema) -> Weights:
        """Weights of a run that exists: same names, shapes and ties, cast to its dtypes.

        Raises:
            SchemaMismatch: a name, shape or tie differs, or a dtype that no cast leads from.
            Misuse: as for :meth:`of`.
        """
        stored, aliases = _untie(named_tensors(source), {s.name for s in schema})
        served = {spec.name: spec.dtype for spec in schema}
        specs = []
        for name, tensor in stored.items():
            target = served.get(name, tensor.dtype)
            if target != tensor.dtype and not _castable(tensor.dtype, target):
                target = tensor.dtype
            specs.append(TensorSpec(name, target, tensor.shape))
        schema.require_same(Schema(tuple(specs), aliases))
        return cls(schema, tuple(stored[spec.name] for spec in schema))


def _castable(source: DType, target: DType) -> bool:
    try:
        cast_between(source, target)
    except UnsupportedDtype:
        return False
    return True


def names_one(wanted: ServingDtype) -> bool:
    """Whether a serving dtype is one for all tensors."""
    if wanted is None or isinstance(wanted, Mapping):
        return False
    return isinstance(wanted, (str, DType, type)) or not callable(wanted)


def _serving(spec: TensorSpec, wanted: ServingDtype) -> DType:
    if wanted is None:
        return spec.dtype
    if isinstance(wanted, Mapping):
        chosen = wanted.get(spec.name)
    elif names_one(wanted):
        one = dtype(wanted)
        chosen = one if _castable(spec.dtype, one) else None
    else:
        chosen = wanted(spec)
    target = spec.dtype if chosen is None else dtype(chosen)
    cast_between(spec.dtype, target)
    return target


def named_tensors(source: Source) -> dict[str, Tensor]:
    """Every named tensor of the source under its canonical name, in the owner's order.

    Raises:
        Misuse, SchemaMismatch, UnsupportedDtype: as for :meth:`Weights.of`.
    """
    return _read(source)[0]


def _read(source: Source) -> tuple[dict[str, Tensor], set[str]]:
    """The named tensors, and which of the names their checkpoint prefers among tied ones."""
    is_module = hasattr(source, "state_dict") and hasattr(source, "named_parameters")
    if is_module:
        source = _unwrapped(source)
        pairs: Iterable[Any] = source.state_dict(keep_vars=True).items()
    elif isinstance(source, Mapping):
        pairs = source.items()
    elif isinstance(source, Iterable) and not isinstance(source, (str, bytes)):
        pairs = source
    else:
        raise Misuse(
            f"cannot take weights out of a {type(source).__name__}",
            hint="pass a torch module, a state dict, or (name, tensor) pairs",
        )
    found: dict[str, Tensor] = {}
    for pair in pairs:
        if not isinstance(pair, (tuple, list)) or len(pair) != 2 or not isinstance(pair[0], str):
            raise Misuse(f"not a (name, tensor) pair: {str(pair)[:60]}")
        name, value = pair
        if name.endswith("_extra_state") and not _is_torch(value):
            continue
        _require_values(name, value)
        canonical = _canonical(name)
        if canonical in found:
            raise SchemaMismatch(f"two tensors are named {canonical!r}")
        found[canonical] = Tensor(value)
    if found and all(name.startswith("module.") for name in found):
        found = {name.removeprefix("module."): tensor for name, tensor in found.items()}
    if not is_module:
        return found, set()
    stored_as = _checkpoint_names(source, found)
    named = {stored_as.get(name, name): tensor for name, tensor in found.items()}
    return named, {stored_as.get(name, name) for name in _tie_sources(source)}


def _unwrapped(module: Any) -> Any:
    """The model itself, without data parallelism and compilation around it."""
    while (attribute := _INNER.get(type(module).__name__)) is not None:
        module = getattr(module, attribute)
    return module


def _is_torch(value: object) -> bool:
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.Tensor)


def _require_values(name: str, value: Any) -> None:
    if isinstance(value, (FlatTensor, np.ndarray)):
        return
    if not _is_torch(value):
        raise Misuse(f"{name!r} is a {type(value).__name__}, not a tensor")
    if value.device.type == "meta":
        raise Misuse(f"{name!r} is on the meta device: it has no values to publish")
    if value.layout is not sys.modules["torch"].strided:
        raise Misuse(f"{name!r} is a sparse tensor", hint="pass a dense one")
    if value.numel() and not _has_memory(value):
        raise Misuse(
            f"the memory of {name!r} has been released: it has no values to publish",
            hint="gather sharded or offloaded weights first, or pass their full state dict",
        )
    # DTensor and the like hold their elements elsewhere: their own address says nothing
    if hasattr(type(value), "__tensor_flatten__"):
        raise Misuse(
            f"{name!r} is a {type(value).__name__}, which holds its elements in other tensors",
            hint="pass whole, plain tensors: for a DTensor, its full_tensor()",
        )


def _has_memory(value: Any) -> bool:
    """Whether there is storage behind a tensor; sharding frameworks free it between uses."""
    try:
        return bool(value.untyped_storage().nbytes())
    except (RuntimeError, NotImplementedError):
        return True  # some subclasses have none of their own


def _canonical(name: str) -> str:
    *modules, leaf = name.split(".")
    return ".".join([part for part in modules if part not in _WRAPPERS] + [leaf])


def _checkpoint_names(model: Any, named: Mapping[str, Tensor]) -> dict[str, str]:
    """What a transformers model's checkpoint calls its tensors, where the names differ.

    Since version 5, transformers may fuse on loading what checkpoints keep apart, and undoes it
    in ``save_pretrained``. The same function is asked here, with tensors that hold no memory.

    Raises:
        Misuse: the checkpoint holds other tensors than the model.
    """
    loading = sys.modules.get("transformers.core_model_loading")
    modeling = sys.modules.get("transformers.modeling_utils")
    if not loading or not modeling or not isinstance(model, modeling.PreTrainedModel):
        return {}
    empty = sys.modules["torch"].empty
    shells = {n: empty(t.shape, dtype=t.value.dtype, device="meta") for n, t in named.items()}
    names = {id(shell): name for name, shell in shells.items()}
    stored_as = {}
    for name, tensor in loading.revert_weight_conversion(model, shells).items():
        if id(tensor) in names:
            stored_as[names[id(tensor)]] = name
    if apart := sorted(named.keys() - stored_as.keys()):
        raise Misuse(
            f"the checkpoint of {type(model).__name__} holds {apart[0]!r} in another layout",
            hint="pass the checkpoint's own tensors: transformers.core_model_loading."
            "revert_weight_conversion(model, model.state_dict())",
        )
    return stored_as


def _tie_sources(model: Any) -> set[str]:
    """What a transformers model ties other names to: ``save_pretrained`` keeps these."""
    expanded = getattr(model, "all_tied_weights_keys", None)
    tied = expanded or getattr(model, "_tied_weights_keys", None)
    return {str(v) for v in tied.values()} if isinstance(tied, Mapping) else set()


def _untie(
    named: dict[str, Tensor], preferred: set[str]
) -> tuple[dict[str, Tensor], dict[str, str]]:
    groups: dict[object, list[str]] = {}
    for name, tensor in named.items():
        groups.setdefault(tensor.identity() or name, []).append(name)
    stored: dict[str, Tensor] = {}
    aliases: dict[str, str] = {}
    for names in groups.values():
        kept = next((name for name in names if name in preferred), names[0])
        stored[kept] = named[kept]
        aliases.update({name: kept for name in names if name != kept})
    return stored, aliases
