"""Run by torchrun: a Trainer on every rank. Arguments: folder, then plain or fsdp."""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path
from typing import Any

from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from transformers import TrainerCallback

from thinwire.errors import Misuse
from thinwire.trainers.callback import PublishCallback
from trainers._training import Recorder, make_trainer


class Shard(TrainerCallback):
    """Spreads the model over the ranks, as FSDP2 does; accelerate itself does so on GPUs only."""

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        fully_shard(kwargs["model"], mesh=init_device_mesh("cpu", (2,)))


def main() -> None:
    folder, how = Path(sys.argv[1]), sys.argv[2]
    rank = os.environ["RANK"]
    recorder = Recorder()
    callback = PublishCallback(folder / "bucket")
    first = Shard() if how == "fsdp" else recorder
    trainer = make_trainer(folder / "out", first, max_steps=3)
    callback.attach(trainer)
    told = ""
    try:
        trainer.train()
    except Misuse as error:
        told = str(error)
    last = {name: bits.tolist() for name, bits in recorder.steps.get(3, {}).items()}
    opened = trainer.accelerator.distributed_type.name
    report = {"told": told, "last": last, "how": opened}
    (folder / f"rank-{rank}.json").write_text(json.dumps(report))


if __name__ == "__main__":
    main()
