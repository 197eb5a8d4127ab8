"""The engine changes a live module in place, wholly or not at all, and never while it generates."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from thinwire import DiskMirror, MemoryMirror, Publisher, Replica, open_bucket
from thinwire.engines.gate import Gate
from thinwire.engines.transformers import TransformersEngine
from thinwire.errors import DigestMismatch, EnginePoisoned, Misuse, SchemaMismatch


def tiny_llama(*, tied: bool = True, seed: int = 0) -> LlamaForCausalLM:
    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        tie_word_embeddings=tied,
    )
    # unlike .to(bfloat16), this leaves the rotary frequencies in float32, as loading does
    return LlamaForCausalLM._from_config(config, dtype=torch.bfloat16)


def nudge(model: torch.nn.Module, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in model.parameters():
            noise = torch.randn(parameter.shape, generator=generator) * 1e-3
            parameter.add_(noise.to(parameter.dtype))


def bits_of(model: torch.nn.Module) -> dict[str, bytes]:
    return {
        name: tensor.detach().contiguous().view(-1).view(torch.uint8).numpy().tobytes()
        for name, tensor in model.state_dict().items()
    }


@pytest.fixture
def trainer(tmp_path: Path) -> Iterator[tuple[Publisher, LlamaForCausalLM]]:
    model = tiny_llama()
    model.save_pretrained(tmp_path / "checkpoint")
    with Publisher(
        open_bucket(tmp_path / "bucket"), model, assets=tmp_path / "checkpoint"
    ) as publisher:
        yield publisher, model


@pytest.fixture
def replica(trainer: tuple[Publisher, LlamaForCausalLM], tmp_path: Path) -> Iterator[Replica]:
    with Replica(open_bucket(tmp_path / "bucket"), tmp_path / "mirror") as replica:
        replica.sync()
        yield replica


def publish(publisher: Publisher, model: torch.nn.Module, seed: int) -> None:
    nudge(model, seed)
    publisher.publish(model, step=seed).result()


def load(replica: Replica) -> TransformersEngine:
    mirror = replica.mirror
    if not isinstance(mirror, DiskMirror):
        raise TypeError
    return TransformersEngine.load(mirror, dtype=torch.bfloat16)


def test_updates_reach_the_live_module_bit_for_bit(
    trainer: tuple[Publisher, LlamaForCausalLM], replica: Replica
) -> None:
    publisher, model = trainer
    engine = load(replica)
    assert bits_of(engine.model) == bits_of(model)
    for seed in range(1, 4):
        publish(publisher, model, seed)
        (update,) = replica.sync()
        engine.apply(update)
        assert engine.version == seed
        assert bits_of(engine.model) == bits_of(model)
        assert engine.attest() == update.commit.digest


def test_tied_weights_stay_one_tensor(
    trainer: tuple[Publisher, LlamaForCausalLM], replica: Replica
) -> None:
    publisher, model = trainer
    engine = load(replica)
    publish(publisher, model, 1)
    for update in replica.sync():
        engine.apply(update)
    head, embedding = engine.model.lm_head.weight, engine.model.model.embed_tokens.weight
    assert head.data_ptr() == embedding.data_ptr()
    assert torch.equal(head, model.lm_head.weight)


def test_logits_equal_the_trainers(
    trainer: tuple[Publisher, LlamaForCausalLM], replica: Replica
) -> None:
    publisher, model = trainer
    engine = load(replica)
    ids = torch.arange(20).view(2, 10)
    publish(publisher, model, 1)
    for update in replica.sync():
        engine.apply(update)
    with torch.no_grad():
        assert torch.equal(engine.model(ids).logits, model(ids).logits)


def test_the_module_is_no_view_of_the_mirror(
    trainer: tuple[Publisher, LlamaForCausalLM], replica: Replica
) -> None:
    publisher, model = trainer
    engine = load(replica)
    before = bits_of(engine.model)
    publish(publisher, model, 1)
    (update,) = replica.sync()
    assert bits_of(engine.model) == before
    engine.apply(update)
    assert bits_of(engine.model) != before


def test_a_gap_or_an_anchor_reloads_from_the_mirror(
    trainer: tuple[Publisher, LlamaForCausalLM], replica: Replica, tmp_path: Path
) -> None:
    publisher, model = trainer
    engine = load(replica)
    for seed in range(1, 4):
        publish(publisher, model, seed)
    updates = replica.sync()
    engine.apply(updates[-1])  # versions 1 and 2 were never shown to the engine
    assert engine.version == 3
    assert bits_of(engine.model) == bits_of(model)
    engine.apply(updates[0])  # old news
    assert engine.version == 3
    assert bits_of(engine.model) == bits_of(model)


def test_strided_parameters_and_every_width() -> None:
    class Odd(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.turned = torch.nn.Parameter(torch.randn(6, 5).t())
            self.scalar = torch.nn.Parameter(torch.tensor(1.5))
            self.register_buffer("mask", torch.rand(9) > 0.5)
            self.register_buffer("steps", torch.arange(4))
            self.register_buffer("eight", torch.randn(7).to(torch.float8_e4m3fn))
            self.register_buffer("every_other", torch.arange(10, dtype=torch.int32)[::2])

    torch.manual_seed(0)
    source, target = Odd(), Odd()
    bucket = open_bucket("memory://")
    publisher = Publisher(bucket, source)
    replica = Replica(bucket, MemoryMirror())
    replica.sync()
    engine = TransformersEngine(target, replica.mirror)
    assert bits_of(target) == bits_of(source)
    with torch.no_grad():
        source.turned[2, 3] += 1
        source.scalar += 1
        source.mask.logical_not_()
        source.steps[3] = -1
        source.eight.view(torch.uint8)[6] ^= 1
        source.every_other[4] = 77
    publisher.publish(source).result()
    (update,) = replica.sync()
    engine.apply(update)
    assert not target.turned.is_contiguous()
    assert bits_of(target) == bits_of(source)


def test_what_does_not_fit_is_refused(
    trainer: tuple[Publisher, LlamaForCausalLM], replica: Replica
) -> None:
    with pytest.raises(SchemaMismatch, match="F32"):
        TransformersEngine(tiny_llama().float(), replica.mirror)
    with pytest.raises(SchemaMismatch, match="does not update"):
        TransformersEngine(tiny_llama(tied=False), replica.mirror)
    with pytest.raises(SchemaMismatch, match="nothing"):
        TransformersEngine(torch.nn.Linear(2, 2), replica.mirror)
    with pytest.raises(Misuse, match="holds nothing"):
        TransformersEngine(tiny_llama(), MemoryMirror())


def test_a_failed_scatter_poisons_until_reloaded(
    trainer: tuple[Publisher, LlamaForCausalLM],
    replica: Replica,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    publisher, model = trainer
    engine = load(replica)
    publish(publisher, model, 1)
    (update,) = replica.sync()
    from thinwire.engines import transformers as module

    real, calls = module._Change.scatter, iter(range(100))

    def fail_in_the_middle(change: object) -> None:
        if next(calls) == 3:
            raise RuntimeError("device lost")
        real(change)  # type: ignore[arg-type]

    with monkeypatch.context() as patch:
        patch.setattr(module._Change, "scatter", fail_in_the_middle)
        with pytest.raises(EnginePoisoned):
            engine.apply(update)
    with pytest.raises(EnginePoisoned), engine.generating():
        pass
    with pytest.raises(EnginePoisoned):
        engine.apply(update)
    engine.reload()
    with engine.generating() as version:
        assert version == 1
    assert bits_of(engine.model) == bits_of(model)


def test_a_module_that_does_not_keep_what_it_is_given_is_caught(
    replica: Replica, monkeypatch: pytest.MonkeyPatch
) -> None:
    from thinwire.engines import transformers as module

    real = module._fill

    def lossy(tensor: object, bits: np.ndarray) -> None:
        spoiled = bits.copy()
        if spoiled.size > 500:
            spoiled[17] ^= 1
        real(tensor, spoiled)  # type: ignore[arg-type]

    monkeypatch.setattr(module, "_fill", lossy)
    with pytest.raises(DigestMismatch):
        TransformersEngine(tiny_llama(), replica.mirror)


def test_an_update_waits_for_generation_and_holds_it_up() -> None:
    gate = Gate()
    order: list[str] = []
    inside, leave = threading.Event(), threading.Event()

    def generate() -> None:
        with gate.shared():
            inside.set()
            leave.wait(10)
            order.append("generated")

    def update() -> None:
        with gate.exclusive():
            order.append("updated")
            time.sleep(0.05)

    def generate_later() -> None:
        with gate.shared():
            order.append("generated later")

    threads = [threading.Thread(target=generate)]
    threads[0].start()
    inside.wait(10)
    threads.append(threading.Thread(target=update))
    threads[1].start()
    while not gate._waiting:
        time.sleep(0.001)
    threads.append(threading.Thread(target=generate_later))
    threads[2].start()
    leave.set()
    for thread in threads:
        thread.join(10)
    assert order == ["generated", "updated", "generated later"]
    assert 0.04 < gate.closed_s < 5


def test_without_a_mirror_steps_are_applied_to_the_modules_own_bits(tmp_path: Path) -> None:
    trainer = tiny_llama()
    served = tiny_llama()  # the same seed: it holds version 0
    bucket = open_bucket(tmp_path / "bucket")
    publisher = Publisher(bucket, trainer, codec="packed")
    replica = Replica(bucket, mirror=None)
    engine = TransformersEngine(served, replica.mirror)
    for update in replica.sync():
        engine.apply(update)
    for seed in range(1, 4):
        publish(publisher, trainer, seed)
        for update in replica.sync():
            engine.apply(update)
        assert engine.version == seed
        assert bits_of(served) == bits_of(trainer)
    with pytest.raises(Misuse):
        replica.mirror.rescan()
    with pytest.raises(Misuse):
        engine.reload()


def test_without_a_mirror_wrong_weights_are_found_before_anything_changes(tmp_path: Path) -> None:
    trainer, served = tiny_llama(), tiny_llama()
    bucket = open_bucket(tmp_path / "bucket")
    publisher = Publisher(bucket, trainer, codec="packed")
    replica = Replica(bucket, mirror=None)
    (first,) = replica.sync()
    with pytest.raises(DigestMismatch):
        TransformersEngine(tiny_llama(seed=1), replica.mirror).apply(first)
    engine = TransformersEngine(served, replica.mirror)
    engine.apply(first)
    publish(publisher, trainer, 1)
    (update,) = replica.sync()
    with torch.no_grad():
        patch = update.patches[0]  # rot, at a place that changes
        tensor = dict(served.named_parameters())[patch.name]
        tensor.view(torch.int16).view(-1)[int(patch.positions[0])] ^= 1
    before = bits_of(served)
    with pytest.raises(DigestMismatch):
        engine.apply(update)
    assert bits_of(served) == before
    assert engine.version == 0


def test_compact_payloads_need_a_mirror(tmp_path: Path) -> None:
    trainer = tiny_llama()
    bucket = open_bucket(tmp_path / "bucket")
    publisher = Publisher(bucket, trainer, codec="compact")
    replica = Replica(bucket, mirror=None)
    replica.sync()
    publish(publisher, trainer, 1)
    with pytest.raises(Misuse, match="only be read with a mirror"):
        replica.sync()


def test_parameters_replaced_behind_the_engines_back_are_attested(tmp_path: Path) -> None:
    trainer, served = tiny_llama(), tiny_llama(seed=1)
    bucket = open_bucket(tmp_path / "bucket")
    publisher = Publisher(bucket, trainer)
    replica = Replica(bucket, MemoryMirror())
    replica.sync()
    engine = TransformersEngine(served, replica.mirror)
    norm = served.model.norm
    norm.weight = torch.nn.Parameter(torch.zeros_like(norm.weight))
    publish(publisher, trainer, 1)
    (update,) = replica.sync()
    engine.apply(update)
    assert engine.attest() != update.commit.digest
    engine.reload()
    assert engine.attest() == update.commit.digest
    assert bits_of(served) == bits_of(trainer)
    served.to(torch.float32)
    with pytest.raises(SchemaMismatch):
        engine.attest()


def test_loading_says_what_a_mirror_lacks(tmp_path: Path) -> None:
    bucket = open_bucket(tmp_path / "bucket")
    Publisher(bucket, tiny_llama())  # no assets
    with Replica(bucket, tmp_path / "mirror") as replica:
        replica.sync()
        with pytest.raises(Misuse, match=r"config\.json"):
            load(replica)
    with pytest.raises(Misuse, match="no mirror on disk"):
        TransformersEngine.load("mirror")  # type: ignore[arg-type]
