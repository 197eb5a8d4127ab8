"""Reloading through the engine's own loader, and the trial that it has to pass first.

Some engines quantise, pack or turn weights once they are loaded: nothing can be written to those
element by element, and nothing read back. What remains is to have the engine load the checkpoint
again. Whether that works is not believed but tried, before anything is served: other weights are
loaded, then the first ones again. Memory has to differ in between, wherever a loader has filled
it, and has to be bit for bit what the engine's own start has left in the end.

The trial proves the path, not a version: what a later version becomes in memory is whatever the
engine's own processing makes of it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from thinwire.engines.layout import Layout
from thinwire.engines.memory import Print, fingerprint, held
from thinwire.engines.regions import integer_view, storage_of
from thinwire.patch import Bits
from thinwire.schema import Schema, TensorSpec

__all__ = ["Reloader", "Trial", "follow_along", "spoilt", "try_out", "weights"]

Weights = Iterable[tuple[str, torch.Tensor]]


class Reloader(Protocol):
    """An engine's way of loading a checkpoint again into the model that is there."""

    def load(self, weights: Weights, filled: set[str] | None = None) -> None:
        """Load a whole checkpoint, and process it as at the engine's start.

        Everything ends up in the memory that the engine has been using. A load that fails may
        leave wrong elements behind, but a model that can be loaded again.

        Args:
            weights: every tensor of the checkpoint by name; may be kept.
            filled: if given, takes the names, as ``module.parameter``, of all that was loaded
                into, as it was before processing.
        """


@dataclass(frozen=True)
class Trial:
    """What came of trying a reload.

    Attributes:
        wrong: why the engine must not be reloaded; empty if it may. If not, memory is spoilt.
        derived: names of the module's tensors that follow the checkpoint's.
    """

    wrong: str
    derived: frozenset[str]


def weights(schema: Schema, tensors: Sequence[Bits]) -> Iterator[tuple[str, torch.Tensor]]:
    """A checkpoint for a loader: copies, since what serves must not alias the mirror."""
    for spec, bits in zip(schema, tensors, strict=True):
        yield spec.name, _tensor(spec, bits)


def spoilt(schema: Schema, tensors: Sequence[Bits]) -> Iterator[tuple[str, torch.Tensor]]:
    """Other weights of the same kind: every float times -1/2, everything else back to front."""
    for name, tensor in weights(schema, tensors):
        if tensor.is_floating_point() and tensor.element_size() > 1:
            yield name, tensor.mul_(-0.5)
        elif tensor.dtype == torch.bool:
            yield name, tensor.logical_not_()
        else:
            backwards = integer_view(tensor).reshape(-1).flip(0)
            yield name, backwards.view(tensor.dtype).view(tensor.shape)


def _tensor(spec: TensorSpec, bits: Bits) -> torch.Tensor:
    signed = bits if bits.itemsize == 1 else bits.view(f"<i{bits.itemsize}")
    flat = torch.from_numpy(signed.copy())
    return flat.view(getattr(torch, spec.dtype.torch_name)).view(spec.shape)


@torch.no_grad()
def try_out(
    module: torch.nn.Module,
    layout: Layout,
    reloader: Reloader,
    schema: Schema,
    tensors: Sequence[Bits],
) -> Trial:
    """Load other weights, then those that the engine has loaded by itself; compare all memory.

    Nothing may be generated meanwhile. After a trial that went wrong memory is not what it was.

    Args:
        layout: the module's; its memory has to stay in use.
        schema, tensors: the checkpoint that the engine has loaded.
    """
    filled: set[str] = set()
    before = fingerprint(module)
    try:
        reloader.load(spoilt(schema, tensors))
        other = fingerprint(module)
        reloader.load(weights(schema, tensors), filled)
        after = fingerprint(module)
    except Exception as error:  # noqa: BLE001 - a loader may raise anything: it is not used then
        return Trial(f"the engine's loader failed: {type(error).__name__}: {error}", frozenset())
    derived = frozenset(name for name, was in before.items() if other.get(name) != was)
    wrong = _not_reproduced(before, after) or _exchanged(layout, module) or _unseen(filled, derived)
    return Trial(wrong, derived)


def _not_reproduced(before: Mapping[str, Print], after: Mapping[str, Print]) -> str:
    names = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if not names:
        return ""
    return (
        f"loading the same weights again does not make {names[0]} what it was"
        f"{_more(len(names) - 1)}"
    )


def _exchanged(layout: Layout, module: torch.nn.Module) -> str:
    gone = layout.moved(module)
    return f"loading again exchanges the memory of {min(gone)}" if gone else ""


def _unseen(filled: set[str], derived: frozenset[str]) -> str:
    """Whatever is loaded has to be seen in memory, else nobody knows what became of it."""
    made = {name.rpartition(".")[0] for name in derived.difference(filled)}
    lost = sorted(
        name
        for name in set(filled) - derived
        if name not in made and name.rpartition(".")[0] not in made
    )
    if not lost:
        return ""
    return f"what is loaded into {lost[0]} is not seen in memory{_more(len(lost) - 1)}"


def _more(count: int) -> str:
    return f", nor {count} more" if count else ""


def follow_along(
    module: torch.nn.Module, layout: Layout, proved: Iterable[str], derived: Iterable[str]
) -> tuple[set[str], set[str]]:
    """What a reload decides, where other tensors are written in place.

    A module that has made something from a tensor would not notice that the tensor is written to.

    Args:
        proved: checkpoint tensors that could be written in place.
        derived: the module's tensors that follow the checkpoint's.

    Returns:
        Names of the module's tensors that only a reload renews, and of the proved tensors that
        have to be reloaded with them.
    """
    proved = list(proved)
    places = {
        name: {storage_of(piece.target) for piece in layout.pieces.get(name, ())} for name in proved
    }
    written = set[int]().union(*places.values())
    derived = set(derived)
    remade, near = set(), set[int]()
    everything = False
    for one in held(module):
        if one.name in derived and storage_of(one.tensor) not in written:
            remade.add(one.name)
            everything |= one.beside  # whose weights it was made from is not known
            near |= {storage_of(t) for t in [*one.owner.parameters(), *one.owner.buffers()]}
    return remade, {name for name in proved if everything or places[name] & near}
