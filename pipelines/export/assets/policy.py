"""Acts with the policy in this directory; needs numpy and onnxruntime, nothing else.

    policy = OnnxPolicy()                              # OnnxPolicy(actors=8): observations, rewards of 8 at once
    observation, _ = env.reset()
    policy.reset()
    while not done:
        action = policy.act(observation, reward)       # reward: that of the previous action; 0 at first

`python policy.py` repeats the proof, the recorded steps of parity.npz, and ends with exit code 4 if it does not hold.
"""

import hashlib
import io
import json
import os
from typing import Any

import numpy as np

Record = dict[str, Any]
DTYPES = {"discrete": "int32", "multi_discrete": "int32", "multi_binary": "uint8"}
LARGE = 1 << 19  # bytes of a ring that is rather written in place than copied
HERE = os.path.dirname(os.path.abspath(__file__))
# Of the messages of an ONNX file, the fields that lead to a tensor.
TENSORS = {
    "ModelProto": {7: "GraphProto", 20: "TrainingInfoProto", 25: "FunctionProto"},
    "TrainingInfoProto": {1: "GraphProto", 2: "GraphProto"},
    "GraphProto": {1: "NodeProto", 5: "TensorProto", 15: "SparseTensorProto"},
    "FunctionProto": {7: "NodeProto", 11: "AttributeProto"},
    "NodeProto": {5: "AttributeProto"},
    "AttributeProto": {
        5: "TensorProto", 6: "GraphProto", 10: "TensorProto", 11: "GraphProto", 22: "SparseTensorProto",
        23: "SparseTensorProto",
    },
    "SparseTensorProto": {1: "TensorProto", 2: "TensorProto"},
}  # fmt: skip
MOST_FIELDS = 1 << 20  # that are read: 2 s; an exported policy has some thousands


