"""Which KV a decode server takes for a request's own, as it arrives."""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang.srt.disaggregation.base.conn import StateType  # noqa: E402
from sglang.srt.disaggregation.utils import FAKE_BOOTSTRAP_HOST  # noqa: E402

from sglang_ext.errors import HierKVConfigError  # noqa: E402
from sglang_ext.identity.handover import FOREIGN, GivenUpRooms, SendingRooms  # noqa: E402
from sglang_ext.identity.model_identity import ModelIdentity  # noqa: E402
from sglang_ext.provenance.request_state import find_state, state_of  # noqa: E402
from sglang_ext.seam.cache import HierKVRadixCache  # noqa: E402
from sglang_ext.seam.hooks import disaggregation, loaded_models  # noqa: E402
from sglang_ext.seam.media.requests import MediaRequests  # noqa: E402
from sglang_ext.settings.quotas import parse_quotas  # noqa: E402
from sglang_ext.tiers.host import HostArena  # noqa: E402
from sglang_ext.tiers.index import PageIndex  # noqa: E402
from sglang_ext.tiers.records.quality import Quality  # noqa: E402
from sglang_ext.tiers.store import PageStore, PageStoreConfig  # noqa: E402

TOKENS, PAGE = array("q", range(100)), 16
RECEIVER, DUMMY = "10.0.0.2:1234", "dummy"  # names of ranks
FIRST = 17  # token of an answer


class Cache(HierKVRadixCache):
    """A cache of no tree: what a mark is made of."""

    def __init__(self) -> None:
        store = PageStore(HostArena(2, 4096), PageIndex(16), None, PageStoreConfig())
        self.transport = SimpleNamespace(
            store=store,
            restoring=lambda: self.restoring,
            wait_for_forward=lambda: self.waited.append(True),
            windows=None,
            is_hybrid=False,
        )
        self.waited: list[bool] = []  # once for each time that a forward was waited for
        self.linker: Any = SimpleNamespace(cache_linker=self.transport)
        core: Any = SimpleNamespace(page_size=PAGE)
        self.tree_core = core
        self.identity = ModelIdentity(torch.nn.Linear(3, 3), {}, {}, dict)
        self._quotas = parse_quotas("")
        # What this server has of a request, and what another rank found of what came.
        self.restoring: Any = None  # an event behind restored pages
        self.on_device, self.elsewhere = int(Quality.EXACT), int(Quality.EXACT)
        agree: Any = SimpleNamespace(agree_on_worst=lambda worst: max(worst, self.elsewhere))
        self.admission = agree
        taint: Any = SimpleNamespace(admit=lambda req: state_of(req).note_reused(self.on_device))
        self.taint = taint
        self.given_up_rooms = GivenUpRooms()
        self.sending_rooms = SendingRooms()
        tree: Any = None
        self.media = MediaRequests(tree, store.counters)


class Sender:
    """What sends a request's KV."""

    def __init__(self, kv_mgr: Any) -> None:
        self.kv_mgr = kv_mgr


def sender_to(
    room: int, *names: str, kinds: Sequence[StateType] = (), named: Sequence[list[int]] = ()
) -> Any:
    """What sends a request's KV to ranks that asked for it under its room.

    Args:
        room: of the request.
        names: of the ranks.
        kinds: of what goes apart from K and V.
        named: the pages that the ranks named for it.
    """
    infos = {
        name: SimpleNamespace(
            mooncake_session_id=name, is_dummy=name == DUMMY, dst_state_indices=named
        )
        for name in names
    }
    args = SimpleNamespace(state_types=kinds)
    return Sender(SimpleNamespace(transfer_infos={room: infos}, kv_args=args))


def request(room: int, tokens: array[int] = TOKENS, **more: Any) -> Any:
    fields: dict[str, Any] = {
        "bootstrap_host": "10.0.0.1",
        "bootstrap_room": room,
        "full_untruncated_fill_ids": tokens,
        "metadata_buffer_index": 0,
        "discard_output_reason": None,
        "skip_radix_cache_insert": False,
        "last_node": object(),
        "to_finish": None,
        "sampling_params": SimpleNamespace(custom_params=None),
        "disagg_kv_sender": sender_to(room, DUMMY, RECEIVER),
        "output_ids": array("q", [FIRST]),
        "disagg_decode_prefix_len": 0,
        **more,
    }
    return SimpleNamespace(**fields)


