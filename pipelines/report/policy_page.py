"""A page in which an exported policy adapts to frozen lakes: one file that needs neither server nor network.

It contains the bundle's policy.onnx and policy.mjs, ONNX Runtime (compressed, as text), and the test split's lakes. Its
Content-Security-Policy admits this one script, by its hash, and WebAssembly.
"""

from __future__ import annotations

import base64
import gzip
import re
from collections.abc import Mapping
from typing import Any

import numpy as np

from pipelines.config.encoders import WITHOUT_MEMORY
from pipelines.envs.make import make
from pipelines.envs.suites.frozen_lake import FrozenLake
from pipelines.envs.suites.lake_maps import maps_of_split
from pipelines.errors import UsageError
from pipelines.export import forms
from pipelines.files.checksums import sealed
from pipelines.report.markup import asset, joined, script_data, source_hash
from pipelines.report.onnxruntime_web import NAME, SCRIPT, VERSION, WASM
from pipelines.runs.evaluations import mode_name, number

PAGE = "page.html"
_MOST_CELLS = 16  # the lakes of larger sizes are not enumerated
_ASSETS = ("lake.mjs", "lake_player.mjs", "policy_page.mjs")


def lakes_of(record: Mapping[str, Any]) -> FrozenLake:
    """Return the environment of a policy, from the record of its bundle. UsageError if a page cannot show it."""
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


def page(
    lakes: FrozenLake,
    record: Mapping[str, Any],
    files: Mapping[str, bytes],
    evaluated: Mapping[str, Any] | None,
    runtime: Mapping[str, bytes],
) -> bytes:
    """Return the page of a policy.

    Args:
        lakes: the environment that `lakes_of` found.
        record: what policy.json says of the policy, apart from checksums.
        files: files of the bundle, with policy.onnx and policy.mjs.
        evaluated: the policy's scores, as `evaluation.adaptation.metrics` returns them.
        runtime: what `onnxruntime_web.files` returned.
    """
    own, model = lakes.settings, files[forms.FILES[forms.ONNX]]
    holes, _ = maps_of_split(own.size, own.held_out, "test")
    inner = holes[:, 1:-1]
    attempts = (evaluated or {}).get("per_attempt") or None
    data = {
        "rules": {
            "size": own.size,
            "attempts": own.attempts,
            "limit": own.attempt_steps,
            "progress": own.show_progress,
        },
        "maps": (inner @ (1 << np.arange(inner.shape[1]))).tolist(),
        "reference": {
            "evaluated": attempts and [_interval(attempt) for attempt in attempts],
            "random": lakes.spec.random_success,
            "optimal": lakes.spec.optimal_success,
        },
        "record": sealed(record, {forms.FILES[forms.ONNX]: model}).decode(),
        "model": base64.b64encode(model).decode(),
    }
    script = _script(runtime[SCRIPT].decode(), files["policy.mjs"].decode())
    style = asset("report.css") + asset("policy_page.css")
    policy = (
        f"default-src 'none'; script-src {source_hash(script)} 'wasm-unsafe-eval';"
        f" style-src {source_hash(style)}; base-uri 'none'; form-action 'none'"
    )
    acts = mode_name(bool(record.get("greedy")))
    foot = f"Policy at update {record.get('update')}, {acts} actions, exported by amago"
    foot += f" and run by {NAME} {VERSION} (MIT licence)."
    parts = {
        "policy": policy,
        "style": style,
        "attempts": str(own.attempts),
        "episodes": _episodes(evaluated),
        "foot": joined(foot),
        "data": script_data(data),
        "wasm": base64.b64encode(gzip.compress(runtime[WASM], 9, mtime=0)).decode(),
        "script": script,
    }
    return re.sub(r"\{\{(\w+)\}\}", lambda found: parts[found[1]], asset("policy_page.html")).encode()


def _script(runtime: str, policy: str) -> str:
    """Return all modules as one: their imports refer to each other, so that names stay and the statements go."""
    body, clause = re.fullmatch(
        r"(.*)export\{([^{}]*)\};\s*(?://# sourceMappingURL=\S*\s*)?", runtime, re.DOTALL
    ).groups()  # type: ignore[union-attr]
    names = ", ".join(f"{outer}: {inner}" for inner, outer in re.findall(r"([\w$]+) as ([\w$]+)", clause))
    parts = [f"const ort = (() => {{\n{body}\nreturn {{{names}}};\n}})();"]
    for source in (policy, *map(asset, _ASSETS)):
        parts.append(
            re.sub(
                r"^export (?=(async )?(class|function|const) )",
                "",
                re.sub(r"^import [^;]*;\n", "", source, flags=re.M),
                flags=re.M,
            )
        )
    script = "\n".join(parts)
    assert "</script" not in script.lower()
    assert "<!--" not in script
    return script


def _episodes(evaluated: Mapping[str, Any] | None) -> str:
    """Say how many episodes the evaluation has; nothing without one."""
    count = number((evaluated or {}).get("episodes"))
    return f" in {count:,.0f} episodes" if count else ""


def _interval(attempt: Mapping[str, Any]) -> dict[str, float]:
    low, high = attempt["success_ci95"]
    return {"mean": attempt["success_mean"], "low": low, "high": high}
