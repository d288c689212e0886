"""The settings as data: a JSON Schema for editors, and one row per setting for `amago settings` and its page."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pipelines.config.load import PROFILES
from pipelines.config.settings import Settings
from pipelines.errors import UsageError
from pipelines.nearest import nearest

_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_PLACE = "N"  # of an entry in a list of tables, e.g. stages.N.every
_LIMITS = {"minimum": ">=", "exclusiveMinimum": ">", "maximum": "<=", "exclusiveMaximum": "<"}
_TYPES = {"integer": "integer", "number": "number", "boolean": "true or false", "string": "text", "object": "table"}


@dataclass(frozen=True, kw_only=True)
class Setting:
    """One key of a settings document. `kind`: the kind of table to which the key belongs, where several share the
    table; `default` as TOML spells it, "unset" or "required"."""

    key: str
    table: str
    kind: str
    default: str
    accepts: str
    about: str


class _Tables:
    """The tables of a schema: `whole` is the document, `models` has the definitions to which its fields refer."""

    def __init__(self) -> None:
        self.whole = make_schema()
        self.models = self.whole["$defs"]

    def list_rows(self, model: Mapping[str, Any], table: str, kind: str = "") -> Iterator[Setting]:
        for name, field in model["properties"].items():
            if name == PROFILES:
                continue
            key = f"{table}.{name}" if table else name
            inner = list(self.list_models(field))
            for choice, inside in inner:
                yield from self.list_rows(inside, key if field.get("type") != "array" else f"{key}.{_PLACE}", choice)
            if not inner:
                default = "required" if name in model.get("required", ()) else "unset"
                if "default" in field:
                    default = json.dumps(field["default"], ensure_ascii=False)
                yield Setting(
                    key=key,
                    table=table,
                    kind=kind,
                    default=default,
                    accepts=self._describe_values(field),
                    about=field.get("description", "") or ("selects these keys" if "const" in field else ""),
                )

    def list_models(self, field: Mapping[str, Any]) -> Iterator[tuple[str, Mapping[str, Any]]]:
        """Yield the models whose keys `field` holds, each with its kind if there are several."""
        if "$ref" in field:
            yield "", self.models[field["$ref"].rpartition("/")[2]]
        elif field.get("type") == "array":
            yield from self.list_models(field.get("items", {}))
        else:
            choices = [one for one in field.get("anyOf", ()) if "$ref" in one]
            for choice in choices:
                [(_, model)] = self.list_models(choice)
                yield model["properties"]["kind"].get("const", "module:attr"), model

    def _describe_values(self, field: Mapping[str, Any]) -> str:
        if "const" in field:
            return json.dumps(field["const"])
        if "enum" in field:
            return ", ".join(map(json.dumps, field["enum"]))
        if "anyOf" in field:
            return " or ".join(self._describe_values(one) for one in field["anyOf"])
        if field.get("type") == "array":
            items = field.get("items") or field.get("prefixItems", [{}])[0]
            return f"list of {self._describe_values(items)}"
        limits = [f"{sign} {field[name]}" for name, sign in _LIMITS.items() if name in field]
        return " ".join([_TYPES.get(field.get("type", ""), "any"), " and ".join(limits)]).strip()


def make_schema() -> dict[str, Any]:
    """Make the JSON Schema of a file that holds one settings document, including profiles."""
    schema = _clean(Settings.model_json_schema())
    profile = {"type": "object", "additionalProperties": {"$ref": "#"}, "description": "Settings laid over the others."}
    schema["properties"][PROFILES] = profile
    return {"$schema": _DIALECT, **schema, "title": "Settings of amago"}


def list_settings() -> list[Setting]:
    """List every setting, in the order of the document."""
    tables = _Tables()
    return list(tables.list_rows(tables.whole, ""))


def describe_tables() -> dict[str, str]:
    """Collect descriptions of the tables by dotted name ("" is the top level)."""
    tables = _Tables()
    found = {"": "Keys outside of any table."}

    def visit(model: Mapping[str, Any], table: str) -> None:
        for name, field in model["properties"].items():
            inner = list(tables.list_models(field))
            if name == PROFILES or not inner:
                continue
            key = f"{table}.{name}" if table else name
            key = key if field.get("type") != "array" else f"{key}.{_PLACE}"
            about = field.get("description", "")
            found[key] = about if about and table else inner[0][1].get("description", about)
            visit(inner[0][1], key)

    visit(tables.whole, "")
    return found


def find(key: str) -> list[Setting]:
    """Find the settings that `key` names: one, all of a table, or those with that last part. UsageError with the
    nearest key if there are none."""

    def last(key: str) -> str:
        return key.rpartition(".")[2]

    if key.startswith("env.") and key != "env.name":
        raise UsageError(f"'{key}' is a parameter of an environment", hint="amago envs ENV lists them")
    known = list_settings()
    chosen = [setting for setting in known if setting.key == key or setting.key.startswith(f"{key}.")]
    chosen = chosen or [setting for setting in known if key in (last(setting.key), last(setting.table))]
    if not chosen:
        names = [setting.key for setting in known] + list(describe_tables())
        by_last = {last(name): name for name in reversed(names)}
        close = nearest(key, names) or nearest(key, by_last)
        hint = f"did you mean '{by_last.get(close, close)}'?" if close else "amago settings lists all"
        raise UsageError(f"no setting '{key}'", hint=hint)
    return chosen


def find_default(key: str) -> Any:
    """Look up the default of one setting."""
    value: Any = Settings()
    for part in key.split("."):
        value = getattr(value, part)
    return value


def _clean(part: Any) -> Any:
    """Adapt a schema to TOML: without null, and with descriptions on one line."""
    if isinstance(part, list):
        return [_clean(item) for item in part if item != {"type": "null"}]
    if not isinstance(part, Mapping):
        return part
    made = {name: _clean(value) for name, value in part.items() if not (name == "title" and isinstance(value, str))}
    if isinstance(made.get("description"), str):
        made["description"] = " ".join(made["description"].split())
    if "oneOf" in made:  # a plug-in's table matches the built-in kinds as well
        made["anyOf"] = made.pop("oneOf")
    if "default" in made and (made["default"] is None or "$ref" in made):
        del made["default"]
    if len(made.get("anyOf", ())) == 1:
        made |= made.pop("anyOf")[0]
    return made
