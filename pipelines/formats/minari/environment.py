"""What Minari says of an environment: how to make it, and what it observes, as JSON."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

_GYMNASIUM = {"gym": "gymnasium", "robotics": "gymnasium_robotics"}  # prefix -> the package that registers
_OURS = frozenset({"name", "source", "success_key", "max_length", "max_episode_steps"})


def described(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Describe the environment of a collector's settings: `env_spec`, a text, and `observation_space`; {} where
    gymnasium does not know it.

    What a dataset of Minari said of its own is repeated. Nothing is imported that the settings name.
    """
    source = settings.get("source")
    if isinstance(source, Mapping):
        return dict(source.get("described") or {})
    prefix, _, name = str(settings.get("name", "")).partition(":")
    params = {key: value for key, value in settings.items() if key not in _OURS and value is not None}
    if prefix not in _GYMNASIUM or ":" in name or any(":" in v for v in params.values() if isinstance(v, str)):
        return {}
    return _made(prefix, name, params, settings.get("max_episode_steps"))


def _made(prefix: str, name: str, params: Mapping[str, Any], limit: int | None) -> dict[str, Any]:
    import gymnasium

    try:
        if prefix == "robotics":
            import gymnasium_robotics

            gymnasium.register_envs(gymnasium_robotics)
        kwargs = dict(params) | ({"max_episode_steps": limit} if limit else {})
        env = gymnasium.make(name, disable_env_checker=True, **kwargs)
    except Exception:  # whatever a package that is not here, or an environment, raises
        return {}
    try:
        spec = env.spec.to_json() if env.spec is not None else ""
        return {"env_spec": spec, "observation_space": _space(env.observation_space)}
    except (TypeError, ValueError, gymnasium.error.Error):
        return {}  # arguments that JSON cannot hold
    finally:
        env.close()


def _space(space: Any) -> dict[str, Any]:
    """Convert a space of gymnasium to Minari's JSON; {} for a kind that Minari does not know."""
    from gymnasium import spaces

    if isinstance(space, spaces.Dict):
        return {"type": "Dict", "subspaces": {key: _space(member) for key, member in space.spaces.items()}}
    if isinstance(space, spaces.Box):
        low, high = space.low.tolist(), space.high.tolist()
        return {"type": "Box", "dtype": str(space.dtype), "shape": list(space.shape), "low": low, "high": high}
    if isinstance(space, spaces.Discrete):
        return {"type": "Discrete", "dtype": "int64", "start": int(space.start), "n": int(space.n)}
    if isinstance(space, spaces.MultiDiscrete):
        nvec, start = space.nvec.tolist(), space.start.tolist()
        return {"type": "MultiDiscrete", "dtype": str(space.dtype), "nvec": nvec, "start": start}
    if isinstance(space, spaces.MultiBinary):
        return {"type": "MultiBinary", "n": json.loads(json.dumps(space.n, default=int))}
    if isinstance(space, spaces.Text):
        limits = {"max_length": space.max_length, "min_length": space.min_length}
        return {"type": "Text", **limits, "charset": space.characters}
    return {}
