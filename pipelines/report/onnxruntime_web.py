"""ONNX Runtime for pages: two files of one version of npm's package onnxruntime-web, checked by their SHA-256.

They are read from a directory of the package, or else from this user's cache, which npm fills once.
"""

from __future__ import annotations

import contextlib
import hashlib
import subprocess
import tarfile
import tempfile
from pathlib import Path

from pipelines.errors import AmagoError, InputMissing, IntegrityError, StageFailed
from pipelines.events import Listener, Notice
from pipelines.files.atomic import write_together
from pipelines.files.user_cache import cache_home

NAME, VERSION = "onnxruntime-web", "1.30.0"
SCRIPT, WASM = "ort.wasm.bundle.min.mjs", "ort-wasm-simd-threaded.wasm"
SHA256 = {
    SCRIPT: "11e64bd8ffe11bd1a2a2f0d6275fdfbbba7262f0b76b99b53d228a8a22ef3d90",
    WASM: "3398c10d07d229bd91b364548e130e0e51a8e5704b88c7c083ebbeb78842dee2",
}
_SECONDS = 600


def read_files(directory: str, listener: Listener) -> dict[str, bytes]:
    """Read the script and the WebAssembly of ONNX Runtime.

    `directory`: of the package, or where npm installed it; empty: this user's cache, which npm fills.
    InputMissing if they are not there, IntegrityError if they are of another version.
    """
    if directory:
        given = Path(directory)
        places = (given / "dist", given / NAME / "dist", given / "node_modules" / NAME / "dist")
        place = next((place for place in places if (place / WASM).is_file()), None)
        if place is None:
            raise InputMissing(f"no {NAME} in '{directory}'", hint=f"install it: npm install {NAME}@{VERSION}")
        return {name: _check(name, (place / name).read_bytes(), str(place)) for name in SHA256}
    cache = cache_home() / f"{NAME}-{VERSION}"
    try:
        return {name: _check(name, (cache / name).read_bytes(), str(cache)) for name in SHA256}
    except (OSError, IntegrityError):
        found = _fetch(listener)
    with contextlib.suppress(AmagoError):  # a cache that cannot be written costs the next page a download
        write_together(cache, found)
    return found


def _check(name: str, content: bytes, where: str) -> bytes:
    if hashlib.sha256(content).hexdigest() != SHA256[name]:
        raise IntegrityError(
            f"{name} in '{where}' is not that of {NAME} {VERSION}", hint=f"npm install {NAME}@{VERSION}"
        )
    return content


def _fetch(listener: Listener) -> dict[str, bytes]:
    """Download the package with npm, which verifies it, without installing it or its dependencies."""
    listener(Notice(stage="export", text=f"fetching {NAME} {VERSION} with npm (33 MB, once)"))
    with tempfile.TemporaryDirectory() as folder:
        command = ["npm", "pack", f"{NAME}@{VERSION}", "--json", "--ignore-scripts", "--pack-destination", folder]
        try:
            done = subprocess.run(
                command,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                text=True,
                check=False,
                timeout=_SECONDS,
                cwd=folder,
            )
        except FileNotFoundError as error:
            raise InputMissing(
                f"a page contains {NAME} {VERSION}, which npm fetches, and there is no npm here",
                hint="install npm, or copy the package and give --set export.onnxruntime_web=DIR",
            ) from error
        except subprocess.TimeoutExpired as error:
            raise StageFailed(f"npm did not fetch {NAME} within {_SECONDS} s", hint="repeat the command") from error
        if done.returncode:
            last = (done.stderr.strip().splitlines() or ["no message"])[-1]
            raise StageFailed(f"npm could not fetch {NAME} {VERSION}: {last}", hint="check the network, and repeat")
        [archive] = Path(folder).glob("*.tgz")
        with tarfile.open(archive) as opened:
            found = {}
            for name in SHA256:
                member = opened.extractfile(f"package/dist/{name}")
                assert member is not None
                found[name] = _check(name, member.read(), NAME)
        return found
