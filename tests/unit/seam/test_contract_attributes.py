"""What is read of SGLang's objects is in the contract, too, though nothing imports it.

Of the seam all names, and of the other rooms that are handed SGLang's objects.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import concurrent.futures
import contextlib
import ctypes
import fractions
import functools
import hashlib
import hmac
import http
import importlib
import inspect
import logging
import multiprocessing
import os
import pathlib
import pkgutil
import queue
import random
import re
import socket
import threading
import time
import traceback
import types
from collections import Counter, OrderedDict, deque
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import numpy.typing as npt
import pydantic
import starlette.applications
import starlette.requests
import torch

from sglang_ext.seam.contract.symbols import SYMBOLS

ROOT = Path(__file__).resolve().parents[3]
SEAM = ROOT / "sglang_ext" / "seam"
OURS = ("sglang_ext", "tiers", "kernels")
OTHERS = (
    asyncio, concurrent.futures, contextlib, functools, hashlib, hmac, http.HTTPStatus, inspect,
    inspect.Parameter, logging, logging.Logger, multiprocessing, multiprocessing.Process, np,
    np.ndarray, np.ufunc, npt, os, pathlib.Path, pkgutil,
    pydantic.BaseModel, starlette.applications.Starlette, starlette.requests.Request, threading,
    time, torch, torch.Tensor, torch.cuda, torch.nn, torch.nn.Module, traceback, OrderedDict,
    asyncio.AbstractEventLoop, str, bytes, dict, Exception,
)  # fmt: skip
NOT_IN_A_FILE = {
    "attn_cp_size": "SGLang has its ranks' widths in a table, by name",
    "attn_dcp_size": "SGLang has its ranks' widths in a table, by name",
    "attn_dp_rank": "SGLang has its ranks' widths in a table, by name",
    "attn_dp_size": "SGLang has its ranks' widths in a table, by name",
    "attn_tp_rank": "SGLang has its ranks' widths in a table, by name",
    "attn_tp_size": "SGLang has its ranks' widths in a table, by name",
    "_model_config": "set from outside, and looked for with a default",
    "_raw_input": "set from outside, and looked for with a default",
    "admin_api_key": "an argument, as `settings/arguments.py` has all of them",
    "annotation": "of pydantic's fields",
    "architectures": "of a model's own configuration",
    "cp_strategy": "an argument, as `settings/arguments.py` has all of them",
    "default_factory": "of dataclasses' fields",
    "disaggregation_mode": "an argument, as `settings/arguments.py` has all of them",
    "enable_prefill_cp": "an argument, as `settings/arguments.py` has all of them",
    "get_internal_state_communicator": "named by a table, called by what is followed",
    "inc": "of prometheus' counters",
    "nnodes": "an argument, as `settings/arguments.py` has all of them",
    "num_attention_layers": "of SGLang's configuration of a model, looked for with a default",
    "num_kv_shared_layers": "of a model's own configuration, looked for with a default",
    "padding_values": "not in 0.5.22, and asked for behind `identity`, looked for with a default",
    "router": "of starlette's applications, set in them",
    "routes": "of starlette's routers",
    "set_internal_state_communicator": "named by a table, called by what is followed",
    "set_identity": "not in 0.5.22, and looked for with a default",
    "user_middleware": "of starlette's applications, set in them",
}


# Rooms beside the seam that SGLang's objects are handed to.
ROOMS = (
    "admission", "assembly", "device", "identity", "provenance", "ranks", "settings", "truncation",
)  # fmt: skip
# Classes whose objects these are handed by what they import.
ALSO_OTHERS = (
    argparse.ArgumentParser, concurrent.futures.ThreadPoolExecutor, contextlib.ExitStack,
    ctypes.Array, fractions.Fraction, hashlib.sha256(), queue.Queue, random.Random, re.Match,
    re.Pattern, socket.socket, threading.Condition, threading.Thread, torch.cuda.Event,
    torch.cuda.Stream, torch.distributed, torch.distributed.ReduceOp,
    torch.version,
    os.path, np.random, np.dtype, np.random.Generator, np.ufunc, np.iinfo, Counter, deque,
    bytearray, float, int, list, memoryview, set, OSError,
    os.stat_result, os.statvfs_result, types.FunctionType, types.CodeType,
)  # fmt: skip
ALSO_NOT_IN_A_FILE = {
    "added_tokens_decoder": "of a tokenizer of transformers",
    "all_special_ids": "of a tokenizer of transformers",
    "apply_chat_template": "of a tokenizer of transformers",
    "chat_template": "of a tokenizer of transformers",
    "conv": "of a class in a class: `MambaPool.State`",
    "temporal": "of a class in a class: `MambaPool.State`",
    "use_hnd": "looked for with a default",
    "kv_cache_layout": "looked for with a default",
    "quant_method": "looked for with a default",
    "swa_gates_prefix_match": "not in 0.5.22, and looked for with a default",
    "enable_hier_kv": "an argument of ours",
    "install_recorder": "of numba",
    "is_start": "of numba",
    "data_as": "of numpy's arrays, as `ctypes` has them",
    "syscall": "of the C library",
    "cuda_stream": "of torch's streams, on a machine that has some",
    "pci_domain_id": "of torch's properties of a device",
    "pci_bus_id": "of torch's properties of a device",
    "pci_device_id": "of torch's properties of a device",
    "cudaHostRegister": "of CUDA's runtime",
    "cudaHostUnregister": "of CUDA's runtime",
    "cudaDeviceGetAttribute": "of CUDA's runtime",
    "cudaGetLastError": "of CUDA's runtime",
    "cudaMemcpyBatchAsync": "of CUDA's runtime",
    "cudaThreadExchangeStreamCaptureMode": "of CUDA's runtime",
}


def names_of_ours() -> Iterator[str]:
    """What our own code defines, binds or sets."""
    for room in OURS:
        for path in (ROOT / room).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                match node:
                    case ast.FunctionDef(name=name) | ast.AsyncFunctionDef(name=name):
                        yield name
                    case ast.ClassDef(name=name) | ast.arg(arg=name) | ast.keyword(arg=str(name)):
                        yield name
                    case ast.Name(id=name, ctx=ast.Store()):
                        yield name
                    case ast.Attribute(value=ast.Name(id="self"), attr=name, ctx=ast.Store()):
                        yield name


def attributes(path: Path) -> Iterator[tuple[str, int]]:
    """Names that a file reads of objects, and where."""
    for node in ast.walk(ast.parse(path.read_text())):
        match node:
            case ast.Attribute(attr=name):
                yield name, node.lineno
            case ast.Call(
                func=ast.Name(id="getattr" | "hasattr"), args=[_, ast.Constant(value=str(name)), *_]
            ):
                yield name, node.lineno


def arguments_of_sglang() -> set[str]:
    """SGLang's arguments, which `settings/arguments.py` classifies, each of them."""
    tree = ast.parse((ROOT / "sglang_ext" / "settings" / "arguments.py").read_text())
    words = [
        node.value
        for node in ast.walk(tree)
        if isinstance(node, ast.Constant) and isinstance(node.value, str)
    ]
    return {name for text in words for name in text.split() if name.isidentifier()}