class OnnxPolicy:
    """The policy for one environment (`actors` None), or for several, whose values then have a leading axis.

    `greedy`: take the most probable action instead of one sampled with `seed`; None: as policy.json says.
    `threads`: of a step. `given`: what is in policy.json and policy.onnx, instead of the files in `directory`.
    ValueError if these were altered.
    """

    def __init__(
        self, directory: Any = HERE, actors: int | None = None, greedy: bool | None = None, seed: int = 0,
        threads: int = 1, given: tuple[Record, bytes] | None = None,
    ) -> None:  # fmt: skip
        import onnxruntime

        record, model = given or (record := read_record(directory), read_checked(directory, "policy.onnx", record))
        require_own_tensors(model)
        self.record, options = record, onnxruntime.SessionOptions()
        options.add_session_config_entry("session.load_model_format", "ONNX")
        greedy = record["greedy"] if greedy is None else greedy
        options.intra_op_num_threads, options.log_severity_level = threads, 3
        self.columns, self.space = dict(record["spaces"]["observation"]), record["spaces"]["action"]
        self.session = onnxruntime.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        self.inputs = {given.name for given in self.session.get_inputs()}
        self.outputs = {given.name: given.type for given in self.session.get_outputs()}
        self.only = onnxruntime.RunOptions()
        self.only.only_execute_path_to_fetches = True
        self.unneeded, self.rng = {"parameters", "sampled" if greedy else "greedy"}, np.random.default_rng(seed)
        self.actors, self.greedy, self.single = actors or 1, greedy, actors is None
        self.reset()

    def reset(self, which: Any = None) -> None:
        """Begin an episode: of all actors, or of those where `which` (actors,) is true."""
        if which is None:
            rows = self.record["memory"].items()
            self.memory = {name: np.zeros((self.actors, *shape), dtype) for name, (shape, dtype) in rows}
            self.previous = np.zeros((self.actors, *shape_of(self.space)), dtype_of(self.space))
            self.begins = np.ones(self.actors, bool)
        else:
            self.begins = self.begins | np.asarray(which, bool)

    def act(self, observation: Any, reward: Any = 0.0) -> Any:
        """Return the action for `observation`; `reward` is that of the previous action."""
        columns: Record = {}
        flatten(observation, "obs", columns, self.columns, self.single)
        if absent := [name for name in self.columns if name not in columns]:
            raise ValueError("the observation lacks " + ", ".join(absent))
        stored = {name: self.convert(columns[name], space, name) for name, space in self.columns.items()}
        rewards = np.broadcast_to(np.asarray(reward, np.float32), (self.actors,))
        if not np.isfinite(rewards).all():
            raise ValueError("the reward is not finite")
        found = self.step(stored, self.previous, rewards, self.begins, all=False)
        self.previous = found["greedy" if self.greedy else "sampled"]
        self.begins = np.zeros(self.actors, bool)
        return executed(self.previous, self.space)[0 if self.single else slice(None)]

    def step(
        self, columns: Record, action: Any, reward: Any, reset: Any, noise: Any = None, all: bool = True
    ) -> Record:
        """Run the graph once on values in stored form; return its outputs by name, or only those that acting needs."""
        most = self.record["max_time"]
        if most is not None and np.any(np.where(reset, 0, self.memory["time"]) >= most):
            raise ValueError(f"an episode has more than the {most} steps that the policy can distinguish")
        if noise is None:
            noise = self.rng.random((self.actors, self.record["noise"]), np.float32)
        given = {**columns, "action": action, "reward": reward, "reset": reset, "noise": noise}
        given |= {"memory." + name: value for name, value in self.memory.items()}
        given = {name: np.ascontiguousarray(given[name]) for name in self.inputs}
        wanted = [name for name in self.outputs if all or name not in self.unneeded]
        slots = {name: self.memory[name[5:]] for name in wanted if name.startswith(("next.keys", "next.values"))}
        rings = {name: at for name, at in slots.items() if self.outputs[name] == "tensor(float)" and at.nbytes > LARGE}
        if rings:  # the one operator that reads a ring writes one slot of it
            bound = self.session.io_binding()
            for name, value in given.items():
                bound.bind_cpu_input(name, value)
            for name in wanted:
                at = rings.get(name)
                bound.bind_output(name, *([] if at is None else ["cpu", 0, at.dtype, at.shape, at.ctypes.data]))
            self.session.run_with_iobinding(bound, self.only)
            values = [rings[n] if n in rings else v.numpy() for n, v in zip(wanted, bound.get_outputs(), strict=True)]
        else:
            values = self.session.run(wanted, given, self.only)
        found = dict(zip(wanted, values, strict=True))
        self.memory = {name: found["next." + name] for name in self.memory}
        return found

    def convert(self, value: Any, space: Record, name: str) -> np.ndarray:
        """Convert a column to stored form (N, ...). ValueError if it is not of its space, instead of a cast."""
        shape = (self.actors, *shape_of(space))
        value = np.asarray(value)
        if value.size != np.prod(shape, dtype=int):
            raise ValueError(f"observation '{name}' has the shape {value.shape}, not {shape[self.single :]}")
        value = value.reshape(shape)
        if "start" in space:
            value = value - np.asarray(space["start"])
        with np.errstate(invalid="ignore"):
            stored = np.ascontiguousarray(value.astype(dtype_of(space)))
        if stored.dtype.kind in "iu" and not np.array_equal(stored, value):
            raise ValueError(f"observation '{name}' has a number that is not {stored.dtype}")
        if stored.dtype.kind == "f" and not np.isfinite(stored).all():
            raise ValueError(f"observation '{name}' has a number that is not finite")
        choices = {"discrete": "n", "multi_discrete": "nvec"}.get(space["kind"])
        if choices and ((stored < 0) | (stored >= np.asarray(space[choices]))).any():
            raise ValueError(f"observation '{name}' has a choice that does not exist")
        return stored


def executed(action: np.ndarray, space: Record) -> np.ndarray:
    """Convert actions (N, ...) in stored form to the environment's."""
    if space["kind"] in ("discrete", "multi_discrete"):
        return action + np.asarray(space.get("start", 0), action.dtype)
    if space["kind"] == "box" and space.get("low") is not None and space.get("high") is not None:
        low, high = (np.asarray(space[bound], np.float64).reshape(space["shape"]) for bound in ("low", "high"))
        scaled = low + (np.clip(action, -1.0, 1.0).astype(np.float64) + 1) * (high - low) / 2
        dtype = np.dtype(space.get("native") or space["dtype"])
        return (np.rint(scaled) if dtype.kind in "iu" else scaled).astype(dtype)
    return action


def flatten(value: Any, name: str, columns: dict[str, Any], spaces: Record, single: bool) -> None:
    """Add the columns of an observation: Dict and Tuple observations have one for each part."""
    space = spaces.get(name)
    if space is not None and space["kind"] == "ragged":
        rows = [padded(each, space) for each in ([value] if single else value)]
        columns[name] = np.stack([row for row, _ in rows])
        columns[name + ".length"] = np.array([length for _, length in rows])
    elif hasattr(value, "items"):
        for key, part in value.items():
            flatten(part, name + "." + key, columns, spaces, single)
    elif isinstance(value, tuple):
        for place, part in enumerate(value):
            flatten(part, f"{name}.{place}", columns, spaces, single)
    else:
        columns[name] = value


