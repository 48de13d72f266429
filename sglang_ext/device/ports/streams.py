"""The streams of one engine, which all parts of its pages and states share.

torch has 32 a device and hands them out round robin, to SGLang as to the plugin: whoever takes many
has some that are another's, too, and then the one waits for the other. What parts do on a shared
stream is in the order in which it was queued, as parts are loaded and saved one behind another.
"""

from __future__ import annotations

from typing import Any

from sglang_ext.device.ports.base import DevicePort


class Streams:
    """What loads and saves run on. Made and taken by the scheduler's thread.

    Args:
        port: the device.
        forwards: SGLang's for forwards; None where it has none of its own.

    Attributes:
        forwards: as given.
        copies: pages come from DRAM on it; None, as all that follow, before they are taken.
        scatters: they go from the device's buffers to rows.
        states: states come from DRAM and go to their slots.
        gathers: pages and states are laid out in the device's buffers.
        sends: pages leave these for DRAM.
    """

    def __init__(self, port: DevicePort, forwards: Any) -> None:
        self.forwards = forwards
        self.copies: Any = None
        self.scatters: Any = None
        self.states: Any = None
        self.gathers: Any = None
        self.sends: Any = None
        self._port = port
        self._are_taken = False

    def take(self, *avoid: Any) -> None:
        """Takes them, unless they are.

        Args:
            avoid: streams of SGLang's, or None, that must be none of these, beside the forwards'.

        Raises:
            RuntimeError: the device has not so many.
        """
        if self._are_taken:
            return
        port, used = self._port, (self.forwards, *avoid)
        self.copies, self.scatters = port.new_stream(used), port.new_stream(used)
        self.states = port.new_stream(used)
        self.gathers, self.sends = port.new_stream(used), port.new_stream(used)
        self._are_taken = True

    def behind_writers(self) -> list[Any]:
        """Events after which rows are as the scheduler, whose thread this is, has had them written.

        The first is of its current stream, which has computed which rows they are. The second, if
        there is one, is of the forwards' stream, which may be writing them.
        """
        current = self._port.current_stream()
        self.take(current)
        writers = (current,) if self.forwards is None else (current, self.forwards)
        return [self._port.record(stream) for stream in writers]

    def wait_for_forward(self) -> None:
        """Lets the calling thread sleep until the forward that was launched last is done.

        Through the port: what SGLang has for a stream on a CPU has nothing to wait for.
        """
        if self.forwards is not None:
            self._port.synchronize(self._port.record(self.forwards))