class Servers:
    """A prefill server and a decode server of the same weights, and one row of metadata."""

    def __init__(self) -> None:
        self.cache = Cache()
        self.buffers = SimpleNamespace(output_ids=torch.zeros((1, 16), dtype=torch.int32))
        self.waiting: list[Any] = []
        self.runner = SimpleNamespace()
        self.has_rows = True  # for the part that is sent next
        self.sent_behind: list[Any] = []  # the event of each part

    def speculate(self) -> None:
        """Both with a draft model."""
        setattr(self.runner, loaded_models._ATTRIBUTE, (object(),))

    def send(self, req: Any) -> None:
        self.begin(req)
        self.send_last(req)

    def begin(self, req: Any) -> None:
        """The prefill server knows where a request's KV goes."""
        queue = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=self.cache))
        disaggregation._before_sending(True, queue, req)

    def send_last(self, req: Any) -> None:
        """It sends the last part, and the mark."""
        scheduler = SimpleNamespace(tree_cache=self.cache, disagg_metadata_buffers=self.buffers)
        self.buffers.output_ids[0, 0] = FIRST  # as SGLang's `set_buf` says it
        disaggregation._around_sending(self._send_part, scheduler, req, True)

    def _send_part(self, scheduler: Any, req: Any, last_chunk: bool) -> None:
        """As SGLang's sender, which hands an event on with the part that it sends."""
        sender = req.disagg_kv_sender
        if self.has_rows and hasattr(sender, "_early_send_wait_event"):
            self.sent_behind.append(sender._early_send_wait_event)
            sender._early_send_wait_event = None

    def receive(self, req: Any) -> bool:
        """Whether the decode server may store a request whose KV has arrived."""
        arrived = SimpleNamespace(req=req, metadata_buffer_index=0)
        kv_manager = SimpleNamespace(get_session_id=lambda: RECEIVER)
        waiting = SimpleNamespace(kv_manager=kv_manager)
        queue = SimpleNamespace(
            scheduler=self.scheduler(disagg_decode_prealloc_queue=waiting),
            metadata_buffers=self.buffers,
            queue=[*(SimpleNamespace(req=each) for each in self.waiting), arrived],
        )
        disaggregation._after_arrival(None, queue, arrived)
        return not req.skip_radix_cache_insert

    def scheduler(self, **more: Any) -> Any:
        worker = SimpleNamespace(model_runner=self.runner)
        return SimpleNamespace(
            tree_cache=self.cache, tp_worker=worker, sliding_window_size=32, **more
        )

    def resume(self, *reqs: Any) -> None:
        """Requests that the decode server retracted have rows again."""
        queue = SimpleNamespace(tree_cache=self.cache, scheduler=self.scheduler())
        disaggregation._after_resuming(list(reqs), queue)

    def give_up(self, req: Any) -> None:
        """The decode server aborts a request whose KV is on its way."""
        queue = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=self.cache))
        disaggregation._after_giving_up(None, queue, SimpleNamespace(req=req))

    def release(self, receiver: Any) -> None:
        """The decode server gives away the rows of an aborted request."""
        queue = SimpleNamespace(scheduler=SimpleNamespace(tree_cache=self.cache))
        aborted = SimpleNamespace(req=request(7), kv_receiver=receiver)
        disaggregation._before_release(queue, aborted, 0)

    def counted(self, name: str) -> int:
        return int(self.cache.store.counters.snapshot().get(name, 0))

    @property
    def num_foreign(self) -> int:
        return self.counted("received_foreign_requests")


def test_kv_of_the_same_tokens_is_stored_once() -> None:
    servers = Servers()
    servers.send(request(7))
    assert servers.receive(request(7))
    assert not servers.receive(request(7))  # the row was read
    assert servers.num_foreign == 1


@pytest.mark.parametrize("has_draft", [False, True])
@pytest.mark.parametrize("output_ids", [array("q", [FIRST + 1]), array("q")])
def test_a_drafts_last_row_is_of_the_token_that_was_sent(
    output_ids: array[int], has_draft: bool
) -> None:
    """A request whose KV is computed anew goes on with the token that it had answered."""
    servers = Servers()
    if has_draft:
        servers.speculate()
    servers.send(request(7))
    assert servers.receive(request(7))
    servers.send(request(7))
    assert servers.receive(request(7, output_ids=output_ids)) == (not has_draft)
    assert servers.num_foreign == has_draft


