from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest

from pipelines.config.load import read_toml
from tests.cli.conftest import Amago

RECIPE = """
about = "two short rounds"
report = false
epochs = 2
[env]
name = "tmaze"
corridor = 3
[agent.timestep]
hidden = [8]
output = 8
[agent.sequence]
kind = "feedforward"
d_model = 8
num_layers = 1
d_ff = 8
[agent.actor]
hidden = [8]
[agent.critic]
hidden = [8]
[collect]
steps = 40
actors = 2
[train]
steps = 2
context_length = 4
batch_size = 2
threads = 1
[evaluate]
episodes = 4
[[stages]]
stage = "collect"
[[stages]]
stage = "train"
[[stages]]
stage = "evaluate"
start_epoch = -1
"""


@pytest.fixture
def recipe(amago: Amago) -> Path:
    path = Path("short.toml")
    path.write_text(RECIPE)
    return path


@pytest.mark.system
def test_every_stage_runs_and_the_same_command_skips_what_is_done(amago: Amago, recipe: Path) -> None:
    done = amago("run", recipe, "--output", "json")
    assert done.code == 0, done.err
    assert (done.json["status"], done.json["run"]) == ("done", "runs/short")
    assert amago("run", recipe, "--output", "json").json["status"] == "skipped"


@pytest.mark.system
def test_the_written_configuration_runs_again(amago: Amago, recipe: Path) -> None:
    assert amago("run", recipe, "--run", "a").code == 0
    again = amago("run", "a/config.toml", "--run", "b")
    assert again.code == 0, again.err
    assert read_toml(Path("a/config.toml")) == read_toml(Path("b/config.toml"))


@pytest.mark.system
def test_a_change_is_refused_unless_fresh(amago: Amago, recipe: Path) -> None:
    assert amago("run", recipe).code == 0
    refused = amago("run", recipe, "--set", "train.batch_size=3")
    assert refused.code == 2
    assert "train.batch_size: 2 -> 3" in refused.err
    assert amago("run", recipe, "--set", "train.batch_size=3", "--fresh").code == 0


@pytest.mark.system
def test_a_dry_run_prints_toml_that_runs_and_touches_nothing(amago: Amago, recipe: Path) -> None:
    shown = amago("run", recipe, "--set", "env.corridor=2", "--set", "train.device=cpu", "--dry-run")
    assert shown.code == 0, shown.err
    assert shown.out.startswith("# run would train on cpu in float32\n# run would write run: runs/short\n")
    assert not Path("runs").exists()
    Path("resolved.toml").write_text(shown.out)
    assert amago("run", "resolved.toml").code == 0


SMOKE = """
[profiles.smoke]
epochs = 1
agent.actor.hidden = [4]
"""


@pytest.mark.system
def test_a_profile_has_a_directory_of_its_own(amago: Amago, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("[[stages]]", SMOKE + "[[stages]]", 1))
    assert amago("run", recipe, "--profile", "smoke", "--output", "json").json["run"] == "runs/short-smoke"
    stored = read_toml(Path("runs/short-smoke/config.toml"))
    assert (stored["profile"], stored["epochs"], stored["agent"]["actor"]["hidden"]) == ("smoke", 1, [4])
    assert amago("run", recipe, "--set", "profile=smoke", "--output", "json").json["status"] == "skipped"
    whole = amago("run", recipe, "--output", "json")
    assert (whole.code, whole.json["status"], whole.json["run"]) == (0, "done", "runs/short")
    again = amago("run", "runs/short-smoke/config.toml", "--profile", "smoke", "--run", "again", "--output", "json")
    assert again.json["status"] == "done"
    assert read_toml(Path("again/config.toml")) == stored
    same = amago("run", "runs/short-smoke/config.toml", "--profile", "smoke", "--output", "json")
    assert (same.json["status"], same.json["run"]) == ("skipped", "runs/short-smoke")


@pytest.mark.system
def test_a_profile_is_recorded_and_its_run_is_not_taken_for_another(amago: Amago, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("[[stages]]", SMOKE + "[[stages]]", 1))
    assert amago("run", recipe, "--profile", "smoke", "--run", "mine").code == 0
    refused = amago("run", recipe, "--run", "mine")
    assert refused.code == 2
    assert "profile: 'smoke' -> ''" in refused.err
    assert "agent.actor.hidden: [4] -> [8]" in refused.err
    assert amago("run", recipe, "--run", "mine", "--fresh").code == 0
    assert read_toml(Path("mine/config.toml"))["profile"] == ""


