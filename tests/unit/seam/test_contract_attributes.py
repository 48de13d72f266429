"""What the seam reads of SGLang's objects is in the contract, too, though nothing imports it."""

from __future__ import annotations

import ast
import asyncio
import concurrent.futures
import contextlib
import functools
import hashlib
import http
import inspect
import logging
import os
import pathlib
import pkgutil
import threading
import time
import traceback
from collections import OrderedDict
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
    asyncio, concurrent.futures, contextlib, functools, hashlib, http.HTTPStatus, inspect,
    inspect.Parameter, logging, logging.Logger, np, np.ndarray, npt, os, pathlib.Path, pkgutil,
    pydantic.BaseModel, starlette.applications.Starlette, starlette.requests.Request, threading,
    time, torch, torch.Tensor, torch.cuda, traceback, OrderedDict, asyncio.AbstractEventLoop, str,
    bytes, dict, Exception,
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
    "annotation": "of pydantic's fields",
    "architectures": "of a model's own configuration",
    "default_factory": "of dataclasses' fields",
    "disaggregation_mode": "an argument, as `settings/arguments.py` has all of them",
    "get_internal_state_communicator": "named by a table, called by what is followed",
    "inc": "of prometheus' counters",
    "nnodes": "an argument, as `settings/arguments.py` has all of them",
    "padding_values": "not in 0.5.22, and asked for behind `identity`, looked for with a default",
    "router": "of starlette's applications, set in them",
    "routes": "of starlette's routers",
    "set_identity": "not in 0.5.22, and looked for with a default",
    "user_middleware": "of starlette's applications, set in them",
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


def test_what_is_read_of_sglangs_objects_is_in_the_contract() -> None:
    known = {symbol.name.rpartition(".")[2] for symbol in SYMBOLS}
    known |= set(names_of_ours()) | set(NOT_IN_A_FILE)
    known |= {name for other in OTHERS for name in dir(other)}
    missing = [
        f"{path.relative_to(ROOT)}:{line}: {name}"
        for path in SEAM.rglob("*.py")
        if SEAM / "contract" not in path.parents  # reads files, not objects
        for name, line in attributes(path)
        if name not in known and not name.startswith("_hier_kv")
    ]
    assert missing == []
