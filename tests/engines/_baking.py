"""A server that makes something else of its weights once they are loaded, and its reloader."""

from __future__ import annotations

from collections.abc import Iterable

import torch

from engines._server import Server


class Baking(Server):
    """Packs its experts in place, quantises a matrix, and keeps a product beside a weight."""

    def __init__(self, rank: int = 0, ranks: int = 1, device: str = "cpu") -> None:
        super().__init__(rank, ranks, device)
        self.attention = torch.nn.Module()
        self.attention.weight = torch.nn.Parameter(self.norm.data.clone(), requires_grad=False)
        self.mlp = torch.nn.Module()
        self.mlp.weight = torch.nn.Parameter(self.down.data.clone(), requires_grad=False)
        self.mlp.bias = torch.nn.Parameter(self.bias.data.clone(), requires_grad=False)
        del self.norm, self.down, self.bias
        self.experts = torch.nn.Module()
        self.experts.w2 = torch.nn.Parameter(self.w2.data.clone(), requires_grad=False)
        del self.w2

    # the loader's names
    norm = property(lambda self: self.attention.weight)
    down = property(lambda self: self.mlp.weight)
    bias = property(lambda self: self.mlp.bias)
    w2 = property(lambda self: self.experts.w2)

    def bake(self, *, pack: bool = True, see: bool = True) -> None:
        """What an engine does once a checkpoint is loaded."""
        packed = self.w2.data.reshape(2, 4, 2, -1).transpose(2, 3).reshape(self.w2.shape)
        if pack:
            self.w2.data = packed.contiguous()
        self.attention.doubled = self.norm.data.float() * 2
        values = self.down.data.float().nan_to_num(0, 0, 0).clamp(-1e30, 1e30)
        scale = values.abs().amax().reshape(1) / 127
        self.mlp.register_buffer("scale", scale)
        eight = (values / scale).round().to(torch.int8)
        if see:
            self.mlp.weight = torch.nn.Parameter(eight, requires_grad=False)
        else:
            self.mlp.scale.fill_(1)
            self.mlp.hidden = [[eight]]  # a handle, as far as anyone can see
            self.mlp.weight = torch.nn.Parameter(torch.empty(0), requires_grad=False)


class Reloads:
    """Loads a fresh server, and copies what came of it; or does so in a wrong way."""

    def __init__(self, server: Baking, wrong: str = "") -> None:
        self._server = server
        self.wrong = wrong
        self.loads = 0

    def load(
        self, weights: Iterable[tuple[str, torch.Tensor]], filled: set[str] | None = None
    ) -> None:
        self.loads += 1
        server = self._server
        fresh = Baking(server.rank, server.ranks)
        if filled is not None:
            filled.update(name for name, _ in fresh.named_parameters())
        for count, pair in enumerate(weights):
            if self.wrong == "fails" and count == 9:
                raise RuntimeError("device lost")
            fresh.load_weights([pair])
        fresh.bake(pack=self.wrong != "forgets", see=self.wrong != "hides")
        if self.wrong == "keeps":
            return
        for name, tensor in [*fresh.named_parameters(), *fresh.named_buffers()]:
            path, _, key = name.rpartition(".")
            there = server.get_submodule(path)
            if self.wrong == "exchanges":
                getattr(there, key).data = tensor.data
            else:
                getattr(there, key).data.copy_(tensor)
        if self.wrong != "stale":
            server.attention.doubled = fresh.attention.doubled
