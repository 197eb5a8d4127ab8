"""What a set of weights is, bit for bit: computed the same way from three places that share no code
path. A trainer's masters are cast by torch, apart from the publisher and its baseline; a server
reads the tensors of its live module; a mirror is read from disk with plain safetensors.
"""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Fingerprint:
    """Of weights in bf16.

    Attributes:
        state_digest: thinwire's digest of the state, as in commits.
        sha256: over the bytes of all tensors, in the order of their names' UTF-8 bytes.
        tensors, parameters: how many there are, ties counted once.
    """

    state_digest: str
    sha256: str
    tensors: int
    parameters: int


def fingerprint(model: torch.nn.Module) -> Fingerprint:
    """The fingerprint of a module's parameters, cast by torch to bf16 where they are wider."""
    import torch

    from thinwire.digest import digest_tensor, state_digest
    from thinwire.schema import schema_of

    named = dict(model.named_parameters())
    schema = schema_of([(n, "BF16", tuple(p.shape)) for n, p in named.items()])
    total = hashlib.sha256()
    digests = []
    for spec in schema:
        served = named[spec.name].detach().to(torch.bfloat16).contiguous().cpu()
        bits = served.reshape(-1).view(torch.int16).numpy().view("<u2")
        total.update(bits.data)
        digests.append(digest_tensor(bits))
    return Fingerprint(state_digest(schema, digests), total.hexdigest(), len(schema), schema.numel)


def folder_sha256(folder: Path) -> str:
    """SHA-256 over all tensors' bytes in a checkpoint folder, in the order of their names.

    Raises:
        OSError, ValueError: there is no readable checkpoint.
    """
    from safetensors import deserialize

    tensors: dict[str, Any] = {}
    for shard in sorted(folder.glob("*.safetensors")):
        found = deserialize(shard.read_bytes())  # type: ignore[no-untyped-call]
        tensors.update(found)
    if not tensors:
        raise ValueError(f"{folder} holds no safetensors file")
    total = hashlib.sha256()
    for name in sorted(tensors, key=str.encode):
        total.update(tensors[name]["data"])
    return total.hexdigest()
