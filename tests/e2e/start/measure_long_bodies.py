"""What others wait beside too long bodies: `python -m tests.e2e.start.measure_long_bodies`.

A client sends such a body to a server without the plugin and to one with it; another one asks for
one token again and again, from before the body is sent until it is answered. Printed is the longest
of the small answers, and the usual one.
"""

from __future__ import annotations

import argparse
import http.client
import json
import statistics
import tempfile
import threading
import time
from pathlib import Path

from testkit.server import Server
from tests.e2e.hier_server import hier_args

CONTEXT = 2048
ANSWER = {"max_new_tokens": 1}


def bodies(num_ids: int, num_words: int) -> dict[str, tuple[str, bytes]]:
    """Path and body by name: a prompt of so many tokens or words, as it can be sent."""
    words = "word " * num_words
    chat = {"model": "m", "max_tokens": 1, "messages": [{"role": "user", "content": words}]}
    just_short = "word " * (16 * 8 * CONTEXT // 5)  # of too many tokens, not of too many characters
    return {
        "token ids": (
            "/generate",
            json.dumps({"input_ids": [5] * num_ids, "sampling_params": ANSWER}).encode(),
        ),
        "text": ("/generate", json.dumps({"text": words, "sampling_params": ANSWER}).encode()),
        "text within the bound": (
            "/generate",
            json.dumps({"text": just_short, "sampling_params": ANSWER}).encode(),
        ),
        "chat": ("/v1/chat/completions", json.dumps(chat).encode()),
    }


def send(server: Server, path: str, body: bytes) -> tuple[int, float]:
    """HTTP status and seconds."""
    started_s = time.monotonic()
    connection = http.client.HTTPConnection("127.0.0.1", server.port, timeout=600)
    connection.request("POST", path, body, {"content-type": "application/json"})
    answer = connection.getresponse()
    answer.read()
    return answer.status, time.monotonic() - started_s


def beside(server: Server, path: str, body: bytes) -> tuple[int, float, list[float]]:
    """Status and seconds of a body, and seconds of each small request beside it."""
    small = json.dumps({"input_ids": [7, 8, 9], "sampling_params": ANSWER}).encode()
    waits: list[float] = []
    ended = threading.Event()

    def ask() -> None:
        while not ended.is_set():
            waits.append(send(server, "/generate", small)[1])

    asking = threading.Thread(target=ask)
    asking.start()
    time.sleep(1)
    status, seconds = send(server, path, body)
    ended.set()
    asking.join()
    return status, seconds, waits


def main() -> None:
    """Prints a line for each server and body."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--ids", type=int, default=20_000_000)
    parser.add_argument("--words", type=int, default=2_000_000)
    parser.add_argument("--servers", nargs="+", default=["without", "with"])
    sizes = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        plugin = [*hier_args(folder, host_pages=100, disk_gb=0), "--hier-kv-truncation", "overflow"]
        for title in sizes.servers:
            args = ["--context-length", str(CONTEXT), "--page-size", "64"]
            args += plugin if title == "with" else []
            log_path = folder / f"{title}.log"
            with Server(args, log_path=log_path, stop="kill", start_timeout_s=600) as server:
                for what, (path, body) in bodies(sizes.ids, sizes.words).items():
                    status, seconds, waits = beside(server, path, body)
                    print(
                        f"{title:8} {what:22} {len(body) / 1e6:6.1f} MB: {status} after "
                        f"{seconds:6.2f} s; others {statistics.median(waits) * 1e3:5.0f} ms, "
                        f"longest {max(waits) * 1e3:6.0f} ms",
                        flush=True,
                    )


if __name__ == "__main__":
    main()
