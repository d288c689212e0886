"""A model card of an exported policy: README.md in the layout of the Hugging Face Hub.

Names and commands come from runs and bundles of others: in the front matter each is a JSON string, which is a YAML one
too; in the text, characters that Markdown or HTML would interpret are escaped.
"""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pipelines.runs.evaluations import Evaluation, Standard, to_number
from pipelines.runs.stored import StoredRun

NAME, _PICTURE, _VIDEO = "README.md", "adaptation.png", "replay.mp4"
_MOST_BYTES = 64 << 20
_SPECIAL = re.compile(r"([\\`*_{}\[\]()<>#+!|~&$])")
_TAGS = ("reinforcement-learning", "deep-reinforcement-learning", "in-context-reinforcement-learning")


@dataclass(frozen=True, kw_only=True)
class CardSource:
    """Contents of a card. `evaluation` is None if the policy was not evaluated; `greedy` is how it acts by default."""

    name: str
    env: Mapping[str, Any]
    update: int
    version: str
    files: Sequence[str]
    evaluation: Evaluation | None = None
    greedy: bool = False
    command: Sequence[str] = ()
    lakes: Sequence[str] = ()
    steps: int | None = None
    licence: str = ""

    @property
    def env_name(self) -> str:
        """The environment's name."""
        return str(self.env.get("name") or "unknown")

    def write(self, *, pictures: Sequence[str] = ()) -> bytes:
        """Write the card, in UTF-8. `pictures`: names of files beside it that it shows."""
        given = {key: value for key, value in self.env.items() if key != "name" and value not in ("", None, {}, [])}
        settings = ", ".join(f"{_escape_text(key)} = {_escape_text(json.dumps(value))}" for key, value in given.items())
        parts = [
            self._write_front_matter(),
            f"# {_escape_text(self.name)}",
            f"A policy with memory for `{_escape_code(self.env_name)}`, trained by amago to adapt to a new task in "
            "context.",
            f"Environment settings: {settings}." if settings else "",
            self._write_scores(),
        ]
        if _PICTURE in pictures:
            parts.append(f"![Success by attempt, before and after training]({_PICTURE})")
        parts.append("## Use\n\n```sh\namago verify DIRECTORY\namago evaluate DIRECTORY --episodes 100\n```")
        if "policy.onnx" in self.files:
            parts.append(
                "or without amago, with numpy and onnxruntime alone, in the directory of this card:\n\n"
                "```python\nfrom policy import OnnxPolicy\n\npolicy = OnnxPolicy()\npolicy.reset()\n"
                "action = policy.act(observation, reward)  # reward: that of the previous action; 0 at first\n```"
            )
        training = [
            f"- acts by {'the most likely' if self.greedy else 'sampled'} actions, unless its user chooses",
            f"- update {self.update:,}" + (f", amago {_escape_text(self.version)}" * bool(self.version)),
        ]
        if self.steps is not None:
            training.append(f"- {self.steps:,} time steps trained on")
        if self.lakes:
            training.append(f"- trajectories of {', '.join(f'lake `{_escape_code(lake)}`' for lake in self.lakes)}")
        if self.command:
            training += ["", "```sh", _escape_code(shlex.join(self.command)), "```"]
        parts += ["## Training", "\n".join(training)]
        return ("\n\n".join(part for part in parts if part) + "\n").encode()

    def _write_front_matter(self) -> str:
        lines = ["---", "library_name: amago", "pipeline_tag: reinforcement-learning"]
        if self.licence:
            lines.append(f"license: {json.dumps(self.licence)}")
        lines += ["tags:", *(f"- {json.dumps(tag)}" for tag in dict.fromkeys((*_TAGS, self.env_name)))]
        score = self.evaluation.score() if self.evaluation is not None else None
        if self.evaluation is not None and score is not None:
            spread = to_number(self.evaluation.metrics.get("return_std")) or 0.0
            env = json.dumps(self.env_name)
            lines += [
                "model-index:",
                f"- name: {json.dumps(self.name)}",
                "  results:",
                "  - task:",
                "      type: reinforcement-learning",
                "      name: reinforcement-learning",
                "    dataset:",
                f"      name: {env}",
                f"      type: {env}",
                "    metrics:",
                "    - type: mean_reward",
                f"      value: {json.dumps(f'{score.value:.4g} +/- {spread:.4g}')}",
                "      name: mean_reward",
                "      verified: false",
            ]
        return "\n".join([*lines, "---"])

    def _write_scores(self) -> str:
        evaluation = self.evaluation
        if evaluation is None or evaluation.score() is None:
            return "This policy was not evaluated."
        rows = [("return", evaluation.score()), ("success", evaluation.score("success_mean"))]
        kind = "success" if evaluation.attempts() else "return"
        rows += [(f"{kind} in attempt {at}", score) for at, score in enumerate(evaluation.attempts(kind), start=1)]
        lines = []
        for what, score in rows:
            if score is not None:
                interval = "" if score.low is None or score.high is None else f"{score.low:.4g} to {score.high:.4g}"
                lines.append(f"| {what} | {score.value:.4g} | {interval} |")
        episodes = to_number(evaluation.metrics.get("episodes")) or 0
        head = f"## Scores\n\n{episodes:,.0f} episodes of {_escape_text(str(evaluation.standard))} actions:\n"
        return "\n".join([head, "| | mean | 95% interval |", "|---|---|---|", *lines])


