"""A page in which an exported policy adapts to frozen lakes: one file that needs neither server nor network.

The file contains the bundle's policy.onnx and policy.mjs, ONNX Runtime (compressed, as text), and the lakes of the test
split. Its Content-Security-Policy admits one script, by its hash, and WebAssembly.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.config.model import WITHOUT_MEMORY
from pipelines.envs.make import make
from pipelines.envs.suites.frozen_lake import FrozenLake
from pipelines.envs.suites.lake_maps import list_split_maps
from pipelines.errors import UsageError
from pipelines.export import forms
from pipelines.files.checksums import seal
from pipelines.report.markup import encode_json, hash_source, join, read_asset
from pipelines.report.onnxruntime_web import NAME, SCRIPT, VERSION, WASM
from pipelines.runs.evaluations import name_mode, to_number

PAGE = "page.html"
_MOST_CELLS = 16  # the lakes of larger sizes are not enumerated
_ASSETS = ("lake.mjs", "lake_player.mjs", "policy_page.mjs")


def make_environment(record: Mapping[str, Any]) -> FrozenLake:
    """Make the environment of a policy from the record of its bundle. UsageError if a page cannot show it."""
    env, encoder = record["env"], record["agent"]["sequence"]["kind"]
    if encoder in WITHOUT_MEMORY:
        raise UsageError(
            f"a page shows a policy and its memory; one with the encoder '{encoder}' has none",
            hint="give --format onnx",
        )
    name = str(env.get("name"))
    if name == "meta-frozen-lake":
        made = make(name, num_envs=1, seed=0, params={key: value for key, value in env.items() if key != "name"})
        assert isinstance(made, FrozenLake)
        own = made.settings
        if own.size**2 <= _MOST_CELLS and not (own.hard or own.recover or own.slip):
            return made
    raise UsageError(
        f"a page shows meta-frozen-lake of at most 4x4 cells without hard, recover and slip; this policy is for {name}",
        hint="give --format onnx",
    )


def write_page(
    lakes: FrozenLake,
    record: Mapping[str, Any],
    files: Mapping[str, bytes],
    evaluated: Mapping[str, Any] | None,
    runtime: Mapping[str, bytes],
) -> bytes:
    """Write the page of a policy.

    Args:
        lakes: the environment that `make_environment` found.
        record: what policy.json says of the policy, apart from checksums.
        files: files of the bundle, with policy.onnx and policy.mjs.
        evaluated: the policy's scores, as `evaluation.adaptation.compute_metrics` returns them.
        runtime: what `onnxruntime_web.files` returned.
    """
    own, model = lakes.settings, files[forms.FILES[forms.ONNX]]
    holes, _ = list_split_maps(own.size, own.held_out, "test")
    inner = holes[:, 1:-1]
    attempts = (evaluated or {}).get("per_attempt") or None
    count = to_number((evaluated or {}).get("episodes"))
    intervals = []
    for attempt in attempts or ():
        low, high = attempt["success_ci95"]
        intervals.append({"mean": attempt["success_mean"], "low": low, "high": high})
    data = {
        "rules": {
            "size": own.size,
            "attempts": own.attempts,
            "limit": own.attempt_steps,
            "progress": own.show_progress,
        },
        "maps": (inner @ (1 << np.arange(inner.shape[1]))).tolist(),
        "reference": {
            "evaluated": attempts and intervals,
            "random": lakes.spec.random_success,
            "optimal": lakes.spec.optimal_success,
        },
        "record": seal(record, {forms.FILES[forms.ONNX]: model}).decode(),
        "model": base64.b64encode(model).decode(),
    }
    script = _bundle_script(runtime[SCRIPT].decode(), files["policy.mjs"].decode())
    style = read_asset("report.css") + read_asset("policy_page.css")
    policy = (
        f"default-src 'none'; script-src {hash_source(script)} 'wasm-unsafe-eval';"
        f" style-src {hash_source(style)}; base-uri 'none'; form-action 'none'"
    )
    acts = name_mode(bool(record.get("greedy")))
    foot = f"Policy at update {record.get('update')}, {acts} actions, exported by amago"
    foot += f" and run by {NAME} {VERSION} (MIT licence)."
    parts = {
        "policy": policy,
        "style": style,
        "attempts": str(own.attempts),
        "episodes": f" in {count:,.0f} episodes" if count else "",
        "foot": join(foot),
        "data": encode_json(data),
        "wasm": base64.b64encode(gzip.compress(runtime[WASM], 9, mtime=0)).decode(),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], read_asset("policy_page.html")).encode()


def _bundle_script(runtime: str, policy: str) -> str:
    """Concatenate all modules into one script.

    They import from each other only, by names that are distinct, so dropping import and export statements is enough.
    """
    body, clause = re.fullmatch(
        r"(.*)export\{([^{}]*)\};\s*(?://# sourceMappingURL=\S*\s*)?", runtime, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    names = ", ".join(f"{outer}: {inner}" for inner, outer in re.findall(r"([\w$]+) as ([\w$]+)", clause))
    parts = [f"const ort = (() => {{\n{body}\nreturn {{{names}}};\n}})();"]
    for source in (policy, *map(read_asset, _ASSETS)):
        source = re.sub(r"^import [^;]*;\n", "", source, flags=re.M)
        parts.append(re.sub(r"^export (?=(async )?(class|function|const) )", "", source, flags=re.M))
    script = "\n".join(parts)
    assert "</script" not in script.lower()
    assert "<!--" not in script
    return script
