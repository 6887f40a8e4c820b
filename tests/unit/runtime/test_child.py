"""One supervised process: output, exit and signals."""

from __future__ import annotations

import asyncio
import os
import signal
import sys

import pytest

from wavepp_worker.runtime.child import LINE_BYTES_MAX, LINES_KEPT, Child

DEADLINE_S = 10.0


async def run(code: str, *, signals: tuple[int, ...] = ()) -> Child:
    """Run `code` to its end, sending `signals` once it wrote a first line."""
    exits: list[Child] = []
    child = Child("rank9", [sys.executable, "-c", code], dict(os.environ), exits.append)
    async with asyncio.timeout(DEADLINE_S):
        while signals and not child.tail():  # noqa: ASYNC110 the child has no event
            await asyncio.sleep(0.01)
        for number in signals:
            child.send_signal(number)
        await child.gone
    assert exits == [child]
    return child


async def test_output_passes_through_with_the_name(capsys: pytest.CaptureFixture[str]) -> None:
    child = await run("import sys; print('one'); sys.stdout.flush(); sys.stderr.write('two')")
    assert capsys.readouterr().err == "[rank9] one\n[rank9] two\n"
    assert child.tail() == "one | two"
    assert child.obituary() == f"rank9 (pid {child.pid}) exited with status 0"


@pytest.mark.parametrize(
    ("code", "ending"), [("raise SystemExit(3)", "exited with status 3"), ("1/0", "status 1")]
)
async def test_exit_status_is_told(code: str, ending: str) -> None:
    assert (await run(code)).obituary().endswith(ending)


async def test_death_by_signal_is_told() -> None:
    child = await run("import time; print(1, flush=True); time.sleep(60)", signals=(9,))
    assert child.status == -9
    assert child.obituary().endswith("was killed by SIGKILL")
    child.send_signal(signal.SIGKILL)  # an exited process is left alone


async def test_last_words_are_complete_and_bounded(capsys: pytest.CaptureFixture[str]) -> None:
    child = await run("[print(number, 'x' * 200) for number in range(5000)]; print('end')")
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == 5001
    assert child.tail().split(" | ")[-1] == "end"
    assert len(child.tail().split(" | ")) == LINES_KEPT


async def test_endless_line_is_cut(capsys: pytest.CaptureFixture[str]) -> None:
    await run(f"print('y' * {10 * LINE_BYTES_MAX})")
    lines = capsys.readouterr().err.splitlines()
    assert sum(line.count("y") for line in lines) - len(lines) * "[rank9]".count("y") == (
        10 * LINE_BYTES_MAX
    )
    assert max(map(len, lines)) <= LINE_BYTES_MAX + len("[rank9] ")


async def test_grandchild_that_keeps_the_pipe_does_not_hide_the_exit() -> None:
    code = (
        "import subprocess, sys\n"
        "keeper = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(60)'])\n"
        "print(keeper.pid, flush=True)\n"
    )
    child = await run(code)
    os.kill(int(child.tail()), signal.SIGKILL)
    assert child.status == 0
