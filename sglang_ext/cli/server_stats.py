"""`hier-kv stats` and `hier-kv top`: what a running server's tiers hold and do, in a few lines.

All of it is `/server_info`'s, the part of each scheduler; see docs/metrics.md for the counters.
"""

from __future__ import annotations

import http.client
import json
import re
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Mapping
from typing import Any

from sglang_ext.cli.usage import UsageError

_TIMEOUT_S = 10.0
# Counts that should be 0 while all is well.
_TROUBLE = re.compile(
    r"reject|fail|damaged|timeout|unauthentic|refus|_late$|dropped|swept|stale|unplaced|overrun"
)
# By the gauge of its breaker.
_STORE_USE = {0: "in use", 1: "tried again", 2: "left alone as it fails"}
_UNITS = ("B", "KiB", "MiB", "GiB", "TiB", "PiB")
UNITS_SAID = "Sizes are in powers of 1,024 (1 GiB is 2^30 bytes), as those of the server's flags."
"""For the help of commands that print sizes."""

State = dict[str, Any]


class ServerStatsError(ValueError):
    """The server does not say what was asked; what to do about it is in the message."""


def fetch(url: str, api_key: str = "") -> list[State]:
    """The plugin's state, one entry a scheduler. Blocks for at most 10 s a read.

    Args:
        url: of the server, such as `http://127.0.0.1:30000`.
        api_key: SGLang's, where it was started with one.

    Raises:
        ServerStatsError: nobody answers there, or the plugin is off.
        UsageError: the URL is none.
    """
    return states_of(url, server_info(url, api_key))


def server_info(url: str, api_key: str = "", timeout_s: float = _TIMEOUT_S) -> Any:
    """What the server says of itself. Blocks for at most `timeout_s` a read.

    Raises:
        ServerStatsError: nobody answers there.
        UsageError: the URL is none.
    """
    address = address_of(url, "/server_info")
    try:
        return ask(address, api_key, timeout_s=timeout_s)
    except urllib.error.HTTPError as error:
        if error.code not in (401, 403):
            raise _no_server(address, error) from error
        raise ServerStatsError(
            f"{address} answers {error.code}: {reason_of(error)}; give SGLang's --api-key"
        ) from error
    except (OSError, ValueError, RecursionError, http.client.HTTPException) as error:
        raise _no_server(address, error) from error


def states_of(url: str, info: Any) -> list[State]:
    """The plugin's part of `server_info`, one entry a scheduler.

    Raises:
        ServerStatsError: the plugin is off, or it is the state of no SGLang.
    """
    try:
        states = [each["hier_kv"] for each in info["internal_states"] if each.get("hier_kv")]
    except (KeyError, TypeError, AttributeError) as error:
        raise _no_server(address_of(url, "/server_info"), error) from error
    if not states:
        raise ServerStatsError(f"the server at {url} runs without --enable-hier-kv")
    return states


def _no_server(address: str, error: Exception) -> ServerStatsError:
    return ServerStatsError(
        f"{address} gives no state of an SGLang server ({_reason(error)}); start it, or give the "
        "URL of one that runs, as http://HOST:PORT"
    )


def _reason(error: Exception) -> str:
    """Why nobody answers; urllib wraps what the system says, and shows the wrapping."""
    inner = error.reason if type(error) is urllib.error.URLError else error
    return str(getattr(inner, "strerror", None) or inner)


def address_of(url: str, path: str) -> str:
    """The address of a server's endpoint.

    Raises:
        UsageError: the URL is none.
    """
    try:
        parts = urllib.parse.urlsplit(url)
        is_one = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:  # no address, or no number of a port
        is_one = False
    if not is_one or " " in url or not url.isprintable():
        raise UsageError(f"a URL such as http://127.0.0.1:30000 is expected, got {url!r}")
    return f"{url.rstrip('/')}{path}"


def ask(address: str, api_key: str, body: Any = None, timeout_s: float = _TIMEOUT_S) -> Any:
    """What a server answers, decoded; a `body` is sent as JSON. Follows no redirect.

    Raises:
        OSError, ValueError, http.client.HTTPException: it does not, or not in JSON.
    """
    headers = {"Authorization": f"Bearer {api_key}"} if api_key else {}
    content = None
    if body is not None:
        content, headers["Content-Type"] = json.dumps(body).encode(), "application/json"
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}), _NoRedirect())
    request = urllib.request.Request(address, content, headers)
    with opener.open(request, timeout=timeout_s) as answer:
        return json.load(answer)


