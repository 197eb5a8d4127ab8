"""A trainer whose tensors are bits, and what an engine that follows it has to hold."""

from __future__ import annotations

from pathlib import Path

from engines._server import Checkpoint
from thinwire import Publisher, open_bucket
from thinwire.engines.host import HostMirror, open_host_mirror
from thinwire.weights import FlatTensor


class Run:
    """A trainer whose tensors are bits, and the folders around it."""

    def __init__(self, root: Path, url: str = "", state: Checkpoint | None = None) -> None:
        self.root = root
        self.url = url or str(root / "bucket")
        root.mkdir(exist_ok=True)
        self.states = [state or Checkpoint.random(1)]
        self.base = root / "base"
        self.save(self.base)
        self.publisher = Publisher(open_bucket(self.url), self.source, assets=self.base)

    @property
    def state(self) -> Checkpoint:
        return self.states[-1]

    @property
    def source(self) -> list[tuple[str, FlatTensor]]:
        return [
            (spec.name, FlatTensor(bits, spec.dtype, spec.shape))
            for spec, bits in zip(self.state.schema, self.state.tensors)
        ]

    def save(self, folder: Path) -> None:
        from safetensors.torch import save_file

        folder.mkdir()
        save_file(
            {name: tensor.clone() for name, tensor in self.state.pairs()},
            str(folder / "model.safetensors"),
        )
        (folder / "config.json").write_text("{}")

    def step(self, density: float = 0.1) -> int:
        version = len(self.states)
        patches = self.state.patches(Checkpoint.random(100 + version), density, seed=version)
        self.states.append(self.state.patched(patches))
        self.publisher.publish(self.source, step=version).result()
        return version

    def host(self, name: str = "mirror") -> HostMirror:
        return open_host_mirror(self.url, self.root / name)
