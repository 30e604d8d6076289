# SPDX-License-Identifier: Apache-2.0
"""How far the preparation of layers has come, said at most every few seconds."""

from __future__ import annotations

import logging
import time

logger = logging.getLogger("vllm.exl3")
SECONDS = 5.0  # between two lines


class Progress:
    """Counts layers: `expect` when one is made, `step` when its weights are ready."""

    def __init__(self) -> None:
        self.expected = self.done = 0
        self.began = self.said = 0.0

    def expect(self) -> None:
        self.expected += 1

    def step(self) -> None:
        now = time.monotonic()
        if self.done in (0, self.expected):  # the first load, or a reload
            self.done, self.began, self.said = 0, now, now
        self.done += 1
        if self.done == self.expected:
            logger.info("EXL3: %d layers ready, the last %.1f s after the first", self.done, now - self.began)
        elif now - self.said >= SECONDS:
            logger.info("EXL3: %d of %d layers ready", self.done, self.expected)
            self.said = now
