"""Run by torchrun: asynchronous GRPO on every rank. Arguments: folder, checkpoint."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from thinwire.trainers.trl import DeltaWeightTransfer
from trainers._async_grpo import make_trainer
from trainers._training import served_bits


def main() -> None:
    folder, checkpoint = Path(sys.argv[1]), Path(sys.argv[2])
    transfer = DeltaWeightTransfer(folder / "bucket")
    trainer = make_trainer(folder / "out", checkpoint, transfer, max_steps=3)
    trainer.train()
    bits = served_bits(trainer.accelerator.unwrap_model(trainer.model))
    last = {name: values.tolist() for name, values in bits.items()}
    (folder / f"rank-{os.environ['RANK']}.json").write_text(json.dumps(last))


if __name__ == "__main__":
    main()