def read_fields(run: StoredRun) -> dict[str, Any]:
    """Read the fields of `CardSource` that a run's records have: name, version, command."""
    versions, stages = run.record.get("versions"), run.record.get("stages")
    version = versions.get("amago") if isinstance(versions, Mapping) else None
    found: list[str] = []
    for name in ("run", "train"):
        entry = stages.get(name) if isinstance(stages, Mapping) else None
        argv = entry.get("argv") if isinstance(entry, Mapping) else None
        if isinstance(argv, list) and argv and all(isinstance(word, str) for word in argv):
            found = ["amago", *argv[1:]]
            break
    return {"name": run.name, "version": str(version or ""), "command": found}


def find_evaluation(run: StoredRun, update: int, *, greedy: bool) -> Evaluation | None:
    """Find the newest evaluation of a checkpoint that counts for its run: on held-out tasks, and acting the same way.

    None if there is none. Exported policies act at their own temperature and remember whole episodes: other scores are
    not theirs.
    """
    found = [
        each
        for each in run.scores.final
        if (each.update, each.split, each.standard.temperature) == (update, "test", 1)
        and each.standard.greedy in (greedy, None)
        and each.standard.memory == "episode"
    ]
    return max(found, key=lambda each: each.time or 0.0, default=None)


def make_evaluation(metrics: Mapping[str, Any], *, update: int, split: str, greedy: bool) -> Evaluation:
    """Wrap figures that belong to no run, such as those of a bundle, as an evaluation."""
    nothing: dict[str, Any] = {}
    return Evaluation(
        path=Path(), series="", update=update, time=None, env="", split=split, label="", settings=nothing,
        standard=Standard(env="", split=split, greedy=greedy), metrics=metrics, known=nothing,
    )  # fmt: skip


def list_lakes(record: Mapping[str, Any]) -> list[str]:
    """List the lakes that a checkpoint was trained on, by name and id, from its record."""
    data = record.get("data")
    lakes = data.get("lakes") if isinstance(data, Mapping) else None
    found = []
    for lake in lakes if isinstance(lakes, list) else []:
        name, id = (lake.get("name"), lake.get("id")) if isinstance(lake, Mapping) else (None, None)
        if isinstance(name, str) and isinstance(id, str):
            found.append(f"{'/'.join(Path(name).parts[-2:])} ({id[:12]})")
    return found


def read_media(run: StoredRun) -> dict[str, bytes]:
    """Read the picture and the newest video of a run, by the names that they get beside the card."""
    videos = sorted((run.path / "videos").glob("*.mp4"), key=lambda path: path.stat().st_mtime)
    wanted = {_PICTURE: [run.path / _PICTURE], _VIDEO: videos[-1:]}
    found = {}
    for name, places in wanted.items():
        for place in places:
            if place.is_file() and place.stat().st_size <= _MOST_BYTES:
                found[name] = place.read_bytes()
    return found


def _escape_text(text: str) -> str:
    """Escape text so that Markdown shows it as it is, in one line."""
    return _SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("\\<", "&lt;").replace("\\>", "&gt;")


def _escape_code(text: str) -> str:
    """Prepare text for a code span or block, which it cannot end, in one line."""
    return " ".join(text.split()).replace("`", "'")
