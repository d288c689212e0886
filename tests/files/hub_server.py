"""A server of this host that speaks the few endpoints of the Hugging Face Hub that its client asks for here."""

from __future__ import annotations

import base64
import hashlib
import http.server
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from urllib.parse import unquote, urlsplit


class Hub:
    """Repositories below `folder`, models/ORG/NAME/REVISION/... and datasets/ORG/NAME/REVISION/...

    A commit is a hash of what its revision has; the default revision is `main`. `asked`: the requests, as "METHOD
    PATH"; `named`: what the listing says besides.
    """

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.asked: list[str] = []
        self.named: dict[str, int] = {}
        self.url, self.token = "", "hf_of_a_test"

    def commit(self, kind: str, repository: str, revision: str = "main") -> str:
        """Hash the files of a revision."""
        digest = hashlib.sha1(f"{kind} {repository}".encode())
        for name, path in self.files(kind, repository, revision).items():
            digest.update(name.encode() + path.read_bytes())
        return digest.hexdigest()

    def files(self, kind: str, repository: str, revision: str = "main") -> dict[str, Path]:
        root = self.folder / kind / repository / revision
        return {str(path.relative_to(root)): path for path in sorted(root.rglob("*")) if path.is_file()}

    def find(self, kind: str, repository: str, revision: str) -> str | None:
        """Find the folder of a revision, which may be a commit."""
        home = self.folder / kind / repository
        known = [path.name for path in home.iterdir()] if home.is_dir() else []
        wanted = {name: {name, self.commit(kind, repository, name)} for name in known}
        return next((name for name, names in wanted.items() if revision in names), None)

    def list_files(self, kind: str, repository: str, revision: str) -> tuple[int, str, bytes]:
        """Answer a request for what a revision has: status, the error's code and the body."""
        if not (self.folder / kind / repository).is_dir():
            return 404, "RepoNotFound", b"{}"
        name = self.find(kind, repository, revision)
        if name is None:
            return 404, "RevisionNotFound", b"{}"
        sizes = {name: path.stat().st_size for name, path in self.files(kind, repository, name).items()}
        siblings = [{"rfilename": each, "size": size} for each, size in (sizes | self.named).items()]
        about = {"id": repository, "sha": self.commit(kind, repository, name), "siblings": siblings, "tags": []}
        return 200, "", json.dumps(about | {"downloads": 0, "likes": 0, "private": False}).encode()


def _answer(hub: Hub) -> type[http.server.BaseHTTPRequestHandler]:
    class Handler(http.server.BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_HEAD(self) -> None:
            self.do_GET(body=False)

        def do_GET(self, *, body: bool = True) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"{self.command} {path}")
            parts = path.strip("/").split("/")
            headers: dict[str, str] = {}
            if parts[0] == "api":
                kind, repository = parts[1], "/".join(parts[2:4])
                status, code, content = hub.list_files(kind, repository, parts[5] if len(parts) > 5 else "main")
            else:
                kind = parts.pop(0) if parts[0] == "datasets" else "models"
                repository, commit, name = "/".join(parts[:2]), parts[3], "/".join(parts[4:])
                found = hub.find(kind, repository, commit)
                file = hub.files(kind, repository, found).get(name) if found else None
                status, code, content = (404, "EntryNotFound", b"") if file is None else (200, "", file.read_bytes())
                headers = {"X-Repo-Commit": commit, "ETag": f'"{hashlib.sha256(content).hexdigest()}"'}
            self.send_response(status)
            for key, value in headers.items():
                self.send_header(key, value)
            if code:
                self.send_header("X-Error-Code", code)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            if body:
                self.wfile.write(content)

        def do_POST(self) -> None:
            path = unquote(urlsplit(self.path).path)
            hub.asked.append(f"POST {path}")
            body = self._read_body()
            parts, status, answer = path.strip("/").split("/"), 200, dict[str, object]()
            if self.headers.get("Authorization") != f"Bearer {hub.token}":
                status, answer = 401, {"error": "Invalid username or password."}
            elif parts[1:] == ["repos", "create"]:
                asked = json.loads(body)
                name = f"{asked['organization']}/{asked['name']}"
                (hub.folder / "models" / name / "main").mkdir(parents=True, exist_ok=True)
                answer = {"url": f"{hub.url}/{name}", "name": name}
            elif "preupload" in parts:
                files = [{"path": file["path"], "uploadMode": "regular"} for file in json.loads(body)["files"]]
                answer = {"files": [{**file, "shouldIgnore": False, "oid": None} for file in files]}
            elif "commit" in parts:
                repository, revision = "/".join(parts[2:4]), parts[5]
                for line in map(json.loads, body.splitlines()):
                    if line["key"] == "file":
                        file = hub.folder / "models" / repository / revision / line["value"]["path"]
                        file.parent.mkdir(parents=True, exist_ok=True)
                        file.write_bytes(base64.b64decode(line["value"]["content"]))
                commit = hub.commit("models", repository, revision)
                answer = {"commitOid": commit, "commitUrl": f"{hub.url}/{repository}/commit/{commit}", "hookOutput": ""}
            content = json.dumps(answer).encode()
            self.send_response(status)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def _read_body(self) -> bytes:
            if "chunked" not in self.headers.get("Transfer-Encoding", ""):
                return self.rfile.read(int(self.headers.get("Content-Length", 0)))
            body = b""
            while size := int(self.rfile.readline(), 16):
                body += self.rfile.read(size)
                self.rfile.readline()
            self.rfile.readline()
            return body

        def log_message(self, *_: object) -> None:
            """Not here."""

    return Handler


@contextmanager
def serve(folder: Path) -> Iterator[Hub]:
    """Serve the repositories below a folder."""
    hub = Hub(folder)
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), _answer(hub))
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    hub.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()
