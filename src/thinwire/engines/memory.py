"""All the tensors that a live module holds, by name, and digests to tell whether they change.

Besides parameters and buffers, a module may keep tensors as plain attributes, such as a product of
its weights that it has computed once. Nothing that writes parameters reaches those.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from thinwire.digest import ZERO, TensorDigest
from thinwire.engines.attest import digest_block
from thinwire.engines.regions import Region, integer_view, storage_of

__all__ = ["Held", "Print", "fingerprint", "held", "kept_beside"]

_WORKING_MEMORY = ("kv_cache",)
"""Attributes that change with every token, and are no weights."""


@dataclass(frozen=True)
class Held:
    """A tensor of a module.

    Attributes:
        name: ``path.to.module.attribute``.
        tensor: as the module uses it.
        owner: the module.
        beside: whether it is a plain attribute, neither parameter nor buffer.
    """

    name: str
    tensor: torch.Tensor
    owner: torch.nn.Module
    beside: bool


@dataclass(frozen=True)
class Print:
    """What a tensor was at some moment: shape, dtype and a digest of its elements."""

    shape: tuple[int, ...]
    kind: torch.dtype
    digest: TensorDigest


def held(module: torch.nn.Module) -> Iterator[Held]:
    """Every tensor of a module and its children; tensors of two names twice."""
    for path, child in module.named_modules():
        prefix = f"{path}." if path else ""
        for slots in (child._parameters, child._buffers):
            for key, tensor in slots.items():
                if tensor is not None:
                    yield from _plain(Held(f"{prefix}{key}", tensor, child, False))
        for key, value in vars(child).items():
            if key in ("_parameters", "_buffers", "_modules", *_WORKING_MEMORY):
                continue
            for number, item in enumerate(value if isinstance(value, (list, tuple)) else [value]):
                if isinstance(item, torch.Tensor):
                    name = f"{prefix}{key}" if item is value else f"{prefix}{key}.{number}"
                    yield from _plain(Held(name, item, child, True))


def _plain(one: Held) -> Iterator[Held]:
    """Tensors that wrap others, such as quantised ones, as the tensors that they wrap."""
    if not is_traceable_wrapper_subclass(one.tensor):
        yield one
        return
    for key in one.tensor.__tensor_flatten__()[0]:
        inner = getattr(one.tensor, key)
        yield from _plain(Held(f"{one.name}.{key}", inner, one.owner, one.beside))


def fingerprint(module: torch.nn.Module, names: Collection[str] | None = None) -> dict[str, Print]:
    """Digest every tensor of a module, or those with the given names, where it lies."""
    return {
        one.name: Print(tuple(one.tensor.shape), one.tensor.dtype, _digest(one.tensor))
        for one in held(module)
        if names is None or one.name in names
    }


def _digest(tensor: torch.Tensor) -> TensorDigest:
    if tensor.is_meta or not tensor.numel():
        return ZERO
    values = integer_view(tensor.detach().contiguous()).reshape(-1)
    return digest_block(Region(0, (values.numel(),), (1,)), values)


def kept_beside(module: torch.nn.Module) -> dict[int, tuple[str, ...]]:
    """Memory of weights next to which a module keeps plain tensors: they may be made from them.

    Returns:
        By storage, the names of such plain tensors. Views of weights are none, nor is a tensor
        whose elements are all equal: that is a constant, or space to work in.
    """
    everything = list(held(module))
    weights = {storage_of(one.tensor) for one in everything if not one.beside}
    found: dict[int, tuple[str, ...]] = {}
    for one in everything:
        if one.beside and storage_of(one.tensor) not in weights and _varies(one.tensor):
            for weight in [*one.owner.parameters(), *one.owner.buffers()]:
                names = found.get(storage_of(weight), ())
                if one.name not in names:
                    found[storage_of(weight)] = (*names, one.name)
    return found


def _varies(tensor: torch.Tensor) -> bool:
    if not tensor.is_floating_point() or tensor.is_meta or tensor.numel() < 2:
        return False
    values = integer_view(tensor.detach().contiguous()).reshape(-1)
    return bool((values != values[0]).any())
