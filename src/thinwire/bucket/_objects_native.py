"""obstore as this process may use it, on both sides of a fork.

obstore's calls run on a runtime of threads that starts with the first call and lives as long as the
process. A forked child inherits the runtime without its threads, and the parent's network polling
with it: measured with obstore 0.12.1, a call in such a child never returns, and can stop the
parent's calls as well. So a child whose parent had begun loads a second copy of obstore's compiled
module, from memory, which has a runtime of its own. A child whose parent had not begun needs none.
"""

from __future__ import annotations

import importlib.machinery
import importlib.util
import os
import threading
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from thinwire.errors import Misuse

__all__ = ["Native", "native"]


@dataclass(frozen=True)
class Native:
    """obstore's functions and its store classes, good for one process.

    Attributes:
        calls: has ``get``, ``put``, ``head``, ``list`` and ``delete``.
        stores: has ``S3Store``, ``GCSStore`` and ``AzureStore``.
        errors: what the calls raise when a store says no.
    """

    pid: int
    calls: Any
    stores: Any
    errors: tuple[type[Exception], ...]


_current: Native | None = None
_lock = threading.Lock()


def _new_lock() -> None:
    # A thread that held it at the fork does not exist in the child.
    global _lock
    _lock = threading.Lock()


os.register_at_fork(after_in_child=_new_lock)


def native() -> Native:
    """obstore for this process, loaded when first asked for.

    Raises:
        Misuse: the process was forked from one that used obstore, and the system cannot load it
            a second time.
    """
    global _current
    pid = os.getpid()
    current = _current
    if current is not None and current.pid == pid:
        return current
    with _lock:
        if _current is None:
            _current = _first(pid)
        elif _current.pid != pid:
            _current = _copy(pid)
        return _current


def _first(pid: int) -> Native:
    import obstore
    import obstore.store
    from obstore.exceptions import BaseError

    return Native(pid, obstore, obstore.store, (BaseError, OSError, ValueError))


def _copy(pid: int) -> Native:
    import obstore

    compiled = Path(str(obstore._obstore.__file__))
    if not hasattr(os, "memfd_create"):
        raise Misuse(
            "this process was forked from one that already used an object store",
            hint='start processes with multiprocessing\'s "spawn" or "forkserver" method',
        )
    file = os.memfd_create(compiled.name, os.MFD_CLOEXEC)
    try:
        os.truncate(file, 0)
        content = memoryview(compiled.read_bytes())
        while content:
            content = content[os.write(file, content) :]
        # A new file, so the linker does not hand out the copy that is loaded already. It stays
        # mapped after it is closed.
        loader = importlib.machinery.ExtensionFileLoader(
            "obstore._obstore", f"/proc/{pid}/fd/{file}"
        )
        spec = importlib.util.spec_from_loader("obstore._obstore", loader)
        if spec is None:
            raise ImportError("no module spec")
        module: Any = importlib.util.module_from_spec(spec)
        loader.exec_module(module)
    except (ImportError, OSError) as error:
        raise Misuse(
            f"obstore cannot be loaded again in a forked process: {error}",
            hint='start processes with multiprocessing\'s "spawn" or "forkserver" method',
        ) from error
    finally:
        os.close(file)
    return Native(pid, module, module._store, (module.exceptions.BaseError, OSError, ValueError))
