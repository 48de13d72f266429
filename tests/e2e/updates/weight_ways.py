"""The calls by which SGLang takes new weights while it runs, for the tests of updates."""

from __future__ import annotations

import base64
import itertools
import json
import pickle
import platform
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import zmq
from safetensors.torch import load_file

from runtime_cpu import inprocess, launch
from testkit.ports import free_port
from testkit.requests import let_go
from testkit.server import Server, ServerError
from tests.e2e.updates import weight_models


def call(server: Server, path: str, body: Any = None) -> tuple[bool, int]:
    """SGLang's own answer to an administrative call: success, and HTTP status."""
    try:
        answer = server.post(path, body or {})
    except ServerError as error:
        return False, error.status
    return (answer.get("success", True) if isinstance(answer, dict) else True), 200


def num_ranks(server: Server) -> int:
    """Tensor parallel ranks of a server."""
    return int(server.get("/server_info")["tp_size"])


Update = Callable[[Server, Path, bool], list[tuple[bool, int]]]


def from_disk(server: Server, model: Path, flush: bool) -> list[tuple[bool, int]]:
    body = {"model_path": str(model), "flush_cache": flush}
    let_go(server)
    return [call(server, "/update_weights_from_disk", body)]


def from_tensor(server: Server, model: Path, flush: bool) -> list[tuple[bool, int]]:
    """Two buckets in one session, as trainers send them: whole tensors for each rank."""
    weights = sorted(weight_models.weights_of(model).items())
    answers = [call(server, "/begin_weight_update")]
    for bucket in (weights[: len(weights) // 2], weights[len(weights) // 2 :]):
        payload = pickle.dumps(bucket)  # SGLang's own wire format
        body = {
            "serialized_named_tensors": [base64.b64encode(payload).decode()] * num_ranks(server),
            "flush_cache": flush,
        }
        answers.append(call(server, "/update_weights_from_tensor", body))
    return [*answers, call(server, "/end_weight_update")]


_group_numbers = itertools.count()


def from_distributed(server: Server, model: Path, flush: bool) -> list[tuple[bool, int]]:
    """This process is rank 0 of a gloo group, the server's ranks are the others."""
    inprocess.prepare()
    from sglang.srt.utils import init_custom_process_group

    weights, world_size = weight_models.weights_of(model), 1 + num_ranks(server)
    name, port = f"update-{next(_group_numbers)}", free_port()
    with ThreadPoolExecutor(1) as pool:
        joined = pool.submit(
            init_custom_process_group,
            backend="gloo",
            init_method=f"tcp://127.0.0.1:{port}",
            world_size=world_size,
            rank=0,
            group_name=name,
        )
        body = {
            "master_address": "127.0.0.1", "master_port": port, "rank_offset": 1,
            "world_size": world_size, "group_name": name, "backend": "gloo",
        }  # fmt: skip
        answers = [call(server, "/init_weights_update_group", body)]
        group = joined.result(300)
        answers.append(call(server, "/begin_weight_update"))
        body = {
            "names": list(weights),
            "dtypes": ["bfloat16"] * len(weights),
            "shapes": [list(tensor.shape) for tensor in weights.values()],
            "group_name": name,
            "flush_cache": flush,
        }
        sent = pool.submit(
            lambda: [torch.distributed.broadcast(t, src=0, group=group) for t in weights.values()]
        )
        answers.append(call(server, "/update_weights_from_distributed", body))
        sent.result(300)
    answers.append(call(server, "/end_weight_update"))
    leaving = threading.Thread(target=torch.distributed.destroy_process_group, args=(group,))
    leaving.start()
    answers.append(call(server, "/destroy_weights_update_group", {"group_name": name}))
    leaving.join(300)
    return answers


def _with_stand_in(name: str) -> dict[str, str]:
    """Variables for a server that finds what is in a folder beside this file."""
    base = {"PYTHONPATH": str(Path(__file__).with_name(name))}
    return {"PYTHONPATH": launch.environment(base)["PYTHONPATH"]}


# SGLang's path by IPC needs a package that needs CUDA; a stand-in for its transport is in ipc/.
IPC_ENVIRONMENT = _with_stand_in("ipc")


def from_ipc(server: Server, model: Path, flush: bool) -> list[tuple[bool, int]]:
    """Two buckets through a socket, as checkpoint-engine's parameter server passes them."""
    weights = sorted(weight_models.weights_of(model).items())
    half, ranks = len(weights) // 2, num_ranks(server)
    with TemporaryDirectory() as folder, zmq.Context() as context:
        handle = f"ipc://{folder}/weights"
        with (
            context.socket(zmq.REQ) as socket,
            socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED) as arrivals,
            ThreadPoolExecutor(1) as pool,
        ):
            for one in (socket, arrivals):
                one.setsockopt(zmq.RCVTIMEO, 300_000)
                one.setsockopt(zmq.LINGER, 0)
            socket.bind(handle)

            def send() -> None:
                for _ in range(ranks):
                    arrivals.recv_multipart()
                for bucket in (weights[:half], weights[half:], None):
                    for _ in range(ranks):  # they take turns
                        socket.send_pyobj(bucket)
                        socket.recv()

            sent = pool.submit(send)
            body = {
                # What SGLang takes for the name of its device on a CPU.
                "zmq_handles": {f"GPU-{platform.machine()}": handle},
                "flush_cache": flush,
            }
            answers = [call(server, "/update_weights_from_ipc", body)]
            sent.result(300)
    return answers


def released_and_reloaded(server: Server, model: Path, flush: bool) -> list[tuple[bool, int]]:
    """How trainers share a machine: memory is given up, taken back, then weights are loaded."""
    let_go(server)
    answers = [
        call(server, "/release_memory_occupation"),
        call(server, "/resume_memory_occupation"),
    ]
    return [*answers, *from_disk(server, model, flush)]


def reset_then_disk(server: Server, model: Path, flush: bool) -> list[tuple[bool, int]]:
    """SGLang's weight checker overwrites the weights, and the next load brings them back."""
    answers = [
        call(server, "/weights_checker", {"action": "snapshot"}),
        call(server, "/weights_checker", {"action": "reset_tensors"}),
    ]
    return [*answers, *from_disk(server, model, flush)]


WAYS: dict[str, Update] = {
    "disk": from_disk,
    "tensor": from_tensor,
    "distributed": from_distributed,
    "ipc": from_ipc,
    "release-resume": released_and_reloaded,
    "checker-reset": reset_then_disk,
}

# ---- adapters ----

LORA = [
    "--enable-lora", "--max-lora-rank", "8", "--lora-target-modules", "q_proj", "k_proj", "v_proj",
    "--lora-backend", "torch_native",
]  # fmt: skip
# SGLang's LoRA layers ask for pinned memory, which torch refuses on a machine without accelerator.
UNPINNED = _with_stand_in("unpinned")


def load_adapter(server: Server, name: str, path: Path) -> None:
    """Loads what is in a folder."""
    assert call(server, "/load_lora_adapter", {"lora_name": name, "lora_path": str(path)})[0]


def load_adapter_tensors(server: Server, name: str, path: Path) -> None:
    """Loads the same from memory, a copy for each rank."""
    tensors = load_file(str(path / "adapter_model.safetensors"))
    payload = base64.b64encode(pickle.dumps(tensors)).decode()
    body = {
        "lora_name": name,
        "config_dict": json.loads((path / "adapter_config.json").read_text()),
        "serialized_named_tensors": [payload] * num_ranks(server),
    }
    assert call(server, "/load_lora_adapter_from_tensors", body)[0]


def unload_adapter(server: Server, name: str) -> None:
    """Waits, in SGLang, until no request uses it."""
    assert call(server, "/unload_lora_adapter", {"lora_name": name})[0]
