"""The weight transfer engine that vLLM creates in each of its workers.

It is told what to do in two ways: by :meth:`ThinwireEngine.call`, which the routes and
:mod:`thinwire.engines.vllm.offline` use and which keeps all slow work out of the engine's loop; and
by vLLM's own interface, where ``update_weights({"version": 7})`` does everything at once.

Where ``THINWIRE_BUCKET`` is set, a worker catches up with the run before its server serves.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from vllm.distributed.weight_transfer.base import (
    WeightTransferEngine,
    WeightTransferInitInfo,
    WeightTransferUpdateInfo,
)

from thinwire.engines.host import open_host_mirror
from thinwire.engines.session import Session
from thinwire.engines.vllm import versions
from thinwire.engines.vllm.reloader import LayerwiseReloader
from thinwire.engines.vllm.requests import answer
from thinwire.engines.vllm.settings import one_of, positive_seconds
from thinwire.errors import Misuse

__all__ = ["InitInfo", "ThinwireEngine", "UpdateInfo"]

METHOD = "thinwire"
"""What the worker's method is called."""


@dataclass
class InitInfo(WeightTransferInitInfo):  # type: ignore[misc]
    """For ``init_weight_transfer_engine``.

    Attributes:
        bucket: URL of the run.
        mirror: folder of this host's mirror; empty: that of the environment.
        version: to catch up with; None: the newest.
    """

    bucket: str
    mirror: str = ""
    version: int | None = None


@dataclass
class UpdateInfo(WeightTransferUpdateInfo):  # type: ignore[misc]
    """For ``update_weights``.

    Attributes:
        version: to move to; None: the newest.
    """

    version: int | None = None


class ThinwireEngine(WeightTransferEngine):  # type: ignore[misc]
    """One worker's part in following a run."""

    init_info_cls = InitInfo
    update_info_cls = UpdateInfo
    supports_draft_weight_update = False

    def __init__(
        self, config: Any, vllm_config: Any, device: torch.device, model: torch.nn.Module
    ) -> None:
        super().__init__(config, vllm_config, device, model)
        self._session: Session | None = None
        versions.warn_if_untested()
        versions.add_worker_method(METHOD)
        versions.keep_seeds_alive()
        if bucket := os.environ.get("THINWIRE_BUCKET"):
            self.init_transfer_engine(InitInfo(bucket))

    def init_transfer_engine(self, init_info: InitInfo) -> None:
        """Prove the model's layout and catch up with the run.

        Raises:
            Misuse: no mirror is named, or a run is followed already.
            As for :meth:`~thinwire.engines.session.Session.start`.
        """
        if self._session is not None:
            raise Misuse("the engine follows a run already", hint="shut the transfer engine down")
        folder = init_info.mirror or os.environ.get("THINWIRE_MIRROR", "")
        if not folder:
            raise Misuse("no mirror is named", hint="set THINWIRE_MIRROR to a folder on this host")
        unproven = one_of("THINWIRE_UNPROVEN", ["reload", "refuse", "freeze"])
        reloader = LayerwiseReloader(self.vllm_config, self.model) if unproven == "reload" else None
        host = open_host_mirror(init_info.bucket, folder)
        session = Session(
            self.model,
            self._load,
            host,
            gather=versions.gather,
            synchronize=lambda: versions.synchronize(self.device),
            reloader=reloader,
            freeze=unproven == "freeze",
        )
        loaded = versions.checkpoint_folder(self.vllm_config)
        try:
            session.start(
                None if loaded is None else Path(loaded),
                init_info.version,
                patience=positive_seconds("THINWIRE_PATIENCE", 300.0),
            )
        except BaseException:
            session.close()
            raise
        self._session = session

    def _load(self, weights: Any) -> object:
        with versions.configured(self.vllm_config), torch.no_grad():
            return self.model.load_weights(weights)

    def _following(self) -> Session:
        if self._session is None:
            raise Misuse(
                "the engine does not follow a run", hint="set THINWIRE_BUCKET and THINWIRE_MIRROR"
            )
        return self._session

    # --- thinwire's own calls -----------------------------------------------------------

    def call(self, request: dict[str, Any]) -> dict[str, Any]:
        """See :func:`thinwire.engines.vllm.requests.answer`."""
        return answer(self._session, request)

    # --- vLLM's interface ---------------------------------------------------------------

    def start_weight_update(self) -> None:
        """Nothing: an update is one step."""

    def finish_weight_update(self) -> None:
        """Nothing: an update is one step."""

    def update_weights(self, update_info: dict[str, Any]) -> None:
        """Like the base class's, which waits for the device in a way that raises on a CPU."""
        self.receive_weights(self.parse_update_info(update_info))

    def receive_weights(self, update_info: UpdateInfo) -> None:
        """Stage and apply a version, holding up the engine for both."""
        session = self._following()
        session.stage(update_info.version)
        version = session.status()["staged"]
        if version is not None:
            session.apply(version)

    def shutdown(self) -> None:
        """Stop following; let go of the mirror."""
        if self._session is not None:
            self._session.close()
            self._session = None
