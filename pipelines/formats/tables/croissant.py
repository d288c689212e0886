"""`croissant.json` of a Parquet export: what its files and columns are, in the vocabulary of MLCommons' Croissant 1.0,
and how the data came to be, in that of its extension for responsible AI (https://docs.mlcommons.org/croissant).

Data portals and loaders such as `mlcroissant` read the dataset by it. All facts are those of the trajectories that were
exported; the date is that of the last one.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from pipelines.files.atomic import write_atomically
from pipelines.formats.tables.files import TRAJECTORIES

NAME = "croissant.json"
_PARQUET = "application/x-parquet"
_MOST_NAMED = 20  # environments, policies and collectors that the text names
_CONTEXT: Mapping[str, Any] = {
    "@language": "en",
    "@vocab": "https://schema.org/",
    "citeAs": "cr:citeAs",
    "column": "cr:column",
    "conformsTo": "dct:conformsTo",
    "cr": "http://mlcommons.org/croissant/",
    "rai": "http://mlcommons.org/croissant/RAI/",
    "data": {"@id": "cr:data", "@type": "@json"},
    "dataType": {"@id": "cr:dataType", "@type": "@vocab"},
    "dct": "http://purl.org/dc/terms/",
    "equivalentProperty": "cr:equivalentProperty",
    "examples": {"@id": "cr:examples", "@type": "@json"},
    "extract": "cr:extract",
    "field": "cr:field",
    "fileProperty": "cr:fileProperty",
    "fileObject": "cr:fileObject",
    "fileSet": "cr:fileSet",
    "format": "cr:format",
    "includes": "cr:includes",
    "isLiveDataset": "cr:isLiveDataset",
    "jsonPath": "cr:jsonPath",
    "key": "cr:key",
    "md5": "cr:md5",
    "parentField": "cr:parentField",
    "path": "cr:path",
    "recordSet": "cr:recordSet",
    "references": "cr:references",
    "regex": "cr:regex",
    "repeated": "cr:repeated",
    "replace": "cr:replace",
    "samplingRate": "cr:samplingRate",
    "sc": "https://schema.org/",
    "separator": "cr:separator",
    "source": "cr:source",
    "subField": "cr:subField",
    "transform": "cr:transform",
}
# Of columns of the table of trajectories that a name does not explain.
_MEANING = {
    "uid": "The trajectory's name, by which its steps are found.",
    "length": "Its actions; it has one row of steps more.",
    "policy_version": "Gradient updates of the policy that acted; -1 where it was not trained.",
    "row_group": "Row group of the file that holds its steps.",
    "first_row": "Its first row in that row group.",
    "base_uid": "The trajectory that it was relabelled from.",
    "crc": "CRC32 of its columns in the lake.",
}
_STEP_MEANING = {
    "uid": "The trajectory that the step belongs to.",
    "t": "Time in the episode. Row t has an observation, and the action and reward that led to it; row 0 has zeros.",
    "action": "The action that led to the row's observation.",
    "reward": "The reward of that action.",
    "label": "What another policy would have done at the row's observation.",
    "logp": "The log-probability with which that action was taken.",
}


def write(folder: Path, about: Mapping[str, Any], digests: Mapping[str, str]) -> None:
    """Describe the Parquet files in `folder`, whose SHA-256 are in `digests` by name. `about` may have a text
    `description` and an `author`."""
    table = pq.read_table(folder / TRAJECTORIES)
    parts: dict[str, str] = {}  # the first file of each schema, by the pattern of its files
    for name in sorted(digests):
        if name.startswith("steps-"):
            parts.setdefault(f"{name.rpartition('-')[0]}-*.parquet", name)
    files = [
        {
            "@type": "cr:FileObject",
            "@id": name,
            "name": name,
            "contentUrl": name,
            "contentSize": f"{(folder / name).stat().st_size} B",
            "encodingFormat": _PARQUET,
            "sha256": digest,
        }
        for name, digest in sorted(digests.items())
    ]
    sets = [
        {"@type": "cr:FileSet", "@id": pattern, "name": pattern, "encodingFormat": _PARQUET, "includes": pattern}
        for pattern in parts
    ]
    records = [_describe_records("trajectories", pq.read_schema(folder / TRAJECTORIES), {"fileObject": TRAJECTORIES})]
    for number, (pattern, first) in enumerate(parts.items()):
        name = "steps" if len(parts) == 1 else f"steps-{number}"
        records.append(_describe_records(name, pq.read_schema(folder / first), {"fileSet": pattern}))
    collected = _describe_collection(table)
    relabelled = ", ".join(_count(table, "relabel_method"))
    last = max((value for value in table["t_end"].to_pylist() if value), default=0.0)
    document: dict[str, Any] = {
        "@context": _CONTEXT,
        "@type": "sc:Dataset",
        "name": folder.absolute().name,
        "description": about.get("description") or collected,
        "conformsTo": ["http://mlcommons.org/croissant/1.0", "http://mlcommons.org/croissant/RAI/1.0"],
        **({"creator": {"@type": "sc:Person", "name": about["author"]}} if about.get("author") else {}),
        **({"datePublished": datetime.fromtimestamp(last, UTC).date().isoformat()} if last else {}),
        "rai:dataCollection": collected,
        "rai:dataCollectionType": ["Experiments", "Software Collection"],
        "rai:dataManipulationProtocol": f"Relabelled by: {relabelled}." if relabelled else "None.",
        "distribution": [*files, *sets],
        "recordSet": records,
    }
    write_atomically(folder / NAME, json.dumps(document, indent=1) + "\n")


def _describe_records(name: str, schema: pa.Schema, place: Mapping[str, str]) -> dict[str, Any]:
    """Describe the rows of a table: a field for each column whose type Croissant has a name for."""
    ((kind, id),) = place.items()
    meanings, fields = _STEP_MEANING if name.startswith("steps") else _MEANING, []
    for column in schema:
        data_type, is_list = _name_type(column.type)
        if data_type is None:
            continue
        shape = (column.metadata or {}).get(b"shape")
        text = meanings.get(column.name, "")
        if is_list and shape is not None:
            text = f"{text} Values of an array of shape {shape.decode()}, row by row.".strip()
        fields.append(
            {
                "@type": "cr:Field",
                "@id": f"{name}/{column.name}",
                "name": column.name,
                **({"description": text} if text else {}),
                "dataType": data_type,
                **({"repeated": True} if is_list else {}),
                "source": {kind: {"@id": id}, "extract": {"column": column.name}},
                **(
                    {"references": {"field": {"@id": "trajectories/uid"}}}
                    if column.name == "uid" and name != "trajectories"
                    else {}
                ),
            }
        )
    key = {"key": {"@id": "trajectories/uid"}} if name == "trajectories" else {}
    return {"@type": "cr:RecordSet", "@id": name, "name": name, **key, "field": fields}


def _name_type(kind: pa.DataType) -> tuple[str | None, bool]:
    """Name the type of a column's values, and say whether they are lists; None where it has no name there."""
    if pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind):
        return _name_type(kind.value_type)[0], True
    tests = {
        "sc:Boolean": pa.types.is_boolean,
        "sc:Integer": pa.types.is_integer,
        "sc:Float": pa.types.is_floating,
        "sc:Text": pa.types.is_string,
    }
    return next((name for name, test in tests.items() if test(kind)), None), False