def reason_of(error: urllib.error.HTTPError) -> str:
    """What an answer that is a refusal says of itself."""
    try:
        text = error.read().decode(errors="replace")
    except (OSError, http.client.HTTPException):  # it ends in the middle
        return str(error.reason)
    try:
        found = json.loads(text)
        found = found.get("error", found)  # SGLang's endpoints differ
        return str(found["message"] if isinstance(found, dict) else found)
    except (ValueError, KeyError, TypeError, AttributeError):
        return text[:200] or str(error.reason)


def describe(now: State, before: State | None = None, seconds: float = 0.0) -> list[str]:
    """One scheduler's state as lines to read.

    Args:
        now: see `fetch`.
        before: an earlier one; counts then have their rates beside them.
        seconds: between the two.

    Raises:
        ServerStatsError: it is the state of another release, which says other things.
    """
    try:
        return _described(now, before, seconds)
    except (KeyError, TypeError, AttributeError, ValueError, ArithmeticError) as error:
        raise ServerStatsError(
            f"the server's state lacks what this release shows ({error!r}); use the hier-kv of the "
            "server's own release, or --json"
        ) from error


def _described(now: State, before: State | None, seconds: float) -> list[str]:
    host, disk = now["host"], now["disk"]
    counts = _Counts(host, (before or {}).get("host"), seconds)
    pages = f"pages of {now['page_size']} tokens, {amount(now['kv_bytes_per_page'])} each"
    stored = f"K {now['rope']}, codec {now['codec']}"
    lines = [
        f"rank tp {now['tp_rank']} dp {now['dp_rank']}: {pages}, {stored}",
        _row(
            "DRAM", _dram(now), f"{counts('saved_pages')} saved, {counts('evicted_pages')} evicted"
        ),
    ]
    if disk:
        disk_counts = _Counts(disk, (before or {}).get("disk"), seconds)
        size = f"{amount(disk['used_bytes'])} of {amount(disk['max_bytes'])}"
        moved = f"{disk_counts('records_written')} written, {disk_counts('records_read')} read"
        lines.append(_row("disk", size, f"{moved}, {disk['mode']} I/O"))
        lines.append(_row("writes", "", _writes(host, disk)))
    remote = now["remote"]
    if remote:
        said = ("error", "breaker_state")
        well = {name: n for name, n in remote.items() if not name.startswith(said)}
        use = _STORE_USE.get(remote.get("breaker_state", 0), "")
        lines.append(_row("remote", use, _named(well) or "nothing yet"))
    ready, late = (host.get(f"admitted_{kind}_requests", 0) for kind in ("ready", "late"))
    noun = noun_of(host.get("loaded_pages", 0), "page")
    reused = f"{counts('loaded_pages')} {noun} came back"
    if ready + late:
        had = number_of(ready + late, "request")
        reused += f"; of {had} that had some, {ready:,} found them all in DRAM"
    lines.append(_row("reuse", "", reused))
    lines.append(_row("tokens", "", _tokens(host, (before or {}).get("host"))))
    lines.append(_row("queue", "", _queue(host)))
    lines.append(_row("speeds", "", _speeds(now["cost"])))
    found = _named(trouble(now))
    told = f"{found}: docs/metrics.md, Counters, says what to do" if found else "none"
    lines.append(_row("trouble", "", told))
    return lines


def trouble(state: State) -> dict[str, int]:
    """Counts that should be 0, those that are not."""
    counts = state["host"].items()  # misses have a line of their own
    found = {n: c for n, c in counts if _TROUBLE.search(n) and not n.startswith("missed_")}
    remote = state.get("remote") or {}
    found |= {f"remote_{name}": n for name, n in remote.items() if name.startswith("error")}
    for kind in ("errors", "dropped"):
        found |= {f"disk_{kind}_{name}": n for name, n in state["disk"].get(kind, {}).items()}
    return {name: n for name, n in sorted(found.items()) if n}


def amount(num_bytes: float) -> str:
    """Bytes in the unit that fits, of powers of 1,024, as the flags have them."""
    for unit in _UNITS[:-1]:
        if num_bytes < 999.5:  # which three digits show
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:,.3g} {_UNITS[-1]}"


def number_of(count: int, noun: str) -> str:
    """A count of things, with its noun in the singular or with an s."""
    return f"{count:,} {noun_of(count, noun)}"


def noun_of(count: int, noun: str) -> str:
    """A noun in the singular or with an s."""
    return noun if count == 1 else f"{noun}s"


class _NoRedirect(urllib.request.HTTPRedirectHandler):
    """The key is for the server that was named, and for no other."""

    def redirect_request(self, *args: Any, **kwargs: Any) -> None:
        """None is followed: the redirect is the answer, and an error."""


