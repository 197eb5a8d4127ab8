"""Updates applied in place to a live transformers (or any torch) module.

The module owns its memory: it is never a view of the mirror's files. Everything that can fail
(finding tensors, checking them, bringing the changes to the device) happens before generation is
held up; inside the pause is only the scatter. Ties need no care in an update: a tied weight is
one tensor in the run, and one storage in the module.
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from thinwire.digest import ZERO, TensorDigest, digest_replaced, digest_tensor, state_digest
from thinwire.disk import DiskMirror
from thinwire.engines.gate import Gate
from thinwire.errors import DigestMismatch, EnginePoisoned, Misuse, SchemaMismatch
from thinwire.mirror import Mirror, NoMirror
from thinwire.patch import Patch, StepPatch
from thinwire.schema import Schema
from thinwire.ulp import resolve
from thinwire.update import Update
from thinwire.weights import PIECE, Tensor, named_tensors

__all__ = ["TransformersEngine"]

_INTEGER = {8: torch.uint8, 16: torch.int16, 32: torch.int32, 64: torch.int64}


class TransformersEngine:
    """A module that follows a replica.

    Generate within :meth:`generating`; call :meth:`apply` for every update, from any thread.

    Args:
        model: any module whose state dict has the run's names. Not a view of the mirror's files.
        mirror: what the updates' replica keeps. The module's weights are set to what it holds;
            with a :class:`~thinwire.mirror.NoMirror` they stay, and the first update attests that
            they are those of its version.

    Raises:
        SchemaMismatch: the module lacks a tensor of the run, or has one with another shape or
            dtype, or one that the run does not update.
        Misuse: the mirror holds nothing yet.

    Attributes:
        version: of the weights that generate now.
    """

    def __init__(self, model: torch.nn.Module, mirror: Mirror) -> None:
        self.model = model
        self._mirror = mirror
        self._gate = Gate()
        self._poisoned = False
        self.version = -1
        self.schema = Schema(())
        self._tensors: list[Tensor] = []
        self._digests: list[TensorDigest] = []
        if not isinstance(mirror, NoMirror):
            self._bind(_held_schema(mirror))
            self.reload()

    def _bind(self, schema: Schema) -> None:
        self._tensors, self.schema = _match(self.model, schema), schema

    @classmethod
    def load(cls, mirror: DiskMirror, **kwargs: Any) -> TransformersEngine:
        """A causal language model made from a mirror's folder, and its engine.

        Args:
            kwargs: for ``AutoModelForCausalLM.from_pretrained``; ``dtype`` defaults to the run's
                most common one, since the configuration may name the trainer's.
        """
        from transformers import AutoModelForCausalLM

        if not isinstance(mirror, DiskMirror):
            raise Misuse(
                f"a {type(mirror).__name__} is no mirror on disk",
                hint="pass replica.mirror of a replica with a mirror folder",
            )
        if not (mirror.folder / "config.json").exists():
            raise Misuse(
                f"{mirror.folder} has no config.json",
                hint="publish with assets=<checkpoint folder>, or make the module yourself",
            )
        kwargs.setdefault("dtype", _common_dtype(_held_schema(mirror)))
        return cls(_own(AutoModelForCausalLM.from_pretrained(mirror.folder, **kwargs)), mirror)

    @property
    def paused_s(self) -> float:
        """Seconds in which nothing could be generated, since the start."""
        return self._gate.closed_s

    @contextlib.contextmanager
    def generating(self) -> Iterator[int]:
        """Hold the weights still; yields their version.

        Raises:
            EnginePoisoned: an update was applied in part; :meth:`reload` first.
        """
        with self._gate.shared():
            if self._poisoned:
                raise EnginePoisoned(f"version {self.version + 1} was applied in part")
            yield self.version

    def apply(self, update: Update) -> None:
        """Move the module to the update's version; a version it has already is ignored.

        Raises:
            SchemaMismatch: a patch fits no tensor; nothing was changed.
            EnginePoisoned: the update may be in there in part; nothing is generated until
                :meth:`reload`.
        """
        if self._poisoned:
            raise EnginePoisoned("an earlier update was applied in part")
        if update.version <= self.version:
            return
        if isinstance(self._mirror, NoMirror):
            self._apply_alone(update, self._mirror)
        elif update.patches is None or update.version != self.version + 1:
            self.reload()
        else:
            patches = [_with_bits(patch) for patch in update.patches]
            self._scatter(update.version, [_stage(self._tensors[p.ordinal], p) for p in patches])

    def _apply_alone(self, update: Update, mirror: NoMirror) -> None:
        """Without a mirror: the module's own bits are the base, and prove the update."""
        if update.patches is None:
            self._bind(mirror.schema)
            digests = _digests_of(self._tensors)
            if state_digest(self.schema, digests) != update.commit.digest:
                raise DigestMismatch(
                    f"the module does not hold version {update.version}",
                    hint="without a mirror, load that version's checkpoint into the module first",
                )
            self._digests, self.version = digests, update.version
            return
        if update.version != self.version + 1:
            raise Misuse(f"the module holds version {self.version}, not {update.version - 1}")
        digests, staged = list(self._digests), []
        for patch in update.patches:
            tensor = self._tensors[patch.ordinal]
            old = _gather(tensor, patch)
            known = resolve(patch, old) if isinstance(patch, StepPatch) else patch
            digests[patch.ordinal] += digest_replaced(known, old)
            staged.append(_stage(tensor, known))
        if state_digest(self.schema, digests) != update.commit.digest:
            raise DigestMismatch(f"version {update.version} does not follow from the module's bits")
        self._scatter(update.version, staged)
        self._digests = digests

    def _scatter(self, version: int, staged: Sequence[_Change]) -> None:
        with self._gate.exclusive():
            try:
                for change in staged:
                    change.scatter()
            except BaseException as error:
                self._poisoned = True
                raise EnginePoisoned(f"version {version} was applied in part") from error
            self.version = version

    def reload(self) -> None:
        """Set every tensor to what the mirror holds; heals a poisoned engine."""
        held = self._mirror.held
        if isinstance(self._mirror, NoMirror):
            raise Misuse("there is no mirror to reload from", hint="make a new engine")
        if held is None:
            raise Misuse("the mirror holds nothing yet", hint="call replica.sync() first")
        self.schema.require_same(self._mirror.schema)
        self._tensors = _match(self.model, self.schema)
        with self._gate.exclusive():
            self._poisoned = True  # until every tensor is in and has proved right
            with self._mirror.reading():
                for tensor, bits in zip(self._tensors, self._mirror.tensors):
                    _fill(tensor, bits)
                held = self._mirror.held or held
                expected = state_digest(self.schema, self._mirror.digests)
            if state_digest(self.schema, _digests_of(self._tensors)) != expected:
                raise DigestMismatch(f"the module does not hold version {held.version}")
            self.version = held.version
            self._poisoned = False

    def attest(self) -> str:
        """State digest of the weights in the live module, read element by element.

        Raises:
            SchemaMismatch: the module has been given other parameters, which do not fit.
        """
        with self._gate.shared():
            # what the module computes with now, not what it had when the engine was made
            return state_digest(self.schema, _digests_of(_match(self.model, self.schema)))