def _describe_collection(table: pa.Table) -> str:
    """Say who acted where, from the facts of the trajectories."""
    steps = sum(table["length"].to_pylist())
    sentences = [f"{table.num_rows:,} trajectories of {steps:,} steps."]
    for column, what in (("env", "Environments"), ("policy_id", "Policies"), ("collector", "Collectors")):
        if names := list(_count(table, column)):
            sentences.append(f"{what}: {', '.join(names)}.")
    sources = [name for name, *_ in _list_counts(table, "source")]
    sentences.append(f"Sources: {', '.join(sources)}.")
    return " ".join(sentences)


def _count(table: pa.Table, column: str) -> Iterator[str]:
    """Yield the values of a column, with the number of trajectories of each, the most frequent first."""
    counts = [(name, count) for name, count in _list_counts(table, column) if name]
    for name, count in counts[:_MOST_NAMED]:
        yield f"{name} ({count:,})"
    if len(counts) > _MOST_NAMED:
        yield f"and {len(counts) - _MOST_NAMED:,} more"


def _list_counts(table: pa.Table, column: str) -> list[tuple[str, int]]:
    found = table[column].value_counts().to_pylist()
    return sorted(((str(each["values"] or ""), each["counts"]) for each in found), key=lambda each: (-each[1], each[0]))
