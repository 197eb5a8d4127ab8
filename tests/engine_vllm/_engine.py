"""A vLLM engine in a process of its own, told what to do line by line: run by the tests.

It must be the process's first user of numba: vLLM's search for kernels stumbles over llvmlite's
library object if that is loaded before the engine.
"""

from __future__ import annotations

import json
import os
import sys
from typing import Any


def main() -> None:
    options = json.loads(sys.argv[1])
    out = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what libraries print is no answer

    def answer(value: Any) -> None:
        out.write(json.dumps(value) + "\n")
        out.flush()

    from vllm import LLM

    try:
        llm = LLM(
            enforce_eager=True,
            max_model_len=128,
            max_num_seqs=4,
            gpu_memory_utilization=0.1,
            seed=0,
            **{"dtype": "bfloat16", **options},
        )
    except Exception as error:
        answer({"failed": f"{type(error).__name__}: {error}"})
        raise
    answer({"ready": True})
    for line in sys.stdin:
        request = json.loads(line)
        try:
            answer(act(llm, **request))
        except Exception as error:  # noqa: BLE001 - told to the test
            answer({"failed": f"{type(error).__name__}: {error}"})


def act(llm: Any, do: str, **options: Any) -> Any:
    from thinwire.engines.vllm import offline

    if do == "generate":
        return generate(llm, **options)
    if do == "update":
        return offline.update_llm(llm, **options)
    if do == "interface":
        llm.start_weight_update()
        llm.update_weights({"update_info": options})
        llm.finish_weight_update()
        llm.reset_prefix_cache()
        return {}
    if do == "open":
        llm.init_weight_transfer_engine({"init_info": options})
        return {}
    if do == "checksums":
        from vllm.v1.worker.gpu_worker import Worker

        merged: dict[str, str] = {}
        if not hasattr(Worker, "compute_weight_checksums"):
            return merged  # before 0.32
        for rank, found in enumerate(llm.collective_rpc("compute_weight_checksums")):
            merged.update({f"{rank}/{name}": value for name, value in found.items()})
        return merged
    if do == "named":
        return llm.get_weight_version()
    asked = {
        "attest": offline.attest_llm,
        "heal": offline.heal_llm,
        "status": offline.llm_status,
    }
    return asked[do](llm)


def generate(llm: Any, prompts: list[str], tokens: int = 12) -> list[Any]:
    from vllm import SamplingParams

    params = SamplingParams(max_tokens=tokens, temperature=0, logprobs=3, ignore_eos=True)
    found = []
    for output in llm.generate(prompts, params, use_tqdm=False):
        (completion,) = output.outputs
        found.append(
            [
                list(completion.token_ids),
                [
                    sorted((token, entry.logprob) for token, entry in step.items())
                    for step in completion.logprobs
                ],
            ]
        )
    return found


if __name__ == "__main__":
    main()
