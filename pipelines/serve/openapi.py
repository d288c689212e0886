"""OpenAPI of a served policy: its paths, and the schemas of its observations and actions."""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata
from typing import Any

import numpy as np

from pipelines.lake.spaces import LENGTH, Box, Discrete, MultiBinary, MultiDiscrete, Ragged, Space, Spaces

_ERROR = {"$ref": "#/components/schemas/Error"}
_PACKED = "application/octet-stream"
_STATUSES = {
    "400": "the body is not a JSON object",
    "401": "the token is missing or wrong",
    "409": "there is no such session (begin again), or it is acting",
    "413": "the body is too large",
    "415": "the body is not JSON",
    "422": "a value is missing, unknown or of another shape",
    "503": "there are too many sessions",
}


def description(spaces: Spaces) -> dict[str, Any]:
    """Write the OpenAPI document of a server whose policy has these spaces."""
    try:
        version = metadata.version("amago")
    except metadata.PackageNotFoundError:  # a source tree that is not installed
        version = "0"
    observation, action = _observation(spaces), _schema(spaces.action)
    reward = {"type": "number", "default": 0, "description": "of the previous action; ignored at the first step"}
    many = {"type": "array", "items": {"type": "string"}, "minItems": 1}
    ids = {"type": "object", "properties": {"sessions": many}, "required": ["sessions"]}
    one = {"type": "object", "properties": {"session": {"type": "string"}}, "required": ["session"]}
    session = [{"name": "id", "in": "path", "required": True, "schema": {"type": "string"}}]
    begin = {
        "type": "object",
        "properties": {"count": {"type": "integer", "minimum": 1}},
        "additionalProperties": False,
    }
    act = {
        "type": "object",
        "properties": {"observation": observation, "reward": reward},
        "required": ["observation"],
        "additionalProperties": False,
    }
    act_many = {
        "type": "object",
        "properties": {
            "sessions": many,
            "observation": {"description": "as of one session, with an axis of sessions before each array"},
            "reward": {"type": "array", "items": reward},
        },
        "required": ["sessions", "observation"],
        "additionalProperties": False,
    }
    empty: dict[str, Any] = {"type": "object"}
    actions = {"type": "array", "items": action}
    answer = {"type": "object", "properties": {"action": action}, "required": ["action"]}
    answers = {"type": "object", "properties": {"actions": actions}, "required": ["actions"]}
    arrays = "; ".join(
        f"{name}: {np.dtype(space.dtype).newbyteorder('<').str} {list(space.shape)}"
        for name, space in spaces.observation.items()
    )
    packed = {
        "description": "The length of the JSON object (uint32, little-endian), the object without its observation, and "
        f"the arrays of the observation one after another, in C order: {arrays}."
    }
    return {
        "openapi": "3.1.0",
        "info": {"title": "amago serve", "version": version, "description": "Sessions that act with a policy."},
        "security": [{"token": []}],
        "paths": {
            "/sessions": {
                "post": _operation(
                    "begin", "Begin one session, or `count`.", {"oneOf": [one, ids]}, begin, status="201"
                )
            },
            "/sessions/{id}/act": {
                "parameters": session,
                "post": _operation("act", "Return the action for an observation.", answer, act, packed=packed),
            },
            "/sessions/{id}/reset": {"parameters": session, "post": _operation("reset", "Begin a new episode.", empty)},
            "/sessions/{id}": {"parameters": session, "delete": _operation("end", "Let a session go.", empty)},
            "/act": {
                "post": _operation(
                    "actMany",
                    "Act for several sessions at once.",
                    answers,
                    act_many,
                    packed=packed,
                )
            },
            "/health": {"get": _operation("health", "Say that the server answers.", empty, security=[])},
            "/openapi.json": {"get": _operation("openapi", "Return this document.", empty)},
            "/metrics": {
                "get": {
                    "operationId": "metrics",
                    "summary": "Figures in Prometheus' text format.",
                    "responses": {
                        "200": {"description": "figures", "content": {"text/plain": {"schema": {"type": "string"}}}}
                    },
                }
            },
        },
        "components": {
            "securitySchemes": {"token": {"type": "http", "scheme": "bearer"}},
            "schemas": {
                "Error": {
                    "type": "object",
                    "properties": {"error": {"type": "string"}, "hint": {"type": "string"}},
                    "required": ["error"],
                }
            },
        },
    }


def _operation(
    name: str,
    summary: str,
    answer: Mapping[str, Any],
    body: Mapping[str, Any] | None = None,
    *,
    status: str = "200",
    security: list[Any] | None = None,
    packed: Mapping[str, Any] | None = None,
) -> dict[str, Any]:
    found: dict[str, Any] = {
        "operationId": name,
        "summary": summary,
        "responses": {
            status: {"description": "done", "content": {"application/json": {"schema": answer}}},
            **{
                code: {"description": text, "content": {"application/json": {"schema": _ERROR}}}
                for code, text in _STATUSES.items()
            },
        },
    }
    if body is not None:
        required = bool(body.get("required"))
        content = {"application/json": {"schema": body}} | ({_PACKED: {"schema": packed}} if packed else {})
        found["requestBody"] = {"required": required, "content": content}
    if security is not None:
        found["security"] = security
    return found


def _observation(spaces: Spaces) -> dict[str, Any]:
    """Write the schema of an observation: nested objects by the names of columns, `observation.a.b`."""
    columns = spaces.observation
    tree: dict[str, Any] = {}
    for name, space in columns.items():
        above, _, last = name.rpartition(".")
        if last == LENGTH and isinstance(columns.get(above), Ragged):
            continue  # a client sends the sequence alone
        place: dict[str, Any] = tree
        *path, leaf = name.split(".")
        for part in path:
            place = place.setdefault(part, {})
        place[leaf] = space

    def nest(part: Any) -> dict[str, Any]:
        if not isinstance(part, dict):
            return _schema(part)
        return {"type": "object", "properties": {name: nest(each) for name, each in part.items()}, "required": [*part]}

    [observation] = tree.values()
    return nest(observation)


def _schema(space: Space) -> dict[str, Any]:
    shape: tuple[int, ...]
    match space:
        case Discrete(n=n, start=start):
            return {"type": "integer", "minimum": start, "maximum": start + n - 1}
        case Ragged(text=True, max_length=most):
            return {"type": "string", "maxLength": most}
        case Ragged(max_length=most):
            return {"type": "array", "items": {"type": "number"}, "maxItems": most}
        case MultiDiscrete() | MultiBinary():
            shape, kind = (len(space.nvec) if isinstance(space, MultiDiscrete) else space.n,), "integer"
        case Box():
            shape, kind = space.shape, "integer" if space.dtype[0] in "iu" else "number"
    found: dict[str, Any] = {"type": kind}
    for size in reversed(shape):
        found = {"type": "array", "items": found, "minItems": size, "maxItems": size}
    return found