def padded(value: Any, space: Record) -> tuple[np.ndarray, int]:
    """Return a text or numbers, padded with zeros, and how many there are."""
    if isinstance(value, str):
        given = np.frombuffer(value.encode("utf-32-le", "surrogatepass"), np.uint32)
    else:
        given = np.concatenate([np.zeros(0), *(np.ravel(part) for part in value)])
    if len(given) > space["max_length"]:
        raise ValueError(f"a sequence has {len(given)} numbers, more than {space['max_length']}")
    row = np.zeros(space["max_length"], space["dtype"])
    row[: len(given)] = given
    return row, len(given)


def shape_of(space: Record) -> tuple[int, ...]:
    size = space.get("n") or space.get("max_length") or len(space.get("nvec", ()))
    return () if space["kind"] == "discrete" else (size,) if size else tuple(space["shape"])


def dtype_of(space: Record) -> np.dtype:
    return np.dtype(DTYPES.get(space["kind"]) or space["dtype"])


def read_record(directory: Any) -> Record:
    """Return policy.json. ValueError if it is not as it was written."""
    with open(os.path.join(directory, "policy.json"), encoding="utf-8") as file:
        record = json.load(file)
    checksum = record.pop("checksum", None)
    if checksum != hashlib.sha256(json.dumps(record, sort_keys=True).encode()).hexdigest():
        raise ValueError("policy.json is not as it was written")
    return record


def read_checked(directory: Any, name: str, record: Record) -> bytes:
    """Return the content of a file. ValueError if it is not as it was written."""
    with open(os.path.join(directory, name), "rb") as file:
        content = file.read()
    if hashlib.sha256(content).hexdigest() != record["files"][name]:
        raise ValueError(name + " is not as it was written (SHA-256)")
    return content


def require_own_tensors(model: bytes) -> None:
    """Read an ONNX file as far as its tensors. ValueError if one has its values in another file, which ONNX Runtime
    would read from the current directory, or if the content cannot be read.
    """
    stack, left = [("ModelProto", 0, len(model))], MOST_FIELDS
    while stack:
        message, at, end = stack.pop()
        while at < end:
            tag, at = varint(model, at, end)
            number, wire = tag >> 3, tag & 7
            value, at = varint(model, at, end) if wire in (0, 2) else (0, at)
            # external_data, and data_location
            if message == "TensorProto" and (number == 13 or (number == 14 and value)):
                raise ValueError("policy.onnx has a tensor whose values are in another file")
            at += {0: 0, 1: 8, 2: value, 5: 4}.get(wire, end)
            left -= 1
            if at > end or not number or tag >> 32 or not left:
                raise ValueError("policy.onnx is not a graph that can be checked")
            kind = TENSORS.get(message, {}).get(number)
            if kind and wire == 2:
                stack.append((kind, at - value, at))


def varint(content: bytes, at: int, end: int) -> tuple[int, int]:
    """Read a number of up to ten bytes, and return it and where it ends; ValueError if it has no end."""
    value = 0
    for place in range(at, min(at + 10, end)):
        value |= (content[place] & 0x7F) << 7 * (place - at)
        if content[place] < 0x80:
            return value, place + 1
    raise ValueError("policy.onnx is not a graph that can be checked")


def verify(directory: Any = HERE) -> tuple[float, float]:
    """Repeat the recorded steps. Return the greatest difference of action parameters and the share of equal actions."""
    record = read_record(directory)
    steps = np.load(io.BytesIO(read_checked(directory, "parity.npz", record)), allow_pickle=False)
    policy = OnnxPolicy(directory, actors=steps["reset"].shape[1])
    greatest, equal = 0.0, []
    for t in range(len(steps["reset"])):
        columns = {name: steps["observation." + name][t] for name in policy.columns}
        found = policy.step(columns, *(steps[name][t] for name in ("action", "reward", "reset", "noise")))
        greatest = max(greatest, float(np.abs(found["parameters"] - steps["parameters"][t]).max()))
        same = np.isclose(found["greedy"], steps["greedy"][t], rtol=0, atol=record["parity"]["actions"])
        equal.append(same.reshape(policy.actors, -1).all(1))
    return greatest, float(np.mean(equal))


if __name__ == "__main__":
    (greatest, equal), limits = verify(), read_record(HERE)["parity"]
    raise SystemExit(0 if greatest <= limits["parameters"] and equal >= limits["equal"] else 4)