def _digests_of(tensors: Sequence[Tensor]) -> list[TensorDigest]:
    digests = []
    for tensor in tensors:
        total = ZERO
        for start, bits in tensor.pieces():
            total += digest_tensor(bits, start=start)
        digests.append(total)
    return digests


def _held_schema(mirror: Mirror) -> Schema:
    if mirror.held is None:
        raise Misuse("the mirror holds nothing yet", hint="call replica.sync() first")
    return mirror.schema


def _common_dtype(schema: Schema) -> torch.dtype:
    sizes: collections.Counter[str] = collections.Counter()
    for spec in schema:
        if spec.dtype.is_float:
            sizes[spec.dtype.torch_name] += spec.numel
    name = sizes.most_common(1)[0][0] if sizes else "float32"
    dtype: torch.dtype = getattr(torch, name)
    return dtype


def _match(model: torch.nn.Module, schema: Schema) -> list[Tensor]:
    """The module's tensors in schema order; what the run does not name must be tied to one."""
    found = named_tensors(model)
    matched = []
    for spec in schema:
        tensor = found.get(spec.name)
        if tensor is None or (tensor.dtype, tensor.shape) != (spec.dtype, spec.shape):
            has = f"{tensor.dtype} {list(tensor.shape)}" if tensor else "nothing"
            raise SchemaMismatch(f"the run has {spec}, the module {has}")
        matched.append(tensor)
    stored = {tensor.identity() for tensor in matched}
    for name, tensor in found.items():
        if name not in schema and tensor.numel and tensor.identity() not in stored:
            raise SchemaMismatch(f"the run does not update the module's {name}")
    return matched


