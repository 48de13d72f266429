"""Redis and Valkey: `redis://` and `rediss://` (TLS), one server or a cluster.

A range of a value is read with GETRANGE, so no more comes than was asked for; commands are
pipelined in a bounded window, over one connection a server; replies are taken in the order of the
call.
"""

from __future__ import annotations

import ssl
from collections import deque
from collections.abc import Callable, Sequence
from typing import NamedTuple

from sglang_ext.tiers.errors import TierConfigError
from sglang_ext.tiers.records.record import ByteArray
from sglang_ext.tiers.remote.base import (
    NAME_VERSION,
    Deadline,
    Fetch,
    OnFetched,
    OnStored,
    RemoteEngine,
    RemoteUnavailableError,
    Usage,
    Value,
)
from sglang_ext.tiers.remote.engines.redis_listing import RedisListing
from sglang_ext.tiers.remote.engines.redis_nodes import Address, Lease, Nodes
from sglang_ext.tiers.remote.engines.resp import (
    Argument,
    Connection,
    Login,
    ReplyBounds,
    ReplyError,
    refusal,
)
from sglang_ext.tiers.remote.keeping.retention import over_life_s
from sglang_ext.tiers.remote.offline.listing import Listing
from sglang_ext.tiers.remote.password import ENV_PASSWORD
from sglang_ext.tiers.remote.url_options import (
    Options,
    RemoteUrl,
    one_of,
    prefix_of,
    readable_file,
    yes_or_no,
)

_WINDOW_BYTES = 16 << 20
_WINDOW_COMMANDS = 256
# A slot that moves is asked for at its old node, then at its new one; twice is for bad luck.
_MAX_ROUNDS = 4
_INFO_BOUNDS = ReplyBounds(num_bytes=1 << 18)
_MAX_DIGITS = 18
_REDIRECTS = ("MOVED ", "ASK ")
_WRONG_TYPE = "WRONGTYPE "


def options(scheme: str) -> Options:
    """See `EngineModule` of registry.py."""
    readers: dict[str, Callable[[str], object]] = {
        "password-file": readable_file,
        "cluster": yes_or_no,
    }
    if scheme == "rediss":
        readers |= {
            "ca-file": readable_file,
            "cert-file": readable_file,
            "key-file": readable_file,
            "verify": one_of("full", "none"),
        }
    return Options(readers, default_port=6379, path="db", max_hosts=16, has_login=True)


def open_engine(url: RemoteUrl) -> RedisEngine:
    """See `EngineModule` of registry.py."""
    is_cluster = url.options.get("cluster", False)
    if len(url.hosts) > 1 and not is_cluster:
        raise TierConfigError(
            "--hier-kv-remote-url: several HOST:PORT are the members of a cluster; add cluster=yes"
            " or leave one"
        )
    if is_cluster and url.path not in ("", "0"):
        raise TierConfigError(
            f"--hier-kv-remote-url: a cluster has database 0 only, got {url.path}; leave it out"
        )
    if url.user and not url.password:
        raise TierConfigError(
            "--hier-kv-remote-url has a user and no password; add password-file=PATH or set"
            f" {ENV_PASSWORD}"
        )
    login = Login(url.user, url.password, int(url.path or 0), _tls(url))
    return RedisEngine(url.hosts, login, is_cluster=is_cluster, ttl_s=url.options.get("ttl", 0.0))


def open_listing(url: RemoteUrl) -> Listing:
    """See `EngineModule` of registry.py. Does not connect."""
    engine = open_engine(url)
    return RedisListing(engine, engine.nodes, f"{prefix_of(url)}:{NAME_VERSION}")


class _Command(NamedTuple):
    """One command of a call.

    Attributes:
        name: of the value, which decides the node.
        arguments: the command.
        reply_bytes: about as much comes back.
        take: reads the reply and reports the item.
    """

    name: str
    arguments: tuple[Argument, ...]
    reply_bytes: int
    take: Callable[[Connection], None]