@pytest.mark.parametrize("lacks", ["nothing", "a draft's rows", "a window's"])
def test_a_request_that_goes_on_without_some_rows_is_not_stored(lacks: str) -> None:
    servers = Servers()
    if lacks == "a draft's rows":
        servers.speculate()
    servers.cache.transport.is_hybrid = lacks == "a window's"
    reqs = [request(7), request(8)]
    servers.resume(*reqs)
    is_left = lacks != "nothing"
    assert [req.skip_radix_cache_insert for req in reqs] == [is_left] * 2
    assert servers.counted("unsaved_retracted_requests") == 2 * is_left


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize(
    ("running", "may_write"), [(None, False), ([False, False], False), ([False, True], True)]
)
def test_rows_of_a_request_that_ended_are_named_when_no_forward_writes_them(
    running: list[bool] | None, may_write: bool, overlap: bool
) -> None:
    """With overlap scheduling the forward that runs has requests that ended meanwhile."""
    servers = Servers()
    reqs = [SimpleNamespace(finished=lambda ended=ended: ended) for ended in running or []]
    scheduler = servers.scheduler(
        enable_overlap=overlap,
        last_batch=None if running is None else SimpleNamespace(reqs=reqs),
    )
    disaggregation._before_rows_are_taken(SimpleNamespace(scheduler=scheduler), request(7))
    assert bool(servers.cache.waited) == (overlap and may_write)


class Kv:
    """What SGLang has of a request's rows.

    Args:
        shared: leading tokens whose rows are the tree's.
        first: the first token for which there are rows of window layers.
    """

    req_pool_idx = 0

    def __init__(self, shared: int, first: int) -> None:
        self.cache_protected_len = shared
        self.first = first

    def get_evicted_seqlen(self, component: Any) -> int:
        return self.first

    def set_evicted_seqlen(self, component: Any, length: int) -> None:
        self.first = length


@pytest.mark.parametrize(
    ("num_tokens", "shared", "first", "given_back"),
    [
        (64, 0, 16, range(16, 32)),  # of whole pages: a page before the window
        (65, 0, 32, range(0)),
        (79, 0, 32, range(0)),
        (80, 32, 32, range(32, 48)),
        (70, 48, 32, range(32, 48)),  # what the device has of the window is not sent
        (20, 0, 0, range(0)),
    ],
)
def test_rows_of_window_layers_that_nobody_fills_are_given_back(
    num_tokens: int, shared: int, first: int, given_back: range
) -> None:
    servers, found = Servers(), []
    allocator = SimpleNamespace(
        free_swa_segment=lambda rows, start_pos: found.append((rows.tolist(), start_pos))
    )
    cache = servers.cache
    cache.transport.windows = object()
    cache.req_to_token_pool = SimpleNamespace(req_to_token=torch.arange(100)[None])
    cache.token_to_kv_pool_allocator = allocator
    tokens, kv = TOKENS[:num_tokens], Kv(shared, first)
    servers.send(request(7, tokens))
    assert servers.receive(request(7, tokens, kv=kv))
    assert found == ([(list(given_back), first)] if given_back else [])
    assert kv.first == (given_back.stop if given_back else first)


@pytest.mark.parametrize(
    ("num_known", "named", "is_stored"),
    [
        (0, [[9] * 7], True),
        (0, [[9] * 6], False),
        (0, [[9] * 8], False),
        (0, [[]], False),
        (0, [], False),
        (32, [[9] * 5], True),
        (32, [[9] * 7], False),
    ],
)
def test_kv_is_not_stored_if_index_rows_of_a_page_were_not_sent(
    num_known: int, named: list[list[int]], is_stored: bool
) -> None:
    """Of two lists of pages SGLang sends what both have, in order.

    Args:
        num_known: leading tokens that the decode server has.
        named: the pages that it named for index rows, of 100 tokens.
        is_stored: whether it may store what comes.
    """
    servers = Servers()
    sender = sender_to(7, DUMMY, RECEIVER, kinds=[StateType.DSA], named=named)
    servers.send(request(7, disagg_kv_sender=sender, disagg_decode_prefix_len=num_known))
    assert servers.receive(request(7)) == is_stored
    assert servers.num_foreign == (not is_stored)


def test_rows_of_other_kinds_that_are_sent_apart_are_not_counted_in_pages() -> None:
    """Of window layers only the last pages are."""
    servers = Servers()
    sender = sender_to(7, RECEIVER, kinds=[StateType.SWA], named=[[9]])
    servers.send(request(7, disagg_kv_sender=sender))
    assert servers.receive(request(7))


class Rows:
    """A layer's rows of a pool, by where they lie."""

    def __init__(self, at: int, num_values: int = 1) -> None:
        self.at, self.num_values = at, num_values

    def numel(self) -> int:
        return self.num_values

    def data_ptr(self) -> int:
        return self.at


