"""docs/metamon.md, with a stand-in for metamon's data set: its interface, and observations of the same shapes."""

from __future__ import annotations

import re
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from pipelines.config.model import TimestepSettings
from pipelines.export.policy_bundle import load_policy
from pipelines.lake.spaces import Box, Discrete, Spaces
from pipelines.lake.sql.catalog import query
from pipelines.lake.store import Lake
from tests.cli.conftest import call
from tests.cli.pages import ROOT, typed

PAGE = "docs/metamon.md"
STAND_IN = {
    "__init__": "",
    "tokenizer": "def get_tokenizer(name): return name\n",
    "interface": """
class DefaultObservationSpace: pass
class DefaultShapedReward: pass
class TokenizedObservationSpace:
    def __init__(self, base_obs_space, tokenizer): pass
""",
    "datasets": """
import numpy as np

class ParsedReplayDataset:
    def __init__(self, observation_space, reward_function, formats): pass

    def __len__(self): return 12

    def __getitem__(self, number):
        rng = np.random.default_rng(number)
        turns = int(rng.integers(5, 9))
        words, numbers = rng.integers(-1, 3000, (turns + 1, 87)), rng.normal(size=(turns + 1, 48))
        actions = rng.integers(-1, 9, turns + 1)
        seen = {"text_tokens": list(words), "numbers": list(numbers.astype(np.float32))}
        dones = np.arange(turns) == turns - 1
        return seen, actions, dones * rng.choice([-1.0, 1.0]), dones, actions == -1
""",
}
SMALLER = {"d_model = 512": "d_model = 32", "d_ff = 2048": "d_ff = 64", "num_heads = 8": "num_heads = 2"}


@pytest.fixture
def turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A directory with the page's module and settings, and the stand-in."""
    (tmp_path / "metamon").mkdir()
    for name, text in STAND_IN.items():
        (tmp_path / f"metamon/{name}.py").write_text(text)
    (program,) = (one for one in typed(PAGE) if one.file)
    (tmp_path / program.file).write_text(program.text)
    text = (ROOT / PAGE).read_text()
    (settings,) = re.findall(r"```toml\n# metamon.toml\n(.*?)```", text, re.DOTALL)
    for wide, narrow in SMALLER.items():
        assert wide in settings
        settings = settings.replace(wide, narrow)
    (tmp_path / "metamon.toml").write_text(settings)
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    monkeypatch.chdir(tmp_path)
    yield tmp_path
    for name in [name for name in sys.modules if name == "turns" or name.partition(".")[0] == "metamon"]:
        del sys.modules[name]


@pytest.mark.full
def test_the_commands_of_the_page_train_a_policy_that_acts(turns: Path) -> None:
    for one in typed(PAGE):
        if one.language == "sh":
            done = call(*(word.replace("2000", "3") for word in shlex.split(one.text)[1:]), "--output", "json")
            assert done.code == 0, f"{one.place}: {done.err}"
    from metamon.datasets import ParsedReplayDataset  # type: ignore[import-not-found]

    replays = [ParsedReplayDataset(None, None, None)[number] for number in range(12)]
    stored = query(Lake("lakes/battles"), 'select length, "return" from trajectories')[1]
    assert sorted(stored) == sorted((len(rewards), rewards.sum()) for _, _, rewards, _, _ in replays)
    policy = load_policy("battles-policy", trust=True)
    seen = replays[0][0]
    turn = {"words": seen["text_tokens"][0].astype(np.int32) + 1, "numbers": seen["numbers"][0], "known": np.ones(1)}
    assert policy.act(turn) in range(9)


def test_the_encoder_of_the_page_reads_words_and_hides_what_only_masks(turns: Path) -> None:
    import turns as module  # type: ignore[import-not-found]

    shapes = {"obs.words": ((87,), "int32"), "obs.numbers": ((48,), "float32"), "obs.known": ((1,), "uint8")}
    observed = {name: Box(shape=shape, dtype=dtype) for name, (shape, dtype) in shapes.items()}
    encoder = module.TurnEncoder(Spaces(observation=observed, action=Discrete(n=9)), TimestepSettings(hidden=(16,)))
    seen: dict[str, Any] = {"obs.words": torch.arange(87).expand(2, 3, 87), "obs.numbers": torch.ones(2, 3, 48)}
    seen["obs.known"] = torch.zeros(2, 3, 1)
    rest = torch.zeros(2, 3, dtype=torch.long), torch.zeros(2, 3), torch.arange(3).expand(2, 3)
    before = encoder(seen, *rest)
    assert before.shape == (2, 3, encoder.output_size)
    assert torch.equal(encoder({**seen, "obs.known": torch.ones(2, 3, 1)}, *rest), before)
    words = seen["obs.words"].clone()
    words[1, 2, 5] = 99
    changed = (encoder({**seen, "obs.words": words}, *rest) != before).any(-1)
    assert changed.tolist() == [[False, False, False], [False, False, True]]
    swapped = words.clone()
    swapped[1, 2, [5, 6]] = words[1, 2, [6, 5]]  # the order of words matters
    assert not torch.equal(encoder({**seen, "obs.words": swapped}, *rest), encoder({**seen, "obs.words": words}, *rest))
