"""Worlds of a simulated device for models that keep more of a request than rows of one pool.

Window layers have a pool of their own, whose rows are given back while the request runs. A state is
a slot; the tree keeps copies of it in slots of their own, which it gives away as soon as they are
saved. The layers of a draft model are the last of a page. Rows of an index lie in V's place.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any, ClassVar

import numpy as np
import torch

from runtime_cpu import inprocess

inprocess.prepare()

from sglang_ext.assembly.draft_setup import _WholeLoads  # noqa: E402
from sglang_ext.assembly.window_setup import bound_ropes  # noqa: E402
from sglang_ext.device.composition import Composition, TokenSpan  # noqa: E402
from sglang_ext.device.copier import PageCopier  # noqa: E402
from sglang_ext.device.layout import (  # noqa: E402
    ROPE_BOUND,
    LayerGroups,
    PageLayout,
    read_tails,
    write_tail,
)
from sglang_ext.device.pools import INDEXED, DevicePool, HybridPools  # noqa: E402
from sglang_ext.device.states.snapshots import Snapshots, StatePool  # noqa: E402
from sglang_ext.device.transfers import LoadJob, StateSlot, WindowRows  # noqa: E402
from sglang_ext.device.windows.block_groups import Block, BlockGroups  # noqa: E402
from sglang_ext.device.windows.window_layers import WindowLayers  # noqa: E402
from sglang_ext.kernels import rope as rope_kernels  # noqa: E402
from testkit.simulated.device import ConflictError  # noqa: E402
from testkit.simulated.kernels import SimulatedSnapshots  # noqa: E402
from tests.property.device.device_parts import (  # noqa: E402
    CONTENTS,
    DIM,
    LAYERS,
    PAGE,
    Load,
    More,
    Offer,
    make_pool,
)
from tests.property.device.device_world import DeviceWorld  # noqa: E402


def bound() -> Any:
    """As hybrids' and drafts' K is stored."""
    return bound_ropes(make_pool())


class DraftWorld(DeviceWorld):
    """The last layer is a draft model's: it waits for the whole load."""

    make_ropes: ClassVar[Any] = staticmethod(bound)

    def _wait_for(self, counter: Any, layer: int) -> None:
        if layer == LAYERS - 1:
            _WholeLoads(counter).wait_until(0)  # its own number of the layer
        else:
            counter.wait_until(layer)


class IndexWorld(DeviceWorld):
    """Rows of an index beside latent ones, in words of a page; the layer in the middle has none."""

    WORDS = (3, 0, 3)

    make_ropes: ClassVar[Any] = staticmethod(bound)

    def _make_pool(self) -> DevicePool:
        plain = make_pool()
        rows = tuple(
            torch.full((plain.num_slots, 1, words), -77, dtype=torch.int32) for words in self.WORDS
        )
        return DevicePool(INDEXED, plain.dtype, plain.k, rows, DIM, plain.num_slots)

    def _layout(self) -> PageLayout:
        return self.pool.layout(PAGE)