def _own(model: torch.nn.Module) -> torch.nn.Module:
    """Give every tensor memory of its own: a loader may have left views of mapped files."""
    copies: dict[tuple[int, torch.Size], torch.Tensor] = {}
    with torch.no_grad():
        for tensor in [*model.parameters(), *model.buffers()]:
            key = (tensor.data_ptr(), tensor.shape)
            tensor.data = copies.setdefault(key, tensor.data.clone())
    return model


@dataclass(frozen=True)
class _Change:
    """A patch on its device: where to write, and what."""

    view: torch.Tensor
    index: tuple[torch.Tensor, ...]
    bits: torch.Tensor

    def scatter(self) -> None:
        self.view.index_put_(self.index, self.bits)


def _integer_view(tensor: Tensor) -> torch.Tensor:
    view: torch.Tensor = tensor.value.detach().view(_INTEGER[tensor.dtype.width])
    return view.view(-1) if view.is_contiguous() else view


def _to_torch(bits: np.ndarray[Any, Any], device: torch.device) -> torch.Tensor:
    signed = bits if bits.itemsize == 1 else bits.view(f"<i{bits.itemsize}")
    return torch.from_numpy(signed.copy()).to(device)


def _stage(tensor: Tensor, patch: Patch) -> _Change:
    if patch.spec.shape != tensor.shape or patch.spec.dtype != tensor.dtype:
        raise SchemaMismatch(f"a patch of {patch.spec} does not fit the module")
    view = _integer_view(tensor)
    positions = torch.from_numpy(patch.positions.astype(np.int64)).to(view.device)
    index = (positions,) if view.ndim == 1 else torch.unravel_index(positions, view.shape)
    return _Change(view, tuple(index), _to_torch(patch.bits, view.device))


def _gather(tensor: Tensor, patch: Patch | StepPatch) -> np.ndarray[Any, Any]:
    """``(n,)`` the module's bits at a patch's positions."""
    view = _integer_view(tensor)
    positions = torch.from_numpy(patch.positions.astype(np.int64)).to(view.device)
    index = (positions,) if view.ndim == 1 else torch.unravel_index(positions, view.shape)
    found: np.ndarray[Any, Any] = view[tuple(index)].cpu().numpy().view(tensor.dtype.bits)
    return found


def _with_bits(patch: Patch | StepPatch) -> Patch:
    if isinstance(patch, StepPatch):
        raise Misuse(f"{patch.name}: steps are for engines without a mirror")
    return patch


def _fill(tensor: Tensor, bits: np.ndarray[Any, Any]) -> None:
    view = _integer_view(tensor)
    if view.ndim != 1 or not view.is_contiguous():
        view.copy_(_to_torch(bits, view.device).view(view.shape))
        return
    for start in range(0, bits.size, PIECE):
        view[start : start + PIECE] = _to_torch(bits[start : start + PIECE], view.device)
