"""Hooks on a server's start: the flags, the engine's arguments, and what its front process does.

Loaded in each process of every SGLang server, also of one without the flag; so what is not needed
there is imported by the functions that need it.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Callable
from typing import Any

logger = logging.getLogger(__name__)

_SERVER_ARGS = "sglang.srt.server_args.ServerArgs"
_SCHEDULER = "sglang.srt.managers.scheduler"
_TOKENIZER = "sglang.srt.managers.tokenizer_manager.TokenizerManager"
_CONTROL = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"
_ENGINE = "sglang.srt.entrypoints.engine"
_HTTP_SERVER = "sglang.srt.entrypoints.http_server"
_OPENAI = "sglang.srt.entrypoints.openai"
_CHAT = f"{_OPENAI}.serving_chat"
_USAGE = f"{_OPENAI}.usage_processor"

# Turns the plugin on for a `ServerArgs`, which is not resolved yet, with a `HierKVConfig`.
Attach = Callable[[Any, Any], None]


def hook_arguments(attach: Attach) -> None:
    """Adds the flags, and has `attach` called where they or the engine's arguments say so."""
    from sglang_ext.seam.hooks.hooking import hook

    def after_from_cli_args(result: Any, cls: Any, namespace: Any) -> None:
        _take_flags(result, namespace, attach)

    hook(f"{_SERVER_ARGS}.add_cli_args", _after_add_cli_args)
    hook(f"{_SERVER_ARGS}.from_cli_args", after_from_cli_args)
    hook(f"{_SERVER_ARGS}.resolve_once", _around_resolution, "around")
    _extend_engine(attach)


def runs_scheduler() -> bool:
    """Whether this process will run a scheduler.

    Importing the scheduler costs seconds and the main process does not need it; a scheduler process
    has imported it before it loads plugins.
    """
    return _SCHEDULER in sys.modules


def _after_add_cli_args(result: Any, parser: Any) -> None:
    from sglang_ext.errors import HierKVConfigError
    from sglang_ext.seam.hooks.hooking import check_hooks
    from sglang_ext.settings.flags import add_flags

    try:
        check_hooks()
    except HierKVConfigError as error:
        # Flags that nobody reads would be accepted and do nothing. A server without them may run.
        logger.error("hier-kv: its flags are not known to this server: %s", error)
        return
    add_flags(parser)


def _take_flags(server_args: Any, namespace: Any, attach: Attach) -> None:
    from sglang_ext.errors import HierKVConfigError
    from sglang_ext.settings.flags import config_from_namespace

    try:
        config = config_from_namespace(namespace)
        if config is not None:
            attach(server_args, config)
            server_args._hier_kv_from_command_line = True
    except HierKVConfigError as error:
        sys.exit(f"sglang-hier-kv: {error}")


def _around_resolution(resolve: Any, self: Any) -> None:
    if getattr(self, "_hier_kv", None) is None:
        resolve(self)
        return
    from sglang_ext.seam.hooks.resolution import around_resolution

    around_resolution(resolve, self)


def _extend_engine(attach: Attach) -> None:
    """Lets ``sglang.Engine`` take ``enable_hier_kv`` and ``hier_kv_*`` arguments."""
    module = sys.modules.get(_ENGINE)
    if module is None:
        return
    engine = module.Engine
    if getattr(engine, "_hier_kv_extended", False):
        return
    from sglang_ext.settings.flags import engine_args_factory

    engine.server_args_class = staticmethod(engine_args_factory(engine.server_args_class, attach))
    engine._hier_kv_extended = True


def hook_tokenizer_manager() -> None:
    """Hooks on how the front process takes requests and answers them; in a server with the flag.

    Registered late: importing the tokenizer manager before the arguments are parsed is slow.

    Raises:
        HierKVConfigError: a hook is not in place.
    """
    from sglang_ext.seam.hooks.admin.refused_changes import around_asking
    from sglang_ext.seam.hooks.answers import around_generate
    from sglang_ext.seam.hooks.early_aborts import (
        around_sending,
        around_sending_batch,
        before_abort,
    )
    from sglang_ext.seam.hooks.front import around_tokenizing, around_validate
    from sglang_ext.seam.hooks.hooking import apply_hooks, hook
    from sglang_ext.seam.hooks.media import around_tokenizing_one
    from sglang_ext.seam.reuse_report import unpack_details

    hook(f"{_TOKENIZER}._handle_batch_output", unpack_details, "before")
    hook(f"{_TOKENIZER}._validate_one_request", around_validate, "around")
    hook(f"{_TOKENIZER}._tokenize_texts", around_tokenizing, "around")
    hook(f"{_TOKENIZER}._tokenize_one_request", around_tokenizing_one, "around")
    hook(f"{_TOKENIZER}._send_one_request", around_sending, "around")
    hook(f"{_TOKENIZER}._send_batch_request", around_sending_batch, "around")
    hook(f"{_TOKENIZER}.abort_request", before_abort, "before")
    hook(f"{_TOKENIZER}.generate_request", around_generate, "around")
    hook(f"{_CONTROL}.set_internal_state", around_asking, "around")
    hook(f"{_TOKENIZER}.__init__", _after_tokenizer_manager)
    apply_hooks()


def _after_tokenizer_manager(result: Any, self: Any, *args: Any, **kwargs: Any) -> None:
    """The HTTP server, if there is one, is imported by now and does not serve yet."""
    from sglang_ext.seam.hooks.admin.steering_endpoint import add_steering
    from sglang_ext.seam.hooks.answers import add_reports
    from sglang_ext.seam.hooks.front import before_rendering, bound_bodies
    from sglang_ext.seam.hooks.hooking import apply_hooks, hook

    server = sys.modules.get(_HTTP_SERVER)
    if server is None or getattr(self.server_args, "_hier_kv", None) is None:
        return
    add_reports(server.app)
    add_steering(server.app, self)
    bound_bodies(server.app, self)
    if _CHAT in sys.modules:
        _hook_usage()
        hook(f"{_CHAT}.OpenAIServingChat._process_messages", before_rendering, "before")
        apply_hooks()


def _hook_usage() -> None:
    """Lets the answers of OpenAI's endpoints say what was reused."""
    from sglang_ext.seam.hooks.answers import (
        RESPONSE_MODEL,
        holders_of,
        reports_usage,
        response_classes,
    )
    from sglang_ext.seam.hooks.hooking import hook

    protocol = sys.modules[f"{_OPENAI}.protocol"]
    for name, replacement in response_classes(protocol):
        if name == RESPONSE_MODEL:
            # No hooks, as a release may have none of them. Who uses them is imported later.
            for holder, new in holders_of(protocol, getattr(protocol, name), replacement):
                setattr(protocol, holder, new)
        hook(f"{protocol.__name__}.{name}", replacement, "replace")
    after_usage = reports_usage(protocol.UsageInfo, protocol.PromptTokensDetails)
    for name in ("calculate_response_usage", "calculate_streaming_usage"):
        hook(f"{_USAGE}.UsageProcessor.{name}", after_usage)
