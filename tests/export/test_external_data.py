"""A graph with tensors in other files is refused before a runtime opens it, in Python and in JavaScript."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipelines.export import forms
from pipelines.export.assets.policy import MOST_FIELDS, TENSORS, OnnxPolicy, require_own_tensors
from pipelines.files.checksums import seal
from tests.export.node import NodePolicy
from tests.export.test_policy_mjs import bundle
from tests.export.test_step_function import made

onnx = pytest.importorskip("onnx")
onnxruntime = pytest.importorskip("onnxruntime")


def move_out(tensor: Any, name: str = "secret.bin") -> None:
    """Make the values of a tensor those of a file."""
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value=name)


def forge(folder: Path, change: Callable[[Any], bytes]) -> None:
    """Change the graph of a bundle, and make its checksums fit."""
    files = {path.name: path.read_bytes() for path in folder.iterdir() if path.name != "policy.json"}
    files["policy.onnx"] = change(onnx.load_from_string(files["policy.onnx"]))
    record = json.loads((folder / "policy.json").read_bytes())
    record = {name: value for name, value in record.items() if name not in ("checksum", "files")}
    (folder / "policy.onnx").write_bytes(files["policy.onnx"])
    (folder / "policy.json").write_bytes(seal(record, files))


def weights_outside(model: Any) -> bytes:
    """A graph whose largest tensor of weights is a file of the current directory."""
    largest = max(model.graph.initializer, key=lambda tensor: len(tensor.raw_data))
    Path("secret.bin").write_bytes(largest.raw_data)
    move_out(largest)
    return bytes(model.SerializeToString())


def doubled() -> Any:
    """A model that adds its one tensor to its input."""
    helper, numbers = onnx.helper, np.arange(300, dtype=np.float32)
    values = [helper.make_tensor_value_info(name, onnx.TensorProto.FLOAT, [300]) for name in ("x", "y")]
    node = helper.make_node("Add", ["x", "w"], ["y"])
    graph = helper.make_graph([node], "g", values[:1], values[1:], [onnx.numpy_helper.from_array(numbers, "w")])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def test_a_runtime_alone_reads_weights_from_the_current_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What the check is for."""
    monkeypatch.chdir(tmp_path)
    content = weights_outside(doubled())
    [found] = onnxruntime.InferenceSession(content).run(None, {"x": np.zeros(300, np.float32)})
    assert found.tobytes() == Path("secret.bin").read_bytes()


