# SPDX-License-Identifier: Apache-2.0
"""The table of commands."""

from __future__ import annotations

import importlib
import inspect

import pytest

from validate.__main__ import COMMANDS, main


@pytest.mark.parametrize("name", COMMANDS)
def test_every_row_is_a_command(name):
    module, purpose = COMMANDS[name]
    assert list(inspect.signature(importlib.import_module(f"validate.{module}").main).parameters) == ["arguments"]
    assert purpose


def test_lists_commands(capsys):
    assert main(["--help"]) == 0
    assert "make-checkpoint" in capsys.readouterr().out


@pytest.mark.parametrize("arguments, said", [([], ""), (["serve"], "validate: no command 'serve'\n")])
def test_refuses_what_it_does_not_know(arguments, said, capsys):
    assert main(arguments) == 2
    err = capsys.readouterr().err
    assert err.startswith(said + "usage: python -m validate COMMAND")
