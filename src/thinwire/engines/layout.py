"""Where an engine keeps what a checkpoint calls by name, learned by watching it load.

The engine's own loader is run once on markers: tensors without memory, one storage per checkpoint
tensor. Every write is intercepted below autograd, so slices, item assignments and ``.data`` are
all seen; nothing is written. A marker's slice is known by its storage, offset and strides, so each
copy into the engine's memory tells which elements of which tensor go where. What a loader does to
a tensor besides slicing, turning and casting it cannot be followed, and is reported as a problem
of that tensor instead of guessed.

A layout is a claim until it has been attested: see :mod:`thinwire.engines.attest`.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from thinwire.engines.regions import Piece, Unordered, blocks, storage_of
from thinwire.schema import Schema

__all__ = ["Layout", "Load", "learn_layout"]

Load = Callable[[Iterable[tuple[str, torch.Tensor]]], object]
"""An engine's loader: takes (checkpoint name, tensor) pairs, writes them to where they belong."""


@dataclass(frozen=True)
class Layout:
    """The map from checkpoint to engine.

    Attributes:
        pieces: by checkpoint name; none where the engine (or this rank of it) holds nothing.
        problems: by checkpoint name, why it could not be followed; such a tensor has no pieces.
    """

    pieces: Mapping[str, tuple[Piece, ...]]
    problems: Mapping[str, str]

    def moved(self, module: torch.nn.Module) -> set[str]:
        """Homes whose memory the module no longer uses: learn the layout again."""
        live = {name: storage_of(tensor) for name, tensor in _tensors(module)}
        return {
            piece.home
            for pieces in self.pieces.values()
            for piece in pieces
            if live.get(piece.home) != storage_of(piece.target)
        }


def learn_layout(load: Load, module: torch.nn.Module, schema: Schema) -> Layout:
    """Run a loader on markers and note where it would have written them.

    Args:
        load: the engine's loader for ``module``, such as its ``load_weights``.
        module: the live model; none of its elements is changed.
        schema: the checkpoint's tensors.
    """
    before = _Snapshot(module)
    watch = _Watch(module, schema)
    try:
        with watch:
            load(watch.markers())
    except Exception:  # noqa: BLE001 - a loader may raise anything: find out for which tensors
        before.restore()
        watch = _Watch(module, schema)
        _load_one_by_one(load, watch)
    finally:
        replaced = before.restore()
    return watch.layout(replaced)


def _load_one_by_one(load: Load, watch: _Watch) -> None:
    for name in watch.names:
        try:
            with watch:
                load(watch.markers([name]))
        except Exception as error:  # noqa: BLE001 - noted as that tensor's problem
            watch.problems[name] = f"the loader failed: {_short(error)}"


class _Snapshot:
    """A module's parameters and buffers, so that a loader that replaces some can be undone."""

    def __init__(self, module: torch.nn.Module) -> None:
        self._slots = [
            (slots, key, f"{path}.{key}" if path else key, tensor, tensor.data)
            for path, child in module.named_modules(remove_duplicate=False)
            for slots in (child._parameters, child._buffers)
            for key, tensor in slots.items()
            if tensor is not None
        ]

    def restore(self) -> set[str]:
        """Put back what was replaced; return the names."""
        replaced = set()
        for slots, key, name, tensor, data in self._slots:
            same = storage_of(tensor) == storage_of(data) and tensor.shape == data.shape
            if slots.get(key) is not tensor or not same:
                replaced.add(name)
            slots[key] = tensor
            if not same:
                tensor.data = data
        return replaced


@dataclass(frozen=True)
class _Origin:
    name: str
    casts: tuple[torch.dtype, ...]


