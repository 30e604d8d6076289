# SPDX-License-Identifier: Apache-2.0
"""How `bench decode` deals with an engine that does not start."""

from __future__ import annotations

import sys

from bench.decode import READY, figures_in, reason, running, wait_for


def test_an_engine_that_takes_too_long_is_ended_and_says_so(tmp_path):
    log = tmp_path / "log"
    with running([sys.executable, "-c", "import time; time.sleep(600)"], {}, log) as process:
        wait_for(process, log, 0.2)
        assert process.poll() is not None
    assert figures_in(log.read_text()) is None
    assert reason(log.read_text()) == "Error: not ready after 0.2 s"


def test_an_engine_that_loads_says_how_far_it_is(tmp_path, capsys):
    log = tmp_path / "plans"
    command = [sys.executable, "-uc", f"import time; print('layer 3 of 78'); time.sleep(3); print('{READY}')"]
    with running(command, {}, log) as process:
        wait_for(process, log, 60, every=0.1)
    assert "plans        not ready after   1 s: layer 3 of 78\n" in capsys.readouterr().out


def test_an_engine_that_is_ready_goes_on(tmp_path):
    log = tmp_path / "log"
    command = [sys.executable, "-c", f"import time; print('{READY}', flush=True); time.sleep(600)"]
    with running(command, {}, log) as process:
        wait_for(process, log, 60)
        assert process.poll() is None