QUEUES = ("disagg_prefill_bootstrap_queue", "disagg_decode_prealloc_queue")


def scheduler_that_sends(queue: str, kv: list[int], windows: list[int]) -> Any:
    """A server of a kind of queue, which sends what lies at some addresses."""
    args = SimpleNamespace(kv_data_ptrs=kv, state_data_ptrs=[windows] if windows else [])
    of_queue = SimpleNamespace(kv_manager=SimpleNamespace(kv_args=args))
    return SimpleNamespace(**{**dict.fromkeys(QUEUES), queue: of_queue})


def cache_of(*addresses: int) -> Any:
    rows = [Rows(at) for at in addresses]
    return SimpleNamespace(hier_linker=SimpleNamespace(device_rows=rows))


@pytest.mark.parametrize("queue", QUEUES)
def test_rows_that_are_not_sent_are_no_part_of_a_page(queue: str) -> None:
    """As a draft's would be, where SGLang sends none: what lies in their place is stored then."""
    cache = cache_of(1, 2, 3)
    disaggregation.check_transfer(scheduler_that_sends(queue, [1, 2, 3], []), cache)
    disaggregation.check_transfer(scheduler_that_sends(queue, [1, 2], [3]), cache)
    # Of a layer without an index there are none to send.
    cache.hier_linker.device_rows.append(Rows(4, num_values=0))
    disaggregation.check_transfer(scheduler_that_sends(queue, [1, 2, 3], []), cache)
    with pytest.raises(HierKVConfigError, match="got 1 kinds of rows that it does not send"):
        disaggregation.check_transfer(scheduler_that_sends(queue, [1, 3], []), cache)
    disaggregation.check_transfer(SimpleNamespace(**dict.fromkeys(QUEUES)), cache)


@pytest.mark.parametrize("tokens", [TOKENS[:-1], TOKENS[:-1] + array("q", [5])])
def test_kv_of_other_tokens_is_not_stored(tokens: array[int]) -> None:
    servers = Servers()
    servers.send(request(7, tokens))
    assert not servers.receive(request(7))
    assert servers.num_foreign == 1


def test_kv_that_went_to_two_requests_of_one_room_is_not_stored() -> None:
    servers = Servers()
    servers.waiting = [request(7), request(8)]
    servers.send(request(7))
    assert not servers.receive(request(7))
    servers.send(request(9))
    assert servers.receive(request(9))
    assert servers.num_foreign == 1


@pytest.mark.parametrize("other", ["sends", "was aborted"])
@pytest.mark.parametrize("is_first", [True, False])
def test_kv_of_two_requests_of_the_prefill_server_in_one_room_is_not_stored(
    is_first: bool, other: str
) -> None:
    """Both are sent to the same rows; the decode server knows of one."""
    servers = Servers()
    mine, others = request(7), [request(7, TOKENS[:50])]
    for req in [mine, *others] if is_first else [*others, mine]:
        servers.begin(req)
    if other == "was aborted":
        others.clear()  # and its sender is gone
    servers.send_last(mine)
    assert not servers.receive(request(7))
    servers.send(request(7))  # nor later: what the other one had sent may be on its way
    assert not servers.receive(request(7))
    servers.send(request(8))
    assert servers.receive(request(8))
    assert servers.num_foreign == 2


def test_a_room_may_be_used_again_when_all_was_sent() -> None:
    """As by a request that was retracted, and whose KV is computed anew."""
    servers = Servers()
    for _ in range(2):
        servers.send(request(7))
        assert servers.receive(request(7))
    for _ in range(2):  # of which nothing is sent, whatever their room
        servers.begin(request(7, bootstrap_host=FAKE_BOOTSTRAP_HOST))
    servers.send(request(7))
    assert servers.receive(request(7))


def test_kv_that_comes_for_the_room_of_a_request_that_was_given_up_is_not_stored() -> None:
    servers = Servers()
    servers.give_up(request(7))
    servers.send(request(7))
    assert not servers.receive(request(7))
    servers.send(request(8))
    assert servers.receive(request(8))
    assert servers.num_foreign == 1


@pytest.mark.parametrize("names", [("another",), ("another", RECEIVER), (DUMMY,), ()])
def test_kv_that_was_not_sent_to_this_rank_alone_is_not_stored(names: tuple[str, ...]) -> None:
    servers = Servers()
    servers.send(request(7, disagg_kv_sender=sender_to(7, *names)))
    assert not servers.receive(request(7))
    assert servers.num_foreign == 1


