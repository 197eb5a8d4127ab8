"""The README's code runs as it stands."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

README = Path(__file__).parents[1] / "README.md"


def block(name: str) -> str:
    pattern = rf"<!-- executed by tests/test_readme.py: {name} -->\n```python\n(.*?)```"
    (code,) = re.findall(pattern, README.read_text(), re.DOTALL)
    return str(code)


def test_trainer_and_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=64,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
    )
    model = LlamaForCausalLM(config)
    model.save_pretrained("checkpoint")
    batches = [torch.randint(0, 64, (2, 8)) for _ in range(4)]
    names: dict[str, Any] = {
        "model": model,
        "optimizer": torch.optim.AdamW(model.parameters(), lr=1e-4),
        "batches": batches,
        "loss_of": lambda model, ids: model(input_ids=ids, labels=ids).loss,
        "prompt": batches[0][:1],
        "last": len(batches),
    }
    exec(block("trainer"), names)
    assert names["publisher"].version == len(batches)

    exec(block("server"), names)
    engine, replica = names["engine"], names["replica"]
    assert names["version"] == engine.version == replica.version == len(batches)
    served = engine.model.state_dict()
    for name, master in model.state_dict().items():
        want, have = master.bfloat16().view(torch.int16), served[name].view(torch.int16)
        assert torch.equal(want, have), name
    replica.close()


def test_the_integration_adds_at_most_five_lines() -> None:
    ours = [
        line for line in block("trainer").splitlines() if "ublish" in line or "thinwire" in line
    ]
    assert len(ours) <= 5