@pytest.mark.parametrize("load", ["alone", "form"])
def test_a_forged_graph_is_refused_before_a_runtime_opens_it(
    load: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    content = weights_outside(doubled())
    monkeypatch.setattr(onnxruntime, "InferenceSession", None)
    record: dict[str, Any] = {"spaces": {"observation": [], "action": {"kind": "discrete", "n": 2}}, "memory": {}}
    with pytest.raises(ValueError, match="in another file"):
        OnnxPolicy(given=(record, content)) if load == "alone" else forms.open_form(forms.ONNX, content, record, 1)


@pytest.mark.full
def test_a_forged_bundle_is_refused_by_what_it_contains(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "forged").mkdir()
    forged = bundle(made("gru"), tmp_path / "forged")
    policy = OnnxPolicy(forged)
    [column] = policy.columns.values()
    policy.act(np.zeros(column["shape"], np.float32))
    with NodePolicy(forged) as in_node:
        in_node("act", np.zeros(column["shape"]))
    forge(forged, weights_outside)
    with pytest.raises(ValueError, match="in another file"):
        OnnxPolicy(forged)
    with pytest.raises(RuntimeError, match="in another file"):
        NodePolicy(forged)


def edges() -> dict[str, dict[int, str]]:
    """From onnx's own description of its format: the fields of each message that lead to a tensor."""
    found: dict[str, dict[int, str]] = {}

    def visit(message: Any) -> None:
        if message.name not in found:
            fields = [field for field in message.fields if field.message_type is not None]
            found[message.name] = {field.number: field.message_type.name for field in fields}
            for field in fields:
                visit(field.message_type)

    visit(onnx.ModelProto.DESCRIPTOR)
    leading = {"TensorProto"}
    while more := {name for name, fields in found.items() if leading & set(fields.values())} - leading:
        leading |= more
    return {name: {n: to for n, to in found[name].items() if to in leading} for name in leading - {"TensorProto"}}


def test_the_table_of_places_is_that_of_the_format() -> None:
    assert {name: dict(fields) for name, fields in TENSORS.items()} == edges()


def places() -> Iterator[tuple[str, ...]]:
    """A way from a model to a tensor through each field of the format."""
    ways: dict[str, tuple[str, ...]] = {"ModelProto": ()}
    names = {}

    def visit(message: Any) -> None:
        for field in message.fields:
            if field.message_type is not None and field.message_type.name in {*TENSORS, "TensorProto"}:
                names[message.name, field.name] = field.message_type
                if field.message_type.name not in ways:
                    ways[field.message_type.name] = (*ways[message.name], field.name)
                    visit(field.message_type)

    visit(onnx.ModelProto.DESCRIPTOR)
    ends = {"TensorProto": ()}
    while len(ends) <= len(TENSORS):
        for (message, name), target in names.items():
            if target.name in ends:
                ends.setdefault(message, (name, *ends[target.name]))
    for (message, name), target in names.items():
        yield (*ways[message], name, *ends[target.name])


def at(model: Any, way: tuple[str, ...]) -> Any:
    """Make the message at the end of a way."""
    for name in way:
        field = getattr(model, name)
        model = field.add() if hasattr(field, "add") else field
    return model


@pytest.mark.parametrize("way", list(places()), ids=".".join)
def test_tensors_are_found_wherever_the_format_has_them(way: tuple[str, ...]) -> None:
    model = onnx.ModelProto()
    tensor = at(model, way)
    tensor.raw_data = b"own"
    require_own_tensors(model.SerializeToString())
    tensor.external_data.add(key="location", value="secret.bin")
    with pytest.raises(ValueError, match="in another file"):
        require_own_tensors(model.SerializeToString())
    tensor.ClearField("external_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    with pytest.raises(ValueError, match="in another file"):
        require_own_tensors(model.SerializeToString())


def varint(number: int, length: int = 0) -> bytes:
    """Encode a number, padded to `length` bytes, which every parser takes for the same number."""
    found = []
    while number >= 0x80:
        found.append(number & 0x7F | 0x80)
        number >>= 7
    found.append(number)
    while len(found) < length:
        found[-1] |= 0x80
        found.append(0)
    return bytes(found)


def field(number: int, content: bytes, padding: int = 0) -> bytes:
    return varint(number << 3 | 2, padding) + varint(len(content), padding) + content


ODD = {
    "its location padded": lambda t: field(7, field(5, t + varint(14 << 3, 5) + varint(1, 10))),
    "its location above 32 bits": lambda t: field(7, field(5, t + varint(14 << 3) + varint((1 << 32) + 1))),
    "its location before others": lambda t: field(7, field(5, varint(14 << 3) + varint(1) + t)),
    "a graph in two parts": lambda t: field(7, b"") + field(7, field(5, t + varint(14 << 3) + b"\1")),
    "lengths padded": lambda t: field(7, field(5, t + varint(14 << 3) + b"\1", 5), 5),
}


@pytest.mark.parametrize("name", ODD)
def test_unusual_encodings_do_not_hide_external_tensors(name: str) -> None:
    content = ODD[name](onnx.TensorProto(name="w", data_type=1, dims=[1]).SerializeToString())
    assert any(tensor.data_location == 1 for tensor in onnx.load_from_string(content).graph.initializer)
    with pytest.raises(ValueError, match="in another file"):
        require_own_tensors(content)


@pytest.mark.system
@pytest.mark.parametrize(
    "content",
    [
        b"\x3a",
        b"\x3a\x05abc",
        b"\x3b\x3c",
        b"\x80" * 11,
        varint((7 << 3 | 2) + (1 << 32)) + b"\0",
        b"\x18\x00\x00\x00ORTM" + bytes(64),
        field(7, field(1, b"") * (MOST_FIELDS + 1)),
    ],
    ids=["no length", "cut", "a group", "no end", "a tag of 33 bits", "ORT's own format", "too many fields"],
)
def test_files_that_are_not_graphs_are_refused(content: bytes) -> None:
    with pytest.raises(ValueError, match=r"policy\.onnx is not a graph"):
        require_own_tensors(content)