def test_a_request_to_which_nothing_is_sent_is_not_stored_by_what_another_left() -> None:
    servers = Servers()
    servers.send(request(7))  # and its transfer fails: nobody reads the row
    assert not servers.receive(request(7, bootstrap_host=FAKE_BOOTSTRAP_HOST))
    assert servers.num_foreign == 0


def test_what_is_foreign_to_another_rank_is_not_stored_by_this_one() -> None:
    servers = Servers()
    servers.cache.elsewhere = FOREIGN
    servers.send(request(7))
    assert not servers.receive(request(7))
    assert servers.num_foreign == 1


@pytest.mark.parametrize(
    ("sent", "elsewhere", "on_device"), [(1, 0, 0), (0, 1, 0), (0, 0, 1), (2, 1, 0), (0, 0, 0)]
)
def test_the_worst_of_what_was_sent_and_of_what_was_here_is_known(
    sent: int, elsewhere: int, on_device: int
) -> None:
    servers = Servers()
    servers.cache.elsewhere, servers.cache.on_device = elsewhere, on_device
    prefilled, decoded = request(7), request(7)
    state_of(prefilled).taint = sent
    servers.send(prefilled)
    assert servers.receive(decoded)
    state = find_state(decoded)
    assert state is not None
    assert state.taint == state.reused == max(sent, elsewhere, on_device)
    assert servers.counted("received_inexact_requests") == (max(sent, elsewhere) > 0)
    assert servers.counted("received_requests") == 1


def test_what_was_sent_stays_known_when_its_rows_are_given_back() -> None:
    """A request that is retracted keeps its KV elsewhere, and is matched as if it had none."""
    servers = Servers()
    prefilled, decoded = request(7), request(7)
    state_of(prefilled).taint = int(Quality.LOSSY)
    servers.send(prefilled)
    servers.receive(decoded)
    state_of(decoded).begin_admission()
    assert state_of(decoded).taint == Quality.LOSSY
    assert state_of(decoded).page_quality(3).tolist() == [Quality.LOSSY] * 3


@pytest.mark.parametrize(("quality", "is_refused"), [(0, False), (1, True)])
def test_a_request_for_exact_kv_is_not_answered_from_other_kv(
    quality: int, is_refused: bool
) -> None:
    servers = Servers()
    exact = SimpleNamespace(custom_params={"hier_kv_exact": True})
    prefilled, decoded = request(7), request(7, sampling_params=exact)
    state_of(prefilled).taint = quality
    servers.send(prefilled)
    servers.receive(decoded)
    assert (decoded.to_finish is not None) == is_refused


@pytest.mark.parametrize(
    ("num_acks", "is_notified", "is_over"), [(1, True, False), (2, True, True), (0, False, True)]
)
def test_nothing_is_stored_once_rows_are_given_away_that_may_still_be_written(
    num_acks: int, is_notified: bool, is_over: bool
) -> None:
    servers = Servers()
    manager = SimpleNamespace(is_abort_release_safe=lambda room, required: num_acks >= required)
    infos: list[Any] | None = [{}, {}] if is_notified else None
    servers.release(
        SimpleNamespace(kv_mgr=manager, abort_notified=is_notified, bootstrap_infos=infos)
    )
    assert servers.counted("unended_transfers") == (not is_over)
    servers.send(request(8))
    assert servers.receive(request(8)) == is_over


class _Event:
    """One of a port's."""

    num_waits = 0

    def synchronize(self) -> None:
        self.num_waits += 1


def test_the_thread_that_sends_waits_for_a_page_that_is_being_restored() -> None:
    """And not the scheduler's, but where SGLang has no such thread."""
    servers, event = Servers(), _Event()
    sender = sender_to(7, DUMMY, RECEIVER)
    sender._early_send_wait_event = None
    req = request(7, disagg_kv_sender=sender)
    servers.send(req)
    assert servers.sent_behind == [None]  # nothing was restored
    servers.cache.restoring = event
    servers.send(req)
    assert servers.sent_behind == [None, event]
    earlier = sender._early_send_wait_event = _Event()
    servers.send(req)
    assert servers.sent_behind == [None, event, earlier]  # SGLang's own is behind the page, too
    servers.has_rows = False
    servers.send(req)
    assert sender._early_send_wait_event is None  # or the next part would go behind this one
    assert (event.num_waits, earlier.num_waits) == (0, 0)
    servers.send(request(7))
    assert event.num_waits == 1