@pytest.mark.system
def test_a_profile_that_only_asks_for_more_epochs_is_another_one_all_the_same(amago: Amago, recipe: Path) -> None:
    recipe.write_text("profiles.long.epochs = 3\n" + RECIPE)
    assert amago("run", recipe).code == 0
    refused = amago("run", recipe, "--profile", "long", "--run", "runs/short")
    assert refused.code == 2
    assert "profile: '' -> 'long'" in refused.err


@pytest.mark.parametrize(
    ("arguments", "code", "words"),
    [
        (["tmazz"], 2, "did you mean 'tmaze'"),
        (["nowhere.toml"], 3, "nowhere.toml"),
        (["short.toml", "--set", "stages.0.step=3"], 2, "stages.0.step"),
        (["short.toml", "--set", "stages.9.steps=3"], 2, "stages.9.steps"),
        (["short.toml:env.x"], 2, "no recipe"),
        (["short.toml", "--profile", "smoke"], 2, "no profile 'smoke' in the configuration (short.toml); it has none"),
        (["quickstart", "--profile", "smok"], 2, "did you mean 'smoke'"),
    ],
)
def test_mistakes_are_named_without_a_traceback(
    amago: Amago, recipe: Path, arguments: list[str], code: int, words: str
) -> None:
    failed = amago("run", *arguments)
    assert failed.code == code, failed.err
    assert words in failed.err
    assert "Traceback" not in failed.err


@pytest.mark.system
def test_a_log_says_at_once_what_starts_what_it_costs_and_every_evaluation(amago: Amago, recipe: Path) -> None:
    shown = RECIPE.replace("report = false\n", "")  # what is next depends on the page
    recipe.write_text(shown.replace("start_epoch = -1", 'mark_best = true\nlabel = "now"'))
    said = amago("run", recipe).err.splitlines()
    assert said[0] == "run runs/short: starting"
    assert said[1] == "epoch 1/2 collect: 2 actors in this process; networks use 1 thread"
    assert re.fullmatch(r"epoch 1/2 train: [\d,]+ parameters, cpu, 1 thread, [\d,]+ MiB; 2 updates: about .*", said[2])
    score = r"return [-\d.]+ \[[-\d.]+, [-\d.]+\], success [\d.]+"
    assert re.fullmatch(rf"epoch 1/2 evaluate: now: update 2 on train tasks: {score}, best so far", said[3])
    best = r"best so far(: return_mean [-\d.]+ at update 2)?"
    assert re.fullmatch(rf"epoch 2/2 evaluate: update 4 on train tasks: {score}, {best}", said[4])
    assert re.fullmatch(rf"epoch 2/2 evaluate: now: update 4 on test tasks: {score}.*", said[5])
    assert "best so far" not in said[5]
    assert said[6].startswith("next: amago watch runs/short")
    assert len(said) == 7
    assert amago("run", recipe, "--fresh", "-q").err == ""


@pytest.mark.system
@pytest.mark.parametrize("recipe", ["quickstart", "mine.toml"])
def test_the_first_line_is_there_before_libraries_are_imported(tmp_path: Path, recipe: str) -> None:
    (tmp_path / "mine.toml").write_text('env.name = "tmaze"\n[[stages]]\nstage = "collect"\n')
    code = """
import sys
from amago_cli import app
from amago_cli.render import progress

def say(self, event):
    print(event.stage, event.text, "torch" in sys.modules, file=sys.stderr)
    raise KeyboardInterrupt

progress.Lines.__call__ = say
app.main(["run", sys.argv[1]])
"""
    command = [sys.executable, "-P", "-c", code, recipe]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.stderr.splitlines()[0] == f"run runs/{Path(recipe).stem} starting False", done.stderr


_ASKED = """
import sys
from amago_cli import app

print(app.main(sys.argv[1:]), "torch" in sys.modules)
"""


@pytest.mark.system
@pytest.mark.parametrize("command", [["run", "short.toml"], ["train", "--from-lake", "runs/short"]])
def test_a_change_is_refused_before_torch_is_imported(amago: Amago, recipe: Path, command: list[str]) -> None:
    assert amago("run", recipe).code == 0
    assert amago("train", "--from-lake", "runs/short", "--steps", 5).code == 0
    words = [*command, "--set", "agent.n_step=2"]
    done = subprocess.run([sys.executable, "-P", "-c", _ASKED, *words], capture_output=True, text=True, check=False)
    assert done.stdout.split() == ["2", "False"], done.stderr
    assert "agent.n_step: 1 -> 2" in done.stderr


@pytest.mark.system
def test_auto_stands_for_what_a_run_has_decided(amago: Amago, recipe: Path) -> None:
    recipe.write_text(RECIPE.replace("actors = 2", 'actors = "auto"').replace("steps = 40", "steps = 400"))
    assert amago("run", recipe).code == 0
    assert amago("run", recipe, "--output", "json").json["status"] == "skipped"
