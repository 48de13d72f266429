import numpy as np
from sglang_ext.tiers.store import directory as d
from sglang_ext.tiers.store.types import *
from sglang_ext.tiers.index import NO_SEGMENT
def old(self, segment):
        with self.lock:
            rows = self.index.rows_of_segment(segment)
            self.index.flags[rows] &= np.uint8(0xFF ^ ON_DISK)
            self.index.segment[rows] = NO_SEGMENT
            gone = rows[(self.index.flags[rows] & (READY | FILLING)) == 0]
            lost = self._log_keys(gone)
            self.index.remove(gone)
        if lost is not None: self.events.pages("lost", lost)
d.Directory.drop_segment=old
from tests.faults.test_store_faults import test_pages_whose_segment_was_reclaimed_can_leave_dram