def names_of_libraries(folder: Path) -> set[str]:
    """What the modules have that files import, but for SGLang's and ours."""
    modules = set()
    for path in folder.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            match node:
                case ast.Import(names=names):
                    modules |= {each.name for each in names}
                case ast.ImportFrom(module=str(module)):
                    modules.add(module)
    others = {each for each in modules if each.split(".")[0] not in (*OURS, "sglang", "__future__")}
    return {name for each in others for name in dir(importlib.import_module(each))}


def unknown(folder: Path, known: set[str]) -> list[str]:
    """Where a name is read that is not known."""
    return [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in folder.rglob("*.py")
        if SEAM / "contract" not in path.parents  # reads files, not objects
        for name, line in attributes(path)
        if name not in known and not name.startswith("_hier_kv")
    ]


def known_names() -> set[str]:
    """What the contract has, what is ours, and what is none of SGLang's."""
    known = {symbol.name.rpartition(".")[2] for symbol in SYMBOLS}
    known |= set(names_of_ours()) | set(NOT_IN_A_FILE)
    return known | {name for other in OTHERS for name in dir(other)}


# What the seam calls SGLang's own objects, and nothing else.
SGLANGS = (
    "allocator", "manager", "model_config", "recv_req", "req", "req_to_token_pool", "runner",
    "scheduler", "token_to_kv_pool_allocator", "tree_core",
)  # fmt: skip


def attributes_of_sglangs(path: Path) -> Iterator[tuple[str, int]]:
    """Names that a file reads of what it calls as SGLang does, and where."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Attribute):
            holder = ast.unparse(node.value).rpartition(".")[2]
            if holder in SGLANGS:
                yield node.attr, node.lineno


def test_a_name_of_ours_hides_none_of_sglangs() -> None:
    """`runner.model` was not in the contract, as something of ours is called `model`, too."""
    known = {symbol.name.rpartition(".")[2] for symbol in SYMBOLS} | set(NOT_IN_A_FILE)
    read = [
        (path.relative_to(ROOT), line, name)
        for path in SEAM.rglob("*.py")
        for name, line in attributes_of_sglangs(path)
    ]
    assert len(read) > 100
    found = [each for each in read if each[2] not in known and not each[2].startswith("_hier_kv")]
    assert found == []


def test_what_is_read_of_sglangs_objects_is_in_the_contract() -> None:
    assert unknown(SEAM, known_names()) == []


def test_what_other_rooms_read_of_them_is_in_the_contract() -> None:
    known = known_names() | set(ALSO_NOT_IN_A_FILE) | arguments_of_sglang()
    known |= {name for other in ALSO_OTHERS for name in dir(other)}
    rooms = [ROOT / "sglang_ext" / room for room in ROOMS]
    known |= {name for room in rooms for name in names_of_libraries(room)}
    found = [name for room in rooms for name in unknown(room, known)]
    assert found == [], "\n".join(found)