class _Window:
    """Commands that were sent and whose replies are still to come, over any number of nodes.

    Attributes:
        pending: in the order of the call, with their connections.
        moved: commands that must be sent to another node, with what the server said.
        refused: the first other error; the replies behind it are taken all the same.
    """

    def __init__(self) -> None:
        self.pending: deque[tuple[_Command, Connection]] = deque()
        self.moved: list[tuple[_Command, ReplyError]] = []
        self.refused: ReplyError | None = None
        self._bytes = 0

    def has_room(self, command: _Command) -> bool:
        fits = self._bytes + command.reply_bytes <= _WINDOW_BYTES
        return not self.pending or (fits and len(self.pending) < _WINDOW_COMMANDS)

    def add(self, command: _Command, connection: Connection) -> None:
        self.pending.append((command, connection))
        self._bytes += command.reply_bytes

    def send(self, num: int, deadline: Deadline) -> None:
        """Sends the youngest `num` commands, those of one node together."""
        groups: dict[int, tuple[Connection, list[tuple[Argument, ...]]]] = {}
        for command, connection in list(self.pending)[len(self.pending) - num :]:
            group = groups.setdefault(id(connection), (connection, []))
            group[1].append(command.arguments)
        for connection, commands in groups.values():
            connection.send(commands, deadline)

    def take(self, *, until_half: bool) -> None:
        """Takes replies: all, or at least one and until half of the window is free again."""
        num_taken = 0
        while self.pending:
            few = len(self.pending) <= _WINDOW_COMMANDS // 2
            if until_half and num_taken and few and self._bytes <= _WINDOW_BYTES // 2:
                return
            num_taken += 1
            command, connection = self.pending.popleft()
            self._bytes -= command.reply_bytes
            try:
                command.take(connection)
            except ReplyError as error:
                if str(error).startswith(_REDIRECTS):
                    self.moved.append((command, error))
                else:
                    self.refused = self.refused or error


class RedisEngine(RemoteEngine):
    """Speaks to Redis or Valkey. Keeps one idle connection a call and node, as they are used."""

    max_value_bytes = 64 << 20
    keeps_ttl = True

    def __init__(
        self,
        hosts: Sequence[Address],
        login: Login,
        *,
        is_cluster: bool = False,
        ttl_s: float = 0.0,
    ) -> None:
        """Does not connect.

        Args:
            hosts: (host, port) of the server, or of members of the cluster.
            login: how to connect to each.
            is_cluster: whether the slots of a cluster decide where a value lies.
            ttl_s: life of a value after it was stored or touched; 0 for no end.
        """
        self._nodes = Nodes(hosts, login, is_cluster=is_cluster)
        self._ttl_ms = int(ttl_s * 1000)

    @property
    def nodes(self) -> Nodes:
        """The servers, and the connections to them."""
        return self._nodes

    def ping(self, deadline: Deadline) -> None:
        """See `RemoteEngine.ping`. Asks every node that has slots."""
        self._nodes.refresh(deadline)
        with Lease(self._nodes) as lease:
            for address in self._nodes.addresses():
                try:
                    lease.get(address, deadline).call(["PING"], deadline)
                except ReplyError as error:
                    raise refusal(error) from error

    def fetch(self, fetches: Sequence[Fetch], on_fetched: OnFetched, deadline: Deadline) -> None:
        """See `RemoteEngine.fetch`."""

        def command(index: int, fetch: Fetch) -> _Command:
            last = fetch.offset + fetch.out.size - 1

            def take(connection: Connection) -> None:
                on_fetched(index, _value_into(fetch.out, connection, deadline))

            arguments = ("GETRANGE", fetch.name, fetch.offset, last)
            return _Command(fetch.name, arguments, fetch.out.size, take)

        self._run([command(*item) for item in enumerate(fetches)], deadline)

    def put(self, values: Sequence[Value], on_stored: OnStored, deadline: Deadline) -> None:
        """See `RemoteEngine.put`."""
        life = ("PX", self._ttl_ms) if self._ttl_ms else ()

        def command(index: int, value: Value) -> _Command:
            def take(connection: Connection) -> None:
                on_stored(index, connection.reply(deadline) is not None)

            only_new = () if value.replaces else ("NX",)
            arguments = ("SET", value.name, value.pieces, *life, *only_new)
            return _Command(value.name, arguments, value.num_bytes, take)

        self._run([command(*item) for item in enumerate(values)], deadline)

    def touch(self, names: Sequence[str], deadline: Deadline) -> None:
        """See `RemoteEngine.touch`."""
        if self._ttl_ms:
            self._each("PEXPIRE", names, (self._ttl_ms,), deadline)
        else:
            self._each("TOUCH", names, (), deadline)

    @property
    def takes_ends(self) -> bool:  # type: ignore[override]
        """See `RemoteEngine`. Without a life of all values nothing would renew what is used."""
        return self._ttl_ms > 0

    def let_go(self, names: Sequence[str], deadline: Deadline) -> None:
        """See `RemoteEngine.let_go`."""
        if self._ttl_ms:
            life_ms = int(over_life_s(self._ttl_ms / 1000) * 1000)
            self._each("PEXPIRE", names, (life_ms,), deadline)

    def delete(self, names: Sequence[str], deadline: Deadline) -> int:
        """See `RemoteEngine.delete`. The server frees the memory later, on a thread of its own."""
        return sum(int(reply == 1) for reply in self._each("UNLINK", names, (), deadline))

    def usage(self, deadline: Deadline) -> Usage:
        """See `RemoteEngine.usage`. Sums over the nodes; no maximum if one of them has none."""
        used, limits = 0, []
        with Lease(self._nodes) as lease:
            for address in self._nodes.addresses():
                try:
                    reply = lease.get(address, deadline).call(
                        ["INFO", "memory"], deadline, _INFO_BOUNDS
                    )
                except ReplyError as error:
                    raise refusal(error) from error
                facts = _info(reply)
                used += facts.get("used_memory", 0)
                limits.append(facts.get("maxmemory", 0))
        return Usage(used, sum(limits) if all(limits) else 0)

    def close(self) -> None:
        """See `RemoteEngine.close`."""
        self._nodes.close()

    def _each(
        self, verb: str, names: Sequence[str], rest: tuple[Argument, ...], deadline: Deadline
    ) -> list[object]:
        replies: list[object] = [None] * len(names)

        def command(index: int, name: str) -> _Command:
            def take(connection: Connection) -> None:
                replies[index] = connection.reply(deadline)

            return _Command(name, (verb, name, *rest), 0, take)

        self._run([command(*item) for item in enumerate(names)], deadline)
        return replies

    def _run(self, commands: Sequence[_Command], deadline: Deadline) -> None:
        """Runs commands wherever their values lie, following slots that move meanwhile."""
        for _ in range(_MAX_ROUNDS):
            moved = self._round(commands, deadline)
            if not moved:
                return
            if not self._nodes.is_cluster:
                raise RemoteUnavailableError(
                    "the server is one of a cluster and points to another, which is followed with"
                    " cluster=yes in --hier-kv-remote-url only"
                )
            commands = [command for command, _ in moved]
            asks = [(c, error) for c, error in moved if str(error).startswith("ASK ")]
            for command, error in asks:
                self._ask(command, error, deadline)
            done = {id(command) for command, _ in asks}
            commands = [command for command in commands if id(command) not in done]
            if not commands:
                return
            self._nodes.refresh(deadline)
        raise RemoteUnavailableError("the cluster's slots do not come to rest")

    def _round(
        self, commands: Sequence[_Command], deadline: Deadline
    ) -> list[tuple[_Command, ReplyError]]:
        """Sends every command and takes every reply; returns those whose slot is elsewhere."""
        window = _Window()
        with Lease(self._nodes) as lease:
            at = 0
            while at < len(commands) or window.pending:
                first = at
                while at < len(commands) and window.has_room(commands[at]):
                    address = self._nodes.address_of(commands[at].name)
                    window.add(commands[at], lease.get(address, deadline))
                    at += 1
                window.send(at - first, deadline)
                window.take(until_half=at < len(commands))
        if window.refused is not None:
            raise refusal(window.refused)
        return window.moved

    def _ask(self, command: _Command, error: ReplyError, deadline: Deadline) -> None:
        """Runs one command at the node that its slot is moving to.

        Where that is none of the cluster's nodes known so far, the command is left out: the item
        is not reported, and so counts as failed.
        """
        address = self._nodes.redirect_address(str(error))
        if address is None:
            return
        with Lease(self._nodes) as lease:
            connection = lease.get(address, deadline)
            connection.send([("ASKING",), command.arguments], deadline)
            try:
                connection.reply(deadline)
                command.take(connection)
            except ReplyError as again:
                raise refusal(again) from again