class _Counts:
    """Counts as text, with their rates where an earlier state is known."""

    def __init__(
        self, now: Mapping[str, int], before: Mapping[str, int] | None, seconds: float
    ) -> None:
        self._now, self._before, self._seconds = now, before, seconds

    def __call__(self, name: str) -> str:
        count = self._now.get(name, 0)
        if self._before is None or self._seconds <= 0:
            return f"{count:,}"
        return f"{count:,} (+{(count - self._before.get(name, 0)) / self._seconds:,.1f}/s)"


def _dram(state: State) -> str:
    host, slot_bytes = state["host"], state["slot_bytes"]
    pages, capacity = host["host_pages"], host["host_capacity_pages"]
    share = pages / capacity if capacity else 0.0
    return f"{amount(pages * slot_bytes)} of {amount(capacity * slot_bytes)} ({share:.0%})"


def _writes(host: Mapping[str, int], disk: Mapping[str, int]) -> str:
    """What hits cost the disk since the start, and what the queue wanted and could not keep."""
    written, again = (host.get(f"written_{kind}pages", 0) for kind in ("", "again_"))
    hits, first = host.get("loaded_pages", 0), written - again
    shares = [
        f"{written / hits:.2f} pages for each that came back" if hits else "",
        f"{(written + disk['records_salvaged']) / first:.2f} for each new one" if first else "",
    ]
    left, lost = (host.get(f"{how}_wanted_pages", 0) for how in ("disk_evicted", "lost"))
    wanted = f"{number_of(left, 'page')} left the disk while waited for, {lost:,} left all tiers"
    return f"{', '.join(filter(None, shares)) or 'none yet'}; {wanted}"


def _tokens(now: Mapping[str, int], before: Mapping[str, int] | None) -> str:
    """What became of the prompts' tokens, since the start or an earlier state, in shares."""
    counts = {name: n - (before or {}).get(name, 0) for name, n in now.items()}
    requested = counts.get("requested_tokens", 0)
    if not requested:
        return "none asked for" + ("" if before is None else " since then")
    reused, missed = _tokens_by(counts, "reused"), _tokens_by(counts, "missed")
    tiers = ", ".join(f"{tier} {n / requested:.1%}" for tier, n in reused.items())
    reasons = ", ".join(f"{reason} {n / requested:.1%}" for reason, n in missed.items())
    total = f"{requested:,} asked for, {sum(reused.values()) / requested:.1%} reused"
    rest = requested - sum(reused.values()) - sum(missed.values())
    ends = f"; ends of prompts {rest / requested:.1%}" if rest > 0 else ""
    return f"{total}{f' ({tiers})' if tiers else ''}; missed: {reasons or 'nothing'}{ends}"


def _tokens_by(counts: Mapping[str, int], kind: str) -> dict[str, int]:
    """The counts `<kind>_<name>_tokens` that are not 0, by name, the largest first."""
    found = {
        name.removeprefix(f"{kind}_").removesuffix("_tokens"): n
        for name, n in counts.items()
        if n and name.startswith(f"{kind}_") and name.endswith("_tokens")
    }
    return dict(sorted(found.items(), key=lambda one: -one[1]))


def _queue(host: Mapping[str, int]) -> str:
    waiting = ""
    if "waiting_requests" in host:  # a server that looks ahead
        num = host["waiting_requests"]
        waiting = f"{number_of(num, 'request')} {'waits' if num == 1 else 'wait'}, "
        waiting += f"{host['window_requests']:,} of them with a place in DRAM; "
    return (
        f"{waiting}on their way: {number_of(host['save_queue'], 'node')} to DRAM, "
        f"{number_of(host['spill_queue_pages'], 'page')} to disk"
    )


def _speeds(cost: Mapping[str, float | None]) -> str:
    wanted = {
        "prefill of 1,024 tokens {:.0f} ms": "prefill_1024_tokens_ms",
        "disk {:,.0f} MB/s": "disk_read_mb_s",
        "remote {:,.0f} MB/s": "remote_read_mb_s",
        "DRAM to device {:,.0f} MB/s": "device_load_mb_s",
    }
    known = [(text, cost.get(name)) for text, name in wanted.items()]
    return ", ".join(text.format(value) for text, value in known if value) or "not known yet"


def _named(counts: Mapping[str, Any]) -> str:
    numbers = {name: n for name, n in counts.items() if n and isinstance(n, int | float)}
    return ", ".join(f"{name} {n:,}" for name, n in numbers.items())


def _row(name: str, size: str, text: str) -> str:
    return f"  {name:8}{', '.join(filter(None, [size, text]))}"
