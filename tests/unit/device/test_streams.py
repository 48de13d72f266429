"""What is waited for on the streams that an engine and its scheduler share."""

from __future__ import annotations

import pytest
import torch

from sglang_ext.device.ports.host import HostPort
from sglang_ext.device.ports.streams import Streams
from testkit.simulated.device import ConflictError, SimulatedDevice


@pytest.mark.parametrize("waits", [False, True])
def test_a_row_is_written_past_the_streams_when_the_forward_is_done(waits: bool) -> None:
    """As by a transfer from another server, to the rows of a request that ended."""
    device = SimulatedDevice(1, may_not_wait=())
    device.eagerness = 0.0
    streams, row = Streams(device, device.new_stream(())), ("row", 1)

    def name_the_row() -> None:
        if waits:
            streams.wait_for_forward()
        device.touch("a transfer", (), [row])
        device.run_all()

    with device.acting("scheduler"):
        with device.on(streams.forwards):
            device.launch("a forward", lambda: None, [], [row])
        if waits:
            name_the_row()
            return
        with pytest.raises(ConflictError):
            name_the_row()


def test_on_a_cpu_there_is_nothing_to_wait_for() -> None:
    """What SGLang takes for a stream there cannot be waited for."""
    forwards = torch.get_device_module("cpu").Stream()
    assert not hasattr(forwards, "synchronize")
    for each in (forwards, None):
        Streams(HostPort(), each).wait_for_forward()