def _tls(url: RemoteUrl) -> ssl.SSLContext | None:
    if url.scheme != "rediss":
        return None
    files = [url.options.get(name) for name in ("ca-file", "cert-file", "key-file")]
    if (files[1] is None) != (files[2] is None):
        raise TierConfigError(
            "--hier-kv-remote-url: cert-file and key-file belong together; give both or neither"
        )
    try:
        context = ssl.create_default_context(cafile=files[0] and str(files[0]))
        if files[1] is not None:
            # Without a password here OpenSSL would ask for one at the terminal.
            context.load_cert_chain(str(files[1]), str(files[2]), password="")
    except (OSError, ValueError) as error:
        raise TierConfigError(
            "--hier-kv-remote-url: ca-file, cert-file and key-file must be PEM files that belong"
            f" together, the key without a passphrase ({error})"
        ) from error
    if url.options.get("verify") == "none":
        context.check_hostname = False
        context.verify_mode = ssl.CERT_NONE
    return context


def _value_into(out: ByteArray, connection: Connection, deadline: Deadline) -> int:
    """Takes a part of a value; its bytes.

    A list or anything else that is no string is read as one zero: so it is no record, and the next
    put of one overwrites it, where an error of the server's would speak against every page.
    """
    try:
        return connection.bulk_into(out, deadline)
    except ReplyError as error:
        if not str(error).startswith(_WRONG_TYPE):
            raise
        out[:1] = 0
        return 1


def _info(reply: object) -> dict[str, int]:
    """The whole numbers in a reply to INFO."""
    text = reply.decode("utf-8", "replace") if isinstance(reply, bytes) else ""
    pairs = (line.partition(":") for line in text.splitlines())
    # No number of more digits is meant: the server may be anybody's.
    return {
        name: int(value)
        for name, _, value in pairs
        if value.isdecimal() and len(value) <= _MAX_DIGITS
    }