class StateWorld(DeviceWorld):
    """Layers with a state between those with attention; the first has both, one neither."""

    ATTENTION, STATEFUL = (0, 3, 4), (0, 2, 5)
    NUM_STATES = 10  # slots; the first is padding

    num_layers: ClassVar[int] = 6
    num_slots: ClassVar[int] = 60
    make_ropes: ClassVar[Any] = staticmethod(bound)
    weights: ClassVar[dict[str, int]] = {**DeviceWorld.weights, "track": 14}

    def _parts(self, copier: PageCopier) -> dict[str, Any]:
        kinds = (torch.bfloat16, (5, 3)), (torch.float32, (4, 3, 7))
        shapes = [(len(self.STATEFUL), self.NUM_STATES, *shape) for _, shape in kinds]
        self.states = StatePool(
            tuple(
                torch.full(shape, -77.0, dtype=dtype)
                for (dtype, _), shape in zip(kinds, shapes, strict=True)
            ),
            self.STATEFUL,
        )
        self.snapshots = SimulatedSnapshots(self.kernels, self.states, self.layout)
        assert self.snapshots.num_parts == 2
        self.free_states = list(range(1, self.NUM_STATES))
        generator = torch.Generator().manual_seed(self.seed)
        self.values: list[list[torch.Tensor]] = []  # of each state, by the page that it is behind
        for number in range(CONTENTS):
            self.values.append(
                [
                    torch.randn(len(t), *t.shape[2:], generator=generator).to(t.dtype)
                    for t in self.states.tensors
                ]
            )
            self.contents += self._snapshot(number)
        return {"snapshots": self.snapshots, "state_layers": [self.ATTENTION, self.STATEFUL]}

    def _snapshot(self, number: int) -> list[np.ndarray]:
        """Slots with the parts of a state."""
        pool = StatePool(tuple(v[:, None] for v in self.values[number]), self.STATEFUL)
        parts = np.zeros((self.snapshots.num_parts, self.snapshots.part_bytes), np.uint8)
        Snapshots(pool, self.layout).gather(torch.zeros(1, dtype=torch.int64), parts)
        slots = np.zeros((len(parts), self.layout.slot_bytes), np.uint8)
        for slot, part in zip(slots, parts, strict=True):
            slot[self.snapshots.span] = part
            write_tail(slot, self.layout, rope_state=ROPE_BOUND, position=number * PAGE)
        return list(slots)

    def _admit_more(self, first: int, slots: list[int], *, is_restored: bool) -> More | None:
        number = first + len(slots) - 1
        if is_restored:
            return More(first=number)
        found: list[int] = []
        for part in range(2):
            slot = self._find(CONTENTS + 2 * number + part, found)
            if slot is None or not self.free_states:
                return None
            found.append(slot)
        at = self.rng.randrange(len(self.free_states))
        return More(tuple(found), number, state=self.free_states.pop(at))

    def _job(self, pages: Any, rows: torch.Tensor, load: Load) -> LoadJob:
        state = StateSlot(2, self.device.tensor(torch.tensor([load.more.state])))
        return LoadJob(pages, rows, load.position, state=state)

    def _give_back(self, load: Load) -> None:
        super()._give_back(load)
        if load.more.state is not None:
            self.free_states.append(load.more.state)

    def _read(self, load: Load, layer: int, *, compare: bool = True) -> None:
        if layer in self.ATTENTION:
            super()._read(load, self.ATTENTION.index(layer), compare=compare)
        if layer in self.STATEFUL and load.more.state is not None:
            self._go_on(load, self.STATEFUL.index(layer), load.more.state, compare=compare)

    def _write(self, load: Load, layer: int, *, is_kept: bool = False) -> None:
        if layer in self.ATTENTION:
            super()._write(load, self.ATTENTION.index(layer), is_kept=is_kept)

    def _go_on(self, load: Load, layer: int, slot: int, *, compare: bool) -> None:
        """A layer reads its state and writes it; here the next one is as the one before."""
        tensors, values = self.states.tensors, self.values[load.more.first]

        def step() -> None:
            for tensor, wanted in zip(tensors, values, strict=True):
                have = tensor[layer, slot]
                assert not compare or torch.equal(have, wanted[layer]), "a forward read other state"
                tensor[layer, slot] = wanted[layer]

        cells = self.snapshots.cells(slot, [layer])
        self.device.launch("forward goes on", step, cells, cells)

    def track(self) -> bool | None:
        """A forward leaves a copy of its state in a slot, and the tree offers that for saving.

        Now and then in the padding slot, which SGLang names for what has none.
        """
        if not self.running or not self.free_states or len(self.free_slots) < 36:
            return False
        load = self.rng.choice(self.running)
        is_padding = self.rng.random() < 0.1
        slot = 0 if is_padding else self.free_states.pop(0)
        number = load.more.first
        pages = np.arange(2) if self.rng.random() < 0.7 else np.array([self.rng.randrange(2)])
        self.device.wait(self.forwards, self.device.record(self.device.current_stream()))
        with self.device.on(self.forwards):
            self._write_state(slot, number)
        tracked = Load(number * PAGE, load.rows[:0], [], More(first=number, state=slot))
        rows = torch.tensor([slot])
        self._offer(tracked, number * PAGE, rows, pages, is_of_state=True)
        return None

    def _write_state(self, slot: int, number: int) -> None:
        tensors, values = self.states.tensors, self.values[number]

        def write() -> None:
            for tensor, value in zip(tensors, values, strict=True):
                tensor[:, slot] = value

        self.device.launch("forward tracks", write, (), self.snapshots.cells(slot))

    def _saved(self, offer: Offer) -> None:
        """The tree gives a state's slot to others as soon as it is saved."""
        if not offer.job.is_of_state:
            super()._saved(offer)
        elif offer.load.more.state:
            self.free_states.insert(0, offer.load.more.state)

    def _check_saved(self, offer: Offer, slots: np.ndarray) -> None:
        if not offer.job.is_of_state:
            super()._check_saved(offer, slots)
            return
        assert offer.load.more.state, "what is in the padding slot was published"
        number = offer.load.more.first
        tails = read_tails(self.arena, slots, self.layout)
        if tails is None or (tails.position != number * PAGE).any():
            raise ConflictError("a state was published before it was whole")
        for page, slot in zip(offer.pages.tolist(), slots.tolist(), strict=True):
            wanted = self.contents[CONTENTS + 2 * number + page][self.snapshots.span]
            have = self.arena[slot][self.snapshots.span]
            assert np.array_equal(have, wanted), "another state was published"

    def settle(self) -> None:
        """See `DeviceWorld.settle`."""
        super().settle()
        assert sorted(self.free_states) == list(range(1, self.NUM_STATES))


