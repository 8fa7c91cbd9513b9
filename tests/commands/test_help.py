"""The help of every command: its usage, and a text for each option."""

from __future__ import annotations

import argparse

import pytest

from recfuse import cli


def commands() -> dict[str, argparse.ArgumentParser]:
    (action,) = (one for one in cli._parser()._actions if isinstance(one, argparse._SubParsersAction))
    return dict(action.choices)


@pytest.mark.parametrize("command", commands())
def test_every_command_explains_itself(capsys: pytest.CaptureFixture[str], command: str) -> None:
    with pytest.raises(SystemExit) as stopped:
        cli.main([command, "--help"])
    assert stopped.value.code == 0
    text = capsys.readouterr().out
    assert f"usage: recfuse {command}" in text
    for action in commands()[command]._actions:
        assert action.help, f"{action.option_strings or action.dest} has no help"
        assert all(option in text for option in action.option_strings)