class _Watch(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Sees every operation of a loader; lets none of them write to the module."""

    def __init__(self, module: torch.nn.Module, schema: Schema) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._specs = {spec.name: spec for spec in schema}
        self._homes = {storage_of(tensor): name for name, tensor in _tensors(module)}
        self._origins: dict[int, _Origin] = {}
        self._derived: dict[int, tuple[set[str], str]] = {}
        self._kept: list[torch.Tensor] = []  # a storage's identity is its own only while it lives
        self._found: dict[str, list[Piece]] = {}
        self.problems: dict[str, str] = {}

    @property
    def names(self) -> list[str]:
        return list(self._specs)

    def markers(self, names: Iterable[str] | None = None) -> Iterator[tuple[str, torch.Tensor]]:
        for name in self._specs if names is None else names:
            spec = self._specs[name]
            kind = getattr(torch, spec.dtype.torch_name)
            marker = torch.empty(spec.shape, dtype=kind, device="meta")
            self._remember(marker, _Origin(name, ()))
            yield name, marker

    def layout(self, replaced: set[str]) -> Layout:
        """What was seen; ``replaced``: homes that the loader exchanged instead of writing."""
        problems = dict(self.problems)
        pieces: dict[str, tuple[Piece, ...]] = {}
        for name in self._specs:
            found = self._found.get(name, [])
            away = next((piece.home for piece in found if piece.home in replaced), None)
            if away is not None:
                problems.setdefault(name, f"the loader replaces {away}")
            pieces[name] = () if name in problems else tuple(found)
        for name, why in _shared(pieces):
            problems.setdefault(name, why)
            pieces[name] = ()
        return Layout(pieces, problems)

    # --- what a loader does -------------------------------------------------------------

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        inputs = list(_flat_tensors((args, kwargs)))
        written = _written(func, args, kwargs)
        if written:
            return self._write(func, args, kwargs, inputs, written)
        sources = [t for t in inputs if storage_of(t) in self._origins]
        if len(sources) == 1 and _name(func) in ("clone", "_to_copy"):
            return self._copied(sources[0], kwargs.get("dtype"))
        result = func(*args, **kwargs)
        names, how = self._mixed(inputs, _name(func))
        if names:
            for tensor in _flat_tensors(result):
                if storage_of(tensor) not in self._origins:
                    self._derive(tensor, names, how)
        return result

    def _copied(self, source: torch.Tensor, kind: torch.dtype | None) -> torch.Tensor:
        """A copy of a marker's slice: the slice itself, or the same slice of a cast marker."""
        if kind is None or kind == source.dtype:
            return source.view_as(source)
        origin = self._origins[storage_of(source)]
        numel = self._specs[origin.name].numel
        cast = torch.empty(numel, dtype=kind, device="meta")
        self._remember(cast, _Origin(origin.name, (*origin.casts, kind)))
        return cast.as_strided(source.shape, source.stride(), source.storage_offset())

    def _write(
        self,
        func: Any,
        args: tuple[Any, ...],
        kwargs: Any,
        inputs: list[torch.Tensor],
        written: list[torch.Tensor],
    ) -> Any:
        names, how = self._mixed(inputs, _name(func))
        homes = [t for t in written if storage_of(t) in self._homes]
        if homes:
            if _name(func) == "copy_" and storage_of(args[1]) in self._origins:
                self._place(homes[0], args[1])
            else:
                self._blame(names, f"{how} on its way to {self._homes[storage_of(homes[0])]}")
            return written[0] if len(written) == 1 else tuple(written)
        if not names:
            return func(*args, **kwargs)
        for tensor in written:
            self._derive(tensor, names, how)
            if storage_of(tensor) in self._origins:
                self._blame({self._origins[storage_of(tensor)].name}, how)
        return written[0] if len(written) == 1 else tuple(written)

    def _place(self, target: torch.Tensor, source: torch.Tensor) -> None:
        origin = self._origins[storage_of(source)]
        home = self._homes[storage_of(target)]
        chain = [getattr(torch, self._specs[origin.name].dtype.torch_name), *origin.casts]
        casts = (*chain, target.dtype)
        steps = tuple(b for a, b in itertools.pairwise(casts) if a != b)
        source = source.expand(target.shape)
        try:
            found = blocks(
                int(source.storage_offset()), tuple(source.shape), source.stride(), target.detach()
            )
        except Unordered as error:
            self._blame({origin.name}, f"{error} on its way to {home}")
            return
        self._found.setdefault(origin.name, []).extend(
            Piece(region, block, steps, home) for region, block in found
        )

    def _mixed(self, inputs: list[torch.Tensor], operation: str) -> tuple[set[str], str]:
        """Names of the checkpoint tensors that go into an operation, and what was done first."""
        names: set[str] = set()
        how = operation
        for tensor in inputs:
            storage = storage_of(tensor)
            if storage in self._origins:
                names.add(self._origins[storage].name)
            elif storage in self._derived:
                names |= self._derived[storage][0]
                how = self._derived[storage][1]
        return names, how

    def _derive(self, tensor: torch.Tensor, names: set[str], how: str) -> None:
        self._kept.append(tensor)
        known, first = self._derived.get(storage_of(tensor), (set(), how))
        self._derived[storage_of(tensor)] = (known | names, first)

    def _remember(self, marker: torch.Tensor, origin: _Origin) -> None:
        self._kept.append(marker)
        self._origins[storage_of(marker)] = origin

    def _blame(self, names: set[str], what: str) -> None:
        for name in names:
            self.problems.setdefault(name, f"it goes through {what}")


def _shared(pieces: Mapping[str, tuple[Piece, ...]]) -> list[tuple[str, str]]:
    """Tensors whose memory is another's as well: what one writes, the other would lose."""
    homes: dict[int, list[tuple[int, int, str, Piece]]] = {}
    for name, found in pieces.items():
        for piece in found:
            start = int(piece.target.storage_offset())
            span = sum((n - 1) * s for n, s in zip(piece.target.shape, piece.target.stride()))
            key = storage_of(piece.target)
            homes.setdefault(key, []).append((start, start + span + 1, name, piece))
    shared = []
    for entries in homes.values():
        entries.sort(key=lambda entry: entry[:2])
        reach, close = -1, False
        for start, end, *_ in entries:
            close |= start < reach
            reach = max(reach, end)
        if close:  # they may still lie between each other's elements
            shared += _overlapping([(name, piece) for *_, name, piece in entries], reach)
    return shared


def _overlapping(entries: list[tuple[str, Piece]], size: int) -> list[tuple[str, str]]:
    owner = torch.full((size,), -1, dtype=torch.int32)
    names = sorted({name for name, _ in entries})
    found = []
    for name, piece in entries:
        target = piece.target
        place = owner.as_strided(target.shape, target.stride(), target.storage_offset())
        mine = names.index(name)
        others = place[(place != -1) & (place != mine)]
        if others.numel():
            other = names[int(others[0])]
            found += [(name, f"{piece.home} is {other} as well")]
            found += [(other, f"{piece.home} is {name} as well")]
        place.fill_(mine)
    return found


def _tensors(module: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    yield from module.named_parameters()
    yield from module.named_buffers()


def _name(func: Any) -> str:
    return str(getattr(func, "overloadpacket", func).__name__)


def _flat_tensors(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple)):
        for item in value:
            yield from _flat_tensors(item)
    elif isinstance(value, dict):
        yield from _flat_tensors(list(value.values()))


def _written(func: Any, args: tuple[Any, ...], kwargs: Any) -> list[torch.Tensor]:
    """The arguments that an operation writes to, by its schema."""
    written: list[torch.Tensor] = []
    schema = getattr(func, "_schema", None)
    for place, argument in enumerate(schema.arguments if schema else ()):
        if argument.alias_info is not None and argument.alias_info.is_write:
            given = args[place] if place < len(args) else kwargs.get(argument.name)
            written.extend(_flat_tensors(given))
    return written


def _short(error: BaseException) -> str:
    lines = str(error).strip().splitlines()
    return (lines[0] if lines else type(error).__name__)[:160]