class WindowWorld(DeviceWorld):
    """Window layers in two groups, of which the second holds two of the first's layers again."""

    GROUPS: ClassVar[LayerGroups | BlockGroups] = LayerGroups((0, 3, 5), (1, 2, 4, 6))
    SIZES: ClassVar[tuple[int, int]] = DIM, DIM  # of a head of K and of V in a window layer
    WINDOW_PAGES, WINDOW = 24, 2  # of the pool; that a window reaches into

    num_layers: ClassVar[int] = 7
    num_slots: ClassVar[int] = 60
    num_rings: ClassVar[int] = 3
    make_ropes: ClassVar[Any] = staticmethod(bound)
    weights: ClassVar[dict[str, int]] = {**DeviceWorld.weights, "slide": 6, "offer_window": 10}

    def _parts(self, copier: PageCopier) -> dict[str, Any]:
        num = len(self.GROUPS.window)
        self.windows, self.window_shadow, origin = (
            make_pool(num, self.WINDOW_PAGES, self.SIZES) for _ in range(3)
        )
        self.free_windows = list(range(1, self.WINDOW_PAGES))
        self.copiers = [
            copier.for_pool(part, bound_ropes(part), self._layout_of(part))
            for part in self._parts_of(self.windows)
        ]
        self.plain_groups = self._plain_copiers(self.window_shadow)
        savers = self._plain_copiers(origin)
        generator, rows = torch.Generator().manual_seed(self.seed), np.arange(PAGE)
        self.values: list[list[tuple[torch.Tensor, torch.Tensor]]] = []  # of each page, by layer
        for number in range(CONTENTS):
            for tensor in (*origin.k, *origin.v):
                values = torch.randn(PAGE, *tensor.shape[1:], generator=generator)
                tensor[rows] = values.to(tensor.dtype)
            pairs = zip(origin.k, origin.v, strict=True)
            self.values.append([(k[rows].clone(), v[rows].clone()) for k, v in pairs])
            for saver in savers:
                saver.save(rows, number * PAGE, np.zeros(1, np.int64))
                self.contents.append(self.arena[0].copy())
        layers = WindowLayers(self.WINDOW, PAGE, tuple(self.copiers), self.GROUPS.model_layers)
        return {"windows": layers}

    def _parts_of(self, windows: DevicePool) -> list[DevicePool]:
        return HybridPools(self.pool, windows, self.GROUPS).window_parts()

    def _layout_of(self, part: DevicePool) -> PageLayout:
        return self.layout

    def _plain_copiers(self, windows: DevicePool) -> list[PageCopier]:
        """What copies each group on a CPU."""
        return [
            PageCopier(
                part, self._layout_of(part), bound_ropes(part), self.arena,
                mode="pre", kernels=rope_kernels,
            )
            for part in self._parts_of(windows)
        ]  # fmt: skip

    def _in_group(self, group: int, layers: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        """What of K and V of all window layers a group holds, as its copier has it."""
        assert isinstance(self.GROUPS, LayerGroups)
        return [layers[layer] for layer in self.GROUPS.groups[group]]

    def _content_of(self, number: int, group: int) -> int:
        return CONTENTS + 2 * number + group

    def _admit_more(self, first: int, slots: list[int], *, is_restored: bool) -> More | None:
        end = first + len(slots)
        begin = max(first, end - self.WINDOW)
        if len(self.free_windows) < end - begin + 2:
            return None
        found: list[int] = []
        for group in range(2):
            for number in range(begin, end):
                slot = self._find(self._content_of(number, group), [*slots, *found])
                if slot is None:
                    return None
                found.append(slot)
        rows = self._take_rows(self.free_windows, end - begin)
        expected = [
            tuple(torch.cat(parts) for parts in zip(*each, strict=True))
            for each in zip(*self.values[begin:end], strict=True)
        ]
        return More(tuple(found), begin, rows, expected)  # type: ignore[arg-type]

    def _job(self, pages: Any, rows: torch.Tensor, load: Load) -> LoadJob:
        assert load.more.rows is not None
        there = self.device.tensor(load.more.rows)
        windows = WindowRows(len(load.more.rows) // PAGE, there, load.more.first * PAGE)
        return LoadJob(pages, rows, load.position, windows=windows)

    def _give_back(self, load: Load) -> None:
        super()._give_back(load)
        self._give_window_back(load)

    def _give_window_back(self, load: Load) -> None:
        if load.more.rows is not None:
            self.free_windows += sorted({row // PAGE for row in load.more.rows.tolist()})

    def slide(self) -> bool | None:
        """The window of a running request leaves its first pages behind."""
        held = [load for load in self.running if load.more.rows is not None]
        if not held:
            return False
        load = self.rng.choice(held)
        self._give_window_back(load)
        load.more = More(load.more.slots, load.more.first)
        return None

    def _read(self, load: Load, layer: int, *, compare: bool = True) -> None:
        if layer in self.GROUPS.full:
            super()._read(load, self.GROUPS.full.index(layer), compare=compare)
        elif load.more.rows is not None and load.more.expected is not None:
            at = self.GROUPS.window.index(layer)
            wanted = load.more.expected[at]
            self._read_rows(self.windows, at, load.more.rows, wanted, compare=compare)

    def _write(self, load: Load, layer: int, *, is_kept: bool = False) -> None:
        if layer in self.GROUPS.full:
            super()._write(load, self.GROUPS.full.index(layer), is_kept=is_kept)
        elif load.more.rows is not None:
            at, wanted = self.GROUPS.window.index(layer), load.more.expected
            values = wanted[at] if is_kept and wanted is not None else None
            self._write_rows(self.windows, at, load.more.rows, values)

    def offer_window(self) -> bool | None:
        """The window layers' pages of a running request are to be saved."""
        held = [load for load in self.running if load.more.rows is not None]
        if not held or len(self.free_slots) < 36:
            return False
        load = self.rng.choice(held)
        self.running.remove(load)
        assert load.more.rows is not None
        if self.rng.random() < 0.7:
            self._compute(load)
        rows, is_padding = load.more.rows, self.rng.random() < 0.1
        if is_padding:  # SGLang names the padding page for rows that have no window any more
            rows = torch.cat([torch.arange(PAGE), rows[PAGE:]])
        pages = np.arange(2 * len(rows) // PAGE)
        kept = pages[[self.rng.random() < 0.8 for _ in pages]]
        pages = kept if len(kept) else pages
        self._offer(load, load.more.first * PAGE, rows, pages, is_of_windows=True)
        return None

    def _check_saved(self, offer: Offer, slots: np.ndarray) -> None:
        if not offer.job.is_of_windows:
            super()._check_saved(offer, slots)
            return
        more = offer.load.more
        assert more.rows is not None
        assert more.expected is not None
        num = len(more.rows) // PAGE
        for page, slot in zip(offer.pages.tolist(), slots, strict=True):
            group, at = divmod(page, num)
            rows = more.rows[at * PAGE : (at + 1) * PAGE]
            part = slice(at * PAGE, (at + 1) * PAGE)
            expected = self._in_group(group, [(k[part], v[part]) for k, v in more.expected])
            copier = self.plain_groups[group]
            position = (more.first + at) * PAGE
            self._check_pages(copier, copier.pool, slot[None], rows, position, expected)

    def settle(self) -> None:
        """See `DeviceWorld.settle`."""
        super().settle()
        assert sorted(self.free_windows) == list(range(1, self.WINDOW_PAGES))


def in_runs(position: int, num_pages: int) -> Composition:
    """Pages that are made of runs which meet inside one of them."""
    num_tokens = num_pages * PAGE
    at, pages = num_tokens // 2 - 1, np.arange(num_pages)
    runs = (
        TokenSpan(pages[: -(-at // PAGE)], 0, at, 0),
        TokenSpan(pages[at // PAGE :], at % PAGE, num_tokens - at, 0),
    )
    hashes = np.zeros((num_pages, 32), np.uint8)  # nobody looks for them
    return Composition(position, PAGE, hashes, runs, np.zeros(num_pages, np.bool_))


class MadeWindowWorld(WindowWorld):
    """Of each load the pages of all parts are made of runs, as behind a cut."""

    def _job(self, pages: Any, rows: torch.Tensor, load: Load) -> LoadJob:
        job = super()._job(pages, rows, load)
        windows = job.windows
        assert windows is not None
        windows = replace(windows, composition=in_runs(windows.position, windows.num_pages))
        made = in_runs(job.position, len(rows) // PAGE)
        return replace(job, composition=made, windows=windows)


class BlockWorld(WindowWorld):
    """Window layers whose V is of another size: K of one is in a group, its V in the next."""

    SIZES = DIM, DIM + 2
    GROUPS = BlockGroups(
        (0, 3, 5),
        (1, 2, 4, 6),
        tuple(
            tuple(Block(index, is_v) for index, is_v in group)
            for group in (
                [(0, False), (0, True), (1, False), (1, True), (2, False)],
                [(2, True), (3, False), (3, True)],
            )
        ),
    )

    def _layout(self) -> PageLayout:
        return self.pool.layout(PAGE, is_bound=True)

    def _layout_of(self, part: DevicePool) -> PageLayout:
        layout = part.layout(PAGE, self.layout, is_bound=True)
        assert layout.gaps
        return layout

    def _check_saved(self, offer: Offer, slots: np.ndarray) -> None:
        super()._check_saved(offer, slots)
        if not offer.job.is_of_windows:
            return
        assert offer.load.more.rows is not None
        num = len(offer.load.more.rows) // PAGE
        for page, slot in zip(offer.pages.tolist(), slots.tolist(), strict=True):
            for gap in self.copiers[page // num].layout.gaps:
                if self.arena[slot, gap].any():
                    self.counts["foreign bytes"] = self.counts.get("foreign bytes", 0) + 1

    def settle(self) -> None:
        """See `DeviceWorld.settle`."""
        super().settle()
        if "foreign bytes" in self.counts:
            raise ConflictError("a page was published with bytes of another one")

    def _in_group(self, group: int, layers: list[tuple[torch.Tensor, ...]]) -> list[Any]:
        assert isinstance(self.GROUPS, BlockGroups)
        return [(layers[block.index][block.is_v],) for block in self.GROUPS.groups[group]]
