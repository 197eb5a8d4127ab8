"""The model under its wrappers; what is spread over processes is refused."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch
from torch.distributed.fsdp import fully_shard

from thinwire.errors import Misuse
from thinwire.trainers.models import whole_model
from trainers._training import tiny_model


@pytest.fixture
def process_group() -> Iterator[None]:
    store = torch.distributed.HashStore()
    torch.distributed.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    torch.distributed.destroy_process_group()


def test_wrappers_are_taken_off(process_group: None) -> None:
    model = tiny_model()
    assert whole_model(model) is model
    assert whole_model(torch.nn.DataParallel(model)) is model
    assert whole_model(torch.compile(model)) is model
    parallel = torch.nn.parallel.DistributedDataParallel(model)
    assert whole_model(parallel) is model
    assert whole_model(torch.compile(parallel)) is model


def test_fsdp2_is_refused(process_group: None) -> None:
    model = tiny_model()
    fully_shard(model, mesh=torch.distributed.init_device_mesh("cpu", (1,)))
    with pytest.raises(Misuse, match="sharded by DTensor") as caught:
        whole_model(model)
    assert "full state dict" in caught.value.hint


def test_zero3_is_refused() -> None:
    model = tiny_model()
    # what DeepSpeed leaves of a parameter whose elements are elsewhere
    parameter = next(model.parameters())
    parameter.data = torch.empty(0)
    parameter.ds_status = "NOT_AVAILABLE"
    with pytest.raises(Misuse, match="ZeRO-3"):
        whole_model(model)


def test_adapters_are_refused() -> None:
    class PeftModel(torch.nn.Module):
        peft_config: dict[str, object] = {}  # noqa: RUF012 - as in peft

        def merge_adapter(self) -> None: ...

    with pytest.raises(Misuse, match="adapters"):
        whole_model(PeftModel())
