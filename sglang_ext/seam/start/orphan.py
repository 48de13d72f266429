"""A scheduler whose server has ended while it started."""

from __future__ import annotations

import logging
import multiprocessing
import os
from typing import Any

logger = logging.getLogger(__name__)


def end_orphan(_: Any, server_args: Any, *args: Any, **kwargs: Any) -> None:
    """BEFORE hook of `Scheduler.__init__`: ends this process where its server is gone.

    SGLang has its processes end with the one that started them, from the moment at which they have
    imported it: some seconds in which a signal to that one, as a supervisor sends it, leaves them
    behind. They would load the model, and hold the disk folder against the next server. Nothing is
    done where the plugin is off.
    """
    parent = multiprocessing.parent_process()
    if getattr(server_args, "_hier_kv", None) is None or parent is None or parent.is_alive():
        return
    logger.warning("hier-kv: the server ended while it started, and so does its scheduler")
    logging.shutdown()
    os._exit(1)
