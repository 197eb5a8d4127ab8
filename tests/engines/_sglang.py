"""SGLang's interface for weight updates, recorded: what was read in its source, and no more.

Not SGLang. Each part names the file under ``python/sglang/srt`` that it follows. Read in
sgl-project/sglang itself, at commits and not at a release: both ``weight_updater.py`` (00a2ca2e,
027814ef), ``parallel_state.py`` (0005973a), ``scheduler_update_weights_mixin.py`` (018c9109, for
``sessions=False``), and ``docs/advanced_features/sglang_for_rl.md`` (067bfe93). All else was read
in excerpts and copies whose release is not known.
"""

from __future__ import annotations

import base64
import importlib
import io
import json
import pickle
import sys
import threading
import types
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch

from servers.ports import free_port

# utils/common.py: SafeUnpickler.ALLOWED_MODULE_PREFIXES, as far as it matters here
_ALLOWED = ("builtins.", "collections.", "copyreg.", "torch.", "multiprocessing.reduction.")


class SafeUnpickler(pickle.Unpickler):
    """utils/common.py; MultiprocessingSerializer.deserialize decodes base64 before it."""

    def find_class(self, module: str, name: str) -> Any:
        if not (module + ".").startswith(_ALLOWED):
            raise RuntimeError(f"{module}.{name} is blocked")
        self.named.add(f"{module}.{name}")
        return super().find_class(module, name)

    def __init__(self, data: bytes) -> None:
        super().__init__(io.BytesIO(data))
        self.named: set[str] = set()


def deserialize(text: str) -> Any:
    """utils/common.py: MultiprocessingSerializer.deserialize."""
    return SafeUnpickler(base64.b64decode(text, validate=True)).load()


def dynamic_import(path: str) -> Any:
    """utils/common.py."""
    module, _, name = path.rpartition(".")
    return getattr(importlib.import_module(module), name)


def install_distributed(patch: pytest.MonkeyPatch) -> None:
    """distributed/parallel_state.py: GroupCoordinator has these three attributes."""
    group = types.SimpleNamespace(world_size=1, rank_in_group=0, cpu_group=None)
    module = types.ModuleType("sglang.srt.distributed")
    module.get_tp_group = lambda: group  # type: ignore[attr-defined]
    for name in ("sglang", "sglang.srt"):
        patch.setitem(sys.modules, name, types.ModuleType(name))
    patch.setitem(sys.modules, "sglang.srt.distributed", module)


class Recorded:
    """A server with one worker.

    Attributes:
        dead: what the scheduler raised: the parent process ends then (managers/scheduler.py,
            run_scheduler_process).
        stale: whether the cache holds what old weights computed.
        paused, weight_version: as the server would say.
        paths: of every request.
    """

    def __init__(self, model: Any, *, sessions: bool = True, pauses: bool = True) -> None:
        self.model, self.sessions, self.pauses = model, sessions, pauses
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self.dead: BaseException | None = None
        self.paused = self.stale = self.open = self.waiting = False
        self.weight_version = "default"
        self.paths: list[str] = []
        self.info: dict[str, Any] = {
            "tp_size": 1,
            "pp_size": 1,
            "dp_size": 1,
            "nnodes": 1,
            "speculative_algorithm": None,
            "custom_weight_loader": ["thinwire.engines.sglang.load"],
        }

    def __enter__(self) -> Recorded:
        self._http = _Http(("127.0.0.1", self.port), _Handler)
        self._http.owner = self
        threading.Thread(target=self._http.serve_forever, args=(0.02,), daemon=True).start()
        return self

    def __exit__(self, *_: object) -> None:
        self._http.shutdown()
        self._http.server_close()

    # --- entrypoints/http_server.py -------------------------------------------------------

    def handle(self, path: str, body: dict[str, Any]) -> tuple[int, Any]:
        self.paths.append(path)
        known = {
            "/get_server_info": lambda: (200, self.info),  # /server_info in later releases
            "/flush_cache": self.flush,
            "/update_weights_from_tensor": lambda: self.update(body),
            "/update_weight_version": lambda: self.name(body),
        }
        if self.pauses:
            known["/pause_generation"] = lambda: self.pause(body["mode"])
            known["/continue_generation"] = lambda: self.resume()
        if self.sessions:
            known["/begin_weight_update"] = lambda: self.session(True)
            known["/end_weight_update"] = lambda: self.session(False)
        if path not in known:
            return 404, {"detail": "Not Found"}
        try:
            return known[path]()
        except BaseException as error:  # noqa: BLE001 - the scheduler's loop catches nothing
            self.dead = error
            return 0, None

    def pause(self, mode: str) -> tuple[int, Any]:
        # managers/io_struct.py: PauseGenerationReqInput; "abort" leaves no request behind
        assert mode in ("abort", "retract", "in_place")
        self.paused = True
        self.waiting = self.waiting and mode != "abort"
        return 200, {"message": "Generation paused successfully.", "status": "ok"}

    def resume(self) -> tuple[int, Any]:
        self.paused = False
        return 200, {"message": "Generation continued successfully.", "status": "ok"}

    def flush(self) -> tuple[int, Any]:
        if self.waiting:  # releases whose flush wants no request at all
            return 400, "Flush cache failed.\n"
        self.stale = False
        return 200, "Cache flushed.\nPlease check backend logs for more details.\n"

    def session(self, opens: bool) -> tuple[int, Any]:
        # managers/scheduler_components/weight_updater.py: begin_weight_update, end_weight_update
        assert self.open != opens
        self.open = opens
        return 200, {"success": True, "message": "Success"}

    def name(self, body: dict[str, Any]) -> tuple[int, Any]:
        # managers/io_struct.py: UpdateWeightVersionReqInput, where the default is to abort
        assert body["abort_all_requests"] is False
        self.weight_version = body["new_version"]
        return 200, {"success": True, "new_version": body["new_version"]}

    def update(self, body: dict[str, Any]) -> tuple[int, Any]:
        # managers/tokenizer_control_mixin.py, managers/scheduler_components/weight_updater.py and
        # model_executor/model_runner_components/weight_updater.py: update_weights_from_tensor
        assert self.open == self.sessions
        assert self.paused or not self.pauses
        with torch.inference_mode():  # managers/scheduler.py: DynamicGradMode
            named = deserialize(body["serialized_named_tensors"][0])
            named = [(name, tensor.to("cpu")) for name, tensor in named]
            if body["load_format"] not in self.info["custom_weight_loader"]:
                raise NotImplementedError(body["load_format"])
            dynamic_import(body["load_format"])(self.model, named)
        if body["flush_cache"]:
            assert self.flush()[0] == 200, "Cache flush failed after updating weights"
        return 200, {"success": True, "message": "Success"}


class _Http(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    owner: Recorded


class _Handler(BaseHTTPRequestHandler):
    server: _Http

    def do_GET(self) -> None:
        self._reply({})

    def do_POST(self) -> None:
        length = int(self.headers.get("Content-Length", 0))
        self._reply(json.loads(self.rfile.read(length) or b"{}"))

    def _reply(self, body: dict[str, Any]) -> None:
        owner = self.server.owner
        code, document = owner.handle(self.path, body) if owner.dead is None else (0, None)
        if owner.dead is not None:
            self.close_connection = True
            return
        data = document.encode() if isinstance(document, str) else json.dumps(document).encode()
        self.send_response(code)
        self.send_header("Content-Length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args: Any) -> None:
        return
