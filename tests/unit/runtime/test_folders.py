"""Private folders end with their owner, however it ends."""

from __future__ import annotations

import signal
import stat
import subprocess
import sys
from pathlib import Path

from wavepp_worker.runtime.folders import PrivateFolder

OWNER = """
import sys
from wavepp_worker.runtime.folders import PrivateFolder
folder = PrivateFolder("run", sys.argv[1])
print(folder.path, flush=True)
sys.stdin.read()
"""


def test_a_folder_is_private_and_removed_once(tmp_path: Path) -> None:
    folder = PrivateFolder("run", tmp_path)
    assert stat.S_IMODE(Path(folder.path).stat().st_mode) == 0o700
    (Path(folder.path) / "socket").write_text("x")
    folder.remove()
    folder.remove()
    assert list(tmp_path.iterdir()) == []


def test_the_next_owner_removes_what_a_killed_one_left(tmp_path: Path) -> None:
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, str(tmp_path)], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None and owner.stdin is not None
    left = Path(owner.stdout.readline().decode().strip())
    with PrivateFolder("run", tmp_path):
        assert left.exists(), "a living owner's folder was removed"
    with PrivateFolder("graph", tmp_path):
        pass
    owner.send_signal(signal.SIGKILL)
    owner.wait(10)
    owner.stdout.close()
    owner.stdin.close()
    other_kind = PrivateFolder("graph", tmp_path)
    assert left.exists(), "folders of another kind are none of its business"
    other_kind.remove()
    with PrivateFolder("run", tmp_path):
        assert not left.exists()
    assert list(tmp_path.iterdir()) == []
